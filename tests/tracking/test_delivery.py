"""Delivery to a real store: the whole journal arrives, even if the run or the delivery is killed."""

import json
import logging
import math
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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


def assert_delivered(root: Path, run_dir: Path, *names: str) -> None:
    """Assert that MLflow has each value of the journal once."""
    client = client_of(root)
    for name in names or ("test/m0",):
        assert points(client, main_run(client), name) == journal_points(run_dir / "metrics.jsonl", name)


Begin = Callable[..., RunJournal]


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


def test_values_arrive_with_the_times_of_the_journal(begin: Begin, run_dir: Path, root: Path):
    train(begin(), 1, 7)
    deliver(run_dir)
    client = client_of(root)
    run = main_run(client)
    history = client.get_metric_history(run.info.run_id, "test/m0")
    assert [metric.timestamp / 1e3 for metric in history] == [r.time for r in read_journal(run_dir / "metrics.jsonl")]
    assert_delivered(root, run_dir, *values(1))
    assert len(points(client, run, "test/m0")) == 7
    assert [each.info.status for each in all_runs(client)] == ["RUNNING"], "there is one run"


def test_run_has_settings_and_tags(begin: Begin, run_dir: Path, root: Path, offline: RunConfig):
    train(begin(), 1, 1)
    deliver(run_dir)
    run = main_run(client_of(root))
    assert run.info.run_name == "run-1"
    assert run.data.tags["stage"] == "train"
    assert run.data.tags["attempts"] == "1"
    assert run.data.params["trainer.total_steps"] == str(offline.trainer.total_steps)
    assert run.data.params["algo.advantage"] == "grpo"


def test_repeated_batch_is_stored_once(begin: Begin, run_dir: Path, root: Path):
    """Restore the state before a delivery, as after kill -9 between `log_batch` and the cursor."""
    tracker = begin()
    train(tracker, 1, 4)
    deliver(run_dir)
    before = (run_dir / "tracking.json").read_bytes()
    train(tracker, 5, 400)
    deliver(run_dir)
    (run_dir / "tracking.json").write_bytes(before)
    deliver(run_dir)
    assert_delivered(root, run_dir, *values(1))
    assert len(journal_points(run_dir / "metrics.jsonl", "test/m0")) == 400


def test_folders_with_same_run_id_have_two_runs(begin: Begin, run_dir: Path, root: Path, offline: RunConfig):
    train(begin(), 1, 3)
    deliver(run_dir)
    theirs = root / "other_user" / run_dir.name
    tracker = RunJournal(theirs, offline, tags={"stage": "train"})
    tracker.resume_at(0, 0)
    train(tracker, 1, 2, shift=0.5)
    deliver(theirs)
    client = client_of(root)
    for folder, run in zip((run_dir, theirs), main_runs(client), strict=True):
        assert points(client, run, "test/m0") == journal_points(folder / "metrics.jsonl", "test/m0")


def test_partial_line_is_sent_when_complete(begin: Begin, run_dir: Path, root: Path):
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
    client = client_of(root)
    assert [step for step, _ in points(client, main_run(client), "test/m0")] == [1, 2, 3]


def test_step_larger_than_a_batch(begin: Begin, run_dir: Path, root: Path):
    tracker = begin()
    for step in (1, 2):
        tracker.append_step(step, {f"many/m{i}": float(i * step) for i in range(1_500)})
    deliver(run_dir)
    client = client_of(root)
    assert len(main_run(client).data.metrics) == 1_500
    assert points(client, main_run(client), "many/m1499") == [(1, 1499.0), (2, 2998.0)]


def test_values_sent_before_failure_are_recorded(begin: Begin, run_dir: Path):
    tracker = begin()
    train(tracker, 1, 400)  # two batches
    before = tracker.sync()
    tracker.append_step(2**70, {"a": 1.0})  # too large for any store
    with delivery_of(run_dir) as delivery, pytest.raises(Exception, match=r"large|out of range|Overflow"):
        delivery.catch_up()
    assert read_state(run_dir).journal_bytes == before


def test_nonfinite_values_are_counted_and_not_sent(begin: Begin, run_dir: Path, root: Path):
    tracker = begin()
    tracker.append_step(1, {"a": 1.0, "b": math.nan, "c": math.inf})
    tracker.append_step(2, {"a": 2.0, "b": 3.0, "c": 4.0})
    deliver(run_dir)
    client = client_of(root)
    run = main_run(client)
    assert points(client, run, "b") == [(2, 3.0)]
    assert points(client, run, "c") == [(2, 4.0)]
    assert points(client, run, "training/num_nonfinite") == [(1, 2.0)]


def test_invalid_name_is_logged_once_and_omitted(
    begin: Begin, run_dir: Path, root: Path, caplog: pytest.LogCaptureFixture
):
    tracker = begin()
    for step in (1, 2, 3):
        tracker.append_step(step, {"pass^4": 0.5, "mean_at_4": 0.25})
    with caplog.at_level(logging.WARNING, "rlcore.tracking"):
        deliver(run_dir)
    assert len([record for record in caplog.records if "pass^4" in record.getMessage()]) == 1
    client = client_of(root)
    assert main_run(client).data.metrics == {"mean_at_4": 0.25}


