"""Delivery to a real store: the whole journal arrives, even if the run or the delivery is killed."""

import logging
import math
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from rlcore.config import RunConfig
from rlcore.errors import DiskSpaceError, RunInUseError, TrackingError
from rlcore.tracking.attempts import read_attempts
from rlcore.tracking.delivery import FORMAT_VERSION, delivery_lock, ensure_mlflow_run, read_state, sync_run
from rlcore.tracking.journal import WORKERS, RunJournal, read_journal
from rlcore.tracking.lineage import TRAINED_FOR_TAG
from rlcore.tracking.mlflow_store import PARENT_TAG
from tests.helpers.mlflow import (
    all_runs,
    client_of,
    delivery_of,
    journal_points,
    main_run,
    main_runs,
    points,
    values,
    values_by_step,
)
from tests.storage.small_disk import fill, small_disk

__all__ = ["small_disk"]


def deliver(run_dir: Path) -> None:
    with delivery_of(run_dir) as delivery:
        delivery.catch_up()


def assert_delivered(client: MlflowClient, run_dir: Path, *names: str, run: Run | None = None) -> None:
    """Assert that MLflow has each value of the journal once."""
    for name in names or ("test/m0",):
        assert points(client, run or main_run(client), name) == journal_points(run_dir / "metrics.jsonl", name)


Begin = Callable[..., RunJournal]


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.tracking.delivery.MAX_METRICS_PER_BATCH", 10)


@pytest.fixture
def begin(offline: RunConfig, run_dir: Path) -> Begin:
    """Return a trainer that resumes from a checkpoint (step, journal bytes)."""

    def begin(step: int = 0, journal_bytes: int = 0) -> RunJournal:
        tracker = RunJournal(run_dir, offline, tags={"stage": "train"})
        tracker.resume_at(step, journal_bytes)
        return tracker

    return begin


def train(tracker: RunJournal, first: int, last: int, *, shift: float = 0.0) -> int:
    """Write steps and return the journal bytes of a checkpoint."""
    for step in range(first, last + 1):
        tracker.append_step(step, {name: value + shift for name, value in values(step).items()})
    return tracker.sync()


def test_journal_arrives_with_its_times_settings_and_tags(begin: Begin, run_dir: Path, client: MlflowClient):
    tracker = begin()
    train(tracker, 1, 7)
    tracker.append_event(WORKERS, 2, {})
    tracker.append_event("out of memory", 3, {"tokens": 8192, "why": "größer"})
    deliver(run_dir)
    (run,) = all_runs(client)
    history = client.get_metric_history(run.info.run_id, "test/m0")
    assert [metric.timestamp / 1e3 for metric in history] == [r.time for r in read_journal(run_dir / "metrics.jsonl")]
    assert_delivered(client, run_dir, *values(1))
    assert (run.info.run_name, run.info.status, len(history)) == ("run-1", "RUNNING", 7)
    assert (run.data.tags["stage"], run.data.tags["attempts"]) == ("train", "1")
    assert (run.data.params["trainer.total_steps"], run.data.params["algo.advantage"]) == ("100", "grpo")
    assert {key: value for key, value in run.data.tags.items() if "event" in key} == {"events.out of memory": "step 3"}
    assert run.data.metrics.keys() == values(1).keys()


def test_invalid_names_and_nonfinite_values_are_not_sent(
    begin: Begin, run_dir: Path, client: MlflowClient, caplog: pytest.LogCaptureFixture
):
    tracker = begin()
    tracker.append_step(1, {"a": 1.0, "b": math.nan, "c": math.inf, "pass^4": 0.5})
    tracker.append_step(2, {"a": 2.0, "b": 3.0, "c": 4.0, "pass^4": 0.5})
    with caplog.at_level(logging.WARNING, "rlcore.tracking"):
        deliver(run_dir)
    assert len([record for record in caplog.records if "pass^4" in record.getMessage()]) == 1
    run = main_run(client)
    assert (points(client, run, "b"), points(client, run, "c")) == ([(2, 3.0)], [(2, 4.0)])
    assert points(client, run, "training/num_nonfinite") == [(1, 2.0)]
    assert "pass^4" not in run.data.metrics


