"""What a flow and its trainer process say to each other: one JSON object a line, see `rlcore.run.process`."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import rlcore.errors
from rlcore.errors import MillraceError


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a stage stands. `to_step`: end of the chunk; `eta_s`: seconds to the end of the run; None: not known."""

    stage: str
    step: int
    total_steps: int
    metrics: Mapping[str, float]
    to_step: int | None = None
    eta_s: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence for people."""

    text: str


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint has been published."""

    step: int
    path: str


@dataclass(frozen=True, slots=True)
class Validated:
    """The model of a step was judged on held-out problems."""

    name: str
    step: int
    summary: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Happening:
    """Any other event, by its name: paused_for_disk, disk_room, resumed, an alarm. `text` in it is for people."""

    name: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Done:
    """The command's result."""

    command: str
    result: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """The command failed with this error."""

    command: str
    kind: str
    message: str

    def error(self) -> MillraceError:
        """The exception that the trainer raised; one that is none of ours becomes the base class."""
        found = getattr(rlcore.errors, self.kind, None)
        if isinstance(found, type) and issubclass(found, MillraceError):
            return found(self.message)
        return MillraceError(self.message)


Event = Progress | Note | CheckpointSaved | Validated | Happening
Reply = Event | Done | Failed


def parse_reply(line: bytes) -> Reply:
    """A reply from its line.

    Raises:
        ValueError, KeyError, TypeError: the line is none.
    """
    match json.loads(line):
        case {"event": "progress", **values}:
            return _progress({str(name): value for name, value in values.items()})
        case {"event": "note", "text": text}:
            return Note(str(text))
        case {"event": "checkpoint", "step": step, "path": path}:
            return CheckpointSaved(int(step), str(path))
        case {"event": "validated", "name": name, "step": step, "summary": dict(summary)}:
            return Validated(str(name), int(step), {str(key): float(value) for key, value in summary.items()})
        case {"event": "done", "command": command, "result": dict(result)}:
            return Done(str(command), result)
        case {"event": "error", "command": command, "type": kind, "message": message}:
            return Failed(str(command), str(kind), str(message))
        case {"event": str(name), **data}:
            return Happening(name, {str(key): value for key, value in data.items()})
    raise ValueError("not a reply")


def _progress(values: Mapping[str, Any]) -> Progress:
    to_step, eta_s, tokens_per_s = values.get("to_step"), values.get("eta_s"), values.get("tokens_per_s")
    return Progress(
        stage=str(values["stage"]),
        step=int(values["step"]),
        total_steps=int(values["total_steps"]),
        metrics={str(name): float(value) for name, value in values["metrics"].items()},
        to_step=None if to_step is None else int(to_step),
        eta_s=None if eta_s is None or math.isnan(eta_s) else float(eta_s),
        tokens_per_s=None if tokens_per_s is None else float(tokens_per_s),
    )


def command_line(command: str, **arguments: str | int) -> bytes:
    """A command as it is sent."""
    return json.dumps({"command": command, **arguments}).encode() + b"\n"
