"""The journal of a run, `metrics.jsonl`, with one JSON line for the metrics of each step and for each event.

    {"step": 3, "time": 1763.25, "metrics": {"actor/lr": 0.1, "critic/lr": null}, "nonfinite": ["critic/lr"]}
    {"event": "out_of_memory", "step": 3, "time": 1763.31, "data": {"max_tokens_per_micro_batch": 8192, ...}}

MLflow, the report and the progress line are derived from the journal. Times are seconds since the epoch, rounded to
MLflow's milliseconds, so that a second delivery of a line gives the same points in MLflow. Metrics that are NaN or
infinite are written as null, and `nonfinite` lists their names."""

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rlcore.config import RunConfig
from rlcore.errors import TrackingError
from rlcore.storage.documents import LineFile, iter_json, open_ordinary
from rlcore.storage.locks import Holder
from rlcore.tracking import attempts

log = logging.getLogger(__name__)
JOURNAL_FILE = "metrics.jsonl"
WORKERS = "workers"  # event at each start of the ranks, with their number, device and model size
GPU_SECONDS = "cost/gpu_seconds"
"""The GPU-seconds of a run over all its attempts. Each journal line has the GPU-seconds of the run so far. A resume
moves journal lines to other files. The cost is therefore the largest number in the journal and these files. Steps that
are repeated after a resume count twice. The time of a killed process after its last journal line does not count."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The finite metrics of one step, and the names of metrics that are NaN or infinite."""

    step: int
    time: float
    metrics: Mapping[str, float]
    nonfinite: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An event at a step, for example that memory ran out, a worker was lost, or the run resumed."""

    name: str
    step: int
    time: float
    data: Mapping[str, object]


Record = StepRecord | EventRecord


@dataclass(frozen=True, slots=True)
class JournalContents:
    """The content of a journal, with several lines of one step merged into one record. `torn_bytes`: the length of an
    incomplete last line."""

    steps: tuple[StepRecord, ...]
    events: tuple[EventRecord, ...]
    torn_bytes: int
    num_damaged_lines: int


class Journal(LineFile):
    """The journal of one run. The run's lock ensures that there is only one writer."""

    def append_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step. Raises TypeError or ValueError if `float` cannot convert a value."""
        values = {name: float(value) for name, value in metrics.items()}
        nonfinite = [name for name, value in values.items() if not math.isfinite(value)]
        line = {"step": int(step), "time": _now(), "metrics": values | dict.fromkeys(nonfinite)}
        self.append(line | {"nonfinite": nonfinite} if nonfinite else line)

    def append_event(self, name: str, step: int, data: Mapping[str, object]) -> None:
        """Append an event. Data that JSON cannot represent is written as text."""
        self.append({"event": name, "step": int(step), "time": _now(), "data": _json_safe(data)})


class RunJournal(Journal):
    """The journal of a trainer, with the process that delivers the journal to MLflow. Call `resume_at` first. For a new
    run, call it with step 0 and 0 bytes. Call `sync` at each checkpoint, and `finish` at the end."""

    def __init__(self, run_dir: Path, config: RunConfig, *, tags: Mapping[str, str]) -> None:
        """Open the journal. `tags` override the run's `lineage_tags`."""
        super().__init__(run_dir / JOURNAL_FILE)
        self._run_dir, self._config, self._tags = run_dir, config, dict(tags)
        self._attempts = attempts.AttemptLog(run_dir / attempts.ATTEMPTS_FILE)
        self._companion = attempts.Companion(run_dir, config.tracking)
        self._has_begun = False

    def resume_at(self, step: int, journal_bytes: int) -> None:
        """Resume from a checkpoint at which the journal had `journal_bytes` bytes. Move the later lines to a separate
        file, and begin a new attempt. If the journal is shorter, log a warning."""
        try:
            if self.truncate(journal_bytes) is not None:
                self._has_begun = False
        except TrackingError as error:
            log.warning("%s", error)
        self._begin_attempt(step)

    def append_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step. Raises DiskSpaceError if the disk is full."""
        self._begin_attempt(step)
        super().append_step(step, metrics)
        self.require_written()

    def append_event(self, name: str, step: int, data: Mapping[str, object]) -> None:
        """Append an event."""
        self._begin_attempt(step)
        super().append_event(name, step, data)

    def sync(self) -> int:
        """Flush the journal to disk and return its size in bytes. Raises DiskSpaceError if the disk is full."""
        if self._has_begun:
            self._companion.ensure_running()
        return super().sync()

    def finish(self, status: attempts.FinalStatus, timeout_s: float | None = attempts.CLOSE_TIMEOUT_S) -> bool:
        """End the attempt. Wait at most `timeout_s` for the delivery to MLflow, or not at all if `timeout_s` is None.
        Return whether MLflow has all values."""
        # Without an attempt there is no run. A process that trained nothing may change an end only to FINISHED.
        known = [] if self._has_begun else attempts.read_attempts(self._run_dir)
        has_run = self._has_begun or (bool(known) and (known[-1][1] is None or status == "FINISHED"))
        self.close()
        if has_run:
            self._attempts.add(attempts.End(status, _now()))
        self._attempts.close()
        return self._companion.finish(timeout_s) if has_run else True

    def _begin_attempt(self, step: int) -> None:
        if not self._has_begun:
            self._has_begun = True
            where = attempts.destination_of(self._run_dir, self._config, self._tags)
            self._attempts.add(attempts.Attempt(step, self.size_bytes, _now(), Holder.me(), where))
            self._companion.ensure_running()


def read_journal(path: Path) -> list[StepRecord]:
    """Return the metrics of every step in order. Several lines of one step are merged. Warn about unreadable lines."""
    contents = load_journal(path)
    if contents.torn_bytes or contents.num_damaged_lines:
        text = "%s: skipped %d bytes of an unfinished last line and %d unreadable lines"
        log.warning(text, path, contents.torn_bytes, contents.num_damaged_lines)
    return list(contents.steps)


def load_journal(path: Path) -> JournalContents:
    """Return the records of the whole journal, and how many lines and bytes of it cannot be read."""
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
    """Return the steps from 1 to `up_to` that have no journal line, as a text such as `steps 4-6, 9`. Return '' if
    there are none."""
    absent = set(range(1, up_to + 1)) - {record.step for record in contents.steps}
    starts = sorted(step for step in absent if step - 1 not in absent)
    ends = sorted(step for step in absent if step + 1 not in absent)
    spans = [str(first) if first == last else f"{first}-{last}" for first, last in zip(starts, ends, strict=True)]
    return f"{'step' if len(absent) == 1 else 'steps'} {', '.join(spans)}" if absent else ""


def iter_lines(fd: int, start: int) -> Iterator[tuple[Record | None, int]]:
    """Yield the record of each complete line from byte `start` on, and the byte at which the line ends. Unreadable
    records are None."""
    return ((parse_record(value), end) for value, end in iter_json(fd, start))


def parse_record(value: object) -> Record | None:
    """Convert the JSON value of a line into a record. Return None if the value is neither a step nor an event."""
    with suppress(TypeError, ValueError):
        match value:
            case {"event": str(name), "step": int(step), "time": int() | float() as when, "data": dict(data)}:
                return EventRecord(name, step, float(when), data)
            case {"step": int(step), "time": int() | float() as when, "metrics": dict(metrics), **rest}:
                finite = {str(name): float(each) for name, each in metrics.items() if each is not None}
                named = rest.get("nonfinite")
                return StepRecord(step, float(when), finite, tuple(named) if isinstance(named, list) else ())
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


class GpuUse(NamedTuple):
    """The seconds since a rank began to use its GPU. `began`: the monotonic clock at that moment, which distinguishes
    the rank's process from a later one."""

    began: float
    seconds: float


def gpu_seconds(journal: Path) -> float | None:
    """Return the GPU-seconds of a run so far, or None if no journal line has the metric."""
    files = [journal, *journal.parent.glob(f"{journal.stem}.abandoned-*{journal.suffix}")]
    lines = [record.metrics for file in files if file.is_file() for record in load_journal(file).steps]
    return max((line[GPU_SECONDS] for line in lines if GPU_SECONDS in line), default=None)


class CostMeter:
    """A meter of a run's GPU-seconds. It adds the GPU-seconds of the current ranks to those that are already in the
    journal."""

    def __init__(self, journal: Path) -> None:
        self._before = gpu_seconds(journal) or 0.0
        self._seconds: dict[tuple[int, float], float] = {}
        """The seconds of each rank, by the rank's number and start time."""

    def metrics(self, uses: Sequence[GpuUse]) -> dict[str, float]:
        """Return the run's GPU-seconds so far as a metric, or {} without GPUs. `uses`: the GPU use of each rank."""
        if not uses:
            return {}
        self._seconds |= {(rank, use.began): use.seconds for rank, use in enumerate(uses)}
        return {GPU_SECONDS: self._before + sum(self._seconds.values())}
