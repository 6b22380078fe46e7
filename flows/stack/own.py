"""`millrace deploy`: an experiment of one's own as a deployment of the stack, by a clock if wanted."""

import os
import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from flows import SOURCE_FOLDER
from flows.commands.settings import beside_python, with_root
from flows.parameters import RunSettings, compose_settings
from flows.plan.checks import check_run
from flows.server.api import running_prefect
from rlcore.config.base import FILE_ENDINGS
from rlcore.config.problems import Problem, settings_error
from rlcore.errors import MillraceError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

SLUG = "deploy"
"""Of the schedule that is made here: another one takes its place, and those that people add in the page stay."""


def deploy(
    experiment: str,
    overrides: list[str] | None,
    *,
    name: str | None,
    cron: str | None,
    timezone: str,
    root: Path | None,
) -> None:
    """Check the settings as a worker will see them, make the deployment or bring it up to date, and say how it runs.

    Raises:
        ConfigError: the settings or the schedule are wrong.
        MillraceError: the run could not begin, no stack is up under the root, or Millrace has a deployment of the name.
    """
    if experiment.endswith(FILE_ENDINGS):
        experiment = str(Path(experiment).resolve())
    at = Path(compose_settings(with_root(overrides, root), experiment).config.paths.root).resolve()
    _stand_where_workers_do()
    composed = compose_settings(with_root(overrides, at), experiment)
    api = running_prefect(at)
    if api is None:
        raise MillraceError(
            f"no Prefect server is up under {at}, and a deployment lies in one. `millrace up --root {quote(str(at))}` "
            "starts it, with the worker that runs the deployment."
        )
    schedule = _schedule(cron, timezone)
    check_run(composed)
    deployment, page = _apply(composed, name or composed.config.name, schedule, at)
    print(f"deployment {deployment}{f', {cron} ({timezone})' if cron else ''}: {api.url.removesuffix('/api')}/{page}")
    print(beside_python(f"prefect deployment run {quote(deployment)} --watch"))


def _stand_where_workers_do() -> None:
    """In the checkout: paths are relative to that, and modules of this folder are found beside an experiment alone."""
    here = str(Path.cwd())
    if here != str(SOURCE_FOLDER):
        sys.path[:] = [path for path in sys.path if path != here]
        os.chdir(SOURCE_FOLDER)


def _schedule(cron: str | None, timezone: str) -> Any:
    """A schedule of Prefect's that is on; None without `cron`."""
    if cron is None:
        return None
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule

    try:
        schedule = CronSchedule(cron=cron, timezone=timezone)
    except ValueError as error:
        rule = "must be five fields of cron, and --timezone a known one"
        remedy = "--cron '0 3 * * *' is each day at 3:00"
        raise settings_error([Problem("--cron", rule, f"{cron!r} in {timezone}", remedy)]) from error
    return DeploymentScheduleCreate(schedule=schedule, active=True, slug=SLUG)


def _apply(settings: RunSettings, name: str, schedule: Any, root: Path) -> tuple[str, str]:
    """Its name with that of its flow, and where its page is."""
    from prefect.client.orchestration import get_client

    from flows.stack.deploy import MODEL, OWN, copied

    full = f"{MODEL.partition('/')[0]}/{name}"
    with get_client(sync_client=True) as client:
        model, known = _known(client, MODEL), _known(client, full)
        if model is None:
            raise MillraceError(
                f"the Prefect server at {client.api_url} has no deployment {MODEL}. `millrace up` applies them."
            )
        if known is not None and OWN not in known.tags:
            raise MillraceError(f"{full}: is a deployment of Millrace's own. Give another name by --name.")
        # Prefect forgets the schedules of a deployment that is made anew.
        before = [] if known is None else [copied(one) for one in known.schedules]
        kept = [one for one in before if schedule is None or one.slug != SLUG]
        made = client.create_deployment(
            flow_id=model.flow_id,
            name=name,
            parameters={
                "experiment": settings.experiment,
                "overrides": [text for text in settings.overrides if not text.startswith("paths.root=")],
                "root": str(root),
            },
            description=f"`{settings.experiment}`, deployed by `millrace deploy`.",
            tags=[OWN],
            schedules=kept if schedule is None else [*kept, schedule],
            path=model.path,
            entrypoint=model.entrypoint,
            pull_steps=model.pull_steps,
            work_pool_name=model.work_pool_name,
            work_queue_name=model.work_queue_name,
            parameter_openapi_schema=model.parameter_openapi_schema,
        )
    return full, f"deployments/deployment/{made}"


def _known(client: "SyncPrefectClient", name: str) -> "DeploymentResponse | None":
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None
