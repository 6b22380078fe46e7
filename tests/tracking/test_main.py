"""Loop of the delivery process: its end and messages."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rlcore.config import RunConfig
from rlcore.tracking import __main__ as program
from rlcore.tracking.attempts import ATTEMPTS_FILE, PREFIX, FinalStatus
from rlcore.tracking.delivery import Delivery
from rlcore.tracking.journal import RunJournal
from tests.helpers.mlflow import delivery_of, main_run, points

NO_PROCESS = -1
"""Id of no process: the trainer is gone."""


@pytest.mark.parametrize(("status", "is_gone"), [("FINISHED", False), ("FAILED", True)])
def test_delivery_ends_with_trainer(
    tracker: RunJournal, run_dir: Path, client: MlflowClient, status: FinalStatus, is_gone: bool
) -> None:
    tracker.finish(status)
    with delivery_of(run_dir) as delivery:
        program.deliver_until_end(delivery, parent_pid=NO_PROCESS if is_gone else os.getppid(), every_s=60.0)
    assert main_run(client).info.status == status
    assert points(client, main_run(client), "a") == [(1, 1.0)]


def test_lost_trainer_ends_delivery(tracker: RunJournal, run_dir: Path, client: MlflowClient) -> None:
    lose(run_dir)
    with delivery_of(run_dir) as delivery:
        program.deliver_until_end(delivery, parent_pid=NO_PROCESS, every_s=60.0)
    assert main_run(client).info.status == "KILLED"


def test_delivery_ends_without_status_for_new_trainer(
    tracker: RunJournal, offline: RunConfig, run_dir: Path, client: MlflowClient
) -> None:
    saved = tracker.sync()
    lose(run_dir)
    with delivery_of(run_dir) as delivery:
        RunJournal(run_dir, offline, tags={}).resume_at(1, saved)
        program.deliver_until_end(delivery, parent_pid=NO_PROCESS, every_s=60.0)
    assert main_run(client).info.status == "RUNNING"


def test_failed_delivery_of_lost_trainer_warns(
    tracker: RunJournal, run_dir: Path, client: MlflowClient, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr(program, "ORPHAN_GRACE_S", -1.0)
    with delivery_of(run_dir) as delivery:
        deleted_before_step_2(delivery, client, tracker)
        with caplog.at_level(logging.WARNING):
            program.deliver_until_end(delivery, parent_pid=NO_PROCESS, every_s=60.0)
    (line,) = caplog.messages
    expected = r"MLflow rejects the values: tracking\.uri sqlite:.*was deleted there.*journal; retrying every 60 s\."
    assert re.fullmatch(expected, line)


def test_delivery_of_lost_trainer_is_retried(
    tracker: RunJournal, run_dir: Path, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with delivery_of(run_dir) as delivery:
        deleted = deleted_before_step_2(delivery, client, tracker)
        monkeypatch.setattr(program, "wait_until_due", lambda *_: client.restore_run(deleted))
        program.deliver_until_end(delivery, parent_pid=NO_PROCESS, every_s=60.0)
    assert points(client, main_run(client), "a") == [(1, 1.0), (2, 2.5)]


def lose(run_dir: Path) -> None:
    """Replace the attempt's process by one that has ended."""
    attempts = run_dir / ATTEMPTS_FILE
    attempts.write_text(re.sub(r'"born":[\d.]+', '"born":1.0', attempts.read_text()))


def deleted_before_step_2(delivery: Delivery, client: MlflowClient, tracker: RunJournal) -> str:
    """Delete the MLflow run and return its id, so that step 2 is rejected."""
    delivery.catch_up()
    deleted = str(main_run(client).info.run_id)
    client.delete_run(deleted)
    tracker.append_step(2, {"a": 2.5})
    return deleted


def test_recovery_of_mlflow_is_reported_once(
    tracker: RunJournal, run_dir: Path, client: MlflowClient, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """Restore the run between two retries, then end the trainer."""
    waits: list[float] = []

    def waited(delivery: Delivery, parent_pid: int, seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            client.restore_run(deleted)
        if len(waits) == 3:
            tracker.finish("FINISHED")

    monkeypatch.setattr(program, "wait_until_due", waited)
    with delivery_of(run_dir) as delivery:
        deleted = deleted_before_step_2(delivery, client, tracker)
        with caplog.at_level(logging.WARNING):
            program.deliver_until_end(delivery, parent_pid=os.getppid(), every_s=2.0)
    assert waits == [2.0, 2.0, 2.0]
    _, line = caplog.messages
    assert line == "MLflow accepts the values again; failed attempts: 2."
    assert points(client, main_run(client), "a") == [(1, 1.0), (2, 2.5)]


def test_wait_ends_with_trainer(tracker: RunJournal, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "POLL_S", 0.0)
    with delivery_of(run_dir) as delivery:
        delivery.catch_up()
        assert not delivery.has_changes()
        tracker.finish("FINISHED")
        program.wait_until_due(delivery, os.getppid(), 600.0)
        assert delivery.catch_up() == "FINISHED"
        assert not delivery.has_changes()


def test_process_reports_failed_delivery(tracker: RunJournal, run_dir: Path) -> None:
    tracker.finish("FINISHED")
    (run_dir / "metrics.jsonl").unlink()
    command = [sys.executable, "-m", "rlcore.tracking", str(run_dir), f"--parent={os.getpid()}", "--every-s=60"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    text = f"{PREFIX}nothing is delivered to MLflow: {run_dir / 'metrics.jsonl'}: does not exist"
    assert (ended.returncode, ended.stderr.startswith(text)) == (1, True), ended.stderr
