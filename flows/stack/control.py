"""The local stack: Prefect server, MLflow server, a worker and, if asked, a Ray head, on loopback."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from shlex import quote

from flows import SOURCE_FOLDER
from flows.stack import services
from flows.stack.services import PortTakenError, answers, end_server, end_worker, say, start, wait_until_ready
from flows.stack.state import (
    STACK,
    Databases,
    Service,
    StackState,
    read_stack,
    write_stack,
)
from rlcore.config.problems import masked
from rlcore.errors import ConfigError, MillraceError
from rlcore.storage.locks import HeldLock
from rlcore.tracking.connection import connect, has_store

LOCK_WAIT_S = 600.0
PORT_TRIES = 3
"""Tries to start a service: stacks that start at the same time may choose the same port."""
WORKERS_ARE_UP = "--workers-are-up"
"""Argument of `flows.stack.deploy`. That module imports Prefect, so it is not imported here."""
SAID = "millrace: "
"""Beginning of a line of `flows.stack.deploy` that is for people."""
NOTIFY_URL = "MILLRACE_NOTIFY_URL"
"""Environment of `up`: where failures and pauses are told. Often a secret, so it is on no command line of ours."""
NOTIFY_BLOCK = "MILLRACE_NOTIFY_BLOCK"
"""Environment of `up`: the notification block in Prefect that tells people, as `prefect block ls` names it."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What `up` was asked for; a port of None: the one that there was before, or a free one."""

    ray: bool = False
    workers: int = 1
    prefect_port: int | None = None
    mlflow_port: int | None = None
    notify_url: str | None = None
    notify_block: str | None = None


def up(root: Path, wishes: Wishes | None = None) -> StackState:
    """Start what is not running, apply the deployments, and wait until each answers. Safe to call again.

    Where that fails, what this call has started is ended again; what ran before it goes on.

    Raises:
        ConfigError: the webhook is no address.
        MillraceError: a service does not start; says why, with the end of its log.
    """
    root = root.resolve()
    wishes = wishes or Wishes()
    if wishes.notify_url is not None and not wishes.notify_url.startswith(("http://", "https://")):
        raise ConfigError("--notify-url (MILLRACE_NOTIFY_URL): must begin with http:// or https://; got another text")
    databases = Databases.chosen(root)
    try:
        with HeldLock(root / "stack.lock", what=f"the stack of {root}", wait_s=LOCK_WAIT_S):
            recorded = read_stack(root)
            _require_fit(root, recorded, wishes)
            ran_before = _running(recorded)
            try:
                return _started(root, recorded, wishes, databases)
            except BaseException:
                _end(_running(read_stack(root)) - ran_before)
                raise
    except MillraceError as error:
        raise MillraceError(masked(str(error))) from None


def _started(root: Path, state: StackState, wishes: Wishes, databases: Databases) -> StackState:
    state = _ensure(root, state, "prefect", partial(services.prefect_recipe, root, databases, wishes.prefect_port))
    state = replace(state, prefect_api_url=f"{_url(state, 'prefect')}/api", prefect_version=version("prefect"))
    if not has_store(databases.mlflow):
        # Whole or not at all: of a server that is killed meanwhile half the tables would stay.
        connect(databases.mlflow)
    earlier = state.service("mlflow")
    state = _ensure(root, state, "mlflow", partial(services.mlflow_recipe, root, databases, wishes.mlflow_port))
    if state.service("mlflow") != earlier:
        state = replace(state, mlflow_database=masked(databases.mlflow))
    state = replace(state, mlflow_url=_url(state, "mlflow"), mlflow_version=version("mlflow"))
    if wishes.ray:
        state = _ensure(root, state, "ray", services.ray_recipe)
    _set_up_prefect(root, state, wishes)
    for number in range(1, wishes.workers + 1):
        worker = partial(services.worker_recipe, root, number)
        state = _ensure(root, state, f"worker-{number}", worker)
    write_stack(root, state)
    return state


def down(root: Path) -> None:
    """End what `up` has started, workers first. Flow runs are told to end, and their trainers save; also those that a
    killed worker has left.

    The record stays, so that the next `up` takes the same ports and goes on with those runs.
    """
    root = root.resolve()
    with HeldLock(root / "stack.lock", what=f"the stack of {root}", wait_s=LOCK_WAIT_S):
        running = _running(read_stack(root))
        _end(filter(_is_worker, running))
        services.end_flows(orphans := services.orphans(root))
        for flow in orphans:
            say(f"a flow run whose worker was gone (process {flow.pid}) has ended")
        _end(running)


