"""What the trainer did with its journal, one JSON line each, in `attempts.jsonl`: begun, committed, finished.

    {"attempt": 2, "step": 40, "journal_bytes": 91812, "abandoned": "metrics.abandoned-1.jsonl", "owner": {...}, ...}
    {"commit": 60, "journal_bytes": 137290}
    {"finish": "FINISHED", "journal_bytes": 137290, "time": 1763.5}

The journal alone cannot say which of its lines belong to a checkpoint. This file can, and it is never shortened, so
that whoever carries values to MLflow, then or a week later, knows which attempt wrote a line, which lines will never
be taken back, and how the run ended.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil
from pydantic import TypeAdapter, ValidationError

from rlcore.storage.documents import open_ordinary
from rlcore.tracking.lines import LineFile, iter_json

ATTEMPTS_FILE = "attempts.jsonl"
"""Name of the file in a run's folder."""

FinalStatus = Literal["FINISHED", "FAILED", "KILLED"]
"""How a run ends, in MLflow's words. KILLED: stopped or lost; it can be resumed."""


def has_begun(run_dir: Path) -> bool:
    """Whether a trainer has ever begun at the run's steps."""
    file = run_dir / ATTEMPTS_FILE
    return file.is_file() and file.stat().st_size > 0


@dataclass(frozen=True, slots=True)
class Owner:
    """The process of an attempt. Its start time tells it from a later process with the same id."""

    host: str
    pid: int
    started: float

    @classmethod
    def this_process(cls) -> "Owner":
        """The process that asks."""
        return cls(socket.gethostname(), os.getpid(), psutil.Process().create_time())

    def is_gone(self) -> bool:
        """Whether the process has surely ended. Of a process on another host nobody knows: False."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            # A second of slack: the start time is computed from the boot time, which is read anew each time.
            same = abs(process.create_time() - self.started) < 1.0
            return not same or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a run's values go in MLflow, and what is said of it there. `settings` is the run's settings as JSON."""

    uri: str
    experiment: str
    artifact_root: str
    run_id: str
    tags: Mapping[str, str]
    settings: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A process that trains the run from a step on. `journal_bytes` is where its first line stands.

    `abandoned` names the file with the lines that were cut off there; None if none were.
    """

    number: int
    step: int
    journal_bytes: int
    abandoned: str | None
    time: float
    owner: Owner
    destination: Destination


@dataclass(frozen=True, slots=True)
class Commit:
    """Lines up to `journal_bytes` belong to a checkpoint that is published."""

    step: int
    journal_bytes: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The attempt's end. All lines up to `journal_bytes` stay if the status is FINISHED."""

    status: FinalStatus
    journal_bytes: int
    time: float


Act = Attempt | Commit | Finish


class AttemptLog(LineFile):
    """Writes `attempts.jsonl`."""

    def add(self, act: Act) -> None:
        """Add a line."""
        match act:
            case Attempt():
                line = asdict(act)
                self.append({"attempt": line.pop("number"), **line})
            case Commit(step, journal_bytes):
                self.append({"commit": step, "journal_bytes": journal_bytes})
            case Finish(status, journal_bytes, time):
                self.append({"finish": status, "journal_bytes": journal_bytes, "time": time})


def read_acts(path: Path, start: int = 0) -> list[tuple[Act, int]]:
    """The acts from a byte on, each with the byte after its line. No file: none. Unreadable lines are left out."""
    if not path.exists():
        return []
    with open_ordinary(path) as file:
        parsed = [(_parse(value), end) for value, end in iter_json(file.fileno(), start)]
    return [(act, end) for act, end in parsed if act is not None]


def last_attempt(path: Path) -> Attempt | None:
    """The newest attempt; None if there is none yet."""
    attempts = [act for act, _ in read_acts(path) if isinstance(act, Attempt)]
    return attempts[-1] if attempts else None


def _parse(value: object) -> Act | None:
    try:
        match value:
            case {"attempt": number, **rest}:
                return _ATTEMPT.validate_python({"number": number, **rest})
            case {"commit": step, **rest}:
                return _COMMIT.validate_python({"step": step, **rest})
            case {"finish": status, **rest}:
                return _FINISH.validate_python({"status": status, **rest})
    except ValidationError:
        return None
    return None


_ATTEMPT, _COMMIT, _FINISH = TypeAdapter(Attempt), TypeAdapter(Commit), TypeAdapter(Finish)
