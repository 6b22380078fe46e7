"""Delivery of a run's journal to MLflow: the lines after a cursor, which is kept in `tracking.json`.

A batch is sent first and the cursor moved after it, so a kill in between sends a batch twice, which MLflow stores once:
the time stamps are the journal's. A trainer that goes back to a checkpoint cuts its journal, the cursor goes back to
the cut, and the repeated steps are sent again with new times; MLflow shows the last value of a step.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from pydantic import TypeAdapter

from rlcore.config import RunConfig, TrackingConfig
from rlcore.errors import DataError, RunInUseError, TrackingError
from rlcore.storage.documents import open_ordinary, read_document
from rlcore.storage.locks import HeldLock
from rlcore.storage.publish import remove_stale_temporaries, write_text_atomically
from rlcore.tracking.attempts import ATTEMPTS_FILE, Destination, End, FinalStatus, destination_of, read_attempts
from rlcore.tracking.connection import accepted_values, explain_error, resolve_uri
from rlcore.tracking.journal import JOURNAL_FILE, WORKERS, EventRecord, Record, StepRecord, iter_lines
from rlcore.tracking.lineage import KEY_TAG
from rlcore.tracking.mlflow_store import MlflowStore, milliseconds

if TYPE_CHECKING:
    from mlflow.entities import Metric

STATE_FILE = "tracking.json"
"""Name of the file with the cursor in a run's folder."""

FORMAT_VERSION = 2
"""Format version of that file; another one is refused."""

CREATE_TIMEOUT_S = 60.0
"""Seconds to wait for another process that is making the run in MLflow."""

MAX_METRICS_PER_BATCH = 1_000
"""MLflow's limit for one request."""

NONFINITE_METRIC = "training/num_nonfinite"
"""How many metrics of a step were NaN or infinite; these themselves are not sent."""


@dataclass(frozen=True, slots=True)
class TrackingState:
    """What has been delivered to which MLflow run: `tracking.json` in the run's folder.

    `key`: tag of the MLflow run, by which one that was made and not noted is found. `attempt_time`: of the newest
    attempt that is described there. `journal_bytes`: the cursor. `status`: the end of that attempt, once MLflow has it.
    """

    format_version: int = FORMAT_VERSION
    uri: str = ""
    experiment: str = ""
    key: str = field(default_factory=lambda: uuid4().hex)
    mlflow_run_id: str | None = None
    attempt_time: float = 0.0
    journal_bytes: int = 0
    status: FinalStatus | None = None


_STATE = TypeAdapter(TrackingState)


def read_state(run_dir: Path) -> TrackingState:
    """The state of a run's delivery; a fresh one if nothing has been delivered yet.

    Raises:
        TrackingError: the file is of another format version or damaged.
    """
    path = run_dir / STATE_FILE
    remedy = "move the file away: the journal is then delivered to a new MLflow run"
    try:
        state = read_document(path, _STATE, remedy) or TrackingState()
    except DataError as error:
        raise TrackingError(str(error)) from error
    if state.format_version != FORMAT_VERSION:
        raise TrackingError(
            f"{path}: format version {state.format_version}, this Millrace knows {FORMAT_VERSION}. Use the Millrace "
            f"that wrote it, or {remedy}."
        )
    return state


def delivery_lock(run_dir: Path, wait_s: float = 0.0) -> HeldLock:
    """The lock of the one process that delivers a run and writes `tracking.json`; a crash frees it."""
    return HeldLock(run_dir / "tracking.lock", what=f"the delivery of run {run_dir.name}", wait_s=wait_s)


class MlflowRun:
    """A run in its MLflow store, and what `tracking.json` says of it."""

    def __init__(self, run_dir: Path, target: Destination) -> None:
        self._run_dir, self.target = run_dir, target
        self.store = MlflowStore(TrackingConfig(uri=target.uri, experiment=target.experiment), Path(target.root))
        state = read_state(run_dir)
        if (state.uri, state.experiment) != (target.uri, target.experiment):
            state = TrackingState(uri=target.uri, experiment=target.experiment, key=state.key)  # gets the whole journal
        self.state = state

    @property
    def id(self) -> str:
        """MLflow's id of the run, which has been made."""
        assert self.state.mlflow_run_id is not None, "make the run first"
        return self.state.mlflow_run_id

    def update_state(self, **changes: object) -> None:
        """Change `tracking.json`."""
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]
        write_text_atomically(self._run_dir / STATE_FILE, _STATE.dump_json(self.state).decode() + "\n")

    def create(self, start_time_s: float) -> None:
        """Make the run in MLflow, unless it is there."""
        if self.state.mlflow_run_id is not None:
            return
        self.update_state()  # the key, before a run that a kill or a slow answer may keep from being noted
        known, name = self.store.find_runs({KEY_TAG: self.state.key}), self._run_dir.name
        tags = {**self.target.tags, KEY_TAG: self.state.key}
        made = known[0].info.run_id if known else self.store.create_run(name, tags, start_time_s=start_time_s)
        self.update_state(mlflow_run_id=str(made))