def status(root: Path) -> list[tuple[Service, str]]:
    """The state of each recorded service: `up`, `does not answer`, or `gone`."""
    found = []
    for service in read_stack(root.resolve()).services:
        process = service.process()
        if process is None:
            found.append((service, "gone"))
        elif answers(service) and services.listens(process, service.port):
            found.append((service, "up"))
        else:
            found.append((service, "does not answer"))
    return found


# ---------------------------------------------------------------------- parts


def _running(state: StackState) -> set[Service]:
    return {service for service in state.services if service.process() is not None}


def _end(ended: Iterable[Service]) -> None:
    for service in sorted(ended, key=_end_order):
        if (process := service.process()) is not None:
            (end_worker if _is_worker(service) else end_server)(process)
            say(f"{service.name} (process {service.pid}) has ended")


def _require_fit(root: Path, state: StackState, wishes: Wishes) -> None:
    """A server that is up is of the installed version and has the port that was asked for."""
    again = f"`millrace down --root {quote(str(root))}`"
    for name, was, port in (
        ("prefect", state.prefect_version, wishes.prefect_port),
        ("mlflow", state.mlflow_version, wishes.mlflow_port),
    ):
        service = state.service(name)
        if service is None or service.process() is None:
            continue
        if was and was != version(name):
            raise MillraceError(
                f"{name} is up at {service.url} in version {was}, and {version(name)} is installed here. {again}, then "
                "`millrace up` again; both read the database of the older one."
            )
        if port is not None and port != service.port:
            raise MillraceError(
                f"--{name}-port {port}: {name} is up already at {service.url}, and keeps its port. {again} first, or "
                "leave the port out."
            )


def _ensure(root: Path, state: StackState, name: str, recipe: Callable[[StackState], services.Recipe]) -> StackState:
    known = state.service(name)
    if known is not None and known.process() is not None:
        wait_until_ready(known)
        say(f"{name} is up already: {known.url or f'process {known.pid}'}")
        return state
    for tries_left in range(PORT_TRIES - 1, -1, -1):
        service = start(root, recipe(state))
        others = tuple(service for service in state.services if service.name != name)
        state = replace(state, services=(*others, service))
        write_stack(root, state)  # at once: whatever happens next, `down` must know of it
        try:
            wait_until_ready(service)
            break
        except PortTakenError:  # the recipe chooses anew, or says who has the port that was asked for
            if not tries_left:
                raise
    say(f"{name} is up: {service.url or f'process {service.pid}'}")
    return state


def _url(state: StackState, name: str) -> str:
    service = state.service(name)
    assert service is not None
    return service.url


def _is_worker(service: Service) -> bool:
    return service.name.startswith("worker-")


def _end_order(service: Service) -> tuple[int, str]:
    """Workers before what their flows talk to."""
    return (0 if _is_worker(service) else ("ray", "mlflow", "prefect").index(service.name) + 1, service.name)


def _set_up_prefect(root: Path, state: StackState, wishes: Wishes) -> None:
    """Work pool, queues, automations and deployments, in a process of its own: Prefect reads its settings once."""
    environment = {
        **os.environ,
        **services.prefect_environment(root, state.prefect_api_url),
        "PYTHONPATH": str(SOURCE_FOLDER),
    }
    environment[STACK] = str(root)
    told = {NOTIFY_URL: wishes.notify_url, NOTIFY_BLOCK: wishes.notify_block}
    environment |= {name: value for name, value in told.items() if value is not None}
    workers = [service for service in state.services if _is_worker(service)]
    are_up = [WORKERS_ARE_UP] if any(service.process() is not None for service in workers) else []
    done = subprocess.run(
        [sys.executable, "-m", "flows.stack.deploy", *are_up],
        cwd=SOURCE_FOLDER,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise MillraceError(f"the deployments cannot be applied:\n{(done.stdout + done.stderr).strip()[-4_000:]}")
    for line in done.stdout.splitlines():
        if line.startswith(SAID):
            say(line.removeprefix(SAID))
