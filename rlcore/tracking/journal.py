"""The journal of a run: every step's metrics and every event, one JSON line each, in `metrics.jsonl`.

    {"step": 3, "time": 1763.25, "metrics": {"actor/lr": 0.1, "critic/lr": null}, "nonfinite": ["critic/lr"]}
    {"event": "out_of_memory", "step": 3, "time": 1763.31, "data": {"max_tokens_per_micro_batch": 8192, ...}}

It is written first, and MLflow, the report and the progress line are made from it. Times are seconds since the epoch,
rounded to the millisecond that MLflow keeps, so that a replay gives the same time stamp and therefore the same point.
JSON has neither NaN nor infinity: such a value is stored as null and its name listed under `nonfinite`.

`LineFile` is the file below it, which survives a kill, a full disk and a torn last line.
"""

import errno
import itertools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlcore.errors import DiskSpaceError, TrackingError
from rlcore.storage.disk import free_bytes, is_out_of_room, out_of_room
from rlcore.storage.documents import READ_BLOCK_BYTES, open_ordinary, parse_json
from rlcore.storage.publish import flush_to_disk, temporary_beside

log = logging.getLogger(__name__)

JOURNAL_FILE = "metrics.jsonl"
"""Name of the journal in a run's folder."""

WORKERS = "workers"
"""Event of each start of the ranks: their number, device and precision, and the size of the model."""


class LineFile:
    """A file that grows by whole lines, each in a single unbuffered write at its end.

    A line that finds no room stays in memory and is written with the next one, so that a full disk costs no value;
    `sync` is where the lack of room is told.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._pending: list[bytes] = []
        self._failure: OSError | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = self._open()
        self._cut_torn_line()

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _cut_torn_line(self) -> None:
        """The next line must not be glued to the half line that a killed process left."""
        size = self.size_bytes
        whole = _end_of_last_line(self.path, size)
        if whole < size:
            log.warning("%s: cut %d bytes of a line that was never finished", self.path, size - whole)
            os.ftruncate(self._fd, whole)

    @property
    def size_bytes(self) -> int:
        """Bytes on disk. Lines that found no room are not in it."""
        return os.fstat(self._fd).st_size

    def append(self, value: Mapping[str, object]) -> None:
        """Add one line. Never raises for lack of room."""
        line = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with self._lock:
            self._pending.append(line)
            self._write_pending()

    def require_written(self) -> None:
        """Write what found no room before.

        Raises:
            DiskSpaceError: lines are still in memory because they could not be written.
        """
        with self._lock:
            self._write_pending()
            if self._pending:
                size = sum(map(len, self._pending))
                error = DiskSpaceError(
                    f"{self.path}: {size} bytes could not be written: {self._failure}. "
                    f"{free_bytes(self.path)} bytes are free on that disk; make room. "
                    "The lines are kept in memory and written as soon as there is room."
                )
                error.needed_bytes = size
                raise error

    def sync(self) -> int:
        """Force everything to the disk and return the size in bytes; raises as `require_written` does."""
        self.require_written()
        with self._lock:
            os.fsync(self._fd)
            return self.size_bytes

    def _write_pending(self) -> None:
        """Write all that waits. After a failed or short write the file is as before: no reader sees half a line."""
        if not self._pending:
            return
        data, before = b"".join(self._pending), self.size_bytes
        try:
            if os.write(self._fd, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._fd, before)
            self._failure = error
            return
        self._pending.clear()

    def close(self) -> None:
        """Write what waits, if there is room, and let go of the file."""
        with self._lock:
            if self._fd >= 0:
                self._write_pending()
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> "LineFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def truncate(self, to_bytes: int) -> Path | None:
        """Go back to the first `to_bytes` bytes. What is cut is kept beside, in `metrics.abandoned-<k>.jsonl`; lines
        that found no room are dropped.

        The shortened journal is a new file put in the place of the old one, so that a reader that has the old one open
        reads on undisturbed.

        Returns:
            The file with the cut lines; None if nothing was cut.

        Raises:
            TrackingError: the journal is shorter, or no line ends at that byte.
            DiskSpaceError: no room for what is cut; the journal is as it was.
        """
        with self._lock:
            self._write_pending()
            size = self.size_bytes
            if to_bytes == size:
                self._pending.clear()
                return None
            if to_bytes > size or _end_of_last_line(self.path, to_bytes) != to_bytes:
                raise TrackingError(
                    f"{self.path}: asked to go back to byte {to_bytes} (a checkpoint's), but the file has {size} bytes "
                    "or no line ends there. The file was changed or replaced since that checkpoint; put it back."
                )
            names = (f"{self.path.stem}.abandoned-{k}{self.path.suffix}" for k in itertools.count(1))
            aside = next(path for name in names if not (path := self.path.with_name(name)).exists())
            shortened = temporary_beside(self.path)
            try:
                _copy_range(self.path, to_bytes, size, aside)
                _copy_range(self.path, 0, to_bytes, shortened)
            except OSError as reason:
                for unfinished in (aside, shortened):
                    unfinished.unlink(missing_ok=True)
                if is_out_of_room(reason):
                    raise out_of_room(self.path, reason, needed_bytes=size) from reason
                raise
            os.close(self._fd)
            shortened.replace(self.path)
            flush_to_disk(self.path.parent)
            self._fd = self._open()
            self._pending.clear()
            return aside


def iter_json(fd: int, start: int) -> Iterator[tuple[object, int]]:
    """Each whole line from a byte on as (its JSON value, the byte after it); the value is None if unreadable."""
    rest, offset = b"", start
    while block := os.pread(fd, READ_BLOCK_BYTES, offset + len(rest)):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            offset += len(line) + 1
            value = None
            with suppress(ValueError):
                value = parse_json(line)
            yield value, offset


def _end_of_last_line(path: Path, size: int) -> int:
    """The byte after the last newline within the first `size` bytes."""
    with path.open("rb") as file:
        end = size
        while end > 0:
            start = max(0, end - READ_BLOCK_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def _copy_range(source: Path, start: int, stop: int, target: Path) -> None:
    with source.open("rb") as reader, target.open("wb") as writer:
        reader.seek(start)
        left = stop - start
        while left > 0 and (block := reader.read(min(READ_BLOCK_BYTES, left))):
            writer.write(block)
            left -= len(block)
        writer.flush()
        os.fsync(writer.fileno())


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What was measured at one step. `metrics` holds finite values only; the names of the others are in `nonfinite`."""

    step: int
    time: float
    metrics: Mapping[str, float]
    nonfinite: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EventRecord:
    """Something that happened at a step and is no number: out of memory, a lost worker, a resume."""

    name: str
    step: int
    time: float
    data: Mapping[str, object]


