"""Delivery of a run's journal to MLflow: each value once, however often the delivery or the run is interrupted.

A batch is sent first and the cursor in `tracking.json` moved after it; what is sent twice stays single, and the first
value of a metric at a step stays (docs/decisions/0004 and `metrics.md` say why). So the lines that a resume cut off the
journal are delivered like all others, from the file that keeps them, and what the journal then repeats of them is left
out. Where a run leaves its line of steps, a new MLflow run gets the whole journal, and the old one is marked as
superseded.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from pydantic import TypeAdapter

from rlcore.config import RunConfig, TrackingConfig
from rlcore.errors import DataError, MillraceError, TrackingError
from rlcore.storage.documents import open_ordinary, read_document
from rlcore.storage.locks import HeldLock
from rlcore.storage.publish import remove_stale_temporaries, write_text_atomically
from rlcore.tracking.attempts import (
    ATTEMPTS_FILE,
    Attempt,
    Commit,
    Destination,
    FinalStatus,
    Finish,
    History,
    read_acts,
    read_history,
)
from rlcore.tracking.connection import explain, mlflow_name, resolve_uri
from rlcore.tracking.journal import JOURNAL_FILE, EventRecord, Record, StepRecord, iter_lines, load_journal
from rlcore.tracking.lineage import FOLDER_TAG, RUN_ID_TAG, lineage_tags
from rlcore.tracking.mlflow_store import SUPERSEDED_TAG, MlflowStore, milliseconds

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run

log = logging.getLogger(__name__)

STATE_FILE = "tracking.json"
"""Name of the file with the state of the delivery in a run's folder."""

FORMAT_VERSION = 1
"""Of that file; one of another version is refused."""

FOLDER_FILE = "tracking.id"
"""The folder's own id: apart from `tracking.json`, so that moving that file away keeps the id."""

STATE_WAIT_S = 60.0
"""Seconds to wait for a process that is making the run in MLflow."""

MAX_METRICS_PER_BATCH = 1_000
"""MLflow's limit for one request."""

MIN_METRICS_PER_BATCH = 50
"""Smallest batch that a slow server is asked to take before its time limit."""

NONFINITE_METRIC = "training/num_nonfinite"
"""How many metrics of a step were NaN or infinite; these themselves are not sent."""


@dataclass(frozen=True, slots=True)
class TrackingState:
    """What has been delivered to which MLflow run: `tracking.json` in the run's folder.

    `attempt` is the newest attempt that MLflow has a description of; `main_bytes` counts what has been delivered of
    `metrics.jsonl`; `settled_status` is the end of that attempt as MLflow has it; `num_failures` counts deliveries
    that failed.
    """

    format_version: int = FORMAT_VERSION
    uri: str = ""
    experiment: str = ""
    mlflow_run_id: str | None = None
    attempt: int = 0
    main_bytes: int = 0
    settled_status: FinalStatus | None = None
    num_failures: int = 0


_STATE = TypeAdapter(TrackingState)


def read_state(run_dir: Path) -> TrackingState:
    """The state of a run; a fresh one if nothing has been delivered yet.

    Raises:
        TrackingError: the file is of another format version or damaged.
    """
    path = run_dir / STATE_FILE
    remedy = (
        "move the file away: the run is then found in MLflow by its tag, and the journal is delivered once more "
        "(values that are there already stay single)"
    )
    try:
        state = read_document(path, _STATE, remedy) or TrackingState()
    except DataError as error:
        raise TrackingError(str(error)) from error
    if state.format_version != FORMAT_VERSION:
        raise TrackingError(
            f"{path}: format version {state.format_version}, this Millrace knows {FORMAT_VERSION}. Use the Millrace "
            "that wrote it, or move the file away: the journal is then delivered once more."
        )
    return state


