"""The attempts at a run in `attempts.jsonl`: one JSON line when a trainer begins or goes back, one when it ends.

{"from_step": 40, "journal_bytes": 91812, "time": 1763.2, "owner": {"pid": 411, ...}, "destination": {...}}
{"status": "FINISHED", "time": 1763.5}
"""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from rlcore.config import RunConfig
from rlcore.storage.documents import open_ordinary
from rlcore.storage.line_file import LineFile, iter_json
from rlcore.storage.locks import Holder
from rlcore.tracking.connection import resolve_uri
from rlcore.tracking.lineage import RUN_ID_TAG, lineage_tags

ATTEMPTS_FILE = "attempts.jsonl"
"""Name of the file in a run's folder."""

FinalStatus = Literal["FINISHED", "FAILED", "KILLED"]
"""How a run ends, in MLflow's words. KILLED: stopped or lost; it can be resumed."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a run's values go in MLflow, and how it is described there.

    `root`: `paths.root` of the run. `settings`: its settings as JSON values.
    """

    uri: str
    experiment: str
    root: str
    tags: Mapping[str, str]
    settings: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Attempt:
    """The training of a run from a step on. `journal_bytes`: size of the journal before its first line, after any cut.

    `owner`: the process.
    """

    from_step: int
    journal_bytes: int
    time: float
    owner: Holder
    destination: Destination

    def is_lost(self) -> bool:
        """Whether the process has surely ended; False for a process on another host."""
        return self.owner.host == socket.gethostname() and self.owner.process() is None


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt ended, and when."""

    status: FinalStatus
    time: float


_LINE: TypeAdapter[Attempt | End] = TypeAdapter(Attempt | End)


def destination_of(run_dir: Path, config: RunConfig, tags: Mapping[str, str]) -> Destination:
    """Where the values of a run go and how it is described there; its name is its folder's."""
    root = Path(config.paths.root).absolute()
    return Destination(
        uri=resolve_uri(config.tracking, root),
        experiment=config.tracking.experiment,
        root=os.fspath(root),
        tags={**lineage_tags(config, stage="train", run_id=run_dir.name), **tags, RUN_ID_TAG: run_dir.name},
        settings=config.model_dump(mode="json"),
    )


class AttemptLog(LineFile):
    """Writes `attempts.jsonl`."""

    def add(self, line: Attempt | End) -> None:
        """Append a line to the file."""
        self.append(_LINE.dump_python(line))


def read_attempts(run_dir: Path) -> list[tuple[Attempt, End | None]]:
    """All attempts at a run, oldest first, each with its end: None for one that goes on or was lost.

    Empty where no trainer has begun. Unreadable lines are left out.
    """
    found: list[tuple[Attempt, End | None]] = []
    path = run_dir / ATTEMPTS_FILE
    if not path.exists():
        return found
    with open_ordinary(path) as file:
        for value, _ in iter_json(file.fileno(), 0):
            with suppress(ValidationError):
                match _LINE.validate_python(value):
                    case Attempt() as attempt:
                        found.append((attempt, None))
                    case End() as end if found:
                        found[-1] = (found[-1][0], end)
    return found
