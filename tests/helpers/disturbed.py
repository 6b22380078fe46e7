"""Starts a run's trainer again and again, each time disturbed by a real signal at a chosen moment.

    python -m tests.helpers.disturbed SETTINGS PLAN OUT

PLAN is a JSON list, one entry a start: null, or a mapping. `at` is a phase, the stage of a progress event, "publish",
"prune", "journal", or an audit event of Python on a `path`, and `nth` which time from 1. `to` is "trainer" (default),
"group", "node", or a process by its name in `rlcore.stacks` or of its program. `signals` are sent `after_s` seconds
later, `aside` while the trainer continues. It then sleeps for `sleep_s`. A stop request is dated back by `late_s`.
`env` has variables. OUT gets the outcome of each start.

Starts are forked from one process that has imported everything. It is the reaper of its descendants, so that whatever a
start leaves behind becomes its child and is seen.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psutil

from rlcore import stacks
from rlcore.checkpoint.catalog import list_checkpoints
from rlcore.run.stop import StopFlag
from rlcore.run.watchdog import Watchdog
from rlcore.tracking.journal import Journal
from tests.helpers.whole_run import run_whole

PR_SET_CHILD_SUBREAPER = 36
DEADLINE_S = 240.0


class Disturbance:
    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.at, self.nth, self.to = plan["at"], plan.get("nth", 1), plan.get("to", "trainer")
        self.path, self.after_s = plan.get("path"), plan.get("after_s", 0.0)
        self.signals = [signal.Signals[name] for name in plan["signals"]]
        self.aside = plan.get("aside", False)
        self.sleep_s, self.late_s = plan.get("sleep_s", 0.0), plan.get("late_s", 0.0)
        self.seen = 0

    def moment(self, name: str) -> None:
        self.seen += name == self.at
        if name == self.at and self.seen == self.nth:
            if self.aside:
                threading.Thread(target=self.send, daemon=True).start()
            else:
                self.send()
            time.sleep(self.sleep_s)

    def send(self) -> None:
        time.sleep(self.after_s)
        for number in self.signals:
            for pid in self.targets():
                with suppress(ProcessLookupError):  # a node's processes end with the first of them
                    os.kill(pid, number)
            time.sleep(0.05)

    def targets(self) -> list[int]:
        """Return the ids of the processes that receive the signals."""
        if self.to == "trainer":
            return [os.getpid()]
        if self.to == "group":
            return [0]
        if self.to == "node":
            return node_of_a_rank()
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:  # it may be at its start
            for path in Path(os.environ[stacks.FOLDER_VARIABLE]).glob(f"{self.to}-*.txt"):
                return [int(path.stem.rpartition("-")[2])]
            for child in psutil.Process().children(recursive=True):
                if child.name() == self.to:
                    return [int(child.pid)]
            time.sleep(0.05)
        raise RuntimeError(f"there is no process {self.to}")


def node_of_a_rank() -> list[int]:
    """Return all processes of a node that has a rank and is not the head. The trainer itself lives on the head."""
    for path in Path(os.environ[stacks.FOLDER_VARIABLE]).glob("rank-*.txt"):
        parent = psutil.Process(int(path.stem.rpartition("-")[2])).parent()
        if parent is not None and "--head" not in parent.cmdline():
            return [child.pid for child in parent.children(recursive=True)] + [parent.pid]
    raise RuntimeError("every rank lives on the head node")


def listen(disturbance: Disturbance) -> None:
    def hook(name: str, arguments: tuple[object, ...]) -> None:
        paths = [os.fspath(one) for one in arguments if isinstance(one, str | os.PathLike)]
        if name == "os.rename" and paths:
            if "/checkpoints/.tmp-step-" in paths[0]:
                disturbance.moment("publish")
            elif "/checkpoints/step-" in paths[0]:
                disturbance.moment("prune")
        if name == disturbance.at and any(fnmatch(path, f"*{disturbance.path}*") for path in paths):
            disturbance.moment(name)

    sys.addaudithook(hook)
    write = Journal._write_pending

    def write_pending(self: Journal) -> None:
        if self._pending:
            disturbance.moment("journal")
        write(self)

    Journal._write_pending = write_pending  # type: ignore[method-assign]
    asked_s = StopFlag.seconds_since_request

    def later(self: StopFlag) -> float | None:
        since = asked_s(self)
        return None if since is None else since + disturbance.late_s

    StopFlag.seconds_since_request = later  # type: ignore[method-assign]


def start(run_dir: Path, plan: Mapping[str, Any] | None, events: Path) -> None:
    code = 99
    os.setsid()
    try:
        disturbance = None if plan is None else Disturbance(plan)
        os.environ.update({} if plan is None else plan.get("env", {}))
        if disturbance is not None:
            listen(disturbance)
        whole = Watchdog.phase

        @contextmanager
        def phase(self: Watchdog, name: str) -> Iterator[None]:
            with whole(self, name):
                if disturbance is not None:
                    disturbance.moment(name)
                yield

        Watchdog.phase = phase  # type: ignore[method-assign]

        def heard(event: Mapping[str, object]) -> None:
            with events.open("a") as file:
                file.write(json.dumps(event) + "\n")
            if disturbance is not None:
                disturbance.moment(str(event.get("stage")))

        code = run_whole(run_dir, heard)
    except BaseException as error:
        print(f"ended by {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = 1
    finally:
        sys.stderr.flush()
        os._exit(code)


def left_over() -> list[str]:
    deadline = time.monotonic() + 60
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return []
        found = []
        for child in psutil.Process().children(recursive=True):
            try:
                if child.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(child.cmdline())[:200])
            except psutil.Error:
                continue
        if not found or time.monotonic() > deadline:
            for child in psutil.Process().children(recursive=True):
                child.kill()
            return found
        time.sleep(0.1)


def main() -> None:
    run_dir, plan, out = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    checkpoints = run_dir / "checkpoints"
    found = []
    for number, entry in enumerate(plan):
        events = out.with_suffix(f".{number}.events")
        events.touch()
        child = os.fork()
        if child == 0:
            start(run_dir, entry, events)
        deadline = time.monotonic() + DEADLINE_S
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.02)
        found.append(
            {
                "plan": entry,
                "pid": child,
                "code": os.waitstatus_to_exitcode(ended[1]),
                "left": left_over(),
                "temporaries": [p.name for p in checkpoints.glob("*") if not p.name.startswith("step-")],
                "checkpoints": sorted(p.name for p in checkpoints.glob("step-*")),
                "unreadable": [
                    f"{row.path.name}: {row.reason}"
                    for row in list_checkpoints(checkpoints, verify_hashes=True)
                    if row.verdict != "verified"
                ],
                "events": [json.loads(line) for line in events.read_text().splitlines()],
            }
        )
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
