"""The messages between a flow and its trainer process, one JSON object per line. See `rlcore.run.process`."""

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
    """The progress of a stage. A value is None if it is not known.

    `to_step` is the last step of the current chunk (`trainer.steps_per_chunk`). `eta_s` and `sweep_eta_s` are the
    remaining seconds of the stage and of the sweep. `tokens_per_s` is per device.
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
    sweep_eta_s: float | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """A message for users."""

    text: str


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The event that reports a complete checkpoint. `step` is the step of the checkpoint, and `path` is its folder."""

    step: int
    path: str


@dataclass(frozen=True, slots=True)
class Validated:
    """The event that reports the validation of a model. `summary` has the held-out metrics."""

    name: str
    step: int
    summary: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunEvent:
    """An event for which there is no separate class, such as `paused_for_disk` or an alarm.

    `data["text"]` is a message for users.
    """

    name: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Done:
    """The trainer process's reply when a command has succeeded. It contains the command's result."""

    command: str
    result: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """The trainer process's reply when a command has failed. It contains the class and message of the error."""

    command: str
    type: str
    message: str

    def error(self) -> MillraceError:
        """Return the trainer's error as an exception of the class that `type` names.

        If `rlcore.errors` has no such class, the exception is a MillraceError.
        """
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
    """Parse a reply of the trainer process. Raises ValueError if the line is not a reply."""
    values = json.loads(line)
    if not isinstance(values, dict) or not isinstance(name := values.pop("event", None), str):
        raise ValueError("not a reply")
    kind = _KINDS.get(name)
    found: Reply = RunEvent(name, values) if kind is None else kind.validate_python(values)
    return found
