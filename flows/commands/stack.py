"""The commands `millrace up`, `down`, `status`, `metrics`, `deploy` and `doctor` for this machine and its services."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from flows import SOURCE_FOLDER
from flows.commands.options import ARTIFACTS, AsJson, ConfigDir, OptionalRoot, Root, Settings
from flows.commands.settings import with_program_path
from rlcore.errors import ConfigError, MillraceError

Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Default: its last port, or a free one.")]


def up(
    root: Root = ARTIFACTS,
    ray: Annotated[bool, typer.Option("--ray", help="Also a Ray head.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Prefect workers.")] = 1,
    prefect_port: Port = None,
    mlflow_port: Port = None,
    notify_block: Annotated[
        str | None,
        typer.Option(
            envvar="MILLRACE_NOTIFY_BLOCK",
            metavar="TYPE/NAME",
            help="A notification block in Prefect (Slack, mail, a webhook) for runs that fail or wait.",
        ),
    ] = None,
) -> None:
    """Start Prefect, MLflow and a worker on this machine, and apply the deployments.

    The databases are files in the workspace. For other databases, set PREFECT_API_DATABASE_CONNECTION_URL and
    MLFLOW_BACKEND_STORE_URI (docs/stack.md).

    Examples:
      millrace up
      millrace up --ray --workers 2
    """
    from flows.stack import control

    control.up(
        root, ray=ray, workers=workers, prefect_port=prefect_port, mlflow_port=mlflow_port, notify_block=notify_block
    )


def down(root: Root = ARTIFACTS) -> None:
    """Stop the services that `millrace up` has started. Runs save their state and resume after the next `millrace up`.

    Examples:
      millrace down
    """
    from flows.stack import control

    control.down(root)


def status(root: Root = ARTIFACTS) -> None:
    """Show the state of the services that `millrace up` has started. The exit code is 1 if a service is missing.

    Examples:
      millrace status
    """
    from flows.stack import control

    control.status(root)


def metrics(
    root: Root = ARTIFACTS,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Replace this file, for node_exporter's textfile collector."),
    ] = None,
) -> None:
    """Print metrics of a workspace (runs, steps, speed, slots, services, disk space) in Prometheus's text format.

    Examples:
      millrace metrics
      millrace metrics --output /var/lib/node_exporter/millrace.prom
    """
    from rlcore.storage.publish import write_text_atomically

    text = prometheus_text(root.resolve())
    if output is None:
        print(text, end="")
    else:
        write_text_atomically(output, text)


def prometheus_text(root: Path) -> str:
    """Return metrics of a workspace's runs, slots, services and disk in Prometheus's text format.

    Each run that is running, waiting or stopping has separate metrics. Other runs are only counted by state.
    """
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    from flows.stack.control import service_states
    from flows.work.runs import STATES, all_runs, status_of
    from flows.work.slots import Slots
    from rlcore.storage.disk import free_bytes

    registry = CollectorRegistry()

    def gauge(name: str, meaning: str, *labels: str) -> "Gauge":
        return Gauge(f"millrace_{name}", meaning, labels, registry=registry)

    runs = gauge("runs", "Number of runs in a state.", "state")
    step = gauge("run_step", "Last step of a run.", "run")
    total = gauge("run_total_steps", "Number of steps after which a run ends.", "run")
    speed = gauge("run_tokens_per_second", "Tokens per second of each device in a run's last step.", "run")
    changed = gauge("run_last_journal_timestamp_seconds", "Time of the last line in a run's journal.", "run")
    for state in STATES:
        runs.labels(state).set(0)
    for run in map(status_of, all_runs(root)):
        runs.labels(run.state).inc()
        if run.state in ("running", "waiting", "stopping"):
            values = {step: run.step, total: run.total_steps, speed: run.tokens_per_s, changed: run.changed}
            for one, value in values.items():
                if value is not None:
                    one.labels(run.run_id).set(value)
    held = Slots(root).read_state()
    slots = gauge("slots", "Number of slots that are taken or free.", "state")
    slots.labels("taken").set(len(held.holders))
    slots.labels("free").set(held.num_free)
    gauge("runs_waiting_for_slots", "Number of runs that wait for slots.").set(len(held.waiting))
    up = gauge("service_up", "1 if a service of millrace up answers, otherwise 0.", "service")
    for service, found in service_states(root):
        up.labels(service.name).set(found == "up")
    gauge("disk_free_bytes", "Free space on the file system of the workspace.").set(free_bytes(root))
    return generate_latest(registry).decode()


def deploy(
    experiment: Annotated[str, typer.Argument(metavar="FILE", help="File or name of an experiment.")],
    overrides: Settings = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the deployment.", show_default="the experiment's name")
    ] = None,
    cron: Annotated[
        str | None, typer.Option(metavar="'M H D M W'", help="Schedule; default: unchanged, none at first.")
    ] = None,
    timezone: Annotated[str, typer.Option(help="Time zone of --cron.")] = "UTC",
    root: OptionalRoot = None,
    config_dir: ConfigDir = None,
) -> None:
    """Create or update a Prefect deployment of an experiment. The worker of `millrace up` runs the deployment.

    Examples:
      millrace deploy mine.yaml
      millrace deploy mine.yaml seed=2 --name mine-2 --cron '0 3 * * *' --timezone Europe/Berlin
    """
    from flows.parameters import compose_settings
    from flows.server.api import running_prefect
    from flows.stack.state import read_stack
    from flows.work.checks import check_run
    from rlcore.config.base import CONFIG_DIR_VARIABLE, FILE_ENDINGS

    if name is not None and (refused := set(name) & set("/%&<>")):
        raise ConfigError(f"--name: must have none of / % & < >, which Prefect refuses; got {name} with {min(refused)}")
    if experiment.endswith(FILE_ENDINGS):
        experiment = str(Path(experiment).resolve())
    at = Path(compose_settings(overrides, experiment, root=root).config.paths.root).resolve()
    # A worker starts in the checkout. There relative paths begin, and modules of this folder are unknown.
    sys.path[:] = [path for path in sys.path if path != str(Path.cwd()) or path == str(SOURCE_FOLDER)]
    os.chdir(SOURCE_FOLDER)
    composed = compose_settings(overrides, experiment, root=at)
    url = running_prefect(at)
    if url is None:
        raise MillraceError(
            f"no Prefect server is up under {at}, and a deployment needs one. `millrace up --root {quote(str(at))}` "
            "starts it, with the worker that runs the deployment."
        )
    if read_stack(at).prefect_api_url != url:
        raise MillraceError(
            f"PREFECT_API_URL: {url} is not the server of the stack under {at}, whose workers would run the "
            "deployment. Unset it, or name that stack's workspace by --root."
        )
    from flows.stack.deploy import FLOW, apply_user_deployment, schedule_of  # imports Prefect with this address

    schedule = None if cron is None else schedule_of(cron, timezone)
    check_run(composed)
    deployment = f"{FLOW}/{name or composed.config.name}"
    deployment_id = apply_user_deployment(composed, deployment, schedule)
    when = f", {cron} ({timezone})" if cron else ""
    page = f"{url.removesuffix('/api')}/deployments/deployment/{deployment_id}"
    print(f"deployment {deployment}{when}, workspace {at}: {page}")
    print(with_program_path(f"prefect deployment run {quote(deployment)} --watch"))
    if own := os.environ.get(CONFIG_DIR_VARIABLE):
        print(
            f"The worker finds the groups in {own} only if {CONFIG_DIR_VARIABLE} was set when `millrace up` started it."
        )


def doctor(
    python: Annotated[
        str | None, typer.Option(metavar="FILE", help="The trainer's interpreter (runtime.python).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine meets the requirements of a run. The exit code is 1 if there is an error.

    Examples:
      millrace doctor
      millrace doctor --python trainer/bin/python
    """
    from flows.work.machine import check_machine, show

    print("checking this machine, which takes half a minute ...", file=sys.stderr, flush=True)
    lines = check_machine(python)
    if as_json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        show(lines)
    if any(line.level == "error" for line in lines):
        sys.exit(1)