def test_repeated_batch_is_stored_once(begin: Begin, run_dir: Path, client: MlflowClient, small_batches: None):
    """Restore the state before a delivery, as after kill -9 between `log_batch` and the cursor."""
    tracker = begin()
    train(tracker, 1, 4)
    deliver(run_dir)
    before = (run_dir / "tracking.json").read_bytes()
    train(tracker, 5, 12)
    deliver(run_dir)
    (run_dir / "tracking.json").write_bytes(before)
    deliver(run_dir)
    assert_delivered(client, run_dir, *values(1))


def test_folders_with_same_run_id_have_two_runs(
    begin: Begin, run_dir: Path, root: Path, client: MlflowClient, offline: RunConfig
):
    train(begin(), 1, 3)
    theirs = root / "other_user" / run_dir.name
    train(RunJournal(theirs, offline, tags={"stage": "train"}), 1, 2, shift=0.5)
    for folder in (run_dir, theirs):
        deliver(folder)
    for folder, run in zip((run_dir, theirs), main_runs(client), strict=True):
        assert_delivered(client, folder, run=run)


def test_step_larger_than_a_batch(begin: Begin, run_dir: Path, client: MlflowClient):
    begin().append_step(1, {f"many/m{i}": float(i) for i in range(1_500)})
    deliver(run_dir)
    assert main_run(client).data.metrics == {f"many/m{i}": float(i) for i in range(1_500)}


def test_values_sent_before_failure_are_recorded(begin: Begin, run_dir: Path, small_batches: None):
    tracker = begin()
    before = train(tracker, 1, 4)  # two batches
    tracker.append_step(2**70, {"a": 1.0})  # too large for any store
    with delivery_of(run_dir) as delivery, pytest.raises(Exception, match=r"large|out of range|Overflow"):
        delivery.catch_up()
    assert read_state(run_dir).journal_bytes == before


def test_partial_line_is_sent_when_complete(begin: Begin, run_dir: Path, client: MlflowClient):
    tracker = begin()
    train(tracker, 1, 2)
    deliver(run_dir)
    path = run_dir / "metrics.jsonl"
    line = path.read_bytes().splitlines(keepends=True)[-1].replace(b'"step":2', b'"step":3')
    with path.open("ab", buffering=0) as file:
        file.write(line[:25])
        deliver(run_dir)
        file.write(line[25:])
    deliver(run_dir)
    assert [step for step, _ in points(client, main_run(client), "test/m0")] == [1, 2, 3]


def test_warm_start_is_nested_when_its_run_is_there(
    begin: Begin, run_dir: Path, root: Path, client: MlflowClient, offline: RunConfig, other: Path
):
    warm = root / "warm-starts" / "warm-start-1"
    own = RunJournal(warm, offline, tags={"stage": "warm-start", TRAINED_FOR_TAG: run_dir.name})
    train(own, 1, 2)
    deliver(warm)
    assert PARENT_TAG not in main_run(client, warm.name).data.tags, "its run is not in MLflow yet"
    train(begin(), 1, 1)
    deliver(run_dir)
    own.finish("FINISHED")
    deliver(warm)
    assert main_run(client, warm.name).data.tags[PARENT_TAG] == main_run(client).info.run_id
    sync_run(warm, f"sqlite:///{other}/mlflow.db")
    assert PARENT_TAG not in main_run(client_of(other), warm.name).data.tags, "the parent is elsewhere"


def test_later_sweep_does_not_move_a_run(begin: Begin, run_dir: Path, root: Path, offline: RunConfig):
    train(begin(), 1, 1)
    deliver(run_dir)
    tracker = RunJournal(run_dir, offline, tags={PARENT_TAG: "sweep", "swept": "yes"})
    train(tracker, 2, 2)
    deliver(run_dir)
    tags = main_run(client_of(root)).data.tags
    assert (tags["swept"], PARENT_TAG in tags) == ("yes", False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ('{"journal_bytes": "many"}', "cannot be read"),
        ('{"format_version": 1, "main_bytes": 7}', f"format version 1, this Millrace reads {FORMAT_VERSION}"),
    ],
)
def test_invalid_state_is_rejected(tmp_path: Path, content: str, message: str):
    (tmp_path / "tracking.json").write_text(content)
    with pytest.raises(TrackingError, match=rf"tracking\.json: {message}.* [Mm]ove the file away: the journal is then"):
        read_state(tmp_path)