def test_events_are_tags_and_no_metrics(begin: Begin, run_dir: Path, root: Path):
    tracker = begin()
    train(tracker, 1, 2)
    tracker.append_event(WORKERS, 2, {})
    tracker.append_event("out of memory", 3, {"tokens": 8192, "why": "größer"})
    deliver(run_dir)
    client = client_of(root)
    run = main_run(client)
    assert {key: value for key, value in run.data.tags.items() if "event" in key} == {"events.out of memory": "step 3"}
    assert not [name for name in run.data.metrics if "event" in name]


def test_warm_start_is_nested_when_its_run_is_there(
    begin: Begin, run_dir: Path, root: Path, offline: RunConfig, tmp_path: Path, empty_store: Path
):
    warm = root / "warm-starts" / "warm-start-1"
    own = RunJournal(warm, offline, tags={"stage": "warm-start", TRAINED_FOR_TAG: run_dir.name})
    train(own, 1, 2)
    deliver(warm)
    client = client_of(root)
    assert PARENT_TAG not in main_run(client, warm.name).data.tags, "its run is not in MLflow yet"
    train(begin(), 1, 1)
    deliver(run_dir)
    own.finish("FINISHED")
    deliver(warm)
    assert main_run(client, warm.name).data.tags[PARENT_TAG] == main_run(client).info.run_id
    (tmp_path / "other").mkdir()
    shutil.copy(empty_store, tmp_path / "other" / "mlflow.db")
    sync_run(warm, f"sqlite:///{tmp_path}/other/mlflow.db")
    assert PARENT_TAG not in main_run(client_of(tmp_path / "other"), warm.name).data.tags, "the parent is elsewhere"


def test_later_sweep_does_not_move_a_run(begin: Begin, run_dir: Path, root: Path, offline: RunConfig):
    train(begin(), 1, 1)
    deliver(run_dir)
    tracker = RunJournal(run_dir, offline, tags={PARENT_TAG: "sweep", "swept": "yes"})
    train(tracker, 2, 2)
    deliver(run_dir)
    tags = main_run(client_of(root)).data.tags
    assert (tags["swept"], PARENT_TAG in tags) == ("yes", False)


def test_unrecorded_run_is_found_again(begin: Begin, run_dir: Path, root: Path):
    """Remove the run's id, as after a kill or a late response."""
    train(begin(), 1, 3)
    deliver(run_dir)
    state = json.loads((run_dir / "tracking.json").read_text())
    (run_dir / "tracking.json").write_text(json.dumps(state | {"mlflow_run_id": None, "journal_bytes": 0}))
    deliver(run_dir)
    assert read_state(run_dir).mlflow_run_id == state["mlflow_run_id"]
    assert_delivered(root, run_dir)


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


def test_full_disk_keeps_cursor(offline: RunConfig, small_disk: Path, root: Path, monkeypatch: pytest.MonkeyPatch):
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
    assert_delivered(root, run_dir)


@pytest.mark.parametrize("delivered", ["never", "before", "not noted", "half"])
def test_last_value_of_repeated_step_is_shown(
    begin: Begin, run_dir: Path, root: Path, tmp_path: Path, empty_store: Path, delivered: str
):
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
    (tmp_path / "other").mkdir()
    shutil.copy(empty_store, tmp_path / "other" / "mlflow.db")
    sync_run(run_dir, f"sqlite:///{tmp_path}/other/mlflow.db")
    sync_run(run_dir)  # back again: the run is found by its key
    expected = [(step, values(step)["test/m0"]) for step in range(1, 10)]
    for folder in (root, tmp_path / "other"):
        client = client_of(folder)
        assert [run.info.status for run in all_runs(client)] == ["FINISHED"]
        run = main_run(client)
        assert values_by_step(client, run, "test/m0") == expected
        assert run.data.metrics["test/m0"] == expected[-1][1]
        assert run.data.tags["attempts"] == "4"
    assert points(client, run, "test/m0") == expected, "the other store has only what the journal has"
    assert journal_points(run_dir / "metrics.jsonl", "test/m0") == expected


def test_cursor_moves_back_to_earliest_cut(begin: Begin, run_dir: Path, root: Path):
    first = train(begin(), 1, 4)
    second = train(begin(4, first), 5, 8)
    train(begin(8, second), 9, 10)
    deliver(run_dir)
    begin(4, first).append_step(5, values(5))
    tracker = begin(8, second)  # beyond the journal's end
    train(tracker, 9, 10)
    size = (run_dir / "metrics.jsonl").stat().st_size
    assert sync_run(run_dir).num_bytes == size - first
    client = client_of(root)
    steps = [step for step, _ in points(client, main_run(client), "test/m0")]
    assert steps == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 9, 10, 10]