Record = StepRecord | EventRecord


@dataclass(frozen=True, slots=True)
class JournalContents:
    """A whole journal. Lines of the same step are one record.

    `torn_bytes` counts what stands after the last newline (a process died while it wrote), `num_damaged_lines` the
    whole lines that are not readable.
    """

    steps: tuple[StepRecord, ...]
    events: tuple[EventRecord, ...]
    torn_bytes: int
    num_damaged_lines: int


class Journal(LineFile):
    """The journal of one run, as its trainer writes it. One writer at a time (the run's lock sees to that)."""

    def append_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step. Anything that `float` takes is a value.

        Raises:
            TypeError, ValueError: a value is no number.
        """
        values = {name: float(value) for name, value in metrics.items()}
        nonfinite = [name for name, value in values.items() if not math.isfinite(value)]
        line: dict[str, object] = {"step": int(step), "time": _now(), "metrics": values}
        if nonfinite:
            line["metrics"] = values | dict.fromkeys(nonfinite)
            line["nonfinite"] = nonfinite
        self.append(line)

    def append_event(self, name: str, step: int, data: Mapping[str, object]) -> None:
        """Add an event. Data that JSON cannot hold is written as its text."""
        self.append({"event": name, "step": int(step), "time": _now(), "data": _json_safe(data)})


def read_journal(path: Path) -> list[StepRecord]:
    """The metrics of every step, in the order written; lines of one step are joined. Says so if the end is torn."""
    contents = load_journal(path)
    if contents.torn_bytes or contents.num_damaged_lines:
        log.warning(
            "%s: left out %d bytes of an unfinished last line and %d unreadable lines",
            path,
            contents.torn_bytes,
            contents.num_damaged_lines,
        )
    return list(contents.steps)


def load_journal(path: Path) -> JournalContents:
    """All of a journal, and what of it could not be read."""
    steps: dict[int, StepRecord] = {}
    events: list[EventRecord] = []
    end = num_damaged = 0
    with open_ordinary(path) as file:
        for line, line_end in iter_lines(file.fileno(), 0):
            end = line_end
            match line:
                case StepRecord() as record:
                    steps[record.step] = _joined(steps.get(record.step), record)
                case EventRecord() as event:
                    events.append(event)
                case None:
                    num_damaged += 1
        torn_bytes = os.fstat(file.fileno()).st_size - end
    return JournalContents(tuple(steps.values()), tuple(events), torn_bytes, num_damaged)


def missing_steps(contents: JournalContents, up_to: int) -> str:
    """The steps from 1 on that have no line, as `steps 4-6, 9`; '' where each has one."""
    absent = set(range(1, up_to + 1)) - {record.step for record in contents.steps}
    starts = sorted(step for step in absent if step - 1 not in absent)
    ends = sorted(step for step in absent if step + 1 not in absent)
    spans = [str(first) if first == last else f"{first}-{last}" for first, last in zip(starts, ends, strict=True)]
    return f"{'step' if len(absent) == 1 else 'steps'} {', '.join(spans)}" if absent else ""


def iter_lines(fd: int, start: int) -> Iterator[tuple[Record | None, int]]:
    """The whole lines of an open journal from a byte on: record (None if unreadable) and the byte after it.

    A line that is still being written is not among them.
    """
    return ((parse_record(value), end) for value, end in iter_json(fd, start))


def parse_record(value: object) -> Record | None:
    """A line's JSON value as a record; None if it is neither a step nor an event."""
    try:
        match value:
            case {"event": str(name), "step": int(step), "time": int() | float() as when, "data": dict(data)}:
                return EventRecord(name, step, float(when), data)
            case {"step": int(step), "time": int() | float() as when, "metrics": dict(metrics), **rest}:
                finite = {str(name): float(each) for name, each in metrics.items() if each is not None}
                named = rest.get("nonfinite")
                return StepRecord(step, float(when), finite, tuple(named) if isinstance(named, list) else ())
    except (TypeError, ValueError):
        return None
    return None


def _joined(first: StepRecord | None, second: StepRecord) -> StepRecord:
    if first is None:
        return second
    metrics = {**first.metrics, **second.metrics}
    nonfinite = tuple(dict.fromkeys([*first.nonfinite, *second.nonfinite]))
    return StepRecord(first.step, first.time, metrics, tuple(name for name in nonfinite if name not in metrics))


def _now() -> float:
    return round(time.time(), 3)


def _json_safe(value: object) -> object:
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case str() | int() | bool() | None:
            return value
        case Mapping():
            return {str(key): _json_safe(each) for key, each in value.items()}
        case list() | tuple():
            return [_json_safe(each) for each in value]
    return str(value)
