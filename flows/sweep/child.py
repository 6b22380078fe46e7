"""One run of a sweep as a flow: trained to a step, from its last checkpoint."""

from typing import Annotated

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from flows.naming import experiment_name
from flows.parameters import NO_OVERRIDES, Root, command_words, plain_command, settings_of
from flows.pipeline import one_heartbeat
from flows.plan.checks import check_before_plan, check_before_start
from flows.plan.plan import make_plan
from flows.plan.tried import try_parts
from flows.server.watch import watched
from flows.shown.tell import tell, tell_command
from flows.train import train_to
from flows.work.open_run import open_run
from rlcore.config.fingerprint import run_id
from rlcore.tracking.mlflow_store import PARENT_TAG


def child_run_name() -> str:
    """`debug optim.lr=0.001 seed=2 to step 4`."""
    given = flow_run.parameters
    words = [experiment_name(given.get("experiment")), *(given.get("label") or "").split()]
    return " ".join([*words, f"to step {given['to_step']}"] if given.get("to_step") else words)


@flow(name="sweep-child", flow_run_name=child_run_name)
def sweep_child(
    experiment: str | None = None,
    overrides: list[str] = NO_OVERRIDES,
    to_step: Annotated[int | None, Field(ge=1)] = None,
    label: str = "",
    mlflow_parent: str | None = None,
    root: Root = None,
) -> str:
    """Train one run of a sweep: data, start model, chunks up to a step; what is done is not done again.

    Args:
        experiment: A name in conf/experiment, or a file's path where the worker is; none: the defaults.
        overrides: Settings as on the command line, such as optim.lr=1e-4.
        to_step: Step after which it is compared with others; none: its last.
        label: What tells it from the other runs of the sweep.
        mlflow_parent: MLflow run of the sweep, to nest this one below.
        root: Folder of datasets, models, runs and the MLflow store; none: as in the settings.
    """
    config = settings_of(experiment, overrides, root=root)
    tell_command(plain_command("train", experiment, overrides))
    check_before_plan(config)
    plan = make_plan(config)
    try_parts(config, plan)
    check_before_start(config, plan)
    if mlflow_parent:
        config = config.model_copy(update={"tags": {**config.tags, PARENT_TAG: mlflow_parent}})
    with watched(), open_run(config, command_words("train", experiment, overrides)), one_heartbeat():
        train_to(config, to_step)
    tell(f"done: {run_id(config)}")
    return run_id(config)
