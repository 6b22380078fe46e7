"""`millrace up`, `down`, `status` and `deploy`."""

import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.options import ARTIFACTS, Root, RootOfRun, Settings
from flows.commands.settings import beside_python

if TYPE_CHECKING:
    from flows.stack.state import StackState

Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Else the one it had, or a free one.")]


def up(
    root: Root = ARTIFACTS,
    ray: Annotated[bool, typer.Option("--ray", help="Also a Ray head.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Prefect workers.")] = 1,
    prefect_port: Port = None,
    mlflow_port: Port = None,
    notify_url: Annotated[
        str | None,
        typer.Option(envvar="MILLRACE_NOTIFY_URL", help="A webhook that is called when a run fails or pauses."),
    ] = None,
    notify_block: Annotated[
        str | None,
        typer.Option(
            envvar="MILLRACE_NOTIFY_BLOCK",
            metavar="TYPE/NAME",
            help="A notification block in Prefect (Slack, mail, ...) that is told the same.",
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
    from flows.server.secret import how_to_log_in
    from flows.stack import control
    from flows.stack.state import stack_store
    from rlcore.config import TrackingConfig
    from rlcore.tracking.mlflow_store import MlflowStore

    wishes = control.Wishes(
        ray=ray, workers=workers, prefect_port=prefect_port, mlflow_port=mlflow_port, notify_url=notify_url,
        notify_block=notify_block,
    )  # fmt: skip
    state = control.up(root, wishes)
    root = root.resolve()
    runs_page = MlflowStore(TrackingConfig(uri=stack_store(root)), root).runs_url(state.mlflow_url)
    print(f"\nPrefect   {state.prefect_api_url.removesuffix('/api')}\nMLflow    {runs_page}")
    print(f"Log in    with {how_to_log_in(root)}")
    if (head := state.service("ray")) is not None:
        print(f"Ray       {head.url} (runtime=ray runtime.ray_address={head.url})")
    print(f"\n{for_a_shell(root, state)}")
    print(beside_python("prefect deployment run pipeline/countdown-demo --watch"))


def for_a_shell(root: Path, state: "StackState") -> str:
    """The line by which Prefect's own commands find this stack and may use it."""
    from flows.server.secret import CLIENT_LOGIN, SECRET_FILE

    return f'export PREFECT_API_URL={state.prefect_api_url} {CLIENT_LOGIN}="$(cat {quote(str(root / SECRET_FILE))})"'


def down(root: Root = ARTIFACTS) -> None:
    """End what `millrace up` has started. Runs save, and go on after the next `up`.

    Examples:
      millrace down
    """
    from flows.stack import control
    from flows.stack.services import orphans

    if all(state == "gone" for _, state in control.status(root)) and not orphans(root.resolve()):
        print(f"nothing is up under {root.resolve()}")
        return
    control.down(root)


def status(root: Root = ARTIFACTS) -> None:
    """Show what `millrace up` has started, and whether it answers. Exit code 1 if something is missing.

    Examples:
      millrace status
    """
    from flows.stack import control
    from flows.stack.state import read_stack

    found = control.status(root)
    for service, state in found:
        print(f"{service.name:<10} {state:<16} {service.url or f'process {service.pid}':<28} {service.log}")
    if not found:
        print(f"nothing was started under {root.resolve()}; `millrace up` starts it")
    elif (stack := read_stack(root)).prefect_api_url:
        print(f"\nFor Prefect's own commands, in each new shell:\n{for_a_shell(root.resolve(), stack)}")
    sys.exit(0 if found and all(state == "up" for _, state in found) else 1)


def deploy(
    experiment: Annotated[str, typer.Argument(metavar="FILE", help="An experiment's file, or one's name.")],
    overrides: Settings = None,
    name: Annotated[str | None, typer.Option(help="Of the deployment.", show_default="the experiment's name")] = None,
    cron: Annotated[
        str | None, typer.Option(metavar="'M H D M W'", help="When it runs by itself; none: as before, at first never.")
    ] = None,
    timezone: Annotated[str, typer.Option(help="Of --cron.")] = "UTC",
    root: RootOfRun = None,
) -> None:
    """Make a deployment of an experiment in the stack that is up, or bring it up to date. It runs in its worker.

    Examples:
      millrace deploy mine.yaml
      millrace deploy mine.yaml seed=2 --name mine-2 --cron '0 3 * * *' --timezone Europe/Berlin
    """
    from flows.stack import own

    own.deploy(experiment, overrides, name=name, cron=cron, timezone=timezone, root=root)
