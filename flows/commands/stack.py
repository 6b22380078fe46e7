"""The commands `millrace up`, `down`, `status`, `metrics`, `deploy` and `doctor` for this machine and its services."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import ARTIFACTS, AsJson, ConfigDir, OptionalRoot, Root, Settings

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

    The databases are files under the root. For other databases, set PREFECT_API_DATABASE_CONNECTION_URL and
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
    """Print runs by state, steps, speed, slots, services and free disk space of a root in Prometheus's text format.

    Examples:
      millrace metrics
      millrace metrics --output /var/lib/node_exporter/millrace.prom
    """
    from flows.work.prometheus import prometheus_text
    from rlcore.storage.publish import write_text_atomically

    text = prometheus_text(root.resolve())
    if output is None:
        print(text, end="")
    else:
        write_text_atomically(output, text)


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
    """Create or update a deployment of an experiment in the running stack. The stack's worker runs the deployment.

    Examples:
      millrace deploy mine.yaml
      millrace deploy mine.yaml seed=2 --name mine-2 --cron '0 3 * * *' --timezone Europe/Berlin
    """
    from flows.stack import user_deployment

    user_deployment.deploy(experiment, overrides, name=name, cron=cron, timezone=timezone, root=root)


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
    from flows.plan.machine import check_machine, show

    print("checking this machine, which takes half a minute ...", file=sys.stderr, flush=True)
    lines = check_machine(python)
    if as_json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        show(lines)
    if any(line.level == "error" for line in lines):
        sys.exit(1)
