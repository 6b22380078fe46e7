"""The delivery of a run's journal to MLflow. The file `tracking.json` records how many bytes were delivered. After a
kill, some metrics can be sent twice. MLflow stores them only once, because both times they have the same time stamps,
which come from the journal. After a resume, the repeated steps are delivered again with new times, and MLflow shows
their last values."""

import time
from collections.abc import Mapping, Sequence
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
from rlcore.tracking.attempts import (
    ATTEMPTS_FILE,
    Attempt,
    Destination,
    End,
    FinalStatus,
    destination_of,
    read_attempts,
)
from rlcore.tracking.connection import accepted_values, explain_error, resolve_uri
from rlcore.tracking.journal import JOURNAL_FILE, WORKERS, EventRecord, StepRecord, iter_lines
from rlcore.tracking.lineage import KEY_TAG, TRAINED_FOR_TAG
from rlcore.tracking.mlflow_store import PARENT_TAG, MlflowStore, milliseconds
from rlcore.tracking.sinks import Sinks

if TYPE_CHECKING:
    from mlflow.entities import Metric

STATE_FILE = "tracking.json"
FORMAT_VERSION = 2  # files of other versions are rejected
CREATE_TIMEOUT_S = 60.0  # seconds to wait for another process that creates the run in MLflow
MAX_METRICS_PER_BATCH = 1_000  # MLflow's limit for one request
NONFINITE_METRIC = "training/num_nonfinite"  # number of NaN or infinite values of a step, which are not sent


@dataclass(frozen=True, slots=True)
class TrackingState:
    """The state of the delivery to MLflow. `key`: the tag by which the run is found in MLflow if its MLflow id was not
    stored. `attempt_time`: the start of the newest attempt that MLflow knows. `status`: the final status of that
    attempt in MLflow. `journal_bytes`: the delivered bytes of the journal."""

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
    """Return the state of the delivery from `tracking.json`, or a new state if there is no such file. Raises
    TrackingError if the file cannot be read."""
    path = run_dir / STATE_FILE
    remedy = "move the file away: the journal is then delivered to a new MLflow run"
    try:
        state = read_document(path, _STATE, remedy) or TrackingState()
    except DataError as error:
        raise TrackingError(str(error)) from error
    if state.format_version != FORMAT_VERSION:
        raise TrackingError(
            f"{path}: format version {state.format_version}, this Millrace reads {FORMAT_VERSION}. Use the Millrace "
            f"that wrote it, or {remedy}."
        )
    return state


def is_delivered(run_dir: Path) -> bool:
    """Return whether MLflow has the whole journal and the final status of a run. Also return True if the run has no
    attempt. Raises TrackingError if the state cannot be read."""
    if not read_attempts(run_dir):
        return True
    state = read_state(run_dir)
    return state.status is not None and state.journal_bytes == (run_dir / JOURNAL_FILE).stat().st_size


def delivery_lock(run_dir: Path, wait_s: float = 0.0) -> HeldLock:
    """Return the lock of the process that delivers a run and writes `tracking.json`. A crash releases the lock."""
    return HeldLock(run_dir / "tracking.lock", what=f"the delivery of run {run_dir.name}", wait_s=wait_s)


