"""The whole chain: dataset, filter, warm start, training, validation, report."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect import flow
from prefect.runtime import deployment, flow_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from flows.dataset import dataset
from flows.filter import filter_flow
from flows.naming import flow_run_name
from flows.parameters import (
    NO_OVERRIDES,
    Count,
    Experiment,
    Rate,
    Root,
    Seed,
    Steps,
    all_overrides,
    command_words,
    plain_command,
    settings_of,
)
from flows.plan.checks import check_before_plan, check_before_start
from flows.plan.plan import make_plan
from flows.plan.tried import try_parts
from flows.report import report
from flows.retries import retried
from flows.server.nested import begin_anew, end_nested
from flows.server.watch import watched
from flows.shown.artifacts import show_link
from flows.shown.tell import tell, tell_command, tell_idle
from flows.train import export_best_weights, train
from flows.validate import validate
from flows.warm_start import warm_start
from flows.work.finished import PipelineResult
from flows.work.mlflow_record import MlflowRecord
from flows.work.open_run import open_run
from flows.work.report import load_ahead
from rlcore.config.compose import idle_settings
from rlcore.run.inputs import RunInputs


@contextmanager
def one_heartbeat() -> Iterator[None]:
    """Nested flows live and die with their parent, whose heartbeat speaks for them; one of their own costs a second."""
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield


@flow(name="pipeline", flow_run_name=flow_run_name, on_cancellation=[end_nested], on_crashed=[end_nested])
def pipeline(
    experiment: Experiment = None,
    overrides: list[str] = NO_OVERRIDES,
    seed: Seed = None,
    total_steps: Steps = None,
    learning_rate: Rate = None,
    batch_size: Count = None,
    samples_per_prompt: Count = None,
    root: Root = None,
) -> PipelineResult:
    """Run an experiment from its dataset to its report. What is finished already is not done again.

    Args:
        experiment: A name in conf/experiment, or a file's path where the worker is; none: the defaults.
        overrides: Settings as on the command line, such as rollout.samples_per_prompt=16.
        seed: Fixes data, initial weights, order of prompts and every sampled token.
        total_steps: Steps of the run; a step is one batch of prompts sampled, scored and learned from.
        learning_rate: Learning rate of the policy, such as 0.0003 or 1e-6.
        batch_size: Prompts of a step.
        samples_per_prompt: Answers to each prompt; a group for GRPO.
        root: Folder of datasets, models, runs and the MLflow store; none: as in the settings.
    """
    given = all_overrides(
        overrides,
        seed=seed,
        total_steps=total_steps,
        learning_rate=learning_rate,
        batch_size=batch_size,
        samples_per_prompt=samples_per_prompt,
        root=root,
    )
    config = settings_of(experiment, given)
    tell_command(plain_command("train", experiment, given))
    tell_idle(idle_settings(config, given, experiment=experiment))
    check_before_plan(config)
    plan = make_plan(config)
    try_parts(config, plan)
    check_before_start(config, plan)
    prefect = {"flow_run_id": str(flow_run.id), "deployment": str(deployment.name or "")}
    with (
        watched(),
        open_run(config, command_words("run", experiment, given)) as run,
        MlflowRecord(run, prefect) as record,
        one_heartbeat(),
    ):
        begin_anew(dataset, filter_flow, warm_start, train, validate, report)
        rows = dataset(experiment, given)
        filtered = filter_flow(experiment, given)
        record.start(rows, filtered)
        if not plan.is_done:
            load_ahead()
        warm_start(experiment, given)
        weights = train(experiment, given)
        judgements = validate(experiment, given)
        best = retried(export_best_weights, config)(config, RunInputs.read(run.layout), weights)
        run.trainer.let_go()
        written = report(experiment, given)
        recorded = record.finish(written, weights, best)
        if recorded.url:
            show_link(run.run_id, "mlflow", recorded.url, f"MLflow run {recorded.mlflow_run_id}")
        tell(f"done: {run.run_id}")
        return PipelineResult(run.run_id, run.layout.run_dir, judgements, written.html, weights.directory, recorded)
