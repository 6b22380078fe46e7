"""`millrace deploy` makes an experiment a deployment of the stack, with a schedule where one is given."""

import os
import sys
from pathlib import Path
from shlex import quote
from typing import Any

from flows import SOURCE_FOLDER
from flows.commands.settings import beside_python
from flows.parameters import RunSettings, compose_settings
from flows.plan.checks import check_run
from flows.server.api import running_prefect
from flows.stack.state import read_stack
from rlcore.config.base import FILE_ENDINGS
from rlcore.config.problems import Problem, settings_error
from rlcore.errors import ConfigError, MillraceError

SLUG = "deploy"
"""Slug of the schedule that a deployment gets here; a later call replaces it, and schedules that people add stay."""
LIKE_THE_MODEL = (
    "entrypoint",
    "path",
    "pull_steps",
    "work_pool_name",
    "work_queue_name",
    "parameter_openapi_schema",
    "enforce_parameter_schema",
)
"""What a deployment of one's own has of the model."""


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
        ConfigError: the name, the settings or the schedule are wrong.
        MillraceError: the run could not begin, no stack is up under the root, the server named is another one's, or the
            name is that of a deployment that Millrace has.
    """
    if name is not None and (refused := set(name) & set("/%&<>")):
        raise ConfigError(f"--name: must have none of / % & < >, which Prefect refuses; got {name} with {min(refused)}")
    if experiment.endswith(FILE_ENDINGS):
        experiment = str(Path(experiment).resolve())
    at = Path(compose_settings(overrides, experiment, root=root).config.paths.root).resolve()
    _stand_where_workers_do()
    composed = compose_settings(overrides, experiment, root=at)
    api = running_prefect(at)
    if api is None:
        raise MillraceError(
            f"no Prefect server is up under {at}, and a deployment lies in one. `millrace up --root {quote(str(at))}` "
            "starts it, with the worker that runs the deployment."
        )
    if read_stack(at).prefect_api_url != api.url:
        raise MillraceError(
            f"PREFECT_API_URL: {api.url} is not the server of the stack under {at}, whose workers would run the "
            "deployment. Unset it, or name that stack's root by --root."
        )
    schedules = _schedules(cron, timezone)
    check_run(composed)
    deployment, page = _apply(composed, name or composed.config.name, schedules)
    when = f", {cron} ({timezone})" if cron else ""
    print(f"deployment {deployment}{when}, root {at}: {api.url.removesuffix('/api')}/{page}")
    print(beside_python(f"prefect deployment run {quote(deployment)} --watch"))


def _stand_where_workers_do() -> None:
    """Change to the checkout, where workers start: paths are relative to it, and modules here are found no more."""
    here = str(Path.cwd())
    if here != str(SOURCE_FOLDER):
        sys.path[:] = [path for path in sys.path if path != here]
        os.chdir(SOURCE_FOLDER)


def _schedules(cron: str | None, timezone: str) -> list[Any]:
    """A schedule of Prefect's that is on; none without `cron`."""
    if cron is None:
        return []
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule

    try:
        return [DeploymentScheduleCreate(schedule=CronSchedule(cron=cron, timezone=timezone), slug=SLUG, active=True)]
    except ValueError as error:
        rule = "must be five fields of cron, and --timezone a known one"
        remedy = "--cron '0 3 * * *' is each day at 3:00"
        raise settings_error([Problem("--cron", rule, f"{cron!r} in {timezone}", remedy)]) from error


def _apply(settings: RunSettings, name: str, schedules: list[Any]) -> tuple[str, str]:
    """Make or update the deployment, as `MODEL` is but for its parameters; schedules that people have added stay.

    Returns:
        `flow/name`, and the path of its page.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentUpdate

    from flows.stack.deploy import MODEL, OWN, known_deployment

    full = f"{MODEL.partition('/')[0]}/{name}"
    overrides = [text for text in settings.overrides if not text.startswith("paths.root=")]
    with get_client(sync_client=True) as client:
        model, known = known_deployment(client, MODEL), known_deployment(client, full)
        if model is None:
            raise MillraceError(
                f"the Prefect server at {client.api_url} has no deployment {MODEL}. `millrace up` applies them."
            )
        if known is not None and OWN not in known.tags:
            raise MillraceError(f"{full}: is a deployment of Millrace's own. Give another name by --name.")
        fields: dict[str, Any] = {field: getattr(model, field) for field in LIKE_THE_MODEL} | {
            "description": f"`{settings.experiment}`, deployed by `millrace deploy`.",
            "tags": [OWN],
            "parameters": {"experiment": settings.experiment, "overrides": overrides},
        }
        if known is None:
            made = client.create_deployment(model.flow_id, name, schedules=schedules, **fields)
            return full, f"deployments/deployment/{made}"
        client.update_deployment(known.id, DeploymentUpdate(**fields))
        for schedule in schedules:
            for before in known.schedules:
                if before.slug == schedule.slug:
                    client.delete_deployment_schedule(known.id, before.id)
            client.create_deployment_schedules(known.id, [schedule])
    return full, f"deployments/deployment/{known.id}"