class MlflowRun:
    """A run in its MLflow store, with the state in `tracking.json`."""

    def __init__(self, run_dir: Path, target: Destination) -> None:
        self._run_dir, self.target = run_dir, target
        self.store = MlflowStore(TrackingConfig(uri=target.uri, experiment=target.experiment), Path(target.root))
        self.state = read_state(run_dir)
        if (self.state.uri, self.state.experiment) != (target.uri, target.experiment):
            # sends the whole journal
            self.state = TrackingState(uri=target.uri, experiment=target.experiment, key=self.state.key)

    @property
    def id(self) -> str:
        """Return the MLflow id of the run. Call `create` first."""
        assert self.state.mlflow_run_id is not None, "create the run first"
        return self.state.mlflow_run_id

    def update_state(self, **changes: object) -> None:
        """Change the given fields of the state, and write the state to `tracking.json`."""
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]
        write_text_atomically(self._run_dir / STATE_FILE, _STATE.dump_json(self.state).decode() + "\n")

    def create(self, start_time_s: float) -> None:
        """Create the run in MLflow unless it already exists there. `start_time_s`: its start in seconds since the
        epoch."""
        if self.state.mlflow_run_id is not None:
            return
        self.update_state()  # stores the key first: a kill may prevent recording the created run
        known, name = self.store.find_runs({KEY_TAG: self.state.key}), self._run_dir.name
        tags = {**self.target.tags, KEY_TAG: self.state.key}
        made = known[0].info.run_id if known else self.store.create_run(name, tags, start_time_s=start_time_s)
        self.update_state(mlflow_run_id=str(made))

    def nest(self) -> None:
        """If this run is the warm start of another run in MLflow, make it a child run of that run."""
        if (run_id := self.target.tags.get(TRAINED_FOR_TAG)) is not None:
            parent = read_state(Path(self.target.root) / "runs" / run_id)
            if parent.mlflow_run_id and (parent.uri, parent.experiment) == (self.state.uri, self.state.experiment):
                self.store.client.set_tag(self.id, PARENT_TAG, parent.mlflow_run_id)


class Delivery(MlflowRun):
    """The delivery of one run to MLflow. Only the holder of `delivery_lock` may use it. `sent_bytes`: the number of
    journal bytes that this object has sent."""

    def __init__(self, run_dir: Path, uri: str | None = None) -> None:
        """Read the attempts and the state. `uri`: the MLflow store, by default the store of the run's newest attempt.
        Raises TrackingError if there is no attempt or no journal, or if the state cannot be read."""
        attempts = read_attempts(run_dir)
        if not attempts:
            raise TrackingError(f"{run_dir / ATTEMPTS_FILE}: no attempt, so there is nothing to deliver.")
        if not (journal := run_dir / JOURNAL_FILE).exists():
            raise TrackingError(f"{journal}: does not exist, so there is nothing to deliver. Restore it.")
        remove_stale_temporaries(run_dir)  # files of a killed process
        target = attempts[-1][0].destination
        if uri is not None:
            target = replace(target, uri=resolve_uri(TrackingConfig(uri=uri), Path(target.root)))
        super().__init__(run_dir, target)
        self.sent_bytes = self._attempts_bytes = 0
        self._sinks = Sinks(run_dir)

    def catch_up(self) -> FinalStatus | None:
        """Send all new values and the final status of the newest attempt. Return this status, or None while the attempt
        is active. KILLED can also mean that the trainer disappeared without recording an end. Raises MLflow's errors.
        Values that were sent before an error are not sent again."""
        self._attempts_bytes = (self._run_dir / ATTEMPTS_FILE).stat().st_size
        attempts = read_attempts(self._run_dir)
        try:
            return self._catch_up_mlflow(attempts)
        finally:
            self._sinks.catch_up(attempts[-1][0])  # after MLflow, since an unreachable tracker takes seconds

    def _catch_up_mlflow(self, attempts: Sequence[tuple[Attempt, End | None]]) -> FinalStatus | None:
        attempt, end = attempts[-1]
        is_lost = attempt.is_lost()  # before its lines are sent, since the process may write more
        self.create(attempts[0][0].time)
        known = [place for place, (one, _) in enumerate(attempts, 1) if one.time == self.state.attempt_time]
        if new := attempts[known[-1] if known else 0 :]:
            self.store.client.update_run(self.id, status="RUNNING")
            self.store.log_params(self.id, attempt.destination.settings)
            self.store.set_tags(self.id, {**attempt.destination.tags, "attempts": str(len(attempts))})
            self.nest()
            cursor = min(self.state.journal_bytes, *(one.journal_bytes for one, _ in new))
            self.update_state(attempt_time=attempt.time, journal_bytes=cursor, status=None)
        self._send_journal()
        if end is None and is_lost:
            end = End("KILLED", time.time())
        if end is None or end.status == self.state.status:
            return None if end is None else end.status
        self.nest()  # the run may be newer in MLflow than its warm start
        self.store.set_status(self.id, end.status, end.time)
        self.update_state(status=end.status)
        return end.status

    def close(self) -> None:
        """End the run in the trackers that `tracking.report_to` names."""
        self._sinks.close(failed=self.state.status == "FAILED")

    def has_changes(self) -> bool:
        """Return whether the trainer has started, resumed or ended since the last call of `catch_up`."""
        return (self._run_dir / ATTEMPTS_FILE).stat().st_size != self._attempts_bytes

    def _send_journal(self) -> None:
        points: list[Metric] = []
        events: dict[str, str] = {}
        end = self.state.journal_bytes
        with open_ordinary(self._run_dir / JOURNAL_FILE) as file:
            for record, next_end in iter_lines(file.fileno(), end):
                if isinstance(record, EventRecord) and record.name != WORKERS:  # every attempt has one
                    events[f"events.{record.name}"] = f"step {record.step}"
                more = _points(record) if isinstance(record, StepRecord) else []
                if points and len(points) + len(more) > MAX_METRICS_PER_BATCH:
                    self._send(points, end)
                    points = []
                points += more
                end = next_end
        self.store.set_tags(self.id, events)
        if end > self.state.journal_bytes:
            self._send(points, end)

    def _send(self, points: "list[Metric]", end: int) -> None:
        for first in range(0, len(points), MAX_METRICS_PER_BATCH):
            self.store.client.log_batch(self.id, metrics=points[first : first + MAX_METRICS_PER_BATCH])
        self.sent_bytes += end - self.state.journal_bytes
        self.update_state(journal_bytes=end)


