"""Messages between a flow and its trainer process: one JSON object per line, see `rlcore.run.process`."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter

import rlcore.errors
from rlcore.errors import MillraceError


def _drop_nan(seconds: float | None) -> float | None:
    return None if seconds is None or math.isnan(seconds) else seconds


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a stage.

    `to_step`: end of the chunk. `eta_s`: seconds to the last step; the stage may end earlier (`may_end_early`).
    `tokens_per_s`: of each of `num_devices`. None: not known.
    """

    stage: str
    step: int
    total_steps: int
    metrics: Mapping[str, float]
    to_step: int | None = None
    eta_s: Annotated[float | None, AfterValidator(_drop_nan)] = None
    tokens_per_s: float | None = None
    num_devices: int = 1
    may_end_early: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """A message for users."""

    text: str


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A published checkpoint."""

    step: int
    path: str


@dataclass(frozen=True, slots=True)
class Validated:
    """Metrics of the model of a step on held-out problems."""

    name: str
    step: int
    summary: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Any other event by name: paused_for_disk, disk_room, resumed, an alarm. `text` in it is for users."""

    name: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Done:
    """Result of a command."""

    command: str
    result: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """Failure of a command."""

    command: str
    type: str
    message: str

    def error(self) -> MillraceError:
        """Return the trainer's exception; `MillraceError` stands for a foreign one."""
        found = getattr(rlcore.errors, self.type, None)
        if isinstance(found, type) and issubclass(found, MillraceError):
            return found(self.message)
        return MillraceError(self.message)


Event = Progress | Note | CheckpointSaved | Validated | RunEvent
Reply = Event | Done | Failed

_KINDS: Mapping[str, TypeAdapter[Any]] = {
    "progress": TypeAdapter(Progress),
    "note": TypeAdapter(Note),
    "checkpoint": TypeAdapter(CheckpointSaved),
    "validated": TypeAdapter(Validated),
    "done": TypeAdapter(Done),
    "error": TypeAdapter(Failed),
}


def parse_reply(line: bytes) -> Reply:
    """Parse a reply. Raises ValueError if the line is not a reply."""
    values = json.loads(line)
    if not isinstance(values, dict) or not isinstance(name := values.pop("event", None), str):
        raise ValueError("not a reply")
    kind = _KINDS.get(name)
    found: Reply = RunEvent(name, values) if kind is None else kind.validate_python(values)
    return found


def command_line(command: str, **arguments: str | int) -> bytes:
    """Encode a command as one line."""
    return json.dumps({"command": command, **arguments}).encode() + b"\n"