def test_full_disk_keeps_cursor(offline: RunConfig, small_disk: Path, client: MlflowClient):
    run_dir = small_disk / "run-1"
    tracker = RunJournal(run_dir, offline, tags={})
    train(tracker, 1, 3)
    deliver(run_dir)
    before = read_state(run_dir)
    train(tracker, 4, 6)
    ballast = fill(small_disk)
    with pytest.raises(DiskSpaceError):
        deliver(run_dir)
    ballast.unlink()
    assert read_state(run_dir) == before
    assert not list(run_dir.glob(".tmp-*"))
    deliver(run_dir)
    assert_delivered(client, run_dir)


@pytest.mark.parametrize("delivered", ["never", "before", "not noted", "half"])
def test_last_value_of_repeated_step_is_shown(begin: Begin, run_dir: Path, root: Path, other: Path, delivered: str):
    """Two attempts die after their checkpoint, and repeat steps with other times and values."""
    saved, state = train(begin(), 1, 4), run_dir / "tracking.json"

    def attempt(first: int, last: int, shift: float) -> RunJournal:
        tracker = begin(4, saved)
        if delivered != "never":
            deliver(run_dir)
        noted = state.read_bytes() if state.exists() else b""
        train(tracker, first, last, shift=shift)
        if delivered in ("before", "not noted"):
            deliver(run_dir)
        if delivered == "not noted":  # a kill -9 between the request and the cursor
            state.write_bytes(noted)
        return tracker

    attempt(5, 7, shift=100.0)
    attempt(5, 8, shift=200.0)
    tracker = attempt(5, 9, shift=0.0)
    tracker.finish("FINISHED")
    sync_run(run_dir)
    sync_run(run_dir, f"sqlite:///{other}/mlflow.db")
    sync_run(run_dir)  # back again: the run is found by its key
    expected = [(step, values(step)["test/m0"]) for step in range(1, 10)]
    for folder in (root, other):
        client = client_of(folder)
        assert [run.info.status for run in all_runs(client)] == ["FINISHED"]
        run = main_run(client)
        assert values_by_step(client, run, "test/m0") == expected
        assert run.data.metrics["test/m0"] == expected[-1][1]
        assert run.data.tags["attempts"] == "4"
    assert points(client, run, "test/m0") == expected, "the other store has only what the journal has"
    assert journal_points(run_dir / "metrics.jsonl", "test/m0") == expected


def test_cursor_moves_back_to_earliest_cut(begin: Begin, run_dir: Path, client: MlflowClient):
    first = train(begin(), 1, 4)
    second = train(begin(4, first), 5, 8)
    train(begin(8, second), 9, 10)
    deliver(run_dir)
    begin(4, first).append_step(5, values(5))
    tracker = begin(8, second)  # beyond the journal's end
    train(tracker, 9, 10)
    size = (run_dir / "metrics.jsonl").stat().st_size
    assert sync_run(run_dir).num_bytes == size - first
    steps = [step for step, _ in points(client, main_run(client), "test/m0")]
    assert steps == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 9, 10, 10]


def test_longer_run_continues_in_its_mlflow_run(begin: Begin, run_dir: Path, client: MlflowClient):
    """The last validation was delivered after the last checkpoint, and is repeated by the longer run."""
    validation = {"val-core/x/reward/mean_at_4": 0.5}
    tracker = begin()
    saved = train(tracker, 1, 4)
    tracker.append_step(4, validation)
    tracker.finish("FINISHED")
    sync_run(run_dir)
    tracker = begin(4, saved)
    tracker.append_step(4, validation)
    assert sync_run(run_dir).status is None
    assert main_run(client).info.status == "RUNNING"
    train(tracker, 5, 8)
    tracker.finish("FINISHED")
    sync_run(run_dir)
    assert values_by_step(client, main_run(client), *validation) == [(4, 0.5)]
    assert_delivered(client, run_dir)
    assert main_run(client).info.status == "FINISHED"