def change_state(run_dir: Path, change: Callable[[TrackingState], TrackingState]) -> TrackingState:
    """Replace the state on disk by `change` of it, one process at a time, and return the new one."""
    lock, what = run_dir / "tracking.lock", f"the MLflow run of {run_dir.name}"
    with HeldLock(lock, what=what, wait_s=STATE_WAIT_S, error=TrackingError):
        state = change(read_state(run_dir))
        write_text_atomically(run_dir / STATE_FILE, _STATE.dump_json(state).decode() + "\n")
        return state


class ReplacedError(TrackingError):
    """A newer attempt of the run has begun; its own delivery goes on."""


class Delivery:
    """Delivers the newest attempt of one run. The caller holds `delivery_lock`."""

    def __init__(self, run_dir: Path, history: History, destination: Destination) -> None:
        self._run_dir = run_dir
        self._attempt = history.attempts[-1]
        self._history = history
        self._destination = destination
        self._store = MlflowStore(
            TrackingConfig(uri=destination.uri, experiment=destination.experiment), Path(destination.artifact_root)
        )
        self.state = _of_store(read_state(run_dir), destination)  # what has been delivered so far
        journal = run_dir / JOURNAL_FILE
        try:
            self._journal_fd = os.open(journal, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise TrackingError(f"{journal}: is not there, so there is nothing to deliver. Put it back.") from error
        self._repeated = self._values_cut_off(history.cuts)
        self._refused: set[str] = set()
        self._batch_size = MAX_METRICS_PER_BATCH

    def close(self) -> None:
        """Close the journal."""
        os.close(self._journal_fd)

    def deliver(self) -> None:
        """Send all that is new. Raises whatever MLflow raises; what was sent before stays noted."""
        self._history = read_history(self._run_dir / ATTEMPTS_FILE)
        newest = self._history.attempts[-1].number if self._history.attempts else 0
        if newest > self._attempt.number:
            raise ReplacedError(f"{self._run_dir}: attempt {newest} has begun")
        try:
            if self.state.mlflow_run_id is None:
                self.state = make_run(self._run_dir, self._store, self._destination, self._attempt.time)
            if self.state.attempt != self._attempt.number:
                self._begin_attempt()
            self._send_journal()
        except Exception:
            # Perhaps the server cannot take so much at once before its time limit.
            self._batch_size = max(MIN_METRICS_PER_BATCH, self._batch_size // 2)
            with suppress(MillraceError, OSError):  # what MLflow said matters more
                self._save(num_failures=self.state.num_failures + 1)
            raise
        self._batch_size = min(MAX_METRICS_PER_BATCH, self._batch_size * 2)

    def catch_up(self, *, trainer_is_gone: bool = False) -> FinalStatus | None:
        """Send all that is new, then the attempt's end, if it has ended and MLflow has another; returns that end.

        The end is what the trainer wrote, or KILLED if its process is gone without a word.
        """
        # Asked first: a trainer that dies while its lines are sent may have written another one since.
        gone = trainer_is_gone or self._attempt.owner.is_gone()
        self.deliver()
        end = self._history.end
        if end is None and gone:
            end = Finish("KILLED", self.state.main_bytes, time.time())
        if end is None or self.state.settled_status == end.status:
            return None if end is None else end.status
        run_id = self._main_run_id()
        self._remove_strays(run_id)
        self._store.set_tags(run_id, attempt_tags(self._history, end))
        self._store.set_status(run_id, end.status, end.time)
        self._upload_events(run_id)  # last: a store may take values and no files
        self._save(settled_status=end.status)
        return end.status

    @property
    def end(self) -> Finish | None:
        """The attempt's end, as of the last `deliver`."""
        return self._history.end

    def has_ended(self) -> bool:
        """Whether the attempt has ended, or another has begun, since the last `deliver`. Reads only the file's end."""
        news = read_acts(self._run_dir / ATTEMPTS_FILE, self._history.end_bytes)
        return any(not isinstance(act, Commit) for act, _ in news)

    def _save(self, **changes: object) -> None:
        self.state = change_state(
            self._run_dir,
            lambda on_disk: replace(_of_store(on_disk, self._destination), **changes),  # type: ignore[arg-type]
        )

    def _main_run_id(self) -> str:
        if self.state.mlflow_run_id is None:
            raise TrackingError(f"{self._run_dir}: has no MLflow run yet")
        return self.state.mlflow_run_id

    def _begin_attempt(self) -> None:
        """Describe the attempt in MLflow, and deliver what it cut off the journal, once an attempt."""
        known = self.state.attempt if self.state.attempt < self._attempt.number else 0
        attempts = [attempt for attempt in self._history.attempts if attempt.number > known]
        kept = min(attempt.journal_bytes for attempt in attempts)
        if 0 < known < self._history.line or self.state.main_bytes > self._known_bytes(attempts[0]):
            self._supersede()
            known = 0
        run_id, target = self._main_run_id(), self._destination
        self._store.client.update_run(run_id, status="RUNNING")
        self._store.log_params(run_id, target.settings)
        self._send_cuts(known)
        # Last: where `tracking.json` is lost or of another store, these tags say which attempts MLflow has.
        self._store.set_tags(run_id, {**target.tags, RUN_ID_TAG: target.run_id, **attempt_tags(self._history)})
        start = min(self.state.main_bytes, kept)
        self._save(attempt=self._attempt.number, main_bytes=start, settled_status=None)

    def _known_bytes(self, attempt: Attempt) -> int:
        """Bytes of the journal before an attempt that are on disk still: a power loss may have taken its end."""
        cut = self._run_dir / attempt.abandoned if attempt.abandoned is not None else None
        return attempt.journal_bytes + (cut.stat().st_size if cut is not None and cut.exists() else 0)

    def _supersede(self) -> None:
        """Make a new MLflow run in place of the old one, which shows steps that the run has gone back on."""
        old = self._main_run_id()
        new = _create_run(self._run_dir, self._store, self._destination, self._attempt.time)
        self._store.set_tags(old, {SUPERSEDED_TAG: new})
        self._store.set_status(old, "KILLED")
        self._save(mlflow_run_id=new, attempt=0, main_bytes=0)

    def _values_cut_off(self, cuts: Mapping[int, str]) -> frozenset[tuple[int, str]]:
        """Step and name of all values in these files."""
        records = (record for name in cuts.values() for record in _records(self._run_dir / name))
        return frozenset((record.step, name) for record in records for name, _ in _values(record))

    def _send_cuts(self, known: int) -> None:
        """Send the lines that were cut off since attempt `known`, each value of a step once."""
        earlier: frozenset[tuple[int, str]] = frozenset()
        for number, name in sorted(self._history.cuts.items()):
            if number > known:
                records = _records(self._run_dir / name)
                self._send([point for record in records for point in self._points(record, earlier)])
            earlier |= self._values_cut_off({number: name})

    def _send_journal(self) -> None:
        """Send the whole lines after the cursor, and move it with each batch."""
        points: list[Metric] = []
        end = self.state.main_bytes
        for record, next_end in iter_lines(self._journal_fd, end):
            more = self._points(record, self._repeated)
            if points and len(points) + len(more) > self._batch_size:
                self._send(points)
                self._save(main_bytes=end)
                points = []
            points += more
            end = next_end
        if end > self.state.main_bytes:
            self._send(points)
            self._save(main_bytes=end)

    def _send(self, points: "list[Metric]") -> None:
        for first in range(0, len(points), self._batch_size):
            self._store.client.log_batch(self._main_run_id(), metrics=points[first : first + self._batch_size])

    def _points(self, record: Record | None, skip: frozenset[tuple[int, str]]) -> "list[Metric]":
        from mlflow.entities import Metric

        if record is None:
            return []
        named = [(self._name(name), value) for name, value in _values(record) if (record.step, name) not in skip]
        time_ms = milliseconds(record.time)
        return [Metric(name, value, time_ms, record.step) for name, value in named if name is not None]

    def _name(self, name: str) -> str | None:
        """MLflow's name of a metric; None where it refuses the name, of which the first time is logged."""
        try:
            return mlflow_name(name)
        except TrackingError as error:
            if name not in self._refused:
                self._refused.add(name)
                log.warning("left out of MLflow: %s The journal has its values.", error)
            return None

    def _upload_events(self, run_id: str) -> None:
        events = load_journal(self._run_dir / JOURNAL_FILE).events
        if events:
            lines = [{"event": e.name, "step": e.step, "time": e.time, "data": e.data} for e in events]
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            self._store.client.log_text(run_id, text, "events/events.jsonl")

    def _remove_strays(self, run_id: str) -> None:
        """Delete empty runs of this folder: a slow server may have made one although the client had given up."""
        for run in _runs_of(self._run_dir, self._store, self._destination):
            if run.info.run_id != run_id and not run.data.metrics and not run.data.params:
                self._store.client.delete_run(run.info.run_id)


def _of_store(state: TrackingState, target: Destination) -> TrackingState:
    """The state if it is of this store and experiment, else a fresh one: another gets everything from the beginning."""
    is_there = state.uri == target.uri and state.experiment == target.experiment
    return state if is_there else TrackingState(uri=target.uri, experiment=target.experiment)


def _records(path: Path) -> Iterator[Record]:
    """The readable lines of a file; none if it is missing."""
    if path.exists():
        with open_ordinary(path) as file:
            yield from (record for record, _ in iter_lines(file.fileno(), 0) if record is not None)


def _values(record: Record) -> Iterator[tuple[str, float]]:
    """The values that MLflow gets of a line, under our names."""
    match record:
        case StepRecord(metrics=metrics, nonfinite=nonfinite):
            yield from metrics.items()
            if nonfinite:
                yield NONFINITE_METRIC, float(len(nonfinite))
        case EventRecord(name=name):
            yield f"events/{re.sub(r'[^A-Za-z0-9_-]', '_', name)}", 1.0  # marks the event on the step axis


def attempt_tags(history: History, end: Finish | None = None) -> dict[str, str]:
    """The record of a run's attempts as tags of its MLflow run. `end`: that of the newest one, where it has no record.

    {"attempts": "2", "attempt.1": "from step 0, 2026-11-22 10:00:00 UTC, node7 process 411, lost", ...}
    """
    newest = len(history.attempts)
    tags = {"attempts": str(newest)}
    for position, attempt in enumerate(history.attempts, 1):
        finish = history.ends.get(attempt.number, end if position == newest else None)
        words = [f"from step {attempt.step}", _utc(attempt.time), f"{attempt.owner.host} process {attempt.owner.pid}"]
        if finish is not None:
            words.append(f"{finish.status} {_utc(finish.time)}")
        elif position < newest:
            words.append("lost")
        tags[f"attempt.{attempt.number}"] = ", ".join(words)
    return tags


def _utc(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


# ------------------------------------------------------------------ the run in MLflow


def make_run(run_dir: Path, store: MlflowStore, target: Destination, start_time_s: float) -> TrackingState:
    """Find or make the MLflow run of a run's folder and note its id, once, whoever comes first."""

    def change(on_disk: TrackingState) -> TrackingState:
        state = _of_store(on_disk, target)
        if state.mlflow_run_id is not None:
            return state
        known = _runs_of(run_dir, store, target)
        if not known:
            return replace(state, mlflow_run_id=_create_run(run_dir, store, target, start_time_s))
        numbers = [tag.removeprefix("attempt.") for tag in known[0].data.tags if re.fullmatch(r"attempt\.\d+", tag)]
        return replace(state, mlflow_run_id=str(known[0].info.run_id), attempt=max(map(int, numbers), default=0))

    return change_state(run_dir, change)


def ensure_mlflow_run(run_dir: Path, config: RunConfig, tags: Mapping[str, str]) -> str:
    """The MLflow id of a run, which is made if it is missing: for the stages around the training.

    Raises whatever MLflow raises, as the calls of `MlflowStore` do.
    """
    target = destination_of(run_dir, config, tags)
    state = _of_store(read_state(run_dir), target)
    if state.mlflow_run_id is None:
        store = MlflowStore(config.tracking, Path(config.paths.root))
        state = make_run(run_dir, store, target, time.time())
    if state.mlflow_run_id is None:
        raise TrackingError(f"{run_dir}: MLflow gave no run")
    return state.mlflow_run_id


def destination_of(run_dir: Path, config: RunConfig, tags: Mapping[str, str]) -> Destination:
    """Where the values of a run go and how it is described there; its name is its folder's."""
    root = Path(config.paths.root).absolute()
    return Destination(
        uri=resolve_uri(config.tracking, root),
        experiment=config.tracking.experiment,
        artifact_root=os.fspath(root),
        run_id=run_dir.name,
        tags={**lineage_tags(config, stage="train", run_id=run_dir.name), **tags},
        settings=config.model_dump(mode="json"),
    )


def _create_run(run_dir: Path, store: MlflowStore, target: Destination, start_time_s: float) -> str:
    tags = {**target.tags, RUN_ID_TAG: target.run_id, FOLDER_TAG: _folder_id(run_dir)}
    return store.create_run(target.run_id, tags, start_time_s=start_time_s)


def _runs_of(run_dir: Path, store: MlflowStore, target: Destination) -> "list[Run]":
    """The folder's runs in MLflow, oldest first; in a shared store other folders may have runs of the same name."""
    own = _folder_id(run_dir)
    runs = store.find_runs({RUN_ID_TAG: target.run_id})
    return [run for run in runs if run.data.tags.get(FOLDER_TAG, own) == own]


def _folder_id(run_dir: Path) -> str:
    """The folder's own id, which is made if it has none."""
    path = run_dir / FOLDER_FILE
    if not path.exists():
        write_text_atomically(path, uuid4().hex + "\n")
    return path.read_text().strip()


# ------------------------------------------------------------------ a delivery now


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What a delivery did. `num_bytes` counts the journal; `status` is None for a run that goes on."""

    mlflow_run_id: str
    num_bytes: int
    status: FinalStatus | None


def delivery_lock(run_dir: Path, wait_s: float = 0.0) -> HeldLock:
    """The lock of the one process that delivers a run; a crash frees it."""
    lock, what = run_dir / "shipper.lock", f"the delivery of run {run_dir.name}"
    return HeldLock(lock, what=what, wait_s=wait_s, error=TrackingError)


def open_delivery(run_dir: Path, uri: str | None = None) -> Delivery | None:
    """The delivery of a run's newest attempt; None if the run has not begun. `uri`: another store than the run's."""
    history = read_history(run_dir / ATTEMPTS_FILE)
    if not history.attempts:
        return None
    remove_stale_temporaries(run_dir)  # of a process that was killed while it wrote the state
    target = history.attempts[-1].destination
    if uri is not None:
        target = replace(target, uri=resolve_uri(TrackingConfig(uri=uri), Path(target.artifact_root)))
    return Delivery(run_dir, history, target)


def sync_run(run_dir: Path, uri: str | None = None) -> SyncResult:
    """Bring MLflow up to date with a run's journal, and its status with how the run ended.

    A run whose process is gone without a record of its end gets the status KILLED. Doing it again changes nothing.
    `uri`: another store than the one of the run's settings.

    Raises:
        TrackingError: there is no journal, the run is being delivered already, or MLflow does not take it.
    """
    with delivery_lock(run_dir):
        delivery = open_delivery(run_dir, uri)
        if delivery is None:
            raise TrackingError(
                f"{run_dir}: holds no {ATTEMPTS_FILE} with an attempt in it: there is nothing to deliver."
            )
        with closing(delivery):
            before = delivery.state.main_bytes
            try:
                status = delivery.catch_up()
            except TrackingError:
                raise
            except Exception as error:
                raise TrackingError(f"{run_dir}: not delivered: {explain(error, delivery.state.uri)}") from error
            return SyncResult(delivery.state.mlflow_run_id or "", delivery.state.main_bytes - before, status)
