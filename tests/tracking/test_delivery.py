"""The delivery against a real store: each value of a step once, whatever happens to the run and to the delivery."""

import json
import logging
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcore.config import RunConfig
from rlcore.errors import TrackingError
from rlcore.tracking.attempts import ATTEMPTS_FILE, read_history
from rlcore.tracking.delivery import (
    ReplacedError,
    delivery_lock,
    ensure_mlflow_run,
    read_state,
    sync_run,
)
from rlcore.tracking.journal import WORKERS, load_journal
from rlcore.tracking.tracker import Tracker
from tests.tracking.reading import (
    all_runs,
    client_of,
    delivery_of,
    journal_points,
    main_run,
    main_runs,
    points,
    values,
)

OFFLINE = {"tracking": {"enabled": False}}
"""No process beside the trainer: the test delivers, at the moments it chooses."""


@pytest.fixture
def offline(config: RunConfig) -> RunConfig:
    return RunConfig(paths=config.paths, tracking=config.tracking.model_copy(update={"enabled": False}))


def open_files() -> set[Path]:
    return {Path(file.path) for file in psutil.Process().open_files()}


def deliver(run_dir: Path) -> None:
    with delivery_of(run_dir) as delivery:
        delivery.deliver()


Begin = Callable[..., Tracker]


@pytest.fixture
def begin(offline: RunConfig, run_dir: Path) -> Begin:
    """A trainer that goes on from a checkpoint (step, journal bytes)."""

    def begin(step: int = 0, journal_bytes: int = 0) -> Tracker:
        tracker = Tracker(run_dir, offline, tags={"stage": "train"})
        tracker.resume_at(step, journal_bytes)
        return tracker

    return begin


def train(tracker: Tracker, first: int, last: int, *, save: bool = True, shift: float = 0.0) -> int:
    """Steps first..last and, if asked, a checkpoint; the bytes that a checkpoint stores."""
    for step in range(first, last + 1):
        tracker.log_step(step, {name: value + shift for name, value in values(step).items()})
    journal_bytes = tracker.journal_bytes
    if save:
        tracker.commit(last)
    return journal_bytes


def test_values_arrive_before_the_checkpoint_in_the_run_itself(begin: Begin, run_dir: Path, root: Path):
    tracker = begin()
    train(tracker, 1, 5)
    train(tracker, 6, 7, save=False)
    deliver(run_dir)
    client = client_of(root)
    run = main_run(client)
    for name in values(1):
        assert points(client, run, name) == journal_points(run_dir / "metrics.jsonl", name)
    assert len(points(client, run, "test/m0")) == 7
    assert [each.info.status for each in all_runs(client)] == ["RUNNING"], "there is one run"


def test_a_second_run_that_a_slow_server_made_is_removed_and_no_other(begin: Begin, run_dir: Path, root: Path):
    tracker = begin()
    train(tracker, 1, 2)
    deliver(run_dir)
    client = client_of(root)
    own = main_run(client)
    empty, used, set_up = (client.create_run(own.info.experiment_id, tags=own.data.tags).info.run_id for _ in range(3))
    client.log_metric(used, "somebody/wrote", 1.0)
    client.log_param(set_up, "somebody", "wrote")
    tracker.finish("FINISHED")
    assert sync_run(run_dir).status == "FINISHED"
    left = {run.info.run_id for run in main_runs(client)}
    assert left == {own.info.run_id, used, set_up}
    assert empty not in left


def test_time_stamps_are_the_journals(begin: Begin, run_dir: Path, root: Path):
    train(begin(), 1, 3)
    deliver(run_dir)
    client = client_of(root)
    history = client.get_metric_history(main_run(client).info.run_id, "test/m0")
    from rlcore.tracking.journal import read_journal

    assert [metric.timestamp / 1e3 for metric in history] == [r.time for r in read_journal(run_dir / "metrics.jsonl")]


