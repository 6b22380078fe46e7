"""The attempts at a run, one JSON line for each act of a trainer, in `attempts.jsonl`: begun, committed, finished.

    {"attempt": 2, "step": 40, "journal_bytes": 91812, "abandoned": "metrics.abandoned-1.jsonl", "owner": {...}, ...}
    {"commit": 60, "journal_bytes": 137290}
    {"finish": "FINISHED", "journal_bytes": 137290, "time": 1763.5}

The journal does not show which of its lines belong to a checkpoint, and which lines were cut off it. This file does,
and it is never shortened: the delivery to MLflow, at once or a week later, follows from it and the journal alone.
"""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import psutil
from pydantic import Field, TypeAdapter, ValidationError

from rlcore.storage.documents import open_ordinary
from rlcore.storage.locks import birth_of, process_of
from rlcore.tracking.journal import LineFile, iter_json

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
    """The process of an attempt. `started` tells it from a later process with the same id, see `birth_of`."""

    host: str
    pid: int
    started: float

    @classmethod
    def this_process(cls) -> "Owner":
        """The current process."""
        return cls(socket.gethostname(), os.getpid(), birth_of(psutil.Process()))

    def is_gone(self) -> bool:
        """Whether the process has surely ended; False for a process on another host."""
        return self.host == socket.gethostname() and process_of(self.pid, self.started) is None


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a run's values go in MLflow, and how it is described there. `settings` is the run's settings as JSON."""

    uri: str
    experiment: str
    artifact_root: str
    run_id: str
    tags: Mapping[str, str]
    settings: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A process that trains the run from a step on. `journal_bytes` is where its first line stands.

    `abandoned` names the file with the lines that were cut off there; None if none were. `repeats` is False where the
    steps of these lines come again with other settings: an alarm rolled the run back.
    """

    number: Annotated[int, Field(alias="attempt")]
    step: int
    journal_bytes: int
    abandoned: str | None
    time: float
    owner: Owner
    destination: Destination
    repeats: bool = True


@dataclass(frozen=True, slots=True)
class Commit:
    """Lines up to `journal_bytes` belong to a checkpoint that is published."""

    step: Annotated[int, Field(alias="commit")]
    journal_bytes: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The attempt's end, when the journal had `journal_bytes`."""

    status: Annotated[FinalStatus, Field(alias="finish")]
    journal_bytes: int
    time: float


Act = Attempt | Commit | Finish
_ACT: TypeAdapter[Act] = TypeAdapter(Act)


class AttemptLog(LineFile):
    """Writes `attempts.jsonl`."""

    def add(self, act: Act) -> None:
        """Append an act to the file."""
        self.append(_ACT.dump_python(act, by_alias=True))


def read_acts(path: Path, start: int = 0) -> list[tuple[Act, int]]:
    """The acts from a byte on, each with the byte after its line. No file: none. Unreadable lines are left out."""
    acts: list[tuple[Act, int]] = []
    if path.exists():
        with open_ordinary(path) as file:
            for value, end in iter_json(file.fileno(), start):
                with suppress(ValidationError):
                    acts.append((_ACT.validate_python(value), end))
    return acts


@dataclass(frozen=True, slots=True)
class History:
    """All attempts at a run, as the delivery needs them.

    Attributes:
        attempts: in order; empty for a run that has not begun.
        ends: how each attempt ended, by its number; none for one that goes on or was lost.
        line: number of the last attempt that began another line of steps: it went back behind a published checkpoint
            (the newest was damaged, say), or back with other settings; 0 where none did.
        cuts: files with lines that were cut off the present line of steps, by the number of the attempt that cut them.
            They follow the last checkpoint, so the next attempt repeats their steps.
        end_bytes: size of the part of the file that was read.
    """

    attempts: tuple[Attempt, ...] = ()
    ends: Mapping[int, Finish] = field(default_factory=dict)
    line: int = 0
    cuts: Mapping[int, str] = field(default_factory=dict)
    end_bytes: int = 0

    @property
    def end(self) -> Finish | None:
        """How the newest attempt ended."""
        return self.ends.get(self.attempts[-1].number) if self.attempts else None


def read_history(path: Path) -> History:
    """The history in `attempts.jsonl`; an empty one without the file."""
    attempts: list[Attempt] = []
    ends: dict[int, Finish] = {}
    cuts: dict[int, str] = {}
    line = committed = 0
    acts = read_acts(path)
    for act, _ in acts:
        match act:
            case Attempt(number=number, journal_bytes=journal_bytes, abandoned=abandoned, repeats=repeats):
                if journal_bytes < committed or (abandoned is not None and not repeats):
                    line, cuts = number, {}
                elif abandoned is not None:
                    cuts[number] = abandoned
                attempts.append(act)
                committed = journal_bytes
            case Commit(journal_bytes=journal_bytes):
                committed = journal_bytes
            case Finish() if attempts:
                ends[attempts[-1].number] = act
    return History(tuple(attempts), ends, line, cuts, acts[-1][1] if acts else 0)
