"""Processes of the stack: start one, wait until it answers, end it."""

import os
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil

from flows import SOURCE_FOLDER
from flows.server.database import PREFECT_DATABASE, PREFECT_DATABASE_TOO
from flows.server.launch import detached
from flows.stack.recipes import Recipe, listens
from flows.stack.state import MLFLOW_DATABASE, Service
from rlcore.errors import MillraceError

READY_WAIT_S = 600.0
"""The first start makes both databases; minutes on a busy machine. A service that dies is noticed at once."""
POLL_S = 0.2
END_WAIT_S = 40.0
"""For a server to end, and for flow runs, which wait for their trainers; a trainer saves by itself."""
NUM_LAST_LINES = 15
TRAINER = "rlcore.run.process"
HINTS = {
    "Can't locate revision": "Its database was written by a newer version of it: install that version, or name "
    "another database.",
    "out-of-date database schema": "Its database was written by an older version of it: make a copy, then "
    "`mlflow db upgrade ADDRESS`.",
    "Connection refused": "Its database does not answer: is it running, and is the address right?",
    "password authentication failed": "Its database refuses the user or the password in the address.",
    "already in use": "Somebody else has taken its port meanwhile.",
}
"""What stands in a log, and what to do."""
NUM_LAST_CHARS = 4_000
"""Of a log, in which they are looked for."""


class PortTakenError(MillraceError):
    """Another process took the port between its choice and its use, which may be a minute."""


def start(root: Path, recipe: Recipe) -> Service:
    """Start it, detached, with its log under the root. A database's address reaches the server of it alone.

    Raises:
        MillraceError: it has ended at once.
    """
    logs = root / "stack-logs"
    logs.mkdir(exist_ok=True)
    log = logs / f"{recipe.name}.log"
    secret = (PREFECT_DATABASE, PREFECT_DATABASE_TOO, MLFLOW_DATABASE)
    inherited = {name: value for name, value in os.environ.items() if name not in secret}
    started = subprocess.run(
        detached(log, recipe.command),
        cwd=SOURCE_FOLDER,
        env={**inherited, **recipe.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
    )
    pid = int(started.stdout)
    try:
        born = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        raise MillraceError(f"{recipe.name} has ended instead of starting. {end_of(str(log))}") from None
    return Service(recipe.name, pid, born, recipe.port, recipe.url, recipe.ready_url, str(log))


def wait_until_ready(service: Service) -> None:
    """Until it answers on its port, and it is the one who does.

    Raises:
        MillraceError: it has ended, or does not answer in time.
    """
    deadline = time.monotonic() + READY_WAIT_S
    while True:
        process = service.process()
        if process is None:
            kind = PortTakenError if has_lost_its_port(service.log) else MillraceError
            raise kind(f"{service.name} has ended instead of starting. {end_of(service.log)}")
        if answers(service) and listens(process, service.port):
            return
        if time.monotonic() >= deadline:
            raise MillraceError(f"{service.name} does not answer on port {service.port}. {end_of(service.log)}")
        time.sleep(POLL_S)


def answers(service: Service) -> bool:
    """Whether its page answers; true where it has none."""
    if not service.ready_url:
        return True
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(service.ready_url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def has_lost_its_port(log: str) -> bool:
    """Whether the last lines of a log say so."""
    return "already in use" in Path(log).read_text(errors="replace")[-NUM_LAST_CHARS:]


def end_of(log: str) -> str:
    """The last lines of a log, and what to do where one of them says it."""
    text = Path(log).read_text(errors="replace")
    lines = text.splitlines()[-NUM_LAST_LINES:]
    hints = [hint for words, hint in HINTS.items() if words in text[-NUM_LAST_CHARS:]]
    return " ".join([*hints, f"The end of {log}:\n"]) + "\n".join(f"    {line}" for line in lines)


def end_server(process: psutil.Process) -> None:
    """SIGTERM, time to end, then SIGKILL to what is left of it and of what it has started."""
    family = [process, *_below(process)]
    with suppress(psutil.NoSuchProcess):
        process.terminate()
    _, left = psutil.wait_procs(family, timeout=END_WAIT_S)
    _kill(left)


def end_worker(process: psutil.Process) -> None:
    """End a worker and let its flow runs save.

    The worker first, and at once: it has no state, and would note its flow runs as crashed. The flows, told to end,
    wait for their trainers, which save; in Prefect they stay Running, and the next `up` starts them again.
    """
    flows = _below(process, all_of_them=False)
    family = [process, *_below(process)]
    _kill([process])
    for flow in flows:
        with suppress(psutil.NoSuchProcess):
            flow.terminate()
    _, left = psutil.wait_procs(family, timeout=END_WAIT_S)
    _kill([member for member in left if TRAINER not in _command_of(member)])  # a trainer was told, and is saving


def _below(process: psutil.Process, *, all_of_them: bool = True) -> list[psutil.Process]:
    """What it has started; nothing where it has ended by itself meanwhile."""
    try:
        return process.children(recursive=all_of_them)
    except psutil.NoSuchProcess:
        return []


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=END_WAIT_S)


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
