"""The trainer's journal and its attempts."""

import json
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from rlcore.config import RunConfig
from rlcore.tracking.attempts import ATTEMPTS_FILE, FinalStatus, read_attempts
from rlcore.tracking.delivery import ensure_mlflow_run, read_state
from rlcore.tracking.journal import RunJournal, read_journal
from tests.helpers.forked import loaded_by
from tests.helpers.mlflow import main_run, main_runs, points, values_by_step, wait_until


def test_trainer_process_does_not_import_mlflow(root: Path, run_dir: Path, client: MlflowClient):
    code = (
        "from pathlib import Path; from rlcore.config import RunConfig\n"
        "from rlcore.tracking.journal import RunJournal\n"
        f"config = RunConfig(paths={{'root': {str(root)!r}}})\n"
        f"t = RunJournal(Path({str(run_dir)!r}), config, tags={{'stage': 'train'}})\n"
        "t.resume_at(0, 0); [t.append_step(step, {'a': step / 7}) for step in range(1, 21)]; "
        "assert t.sync(); assert t.finish('FINISHED', timeout_s=240)"
    )
    assert "mlflow" not in loaded_by(code)
    run = main_run(client)
    assert (run.info.status, run.data.tags["stage"]) == ("FINISHED", "train")
    assert points(client, run, "a") == [(step, step / 7) for step in range(1, 21)]


def values_of(run_dir: Path) -> list[float]:
    return [record.metrics["a"] for record in read_journal(run_dir / "metrics.jsonl")]


def test_disabled_tracking_writes_journal_only(tracker: RunJournal, run_dir: Path):
    assert not tracker.finish("FINISHED")
    assert values_of(run_dir) == [1.0]
    assert not (run_dir / "tracking.json").exists()
    assert not [file for file in psutil.Process().open_files() if Path(file.path).parent == run_dir]


def test_attempts_of_two_processes(tracker: RunJournal, offline: RunConfig, run_dir: Path):
    saved = tracker.sync()
    tracker.append_step(2, {"a": 2.0})
    second = RunJournal(run_dir, offline, tags={})
    second.resume_at(1, saved)
    second.append_step(2, {"a": 2.5})
    second.finish("KILLED")
    (started, lost), (again, end) = read_attempts(run_dir)
    assert lost is None
    assert (started.from_step, started.journal_bytes, started.destination.tags["stage"]) == (1, 0, "train")
    assert (again.from_step, again.journal_bytes, end.status) == (1, saved, "KILLED")
    assert [time for time in (started.time, end.time)] == [round(time, 3) for time in (started.time, end.time)]
    assert values_of(run_dir) == [1.0, 2.5]


def test_resume_starts_attempt_if_lines_are_removed(tracker: RunJournal, run_dir: Path):
    """A worker is lost in a chunk, and the trainer process continues."""
    saved = tracker.sync()
    tracker.resume_at(1, saved)
    assert len(read_attempts(run_dir)) == 1
    tracker.append_event("alarm", 2, {})
    tracker.resume_at(2, saved)
    tracker.append_step(2, {"a": 2.5})
    assert [attempt.from_step for attempt, _ in read_attempts(run_dir)] == [1, 2]
    assert values_of(run_dir) == [1.0, 2.5]


def test_repeated_steps_are_sent_again(config: RunConfig, run_dir: Path, client: MlflowClient):
    tracker = RunJournal(run_dir, config, tags={})
    tracker.resume_at(0, 0)
    tracker.append_step(1, {"a": 1.0})
    saved = tracker.sync()
    tracker.append_step(2, {"a": 2.0})
    wait_until(lambda: read_state(run_dir).journal_bytes > saved)
    tracker.resume_at(1, saved)
    tracker.append_step(2, {"a": 2.5})
    tracker.append_step(3, {"a": 3.5})
    assert tracker.finish("FINISHED", timeout_s=90.0)
    assert points(client, main_run(client), "a") == [(1, 1.0), (2, 2.0), (2, 2.5), (3, 3.5)]
    assert values_by_step(client, main_run(client), "a") == [(1, 1.0), (2, 2.5), (3, 3.5)]


def test_journal_shorter_than_checkpoint_continues(offline: RunConfig, run_dir: Path, caplog):
    tracker = RunJournal(run_dir, offline, tags={})
    tracker.resume_at(20, 5_000)
    tracker.append_step(21, {"a": 1.0})
    assert "cannot be cut to byte 5000" in caplog.text
    assert values_of(run_dir) == [1.0]


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (None, "KILLED", ["KILLED"]),
        (None, "FINISHED", ["FINISHED"]),
        ("KILLED", "FINISHED", ["KILLED", "FINISHED"]),
        ("FINISHED", "FAILED", ["FINISHED"]),
        ("FINISHED", "KILLED", ["FINISHED"]),
        ("FAILED", "KILLED", ["FAILED"]),
    ],
)
def test_idle_process_changes_end_only_to_finished(
    tracker: RunJournal,
    offline: RunConfig,
    run_dir: Path,
    first: FinalStatus | None,
    second: FinalStatus,
    found: list[FinalStatus],
):
    if first is not None:
        tracker.finish(first)
    RunJournal(run_dir, offline, tags={}).finish(second)
    ends = [json.loads(line).get("status") for line in (run_dir / ATTEMPTS_FILE).read_text().splitlines()]
    assert ends == [None, *found]


def test_run_without_attempt_is_not_created(config: RunConfig, run_dir: Path):
    assert RunJournal(run_dir, config, tags={}).finish("KILLED")
    assert read_attempts(run_dir) == []
    assert not (run_dir / "tracking.json").exists()


def test_flow_and_trainer_share_mlflow_run(config: RunConfig, run_dir: Path, client: MlflowClient, other: Path):
    first = ensure_mlflow_run(run_dir, config, {"stage": "train"}).id
    assert ensure_mlflow_run(run_dir, config, {}).id == first
    assert read_state(run_dir).mlflow_run_id == first
    assert len(main_runs(client)) == 1
    address = f"sqlite:///{other}/mlflow.db"
    moved = RunConfig(paths=config.paths, tracking=config.tracking.model_copy(update={"uri": address}))
    second = ensure_mlflow_run(run_dir, moved, {}).id
    assert second != first, "another store has its own run"
    assert (read_state(run_dir).uri, read_state(run_dir).mlflow_run_id) == (address, second)
