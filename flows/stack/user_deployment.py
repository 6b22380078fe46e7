"""The command `millrace deploy`, which makes an experiment a deployment of the stack, optionally with a schedule."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING
from uuid import UUID

from flows import SOURCE_FOLDER
from flows.commands.settings import with_program_path
from flows.parameters import RunSettings, compose_settings
from flows.server.api import running_prefect
from flows.stack.state import read_stack
from flows.work.checks import check_run
from rlcore.config.base import CONFIG_DIR_VARIABLE, FILE_ENDINGS
from rlcore.config.problems import Problem, settings_error
from rlcore.errors import ConfigError, MillraceError

if TYPE_CHECKING:
    from prefect.client.schemas.actions import DeploymentScheduleCreate

SCHEDULE_SLUG = "deploy"  # of the schedule that `millrace deploy` sets and replaces
FLOW = "pipeline"
USER_TAG = "own"  # of the deployments that `millrace deploy` creates


def deploy(
    experiment: str,
    overrides: list[str] | None,
    *,
    name: str | None,
    cron: str | None,
    timezone: str,
    root: Path | None,
) -> None:
    """Check the settings from a worker's working folder, create or update the deployment, and print how to run it.

    Raises ConfigError if the name, settings or schedule are invalid. Raises MillraceError if the run could not start,
    the stack is not up, `PREFECT_API_URL` names another stack, or the name belongs to one of Millrace's deployments.
    """
    if name is not None and (refused := set(name) & set("/%&<>")):
        raise ConfigError(f"--name: must have none of / % & < >, which Prefect refuses; got {name} with {min(refused)}")
    if experiment.endswith(FILE_ENDINGS):
        experiment = str(Path(experiment).resolve())
    at = Path(compose_settings(overrides, experiment, root=root).config.paths.root).resolve()
    # A worker starts in the checkout. There relative paths begin, and modules of this folder are unknown.
    sys.path[:] = [path for path in sys.path if path != str(Path.cwd()) or path == str(SOURCE_FOLDER)]
    os.chdir(SOURCE_FOLDER)
    composed = compose_settings(overrides, experiment, root=at)
    api = running_prefect(at)
    if api is None:
        raise MillraceError(
            f"no Prefect server is up under {at}, and a deployment needs one. `millrace up --root {quote(str(at))}` "
            "starts it, with the worker that runs the deployment."
        )
    if read_stack(at).prefect_api_url != api.url:
        raise MillraceError(
            f"PREFECT_API_URL: {api.url} is not the server of the stack under {at}, whose workers would run the "
            "deployment. Unset it, or name that stack's root by --root."
        )
    schedule = None if cron is None else _schedule(cron, timezone)
    check_run(composed)
    deployment = f"{FLOW}/{name or composed.config.name}"
    deployment_id = _apply(composed, deployment, schedule)
    when = f", {cron} ({timezone})" if cron else ""
    page = f"{api.url.removesuffix('/api')}/deployments/deployment/{deployment_id}"
    print(f"deployment {deployment}{when}, root {at}: {page}")
    print(with_program_path(f"prefect deployment run {quote(deployment)} --watch"))
    if own := os.environ.get(CONFIG_DIR_VARIABLE):
        print(
            f"The worker finds the groups in {own} only if {CONFIG_DIR_VARIABLE} was set when `millrace up` started it."
        )


def _schedule(cron: str, timezone: str) -> "DeploymentScheduleCreate":
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule

    try:
        return DeploymentScheduleCreate(
            schedule=CronSchedule(cron=cron, timezone=timezone), slug=SCHEDULE_SLUG, active=True
        )
    except ValueError as error:
        rule = "must be five fields of cron, and --timezone a known one"
        remedy = "--cron '0 3 * * *' is each day at 3:00"
        raise settings_error([Problem("--cron", rule, f"{cron!r} in {timezone}", remedy)]) from error


def _apply(settings: RunSettings, name: str, schedule: "DeploymentScheduleCreate | None") -> UUID:
    """Create or update the deployment `flow/name`, and return its id. Schedules that users have added are kept."""
    from prefect import Flow
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.deployments.runner import RunnerDeployment
    from prefect.exceptions import ObjectNotFound

    from flows.stack.deploy import ensure_pool, simplify_form
    from flows.stack.services import POOL

    known = None
    with get_client(sync_client=True) as client:
        with suppress(ObjectNotFound):
            known = client.read_deployment_by_name(name)
        if known is not None and USER_TAG not in known.tags:
            raise MillraceError(f"{name}: is a deployment of Millrace's own. Give another name by --name.")
        ensure_pool(client)
        kept = [] if known is None else known.schedules
        schedules = [
            DeploymentScheduleCreate(schedule=one.schedule, active=one.active, parameters=one.parameters, slug=one.slug)
            for one in kept
            if schedule is None or one.slug != SCHEDULE_SLUG
        ]
        # No event loop runs here, so each of the three calls returns its result.
        flow = Flow.from_source(str(SOURCE_FOLDER), f"flows/pipeline.py:{FLOW}")
        assert isinstance(flow, Flow)
        deployment = flow.to_deployment(
            name.removeprefix(f"{FLOW}/"),
            description=f"`{settings.experiment}`, deployed by `millrace deploy`.",
            tags=[USER_TAG],
            parameters={
                "experiment": settings.experiment,
                "overrides": [text for text in settings.overrides if not text.startswith("paths.root=")],
            },
            work_pool_name=POOL,
            work_queue_name="training",
        )
        assert isinstance(deployment, RunnerDeployment)
        deployment.schedules = [*schedules, *([] if schedule is None else [schedule])]
        deployment_id = deployment.apply()
        assert isinstance(deployment_id, UUID)
        simplify_form(client, client.read_deployment(deployment_id), paused=known is not None and known.paused)
    return deployment_id
