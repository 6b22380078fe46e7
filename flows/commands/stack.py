"""`millrace up`, `down`, `status` and `deploy`."""

from typing import Annotated

import typer

from flows.commands.options import ARTIFACTS, OptionalRoot, Root, Settings

Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Else the one it had, or a free one.")]


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
            help="A notification block in Prefect (Slack, mail, a webhook) that tells of runs that fail or wait.",
        ),
    ] = None,
) -> None:
    """Start Prefect, MLflow and a worker on this machine. The deployments are applied.

    Other databases than files under the root: PREFECT_API_DATABASE_CONNECTION_URL and MLFLOW_BACKEND_STORE_URI in the
    environment (docs/stack.md).

    Examples:
      millrace up
      millrace up --ray --workers 2
    """
    from flows.stack import control

    control.up(
        root,
        ray=ray,
        workers=workers,
        prefect_port=prefect_port,
        mlflow_port=mlflow_port,
        notify_block=notify_block,
    )


def down(root: Root = ARTIFACTS) -> None:
    """End what `millrace up` has started. Runs save, and go on after the next `up`.

    Examples:
      millrace down
    """
    from flows.stack import control

    control.down(root)


def status(root: Root = ARTIFACTS) -> None:
    """Show what `millrace up` has started, and whether it answers. Exit code 1 if something is missing.

    Examples:
      millrace status
    """
    from flows.stack import control

    control.status(root)


def deploy(
    experiment: Annotated[str, typer.Argument(metavar="FILE", help="An experiment's file, or one's name.")],
    overrides: Settings = None,
    name: Annotated[str | None, typer.Option(help="Of the deployment.", show_default="the experiment's name")] = None,
    cron: Annotated[
        str | None, typer.Option(metavar="'M H D M W'", help="When it runs by itself; none: as before, at first never.")
    ] = None,
    timezone: Annotated[str, typer.Option(help="Of --cron.")] = "UTC",
    root: OptionalRoot = None,
) -> None:
    """Make a deployment of an experiment in the stack that is up, or bring it up to date. It runs in its worker.

    Examples:
      millrace deploy mine.yaml
      millrace deploy mine.yaml seed=2 --name mine-2 --cron '0 3 * * *' --timezone Europe/Berlin
    """
    from flows.stack import own

    own.deploy(experiment, overrides, name=name, cron=cron, timezone=timezone, root=root)
