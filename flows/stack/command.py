"""`millrace up`, `down` and `status`."""

import sys
from pathlib import Path
from shlex import quote
from typing import Any

from flows.commands.settings import beside_python
from flows.server.secret import CLIENT_LOGIN, SECRET_FILE, how_to_log_in
from flows.stack import control
from flows.stack.services import orphans
from flows.stack.state import StackState, read_stack, stack_store
from rlcore.config import TrackingConfig
from rlcore.tracking.mlflow_store import MlflowStore


def up(root: Path, **wishes: Any) -> None:
    """Start, then say where everything is. `wishes`: the fields of `control.Wishes`."""
    state = control.up(root, control.Wishes(**wishes))
    root = root.resolve()
    runs_page = MlflowStore(TrackingConfig(uri=stack_store(root)), root).runs_url(state.mlflow_url)
    print(f"\nPrefect   {state.prefect_api_url.removesuffix('/api')}\nMLflow    {runs_page}")
    print(f"Log in    with {how_to_log_in(root)}")
    if (head := state.service("ray")) is not None:
        print(f"Ray       {head.url} (runtime=ray runtime.ray_address={head.url})")
    print(f"\n{for_a_shell(root, state)}")
    print(beside_python("prefect deployment run pipeline/countdown-demo --watch"))


def for_a_shell(root: Path, state: StackState) -> str:
    """The line by which Prefect's own commands find this stack and may use it."""
    return f'export PREFECT_API_URL={state.prefect_api_url} {CLIENT_LOGIN}="$(cat {quote(str(root / SECRET_FILE))})"'


def down(root: Path) -> None:
    """End all services of the stack."""
    if all(state == "gone" for _, state in control.status(root)) and not orphans(root.resolve()):
        print(f"nothing is up under {root.resolve()}")
        return
    control.down(root)


def status(root: Path) -> None:
    """Print a line for each service."""
    found = control.status(root)
    for service, state in found:
        print(f"{service.name:<10} {state:<16} {service.url or f'process {service.pid}':<28} {service.log}")
    if not found:
        print(f"nothing was started under {root.resolve()}; `millrace up` starts it")
    elif (stack := read_stack(root)).prefect_api_url:
        print(f"\nFor Prefect's own commands, in each new shell:\n{for_a_shell(root.resolve(), stack)}")
    sys.exit(0 if found and all(state == "up" for _, state in found) else 1)