def _points(record: StepRecord) -> "list[Metric]":
    from mlflow.entities import Metric

    values = {**record.metrics, NONFINITE_METRIC: float(len(record.nonfinite))} if record.nonfinite else record.metrics
    time_ms = milliseconds(record.time)
    return [Metric(name, value, time_ms, record.step) for name, value in accepted_values(values).items()]


def ensure_mlflow_run(run_dir: Path, config: RunConfig, tags: Mapping[str, str]) -> MlflowRun:
    """Return the MLflow run for a stage before or after training, and create it if needed. Raises MLflow's errors."""
    target, deadline = destination_of(run_dir, config, tags), time.monotonic() + CREATE_TIMEOUT_S
    while (run := MlflowRun(run_dir, target)).state.mlflow_run_id is None:
        try:
            with delivery_lock(run_dir):
                run = MlflowRun(run_dir, target)
                run.create(time.time())
                return run
        except RunInUseError:  # the delivery process creates the run
            if time.monotonic() > deadline:
                raise
    return run


@dataclass(frozen=True, slots=True)
class SyncResult:
    """The result of a delivery: the number of sent journal bytes, and the run's status (None if the run is active)."""

    mlflow_run_id: str
    num_bytes: int
    status: FinalStatus | None


def sync_run(run_dir: Path, uri: str | None = None) -> SyncResult:
    """Send a run's new metrics and final status to MLflow, and its journal to the trackers of `tracking.report_to`. See
    `Delivery.catch_up`. Raises RunInUseError if another process delivers the run, and TrackingError if MLflow rejects
    the run."""
    with delivery_lock(run_dir):
        delivery = Delivery(run_dir, uri)
        try:
            status = delivery.catch_up()
        except TrackingError:
            raise
        except Exception as error:
            raise TrackingError(f"{run_dir}: not delivered: {explain_error(error, delivery.state.uri)}") from error
        finally:
            delivery.close()
        return SyncResult(delivery.state.mlflow_run_id or "", delivery.sent_bytes, status)
