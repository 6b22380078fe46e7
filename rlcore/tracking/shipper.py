"""Carries a run's journal to MLflow, each value exactly once, however often it is interrupted.

Two streams leave the journal:
- to the run itself, only lines that a published checkpoint covers, so that its curves hold each step once;
- to a nested run `attempt-<k>`, every line as soon as it is written, so that someone who looks sees seconds-old values.

A batch is sent first and the cursor moved after it. If the process dies in between, the batch is sent again: MLflow's
key of a point is (run, name, time stamp, step, value), all of which come from the journal, so the point stays single.
"""

import json
import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.config import TrackingConfig
from rlcore.errors import TrackingError
from rlcore.tracking.attempts import ATTEMPTS_FILE, Attempt, Commit, Destination, FinalStatus, last_attempt, read_acts
from rlcore.tracking.journal import JOURNAL_FILE, EventRecord, Record, StepRecord, iter_lines, load_journal
from rlcore.tracking.ledger import heed
from rlcore.tracking.lineage import FOLDER_TAG, RUN_ID_TAG
from rlcore.tracking.names import mlflow_name
from rlcore.tracking.state import TrackingState, change_state, ensure_folder_id, folder_id, read_state
from rlcore.tracking.store import PARENT_TAG, SUPERSEDED_TAG, MlflowStore, milliseconds

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run

log = logging.getLogger(__name__)

MAX_METRICS_PER_BATCH = 1_000
"""MLflow's limit for one request."""

MIN_METRICS_PER_BATCH = 50
"""Smallest batch that a slow server is asked to take before its time limit."""

ATTEMPT_TAG, ATTEMPT_OF_TAG = "millrace.attempt", "millrace.attempt_of"
"""Tags of a nested live run: which attempt, and of which run."""

NONFINITE_METRIC = "training/num_nonfinite"
"""How many metrics of a step were NaN or infinite; these themselves are not sent."""


class ReplacedError(TrackingError):
    """A newer attempt of the run has begun; its own shipper goes on."""


