"""The attempts at a run, recorded in `attempts.jsonl`, and the process that delivers the journal to MLflow.

The file gets one JSON line when a trainer starts or resumes, and one when the trainer ends:

    {"from_step": 40, "journal_bytes": 91812, "time": 1763.2, "owner": {"pid": 411, ...}, "destination": {...}}
    {"status": "FINISHED", "time": 1763.5}
"""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from rlcore import SOURCE_FOLDER
from rlcore.config import RunConfig, TrackingConfig
from rlcore.storage.documents import LineFile, iter_json, open_ordinary
from rlcore.storage.locks import Holder
from rlcore.tracking.connection import resolve_uri
from rlcore.tracking.lineage import RUN_ID_TAG, lineage_tags

log = logging.getLogger(__name__)
ATTEMPTS_FILE = "attempts.jsonl"
CLOSE_TIMEOUT_S = 30.0  # the seconds to wait for the delivery of the last values at the end of a run
PREFIX = "tracking: "  # marks lines for the trainer's log, since MLflow's libraries write to the same stream
DELIVERY_VARIABLE = "MILLRACE_DELIVERY"
"""The environment variable with the path of the Python interpreter that delivers to MLflow, followed by the entries of
this interpreter's `PYTHONPATH`."""
MAX_STARTS = 3
REQUEST_LIMITS = {
    # The process retries by itself; a retry inside the client could create a run twice.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}
FinalStatus = Literal["FINISHED", "FAILED", "KILLED"]
"""A run's final status in MLflow. A run with the status KILLED was stopped or lost, and can be resumed."""


@dataclass(frozen=True, slots=True)
class Destination:
    """The MLflow store and experiment of a run, and the tags and settings to send there. `root`: the absolute path of
    the setting `paths.root`."""

    uri: str
    experiment: str
    root: str
    tags: Mapping[str, str]
    settings: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt at a run: one start or resume of its trainer. It begins after step `from_step`. `journal_bytes`: the
    journal's size at this step."""

    from_step: int
    journal_bytes: int
    time: float
    owner: Holder
    destination: Destination

    def is_lost(self) -> bool:
        """Return whether the attempt's trainer process has ended. Return False if the process is on another host,
        because its state cannot be checked."""
        return self.owner.host == socket.gethostname() and self.owner.process() is None


@dataclass(frozen=True, slots=True)
class End:
    """The final status of an attempt at a run, and the time of its end."""

    status: FinalStatus
    time: float


_LINE: TypeAdapter[Attempt | End] = TypeAdapter(Attempt | End)


def destination_of(run_dir: Path, config: RunConfig, tags: Mapping[str, str]) -> Destination:
    """Return the MLflow store and experiment of a run, with the settings and tags to send there. `tags` override the
    run's `lineage_tags`."""
    root, tracking = Path(config.paths.root).absolute(), config.tracking
    tags = {**lineage_tags(config, run_dir.name), **tags, RUN_ID_TAG: run_dir.name}
    settings = config.model_dump(mode="json")
    return Destination(resolve_uri(tracking, root), tracking.experiment, os.fspath(root), tags, settings)


class AttemptLog(LineFile):
    """A writer of `attempts.jsonl`."""

    def add(self, line: Attempt | End) -> None:
        """Append the start or the end of an attempt."""
        self.append(_LINE.dump_python(line))


def read_attempts(run_dir: Path) -> list[tuple[Attempt, End | None]]:
    """Return the attempts at a run with their ends (None if active or lost), oldest first. Skip unreadable lines."""
    found: list[tuple[Attempt, End | None]] = []
    path = run_dir / ATTEMPTS_FILE
    if not path.exists():
        return found
    with open_ordinary(path) as file:
        for value, _ in iter_json(file.fileno(), 0):
            with suppress(ValidationError):
                line = _LINE.validate_python(value)
                if isinstance(line, Attempt):
                    found.append((line, None))
                elif found:
                    found[-1] = (found[-1][0], line)
    return found


class Companion:
    """An object with which the trainer starts and ends the process `python -m rlcore.tracking`. Its methods do nothing
    if tracking is disabled."""

    def __init__(self, run_dir: Path, settings: TrackingConfig) -> None:
        self._run_dir, self._settings = run_dir, settings
        self._process: subprocess.Popen[str] | None = None
        self._num_starts = 0

    def ensure_running(self) -> None:
        """Start the delivery process if it is not running, at most `MAX_STARTS` times. Never raises an error."""
        if not self._settings.enabled or self._num_starts >= MAX_STARTS:
            return
        if self._process is not None:
            if (code := self._process.poll()) is None:
                return
            log.warning("the process that delivers values to MLflow ended with code %d; restarting it", code)
        self._num_starts += 1
        try:
            self._start()
        except OSError as error:
            log.warning("nothing is delivered to MLflow for now: its process cannot be started: %s", error)

    def _start(self) -> None:
        own = os.pathsep.join(filter(None, [sys.executable, str(SOURCE_FOLDER), os.environ.get("PYTHONPATH")]))
        python, _, path = os.environ.get(DELIVERY_VARIABLE, own).partition(os.pathsep)
        command = [python, "-P", "-m", "rlcore.tracking", str(self._run_dir)]
        self._process = subprocess.Popen(
            [*command, "--parent", str(os.getpid()), "--every-s", str(self._settings.ship_every_s)],
            env={**os.environ, **REQUEST_LIMITS, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # readers of the trainer's output must not wait for this process
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._relay, args=(self._process,), name="tracking", daemon=True).start()

    def _relay(self, process: "subprocess.Popen[str]") -> None:
        with process:
            for line in process.stderr or ():
                level = logging.WARNING if line.startswith(PREFIX) else logging.DEBUG
                log.log(level, "%s", line.removeprefix(PREFIX).rstrip())

    def finish(self, timeout_s: float | None) -> bool:
        """Wait at most `timeout_s` until everything is delivered, then end the delivery process. Return whether
        everything was delivered. If `timeout_s` is None, return False immediately, and let the process outlive the
        trainer."""
        self.ensure_running()
        if timeout_s is None or not self._settings.enabled:
            return False
        delivered = False
        if self._process is not None:
            try:
                delivered = self._process.wait(timeout_s) == 0
            except subprocess.TimeoutExpired:
                # safe at any moment: unrecorded values are sent again
                self._process.kill()
                self._process.wait()
        if not delivered:
            log.warning("not every tracker has all of this run yet. To deliver it: millrace sync %s", self._run_dir)
        return delivered