def test_deleted_journal_does_not_stop_run(begin: Begin, run_dir: Path, client: MlflowClient):
    saved = train(begin(), 1, 4)
    deliver(run_dir)
    (run_dir / "metrics.jsonl").unlink()
    train(begin(4, saved), 5, 6)
    deliver(run_dir)
    assert [step for step, _ in points(client, main_run(client), "test/m0")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_final_status_is_delivered_once(begin: Begin, run_dir: Path, client: MlflowClient, status):
    tracker = begin()
    train(tracker, 1, 3)
    tracker.finish(status)
    first, run = sync_run(run_dir), main_run(client)
    assert (first.mlflow_run_id, first.status, read_state(run_dir).status) == (run.info.run_id, status, status)
    ((_, end),) = read_attempts(run_dir)
    assert (run.info.status, run.info.end_time) == (status, round(end.time * 1e3))
    recorded = (run_dir / "tracking.json").stat()
    again = sync_run(run_dir)
    assert (run_dir / "tracking.json").stat() == recorded
    assert (first.num_bytes, again.num_bytes) == ((run_dir / "metrics.jsonl").stat().st_size, 0)
    assert again.status == status
    assert_delivered(client, run_dir)


def test_run_without_process_is_killed(begin: Begin, run_dir: Path, client: MlflowClient):
    train(begin(), 1, 3)
    attempts = run_dir / "attempts.jsonl"
    attempts.write_text(re.sub(r'"born":[\d.]+', '"born":1.0', attempts.read_text()))  # another process
    before = round(time.time() * 1e3)
    assert sync_run(run_dir).status == "KILLED"
    run = main_run(client)
    assert run.info.status == "KILLED"
    assert before <= run.info.end_time <= time.time() * 1e3
    assert read_state(run_dir).status == "KILLED"
    assert sync_run(run_dir).status == "KILLED"
    assert main_run(client).info.end_time == run.info.end_time, "its end is unchanged"


def test_new_end_replaces_delivered_end(begin: Begin, run_dir: Path, client: MlflowClient, offline: RunConfig):
    saved = train(begin(), 1, 3)
    begin(3, saved).finish("KILLED")
    sync_run(run_dir)
    RunJournal(run_dir, offline, tags={}).finish("FINISHED")
    assert sync_run(run_dir).status == "FINISHED"
    assert main_run(client).info.status == "FINISHED"


def test_other_delivery_and_missing_run_are_rejected(begin: Begin, run_dir: Path, tmp_path: Path):
    with pytest.raises(TrackingError, match=r"attempts\.jsonl: no attempt"):
        sync_run(tmp_path)
    train(begin(), 1, 3)
    with delivery_lock(run_dir), pytest.raises(RunInUseError, match="the delivery of run run-1 is in use by process"):
        sync_run(run_dir)


def test_deleted_experiment_is_reported_and_recoverable(begin: Begin, run_dir: Path, client: MlflowClient):
    tracker = begin()
    train(tracker, 1, 3)
    deliver(run_dir)
    experiment = client.get_experiment_by_name("millrace")
    client.delete_experiment(experiment.experiment_id)
    train(tracker, 4, 6)
    with pytest.raises(TrackingError, match="was deleted there"):
        sync_run(run_dir)
    client.restore_experiment(experiment.experiment_id)
    sync_run(run_dir)
    assert_delivered(client, run_dir)


def test_new_experiment_gets_whole_journal(begin: Begin, run_dir: Path, client: MlflowClient, offline: RunConfig):
    """Use the documented remedy for a run deleted in MLflow."""
    saved = train(begin(), 1, 3)
    deliver(run_dir)
    old = main_run(client).info.run_id
    client.delete_run(old)
    tracking = offline.tracking.model_copy(update={"experiment": "new"})
    elsewhere = offline.model_copy(update={"tracking": tracking})
    new = ensure_mlflow_run(run_dir, elsewhere, {}).id
    tracker = RunJournal(run_dir, elsewhere, tags={})
    tracker.resume_at(3, saved)
    train(tracker, 4, 6)
    tracker.finish("FINISHED")
    assert sync_run(run_dir).mlflow_run_id == new != old
    (run,) = all_runs(client, "new")
    assert (run.info.run_id, run.info.status) == (new, "FINISHED")
    assert_delivered(client, run_dir, run=run)