def test_settings_and_tags_describe_the_run(begin: Begin, run_dir: Path, root: Path, offline: RunConfig):
    train(begin(), 1, 1)
    deliver(run_dir)
    run = main_run(client_of(root))
    assert run.info.run_name == "run-1"
    assert run.data.tags["stage"] == "train"
    assert run.data.tags["attempts"] == "1"
    assert run.data.tags["attempt.1"].startswith("from step 0, 20")
    assert run.data.tags["attempt.1"].endswith(f" UTC, {socket.gethostname()} process {os.getpid()}"), "it goes on"
    assert run.data.params["trainer.total_steps"] == str(offline.trainer.total_steps)
    assert run.data.params["algo.advantage"] == "grpo"


def test_a_batch_that_was_sent_but_not_noted_is_sent_again_and_stays_single(begin: Begin, run_dir: Path, root: Path):
    """What kill -9 between `log_batch` and the cursor leaves behind: the state of before the delivery."""
    tracker = begin()
    train(tracker, 1, 4, save=False)
    deliver(run_dir)
    before = (run_dir / "tracking.json").read_bytes()
    train(tracker, 5, 400)
    deliver(run_dir)
    (run_dir / "tracking.json").write_bytes(before)
    deliver(run_dir)
    client = client_of(root)
    for name in values(1):
        every = journal_points(run_dir / "metrics.jsonl", name)
        assert len(every) == 400
        assert points(client, main_run(client), name) == every


def test_why_mlflow_refused_is_told_though_the_failure_cannot_be_noted(begin: Begin, run_dir: Path, root: Path):
    tracker = begin()
    train(tracker, 1, 1)
    with delivery_of(run_dir) as delivery:
        delivery.deliver()
        client = client_of(root)
        client.delete_run(main_run(client).info.run_id)
        train(tracker, 2, 2)
        (run_dir / "tracking.json").write_text("{")
        with pytest.raises(Exception, match="must be in the 'active' state"):
            delivery.deliver()


def test_a_run_without_its_journal_is_not_delivered(begin: Begin, run_dir: Path, root: Path):
    tracker = begin()
    train(tracker, 1, 3)
    tracker.finish("FINISHED")
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(TrackingError, match=r"metrics\.jsonl: is not there"):
        sync_run(run_dir)
    assert not (run_dir / "metrics.jsonl").exists()
    assert all_runs(client_of(root)) == []


def test_a_lost_state_is_made_up_for_without_doubles(begin: Begin, run_dir: Path, root: Path):
    train(begin(), 1, 30)
    deliver(run_dir)
    (run_dir / "tracking.json").unlink()
    deliver(run_dir)
    client = client_of(root)
    assert points(client, main_run(client), "test/m0") == journal_points(run_dir / "metrics.jsonl", "test/m0")


def test_two_folders_with_a_run_of_one_id_have_two_runs_in_a_shared_store(
    begin: Begin, run_dir: Path, root: Path, offline: RunConfig
):
    train(begin(), 1, 3)
    deliver(run_dir)
    theirs = root / "of_somebody_else" / run_dir.name
    tracker = Tracker(theirs, offline, tags={"stage": "train"})
    tracker.resume_at(0, 0)
    train(tracker, 1, 2, shift=0.5)
    deliver(theirs)
    (run_dir / "tracking.json").unlink()  # ours is found by its folder's id
    deliver(run_dir)
    client = client_of(root)
    for folder, run in zip((run_dir, theirs), main_runs(client), strict=True):
        assert points(client, run, "test/m0") == journal_points(folder / "metrics.jsonl", "test/m0")


def test_a_half_written_line_waits_until_it_is_whole(begin: Begin, run_dir: Path, root: Path):
    tracker = begin()
    train(tracker, 1, 2, save=False)
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


def test_a_step_with_more_metrics_than_a_batch_holds(begin: Begin, run_dir: Path, root: Path):
    tracker = begin()
    for step in (1, 2):
        tracker.log_step(step, {f"many/m{i}": float(i * step) for i in range(1_500)})
    assert tracker.journal_bytes
    tracker.commit(2)
    deliver(run_dir)
    client = client_of(root)
    assert len(main_run(client).data.metrics) == 1_500
    assert points(client, main_run(client), "many/m1499") == [(1, 1499.0), (2, 2998.0)]