class Shipper:
    """Delivers one run. The caller holds the run's shipper lock; there is one shipper of a run at a time."""

    def __init__(self, run_dir: Path, attempt: Attempt, destination: Destination) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._destination = destination
        self._store = MlflowStore(
            TrackingConfig(uri=destination.uri, experiment=destination.experiment), Path(destination.artifact_root)
        )
        state = read_state(run_dir)
        # Another store knows nothing of what the first one has: everything is delivered to it from the beginning.
        self._state = state if state.uri == destination.uri else TrackingState(uri=destination.uri)
        self._journal_fd = os.open(run_dir / JOURNAL_FILE, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._refused: set[str] = set()
        self._batch_size = MAX_METRICS_PER_BATCH

    @property
    def state(self) -> TrackingState:
        """What has been delivered so far."""
        return self._state

    def close(self) -> None:
        """Let go of the journal."""
        os.close(self._journal_fd)

    def deliver(self) -> None:
        """Send all that is new. Raises whatever MLflow raises; what was sent before stays noted."""
        self._heed_new_acts()
        try:
            self._ensure_run()
            self._describe()
            self._ship_live()
            self._ship_committed()
        except Exception:
            # Perhaps the server cannot take so much at once before its time limit.
            self._batch_size = max(MIN_METRICS_PER_BATCH, self._batch_size // 2)
            self._save(replace(self._state, num_failures=self._state.num_failures + 1))
            raise
        self._batch_size = min(MAX_METRICS_PER_BATCH, self._batch_size * 2)

    def settle(self, status: FinalStatus, time: float) -> None:
        """Tell MLflow how the attempt ended. Call after a `deliver` that went well."""
        run_id = self._main_run_id()
        for lost in self._state.lost_attempt_run_ids:
            self._store.set_status(lost, "KILLED", time)
        if self._state.attempt_run_id is not None:
            self._store.set_status(self._state.attempt_run_id, status, time)
        self._upload_events(run_id)
        self._remove_strays(run_id)
        self._store.set_status(run_id, status, time)
        self._save(replace(self._state, lost_attempt_run_ids=(), settled=True))

    def trainer_is_gone(self) -> bool:
        """Whether the process of the newest attempt has surely ended."""
        return self._attempt.owner.is_gone()

    def has_news_of_the_end(self) -> bool:
        """Whether the trainer has ended, or another has begun, and that is not yet heeded. Looks at files only."""
        news = read_acts(self._run_dir / ATTEMPTS_FILE, self._state.control_bytes)
        return any(not isinstance(act, Commit) for act, _ in news)

    def _heed_new_acts(self) -> None:
        state = self._state
        for act, end in read_acts(self._run_dir / ATTEMPTS_FILE, state.control_bytes):
            if isinstance(act, Attempt) and act.number > self._attempt.number:
                raise ReplacedError(f"{self._run_dir}: attempt {act.number} has begun")
            state = heed(state, act, end, self._run_dir)
        if state != self._state:
            self._save(state)

    def _save(self, state: TrackingState) -> None:
        """Write the state, but keep the run that a flow may have made in the meantime."""

        def merge(on_disk: TrackingState) -> TrackingState:
            made = on_disk.mlflow_run_id if on_disk.uri == state.uri else None
            usable = None if made in state.superseded_run_ids else made
            return replace(state, mlflow_run_id=state.mlflow_run_id or usable)

        self._state = change_state(self._run_dir, merge)

    def _main_run_id(self) -> str:
        if self._state.mlflow_run_id is None:
            raise TrackingError(f"{self._run_dir}: has no MLflow run yet")
        return self._state.mlflow_run_id

    def _ensure_run(self) -> None:
        if self._state.mlflow_run_id is None:
            self._save(self._state)
        if self._state.mlflow_run_id is None:
            self._state = make_run(self._run_dir, self._store, self._destination, self._attempt.time, self._state)

    def _describe(self) -> None:
        """Once an attempt: the run is RUNNING, has the attempt's tags and settings; lost attempts are closed."""
        if self._state.described_attempt == self._state.attempt:
            return
        target, run_id = self._destination, self._main_run_id()
        tags = {**target.tags, RUN_ID_TAG: target.run_id, "attempts": str(self._state.attempt)}
        self._store.start_or_resume_run(target.run_id, run_id, tags)
        self._store.log_params(run_id, target.settings)
        for old in self._state.superseded_run_ids:
            self._store.set_tags(old, {SUPERSEDED_TAG: run_id})
            self._store.set_status(old, "KILLED")
        for lost in self._state.lost_attempt_run_ids:
            self._store.set_status(lost, "KILLED", self._attempt.time)
        self._save(replace(self._state, described_attempt=self._state.attempt, lost_attempt_run_ids=()))

    def _ship_committed(self) -> None:
        state = self._state
        skip = frozenset(state.delivered_ahead)
        self._ship(
            self._main_run_id(),
            state.main_bytes,
            state.committed_bytes,
            lambda end: replace(self._state, main_bytes=end),
            skip,
        )
        if skip and self._state.num_bytes_waiting == 0:
            last = max((record.step for record in self._records(state.main_bytes, state.committed_bytes)), default=-1)
            # Once the journal is past a step, what was delivered of it ahead cannot come again.
            left = tuple(pair for pair in self._state.delivered_ahead if pair[0] >= last)
            self._save(replace(self._state, delivered_ahead=left))

    def _records(self, start: int, stop: int) -> list[StepRecord]:
        lines = iter_lines(self._journal_fd, start, stop)
        return [line.record for line in lines if isinstance(line.record, StepRecord)]

    def _ship_live(self) -> None:
        if self._state.attempt_run_id is None:
            if os.fstat(self._journal_fd).st_size <= max(self._state.committed_bytes, self._state.live_bytes):
                # Nothing that the run itself will not hold: no nested run is made for it.
                return
            self._make_attempt_run()
        run_id = self._state.attempt_run_id
        if run_id is not None:
            self._ship(run_id, self._state.live_bytes, None, lambda end: replace(self._state, live_bytes=end))

    def _make_attempt_run(self) -> None:
        name, number = self._destination.run_id, str(self._state.attempt)
        identity = {ATTEMPT_OF_TAG: name, ATTEMPT_TAG: number}
        main = self._main_run_id()
        found = self._store.find_runs({**identity, PARENT_TAG: main})
        if found:
            run_id = str(found[0].info.run_id)
            self._store.client.update_run(run_id, status="RUNNING")
        else:
            tags = {**identity, "stage": "live"}
            run_id = self._store.create_run(f"{name} attempt-{number}", tags, main, self._attempt.time)
        self._save(replace(self._state, attempt_run_id=run_id))

    def _ship(
        self,
        run_id: str,
        start: int,
        stop: int | None,
        moved: Callable[[int], TrackingState],
        skip: frozenset[tuple[int, str]] = frozenset(),
    ) -> None:
        """Send the lines between two bytes; `moved` gives the state with the cursor at a byte."""
        points: list[Metric] = []
        end = start
        for line in iter_lines(self._journal_fd, start, stop):
            more = self._points(line.record, skip)
            if points and len(points) + len(more) > self._batch_size:
                self._send(run_id, points)
                self._save(moved(end))
                points = []
            points += more
            end = line.end
        if end > start:
            self._send(run_id, points)
            self._save(moved(end))

    def _send(self, run_id: str, points: "list[Metric]") -> None:
        for first in range(0, len(points), self._batch_size):
            self._store.client.log_batch(run_id, metrics=points[first : first + self._batch_size])

    def _points(self, record: Record | None, skip: frozenset[tuple[int, str]]) -> "list[Metric]":
        from mlflow.entities import Metric

        match record:
            case StepRecord(step, time, metrics, nonfinite):
                named = [(self._name(name), value) for name, value in metrics.items() if (step, name) not in skip]
                if nonfinite:
                    named.append((NONFINITE_METRIC, float(len(nonfinite))))
                return [Metric(name, value, milliseconds(time), step) for name, value in named if name is not None]
            case EventRecord(name, step, time):
                return [Metric(event_metric(name), 1.0, milliseconds(time), step)]
        return []

    def _name(self, name: str) -> str | None:
        """MLflow's name of a metric; None, and one warning, where it takes none such."""
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
        """A slow server may have made the run although the client had given up and asked again."""
        for run in _runs_of(self._run_dir, self._store, self._destination):
            if run.info.run_id != run_id and not run.data.metrics and not run.data.params:
                self._store.client.delete_run(run.info.run_id)


def make_run(
    run_dir: Path, store: MlflowStore, target: Destination, start_time_s: float, state: TrackingState | None = None
) -> TrackingState:
    """Find or make the MLflow run of a run's folder and note its id, once, whoever comes first.

    `state` is what the caller holds of the run's state; None: what is on disk.
    """

    def change(on_disk: TrackingState) -> TrackingState:
        current = on_disk if state is None else state
        if current.uri != store.uri:
            current = TrackingState(uri=store.uri)
        if current.mlflow_run_id is not None:
            return current
        tags = {**target.tags, RUN_ID_TAG: target.run_id, FOLDER_TAG: ensure_folder_id(run_dir)}
        known = [run.info.run_id for run in _runs_of(run_dir, store, target)]
        known = [run_id for run_id in known if run_id not in current.superseded_run_ids]
        run_id = known[0] if known else store.create_run(target.run_id, tags, start_time_s=start_time_s)
        return replace(current, mlflow_run_id=run_id)

    return change_state(run_dir, change)


def _runs_of(run_dir: Path, store: MlflowStore, target: Destination) -> "list[Run]":
    """The folder's runs in MLflow, oldest first; in a shared store others may have runs of the same id."""
    own = folder_id(run_dir)
    return [
        run
        for run in store.find_runs({RUN_ID_TAG: target.run_id})
        if own is None or run.data.tags.get(FOLDER_TAG, own) == own
    ]


def event_metric(name: str) -> str:
    """The metric that marks an event on the step axis."""
    return f"events/{re.sub(r'[^A-Za-z0-9_-]', '_', name)}"


def open_shipper(run_dir: Path, uri: str | None = None) -> Shipper | None:
    """The shipper of a run's newest attempt; None if the run has not begun. `uri`: another store than the run's."""
    attempt = last_attempt(run_dir / ATTEMPTS_FILE)
    if attempt is None:
        return None
    target = attempt.destination if uri is None else replace(attempt.destination, uri=uri)
    return Shipper(run_dir, attempt, target)