def test_longer_run_continues_in_its_mlflow_run(begin: Begin, run_dir: Path, root: Path):
    """The last validation was delivered after the last checkpoint, and is repeated by the longer run."""
    tracker = begin()
    saved = train(tracker, 1, 4)
    tracker.append_step(4, {"val-core/x/reward/mean_at_4": 0.5})
    tracker.finish("FINISHED")
    sync_run(run_dir)
    tracker = begin(4, saved)
    tracker.append_step(4, {"val-core/x/reward/mean_at_4": 0.5})
    assert sync_run(run_dir).status is None
    assert main_run(client_of(root)).info.status == "RUNNING"
    train(tracker, 5, 8)
    tracker.finish("FINISHED")
    sync_run(run_dir)
    client = client_of(root)
    run = main_run(client)
    assert values_by_step(client, run, "val-core/x/reward/mean_at_4") == [(4, 0.5)]
    assert points(client, run, "test/m0") == [(step, values(step)["test/m0"]) for step in range(1, 9)]
    assert run.info.status == "FINISHED"


def test_deleted_journal_does_not_stop_run(begin: Begin, run_dir: Path, root: Path):
    saved = train(begin(), 1, 4)
    deliver(run_dir)
    (run_dir / "metrics.jsonl").unlink()
    tracker = begin(4, saved)
    train(tracker, 5, 6)
    deliver(run_dir)
    client = client_of(root)
    run = main_run(client)
    assert [step for step, _ in points(client, run, "test/m0")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_final_status_is_delivered(begin: Begin, run_dir: Path, root: Path, status):
    tracker = begin()
    train(tracker, 1, 3)
    train(tracker, 4, 5)
    tracker.finish(status)
    assert sync_run(run_dir).status == status
    assert read_state(run_dir).status == status
    client = client_of(root)
    run = main_run(client)
    ((_, end),) = read_attempts(run_dir)
    assert end is not None
    assert (run.info.status, run.info.end_time) == (status, round(end.time * 1e3))
    assert [step for step, _ in points(client, run, "test/m0")] == [1, 2, 3, 4, 5]


def test_run_without_process_is_killed(begin: Begin, run_dir: Path, root: Path):
    train(begin(), 1, 3)
    attempts = run_dir / "attempts.jsonl"
    attempts.write_text(re.sub(r'"born":[\d.]+', '"born":1.0', attempts.read_text()))  # another process
    before = round(time.time() * 1e3)
    assert sync_run(run_dir).status == "KILLED"
    run = main_run(client_of(root))
    assert run.info.status == "KILLED"
    assert before <= run.info.end_time <= time.time() * 1e3
    assert read_state(run_dir).status == "KILLED"
    assert sync_run(run_dir).status == "KILLED"
    assert main_run(client_of(root)).info.end_time == run.info.end_time, "its end is unchanged"


def test_sync_is_idempotent(begin: Begin, run_dir: Path, root: Path):
    tracker = begin()
    train(tracker, 1, 3)
    tracker.finish("FINISHED")
    first = sync_run(run_dir)
    noted = (run_dir / "tracking.json").stat()
    again = sync_run(run_dir)
    assert (run_dir / "tracking.json").stat() == noted
    assert (first.num_bytes, again.num_bytes) == ((run_dir / "metrics.jsonl").stat().st_size, 0)
    assert (first.mlflow_run_id, again.status) == (main_run(client_of(root)).info.run_id, "FINISHED")
    assert_delivered(root, run_dir)


def test_new_end_replaces_delivered_end(begin: Begin, run_dir: Path, root: Path, offline: RunConfig):
    saved = train(begin(), 1, 3)
    begin(3, saved).finish("KILLED")
    sync_run(run_dir)
    idle = RunJournal(run_dir, offline, tags={})
    idle.finish("FINISHED")
    assert sync_run(run_dir).status == "FINISHED"
    assert main_run(client_of(root)).info.status == "FINISHED"


def test_folder_without_run_is_rejected(tmp_path: Path):
    with pytest.raises(TrackingError, match=r"attempts\.jsonl: no attempt"):
        sync_run(tmp_path)


def test_concurrent_delivery_is_rejected(begin: Begin, run_dir: Path):
    train(begin(), 1, 3)
    with delivery_lock(run_dir), pytest.raises(RunInUseError, match="the delivery of run run-1 is in use by process"):
        sync_run(run_dir)


def test_deleted_experiment_is_reported_and_recoverable(begin: Begin, run_dir: Path, root: Path):
    tracker = begin()
    train(tracker, 1, 3)
    deliver(run_dir)
    client = client_of(root)
    experiment = client.get_experiment_by_name("millrace")
    assert experiment is not None
    client.delete_experiment(experiment.experiment_id)
    train(tracker, 4, 6)
    with pytest.raises(TrackingError, match="was deleted there"):
        sync_run(run_dir)
    client.restore_experiment(experiment.experiment_id)
    sync_run(run_dir)
    assert points(client, main_run(client), "test/m0") == journal_points(run_dir / "metrics.jsonl", "test/m0")


def test_new_experiment_gets_whole_journal(begin: Begin, run_dir: Path, root: Path, offline: RunConfig):
    """Use the documented remedy for a run deleted in MLflow."""
    saved = train(begin(), 1, 3)
    deliver(run_dir)
    client = client_of(root)
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
    assert points(client, run, "test/m0") == journal_points(run_dir / "metrics.jsonl", "test/m0")
