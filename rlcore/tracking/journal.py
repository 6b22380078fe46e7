"""The journal of a run: every step's metrics and every event, one JSON line each, in `metrics.jsonl`.

    {"step": 3, "time": 1763.25, "metrics": {"actor/lr": 0.1, "critic/lr": null}, "nonfinite": ["critic/lr"]}
    {"event": "out_of_memory", "step": 3, "time": 1763.31, "data": {"max_tokens_per_micro_batch": 8192, ...}}

It is written first, and MLflow, the report and the progress line are made from it. Times are seconds since the epoch,
rounded to the millisecond that MLflow keeps, so that a replay gives the same time stamp and therefore the same point.
JSON has neither NaN nor infinity: such a value is stored as null and its name listed under `nonfinite`.
"""

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlcore.config import RunConfig
from rlcore.errors import TrackingError
from rlcore.storage.documents import open_ordinary
from rlcore.storage.line_file import LineFile, iter_json
from rlcore.storage.locks import Holder
from rlcore.tracking.attempts import (
    ATTEMPTS_FILE,
    Attempt,
    AttemptLog,
    End,
    FinalStatus,
    destination_of,
    read_attempts,
)
from rlcore.tracking.companion import CLOSE_TIMEOUT_S, Companion

log = logging.getLogger(__name__)

JOURNAL_FILE = "metrics.jsonl"
"""Name of the journal in a run's folder."""

WORKERS = "workers"
"""Event of each start of the ranks: their number, device and precision, and the size of the model."""


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


class RunJournal(Journal):
    """The journal that a trainer writes, with the process that delivers it to MLflow.

    Values go to a local file: only `finish` waits for MLflow. A trainer calls, in this order, `resume_at` (with 0, 0 on
    a fresh start), then `append_step` and `append_event`, at each checkpoint `sync`, whose result the checkpoint
    stores, and in the end `finish`. A resume from the checkpoint cuts off the lines after it.
    """

    def __init__(self, run_dir: Path, config: RunConfig, *, tags: Mapping[str, str]) -> None:
        """`tags` are set on the MLflow run, besides those of lineage (`lineage_tags`), which they override."""
        super().__init__(run_dir / JOURNAL_FILE)
        self._run_dir, self._config, self._tags = run_dir, config, dict(tags)
        self._attempts = AttemptLog(run_dir / ATTEMPTS_FILE)
        self._companion = Companion(run_dir, config.tracking)
        self._has_begun = False

    def resume_at(self, step: int, journal_bytes: int) -> None:
        """Go back to a checkpoint: the lines after it are cut off (and kept in a file of their own).

        Where something is cut, a new attempt begins. A journal that is shorter than the checkpoint states was changed
        from outside; training goes on with what there is.
        """
        try:
            if self.truncate(journal_bytes) is not None:
                self._has_begun = False
        except TrackingError as error:
            log.warning("%s", error)
        self._begin_attempt(step)

    def append_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step, in an attempt. Raises as `Journal.append_step` does."""
        self._begin_attempt(step)
        super().append_step(step, metrics)

    def append_event(self, name: str, step: int, data: Mapping[str, object]) -> None:
        """Add an event, in an attempt."""
        self._begin_attempt(step)
        super().append_event(name, step, data)

    def sync(self) -> int:
        """Size in bytes, after forcing the journal to the disk. Raises as `LineFile.sync` does."""
        if self._has_begun:
            self._companion.ensure_running()
        return super().sync()

    def finish(self, status: FinalStatus, timeout_s: float | None = CLOSE_TIMEOUT_S) -> bool:
        """End the attempt and wait, at most so long, until MLflow has everything; None: do not wait.

        Returns:
            Whether MLflow has everything. If not, nothing is lost: `millrace sync` delivers it later.
        """
        # Without an attempt there is no run, and a process that trains nothing changes no end but to FINISHED.
        known = [] if self._has_begun else read_attempts(self._run_dir)
        has_run = self._has_begun or (bool(known) and (known[-1][1] is None or status == "FINISHED"))
        self.close()
        if has_run:
            self._attempts.add(End(status, _now()))
        self._attempts.close()
        return self._companion.finish(timeout_s) if has_run else True

    def _begin_attempt(self, step: int) -> None:
        """Record, once an attempt, which process writes from which byte on, and start the delivery."""
        if self._has_begun:
            return
        self._has_begun = True
        where = destination_of(self._run_dir, self._config, self._tags)
        self._attempts.add(Attempt(step, self.size_bytes, _now(), Holder.me(), where))
        self._companion.ensure_running()


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
                    steps[record.step] = _merge(steps.get(record.step), record)
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


def _merge(first: StepRecord | None, second: StepRecord) -> StepRecord:
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