def test_a_server_that_fails_is_sent_less_at_once(begin: Begin, run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    begin().log_step(1, {f"many/m{i}": float(i) for i in range(1_500)})
    sizes: list[int] = []

    def fails(run_id: str, metrics: Sequence[Any] = (), **other: Any) -> None:
        if metrics:
            sizes.append(len(metrics))
            raise ConnectionError("took too long")

    with delivery_of(run_dir) as delivery:
        monkeypatch.setattr(delivery._store.client, "log_batch", fails)
        for _ in range(7):
            with pytest.raises(ConnectionError):
                delivery.deliver()
    assert sizes == [1_000, 500, 250, 125, 62, 50, 50]


def test_a_server_that_takes_it_is_sent_more_at_once(begin: Begin, run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    tracker, sizes = begin(), list[int]()
    with delivery_of(run_dir) as delivery:
        take = delivery._store.client.log_batch

        def takes(run_id: str, metrics: Sequence[Any] = (), **other: Any) -> None:
            take(run_id, metrics=metrics, **other)
            sizes.extend([len(metrics)] * bool(metrics))

        monkeypatch.setattr(delivery._store.client, "log_batch", takes)
        delivery._batch_size = 200  # after failures
        for step, num_metrics in enumerate((300, 500, 900, 1_100), 1):
            tracker.log_step(step, {f"many/m{i}": float(i) for i in range(num_metrics)})
            delivery.deliver()
    assert sizes == [200, 100, 400, 100, 800, 100, 1_000, 100]


@pytest.mark.parametrize(("second", "requests"), [(500, [1_000]), (501, [500, 501])])
def test_lines_go_together_as_long_as_they_fit_a_batch(
    begin: Begin, run_dir: Path, monkeypatch: pytest.MonkeyPatch, second: int, requests: list[int]
):
    tracker, sizes = begin(), list[int]()
    for step, num_metrics in ((1, 500), (2, second)):
        tracker.log_step(step, {f"many/m{i}": float(i) for i in range(num_metrics)})

    def takes(run_id: str, metrics: Sequence[Any] = (), **other: Any) -> None:
        sizes.extend([len(metrics)] * bool(metrics))

    with delivery_of(run_dir) as delivery:
        monkeypatch.setattr(delivery._store.client, "log_batch", takes)
        delivery.deliver()
    assert sizes == requests


def test_a_delivery_with_nothing_new_writes_nothing(begin: Begin, run_dir: Path):
    train(begin(), 1, 2)
    with delivery_of(run_dir) as delivery:
        delivery.deliver()
        noted = (run_dir / "tracking.json").stat()
        delivery.deliver()
        assert (run_dir / "tracking.json").stat() == noted


def test_a_delivery_lets_go_of_the_journal(begin: Begin, run_dir: Path):
    tracker = begin()
    train(tracker, 1, 2)
    tracker.finish("FINISHED")
    with delivery_of(run_dir):
        assert run_dir / "metrics.jsonl" in open_files()
    assert run_dir / "metrics.jsonl" not in open_files()


def test_a_delivery_notices_the_end_and_the_next_attempt_not_a_checkpoint(begin: Begin, run_dir: Path):
    tracker = begin()
    train(tracker, 1, 2)
    with delivery_of(run_dir) as delivery:
        assert not delivery.has_ended()
        saved = train(tracker, 3, 4)
        assert not delivery.has_ended(), "a checkpoint is no end"
        begin(4, saved)
        assert delivery.has_ended(), "another attempt has begun"
    with delivery_of(run_dir) as delivery:
        assert not delivery.has_ended()
        train(tracker, 5, 5)
        tracker.finish("FINISHED")
        assert delivery.has_ended()
        delivery.deliver()
        assert not delivery.has_ended(), "that is known already"


def test_what_was_sent_before_a_failure_is_noted(begin: Begin, run_dir: Path):
    tracker = begin()
    train(tracker, 1, 400, save=False)  # two batches
    before = tracker.journal_bytes
    tracker.log_step(2**70, {"a": 1.0})  # no store takes such a step
    with delivery_of(run_dir) as delivery, pytest.raises(Exception, match=r"large|out of range|Overflow"):
        delivery.deliver()
    assert read_state(run_dir).main_bytes == before
    assert read_state(run_dir).num_failures == 1


def test_what_is_not_finite_is_counted_not_sent(begin: Begin, run_dir: Path, root: Path):
    tracker = begin()
    tracker.log_step(1, {"a": 1.0, "b": math.nan, "c": math.inf})
    tracker.log_step(2, {"a": 2.0, "b": 3.0, "c": 4.0})
    assert tracker.journal_bytes
    tracker.commit(2)
    deliver(run_dir)
    client = client_of(root)
    run = main_run(client)
    assert points(client, run, "b") == [(2, 3.0)]
    assert points(client, run, "c") == [(2, 4.0)]
    assert points(client, run, "training/num_nonfinite") == [(1, 2.0)]


def test_a_name_that_mlflow_refuses_is_told_once_and_the_rest_arrives(
    begin: Begin, run_dir: Path, root: Path, caplog: pytest.LogCaptureFixture
):
    tracker = begin()
    for step in (1, 2, 3):
        tracker.log_step(step, {"pass^4": 0.5, "mean@4": 0.25})
    assert tracker.journal_bytes
    tracker.commit(3)
    with caplog.at_level(logging.WARNING, "rlcore.tracking"):
        deliver(run_dir)
    assert len([record for record in caplog.records if "pass^4" in record.getMessage()]) == 1
    client = client_of(root)
    assert main_run(client).data.metrics == {"mean_at_4": 0.25}


def test_events_stand_on_the_step_axis_and_their_data_in_a_file(begin: Begin, run_dir: Path, root: Path):
    tracker = begin()
    train(tracker, 1, 2)
    tracker.log_event(WORKERS, 2, {})
    tracker.log_event("out of memory", 3, {"tokens": 8192, "why": "größer"})
    tracker.finish("FINISHED")
    assert sync_run(run_dir).status == "FINISHED"
    client = client_of(root)
    run = main_run(client)
    assert points(client, run, "events/out_of_memory") == [(3, 1.0)]
    assert "events/workers" not in run.data.metrics
    text = Path(client.download_artifacts(run.info.run_id, "events/events.jsonl")).read_text()
    assert '"data": {"tokens": 8192, "why": "größer"}' in text
    workers, event = load_journal(run_dir / "metrics.jsonl").events
    data = {"tokens": 8192, "why": "größer"}
    assert list(map(json.loads, text.splitlines())) == [
        {"event": WORKERS, "step": 2, "time": workers.time, "data": {}},
        {"event": "out of memory", "step": 3, "time": event.time, "data": data},
    ]
    assert text.endswith("}\n")


# ------------------------------------------------------------------ resume


@pytest.mark.parametrize("delivered", ["never", "before", "not noted", "lost", "half"])
def test_after_a_resume_the_run_holds_each_step_once_with_the_value_that_came_first(
    begin: Begin, run_dir: Path, root: Path, tmp_path: Path, empty_store: Path, delivered: str
):
    """Two attempts die after their checkpoint; what they repeat has other times and, here, other values."""
    saved, state = train(begin(), 1, 4), run_dir / "tracking.json"

    def attempt(first: int, last: int, shift: float) -> Tracker:
        tracker = begin(4, saved)
        if delivered != "never":
            deliver(run_dir)
        noted = state.read_bytes() if state.exists() else b""
        train(tracker, first, last, save=False, shift=shift)
        if delivered in ("before", "not noted", "lost"):
            deliver(run_dir)
        if delivered == "not noted":  # a kill -9 between the request and the cursor
            state.write_bytes(noted)
        if delivered == "lost":
            state.unlink()
        return tracker

    attempt(5, 7, shift=100.0)
    attempt(5, 8, shift=200.0)
    tracker = attempt(5, 9, shift=0.0)
    tracker.finish("FINISHED")
    sync_run(run_dir)
    shifts = {5: 100.0, 6: 100.0, 7: 100.0, 8: 200.0}
    expected = [(step, values(step)["test/m0"] + shifts.get(step, 0.0)) for step in range(1, 10)]
    (tmp_path / "other").mkdir()
    shutil.copy(empty_store, tmp_path / "other" / "mlflow.db")
    sync_run(run_dir, f"sqlite:///{tmp_path}/other/mlflow.db")
    for folder in (root, tmp_path / "other"):
        client = client_of(folder)
        assert [run.info.status for run in all_runs(client)] == ["FINISHED"]
        run = main_run(client)
        assert points(client, run, "test/m0") == expected
        assert run.data.tags["attempts"] == "4"
        assert run.data.tags["attempt.3"].startswith("from step 4, ")
        assert run.data.tags["attempt.3"].endswith(", lost")
        assert ", FINISHED 20" in run.data.tags["attempt.4"]
    assert [step for step, _ in journal_points(run_dir / "metrics.jsonl", "test/m0")] == list(range(1, 10))


def test_what_is_new_at_a_repeated_step_arrives(begin: Begin, run_dir: Path, root: Path):
    saved = train(begin(), 1, 2)
    begin(2, saved).log_step(3, {"a": 1.0})
    deliver(run_dir)
    tracker = begin(2, saved)
    tracker.log_step(3, {"a": 2.0, "b": 2.0})
    tracker.log_event("retry", 3, {})
    deliver(run_dir)
    client = client_of(root)
    found = {name: points(client, main_run(client), name) for name in ("a", "b", "events/retry")}
    assert found == {"a": [(3, 1.0)], "b": [(3, 2.0)], "events/retry": [(3, 1.0)]}


@pytest.mark.parametrize("lost", ["the file with what was cut off", "the journal's end"])
def test_where_delivered_lines_are_lost_a_new_run_gets_the_journal(begin: Begin, run_dir: Path, root: Path, lost: str):
    """A power loss takes what was never forced to the disk, after the process beside the trainer had read it."""
    saved = train(begin(), 1, 4)
    train(begin(4, saved), 5, 7, save=False, shift=100.0)
    deliver(run_dir)
    old = main_run(client_of(root)).info.run_id
    if lost == "the journal's end":
        os.truncate(run_dir / "metrics.jsonl", saved)
    tracker = begin(4, saved)
    (run_dir / "metrics.abandoned-1.jsonl").unlink(missing_ok=True)
    train(tracker, 5, 6)
    deliver(run_dir)
    client = client_of(root)
    assert main_run(client).info.run_id != old
    assert points(client, main_run(client), "test/m0") == [(step, values(step)["test/m0"]) for step in range(1, 7)]


def test_steps_that_were_committed_and_taken_back_move_to_a_new_run(begin: Begin, run_dir: Path, root: Path):
    """The newest checkpoint is damaged: training goes on from the one before it."""
    tracker = begin()
    first = train(tracker, 1, 4)
    train(tracker, 5, 8, shift=100.0)
    deliver(run_dir)
    old = main_run(client_of(root)).info.run_id
    tracker = begin(4, first)
    train(tracker, 5, 9)
    deliver(run_dir)
    client = client_of(root)
    run = main_run(client)
    assert run.info.run_id != old
    assert points(client, run, "test/m0") == [(step, values(step)["test/m0"]) for step in range(1, 10)]
    assert run.data.params["seed"] == "1"
    superseded = client.get_run(old)
    assert superseded.data.tags["millrace.superseded_by"] == run.info.run_id
    assert superseded.info.status == "KILLED"
    (run_dir / "tracking.json").unlink()
    deliver(run_dir)
    assert [each.info.run_id for each in main_runs(client)] == [run.info.run_id]


def test_a_finished_run_that_is_made_longer_goes_on_in_its_run(begin: Begin, run_dir: Path, root: Path):
    """Its last validation stood after the last checkpoint, was delivered, and comes again with the longer run."""
    tracker = begin()
    saved = train(tracker, 1, 4)
    tracker.log_step(4, {"val-core/x/reward/mean@4": 0.5})
    tracker.finish("FINISHED")
    sync_run(run_dir)
    tracker = begin(4, saved)
    tracker.log_step(4, {"val-core/x/reward/mean@4": 0.5})
    assert sync_run(run_dir).status is None
    assert main_run(client_of(root)).info.status == "RUNNING"
    train(tracker, 5, 8)
    tracker.finish("FINISHED")
    sync_run(run_dir)
    client = client_of(root)
    run = main_run(client)
    assert points(client, run, "val-core/x/reward/mean_at_4") == [(4, 0.5)]
    assert points(client, run, "test/m0") == [(step, values(step)["test/m0"]) for step in range(1, 9)]
    assert run.info.status == "FINISHED"


def test_the_delivery_of_an_older_attempt_stops(begin: Begin, run_dir: Path, root: Path):
    saved = train(begin(), 1, 4)
    with delivery_of(run_dir) as old:
        old.deliver()
        train(begin(4, saved), 5, 6, save=False)
        with pytest.raises(ReplacedError, match="attempt 2 has begun"):
            old.deliver()


def test_a_journal_that_was_deleted_does_not_stop_the_run(begin: Begin, run_dir: Path, root: Path):
    saved = train(begin(), 1, 4)
    deliver(run_dir)
    (run_dir / "metrics.jsonl").unlink()
    tracker = begin(4, saved)
    train(tracker, 5, 6)
    deliver(run_dir)
    client = client_of(root)
    run = main_run(client)
    assert [step for step, _ in points(client, run, "test/m0")] == [5, 6]


# ------------------------------------------------------------------ sync and endings


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_the_status_is_how_the_run_ended(begin: Begin, run_dir: Path, root: Path, status):
    tracker = begin()
    train(tracker, 1, 3)
    train(tracker, 4, 5, save=False)
    tracker.finish(status)
    assert sync_run(run_dir).status == status
    assert read_state(run_dir).settled_status == status
    client = client_of(root)
    run = main_run(client)
    end = read_history(run_dir / ATTEMPTS_FILE).end
    assert end is not None
    assert (run.info.status, run.info.end_time) == (status, round(end.time * 1e3))
    assert f", {status} 20" in run.data.tags["attempt.1"]
    assert [step for step, _ in points(client, run, "test/m0")] == [1, 2, 3, 4, 5]


def test_the_status_arrives_where_files_do_not_and_these_are_tried_again(begin: Begin, run_dir: Path, root: Path):
    (root / "mlartifacts").touch()
    tracker = begin()
    tracker.log_event("alarm", 1, {"text": "told"})
    tracker.finish("FAILED")
    with pytest.raises(TrackingError, match=r"not delivered: .*mlartifacts"):
        sync_run(run_dir)
    run = main_run(client_of(root))
    assert (run.info.status, ", FAILED 20" in run.data.tags["attempt.1"]) == ("FAILED", True)
    assert read_state(run_dir).settled_status is None
    (root / "mlartifacts").unlink()
    assert sync_run(run_dir).status == read_state(run_dir).settled_status == "FAILED"
    assert client_of(root).list_artifacts(run.info.run_id, "events")


def test_a_run_whose_process_is_gone_without_a_word_was_killed(begin: Begin, run_dir: Path, root: Path):
    train(begin(), 1, 3)
    attempts = run_dir / "attempts.jsonl"
    attempts.write_text(re.sub(r'"started":[\d.]+', '"started":1.0', attempts.read_text()))  # another process
    before = round(time.time() * 1e3)
    assert sync_run(run_dir).status == "KILLED"
    run = main_run(client_of(root))
    assert run.info.status == "KILLED"
    assert before <= run.info.end_time <= time.time() * 1e3
    assert f", KILLED {datetime.fromtimestamp(run.info.end_time / 1e3, UTC):%Y-%m-%d}" in run.data.tags["attempt.1"]
    assert read_state(run_dir).settled_status == "KILLED"
    assert sync_run(run_dir).status == "KILLED"
    assert main_run(client_of(root)).info.end_time == run.info.end_time, "its end stays"


def test_a_run_that_goes_on_stays_running(begin: Begin, run_dir: Path, root: Path):
    train(begin(), 1, 3)
    assert sync_run(run_dir).status is None
    assert main_run(client_of(root)).info.status == "RUNNING"


def test_doing_it_again_changes_nothing(begin: Begin, run_dir: Path, root: Path):
    tracker = begin()
    train(tracker, 1, 3)
    tracker.finish("FINISHED")
    first = sync_run(run_dir)
    again = sync_run(run_dir)
    assert (first.num_bytes, again.num_bytes) == ((run_dir / "metrics.jsonl").stat().st_size, 0)
    assert (first.mlflow_run_id, again.status) == (main_run(client_of(root)).info.run_id, "FINISHED")
    client = client_of(root)
    assert points(client, main_run(client), "test/m0") == journal_points(run_dir / "metrics.jsonl", "test/m0")


def test_to_another_store_everything_is_delivered_from_the_beginning(
    begin: Begin, run_dir: Path, root: Path, tmp_path: Path, empty_store: Path
):
    saved = train(begin(), 1, 3)
    tracker = begin(3, saved)
    train(tracker, 4, 6)
    tracker.finish("FINISHED")
    sync_run(run_dir)
    (tmp_path / "other").mkdir()
    shutil.copy(empty_store, tmp_path / "other" / "mlflow.db")
    sync_run(run_dir, f"sqlite:///{tmp_path}/other/mlflow.db")
    for folder in (root, tmp_path / "other"):
        client = client_of(folder)
        assert points(client, main_run(client), "test/m0") == journal_points(run_dir / "metrics.jsonl", "test/m0")


def test_a_run_that_ended_elsewhere_first_gets_the_new_end(begin: Begin, run_dir: Path, root: Path):
    saved = train(begin(), 1, 3)
    begin(3, saved).finish("KILLED")
    sync_run(run_dir)
    idle = Tracker(run_dir, RunConfig(paths={"root": str(root)}, **OFFLINE), tags={})  # type: ignore[arg-type]
    idle.finish("FINISHED")
    assert sync_run(run_dir).status == "FINISHED"
    assert main_run(client_of(root)).info.status == "FINISHED"


def test_a_folder_without_a_run_is_told(tmp_path: Path):
    with pytest.raises(TrackingError, match=r"holds no attempts\.jsonl"):
        sync_run(tmp_path)


def test_a_run_that_is_being_delivered_is_told(begin: Begin, run_dir: Path):
    train(begin(), 1, 3)
    with delivery_lock(run_dir), pytest.raises(TrackingError, match="the delivery of run run-1 is in use by process"):
        sync_run(run_dir)


def test_a_deleted_experiment_is_told_and_the_journal_stays(begin: Begin, run_dir: Path, root: Path):
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


def test_another_experiment_gets_everything_from_the_beginning(
    begin: Begin, run_dir: Path, root: Path, offline: RunConfig
):
    """The remedy that is named where the run was deleted in MLflow."""
    saved = train(begin(), 1, 3)
    deliver(run_dir)
    client = client_of(root)
    old = main_run(client).info.run_id
    client.delete_run(old)
    tracking = offline.tracking.model_copy(update={"experiment": "new"})
    elsewhere = offline.model_copy(update={"tracking": tracking})
    new = ensure_mlflow_run(run_dir, elsewhere, {})
    tracker = Tracker(run_dir, elsewhere, tags={})
    tracker.resume_at(3, saved)
    train(tracker, 4, 6)
    tracker.finish("FINISHED")
    assert sync_run(run_dir).mlflow_run_id == new != old
    (run,) = all_runs(client, "new")
    assert (run.info.run_id, run.info.status) == (new, "FINISHED")
    assert points(client, run, "test/m0") == journal_points(run_dir / "metrics.jsonl", "test/m0")