class Delivery(MlflowRun):
    """Delivers one run. The caller holds `delivery_lock` as long as it uses the object.

    `sent_bytes`: of the journal, so far.
    """

    def __init__(self, run_dir: Path, uri: str | None = None) -> None:
        """`uri`: another store than the run's.

        Raises:
            TrackingError: no trainer has begun, there is no journal, or `tracking.json` cannot be read.
        """
        attempts = read_attempts(run_dir)
        if not attempts:
            raise TrackingError(f"{run_dir / ATTEMPTS_FILE}: has no attempt, so there is nothing to deliver.")
        if not (journal := run_dir / JOURNAL_FILE).exists():
            raise TrackingError(f"{journal}: is not there, so there is nothing to deliver. Put it back.")
        remove_stale_temporaries(run_dir)  # of a process that was killed while it wrote the state
        target = attempts[-1][0].destination
        if uri is not None:
            target = replace(target, uri=resolve_uri(TrackingConfig(uri=uri), Path(target.root)))
        super().__init__(run_dir, target)
        self.sent_bytes = self._attempts_bytes = 0

    def catch_up(self) -> FinalStatus | None:
        """Send all that is new, then the newest attempt's end, if it has ended and MLflow has another; returns that
        end. Raises whatever MLflow raises; what was sent before stays noted.

        The end is what the trainer wrote, or KILLED if its process is gone without a record of it.
        """
        self._attempts_bytes = (self._run_dir / ATTEMPTS_FILE).stat().st_size
        attempts = read_attempts(self._run_dir)
        attempt, end = attempts[-1]
        is_lost = attempt.is_lost()  # before its lines are sent: it may write another one meanwhile
        self.create(attempts[0][0].time)
        known = [place for place, (one, _) in enumerate(attempts, 1) if one.time == self.state.attempt_time]
        if new := attempts[known[-1] if known else 0 :]:
            self.store.client.update_run(self.id, status="RUNNING")
            self.store.log_params(self.id, attempt.destination.settings)
            self.store.set_tags(self.id, {**attempt.destination.tags, "attempts": str(len(attempts))})
            cursor = min(self.state.journal_bytes, *(one.journal_bytes for one, _ in new))
            self.update_state(attempt_time=attempt.time, journal_bytes=cursor, status=None)
        self._send_journal()
        if end is None and is_lost:
            end = End("KILLED", time.time())
        if end is None or end.status == self.state.status:
            return None if end is None else end.status
        self.store.set_status(self.id, end.status, end.time)
        self.update_state(status=end.status)
        return end.status

    def has_changes(self) -> bool:
        """Whether the trainer has begun, gone back or ended since the last `catch_up`."""
        return (self._run_dir / ATTEMPTS_FILE).stat().st_size != self._attempts_bytes

    def _send_journal(self) -> None:
        """Send the whole lines after the cursor, and move it with each batch."""
        points: list[Metric] = []
        end = self.state.journal_bytes
        with open_ordinary(self._run_dir / JOURNAL_FILE) as file:
            for record, next_end in iter_lines(file.fileno(), end):
                more = _points(record)
                if points and len(points) + len(more) > MAX_METRICS_PER_BATCH:
                    self._send(points, end)
                    points = []
                points += more
                end = next_end
        if end > self.state.journal_bytes:
            self._send(points, end)

    def _send(self, points: "list[Metric]", end: int) -> None:
        for first in range(0, len(points), MAX_METRICS_PER_BATCH):
            batch = points[first : first + MAX_METRICS_PER_BATCH]
            self.store.client.log_batch(self.id, metrics=batch)
        self.sent_bytes += end - self.state.journal_bytes
        self.update_state(journal_bytes=end)


def _points(record: Record | None) -> "list[Metric]":
    """What MLflow gets of a line."""
    from mlflow.entities import Metric

    values: dict[str, float] = {}
    match record:
        case None:
            return []
        case StepRecord(metrics=metrics, nonfinite=nonfinite):
            values = {**metrics, NONFINITE_METRIC: float(len(nonfinite))} if nonfinite else dict(metrics)
        case EventRecord(name=name) if name != WORKERS:  # which each attempt begins with
            values = {f"events/{re.sub(r'[^A-Za-z0-9_-]', '_', name)}": 1.0}  # marks the event on the step axis
    time_ms = milliseconds(record.time)
    return [Metric(name, value, time_ms, record.step) for name, value in accepted_values(values).items()]


def ensure_mlflow_run(run_dir: Path, config: RunConfig, tags: Mapping[str, str]) -> MlflowRun:
    """A run in MLflow, which is made if it is missing: for the stages around the training.

    Raises whatever MLflow raises, as the calls of `MlflowStore` do.
    """
    target, deadline = destination_of(run_dir, config, tags), time.monotonic() + CREATE_TIMEOUT_S
    while (run := MlflowRun(run_dir, target)).state.mlflow_run_id is None:
        try:
            with delivery_lock(run_dir):
                run = MlflowRun(run_dir, target)
                run.create(time.time())
                return run
        except RunInUseError:  # by the process beside the trainer, which makes the run
            if time.monotonic() > deadline:
                raise
    return run


# ------------------------------------------------------------------ a delivery now


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What a delivery did. `num_bytes` counts the journal; `status` is None for a run that goes on."""

    mlflow_run_id: str
    num_bytes: int
    status: FinalStatus | None


def sync_run(run_dir: Path, uri: str | None = None) -> SyncResult:
    """Bring MLflow up to date with a run's journal, and its status with how the run ended.

    A run whose process is gone without a record of its end gets the status KILLED. Doing it again changes nothing.
    `uri`: another store than the one of the run's settings.

    Raises:
        RunInUseError: the run is being delivered by another process.
        TrackingError: there is no journal, or MLflow does not take it.
    """
    with delivery_lock(run_dir):
        delivery = Delivery(run_dir, uri)
        try:
            status = delivery.catch_up()
        except TrackingError:
            raise
        except Exception as error:
            raise TrackingError(f"{run_dir}: not delivered: {explain_error(error, delivery.state.uri)}") from error
        return SyncResult(delivery.state.mlflow_run_id or "", delivery.sent_bytes, status)
