"""Status of a run from its journal, checkpoints and locks."""

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flows.stack.state import FLOW_RUN_COMMAND
from flows.work.open_run import STOP_FILE, _record_early_end, record_stop_request, with_absolute_paths
from flows.work.status import SAME_COMMAND, failure_of, is_stop_requested, resume_hint, size_of, status_of, worker_of
from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.errors import DataError
from rlcore.run.layout import RunLayout
from rlcore.run.watchdog import append_failure, failure_from
from rlcore.storage.disk import PAUSED, RESUMED
from rlcore.storage.documents import READ_BLOCK_BYTES
from rlcore.storage.locks import RUN_LOCK, HeldLock, Holder, RunLock
from rlcore.tracking.attempts import ATTEMPTS_FILE, Attempt, AttemptLog, Destination, End
from rlcore.tracking.cost import GPU_SECONDS
from rlcore.tracking.journal import Journal
from rlcore.tracking.lineage import Origin
from tests.flows.conftest import commit

REWARD = "critic/score/mean"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config([f"paths.root={tmp_path}", "trainer.total_steps=50"], experiment="debug")


@pytest.fixture
def layout(config: RunConfig) -> RunLayout:
    layout = RunLayout.of(config)
    layout.run_dir.mkdir(parents=True)
    Origin(with_absolute_paths(config, layout)).write(layout.run_dir)
    return layout


def begin(layout: RunLayout) -> None:
    with AttemptLog(layout.run_dir / ATTEMPTS_FILE) as attempts:
        attempts.add(Attempt(0, 0, 1.0, Holder.me(), Destination("", "", "", {}, {})))


def test_status_of_new_run(layout: RunLayout, config: RunConfig) -> None:
    os.utime(layout.run_json, (1_000.5, 1_000.5))
    found = status_of(layout.run_dir)
    known = {"run_id": layout.run_dir.name, "run_dir": str(layout.run_dir), "name": config.name, "state": "not begun"}
    known |= {
        "step": 0,
        "total_steps": 50,
        "changed": 1_000.5,
        "size_bytes": layout.run_json.stat().st_size,
        "note": "",
    }
    assert asdict(found) == known | dict.fromkeys(("score", "reward", "tokens_per_s", "gpu_seconds"))
    message = replace(found, changed=time.time() - 90).to_json()
    assert 90 <= message.pop("age_s") < 3_600
    assert message == asdict(replace(found, changed=message["changed"]))


def test_status_has_latest_metrics(layout: RunLayout) -> None:
    with Journal(layout.journal) as journal:
        journal.append_step(1, {"sft/reward": 0.125})
        assert (status_of(layout.run_dir).step, status_of(layout.run_dir).reward) == (1, 0.125)
        journal.append_step(2, {REWARD: 0.25, "sft/reward": 0.5, GPU_SECONDS: 7.5})
        journal.append_step(3, {"loss": 1.0})
        found = status_of(layout.run_dir)
        assert (found.step, found.reward, found.gpu_seconds) == (3, 0.25, 7.5)
        assert found.changed == json.loads(layout.journal.read_bytes().splitlines()[-1])["time"]
        journal.append_step(4, {GPU_SECONDS: 9.0})
    assert (status_of(layout.run_dir).reward, status_of(layout.run_dir).gpu_seconds) == (0.25, 9.0)


def test_long_journal_is_read_from_its_end(layout: RunLayout) -> None:
    with Journal(layout.journal) as journal:
        journal.append_step(1, {REWARD: 0.5})
        journal.append_event("note", 1, {"text": "x" * 2 * READ_BLOCK_BYTES})
        journal.append_step(2, {"loss": 1.0})
    found = status_of(layout.run_dir)
    assert (found.step, found.reward) == (2, None)


def test_pause_ends_by_event_or_step(layout: RunLayout) -> None:
    with Journal(layout.journal) as journal, HeldLock(layout.run_dir / RUN_LOCK, what="the run"):

        def note() -> str:
            return status_of(layout.run_dir).note

        running = f"process {os.getpid()} on {Holder.me().host}"
        journal.append_event("alarm", 1, {"text": "entropy"})
        assert note() == running
        journal.append_event(PAUSED, 1, {"text": "no room"})
        journal.append_event("alarm", 1, {"text": "entropy"})
        assert note() == "no room"
        journal.append_step(2, {})
        assert note() == running
        journal.append_event(PAUSED, 2, {"text": "no room"})
        journal.append_event(RESUMED, 2, {"text": "room"})
        assert note() == running


def test_score_is_of_latest_scored_checkpoint(layout: RunLayout, config: RunConfig) -> None:
    for step, score in {1: 0.5, 2: 0.25, 3: None}.items():
        commit(config, step, {} if score is None else {"val/reward": score})
    assert status_of(layout.run_dir).score == 0.25


def test_worker_holds_the_lock(layout: RunLayout) -> None:
    run_dir = layout.run_dir
    assert worker_of(run_dir) is None
    assert not is_stop_requested(run_dir, None)
    record_stop_request(run_dir, Holder.me())
    with RunLock(run_dir):
        worker = worker_of(run_dir)
        assert worker is not None
        assert (worker.pid, is_stop_requested(run_dir, worker)) == (os.getpid(), True)
        assert not is_stop_requested(run_dir, replace(worker, pid=1))
        assert not is_stop_requested(run_dir, replace(worker, born=worker.born + 1))
    (run_dir / STOP_FILE).write_text("[]")
    assert not is_stop_requested(run_dir, Holder.me())


def test_resume_hint_names_command_or_flow_run(layout: RunLayout) -> None:
    run_dir, me = layout.run_dir, Holder.me()
    assert resume_hint(run_dir) == SAME_COMMAND == "the same command resumes it"
    (run_dir / RUN_LOCK).write_text(json.dumps(asdict(me)))
    assert resume_hint(run_dir) == SAME_COMMAND
    (run_dir / RUN_LOCK).write_text(json.dumps(asdict(replace(me, command=f"python {FLOW_RUN_COMMAND}"))))
    assert resume_hint(run_dir) == "`prefect flow-run retry ID` resumes it, or Retry on its page"
    message = {"process": [me.pid, me.born], "time": 1.0, "flow_run": "7f"}
    (run_dir / STOP_FILE).write_text(json.dumps(message))
    assert resume_hint(run_dir) == "`prefect flow-run retry 7f` resumes it, or Retry on its page"
    (run_dir / STOP_FILE).write_text(json.dumps(message | {"process": [1, 1.0]}))
    assert resume_hint(run_dir) == "`prefect flow-run retry ID` resumes it, or Retry on its page"


def test_later_of_stop_and_failure_counts(layout: RunLayout) -> None:
    def state() -> str:
        return status_of(layout.run_dir).state

    (layout.run_dir / STOP_FILE).write_text('{"time": 5.0}')
    assert (state(), failure_of(layout.run_dir)) == ("stopped", "")
    append_failure(layout.run_dir, replace(failure_from(DataError("old"), "", 0), time=4.0))
    assert state() == "stopped"
    append_failure(layout.run_dir, replace(failure_from(DataError("row 7\nmore"), "", 0), time=5.0))
    assert (state(), failure_of(layout.run_dir)) == ("failed", "failed: data after step 0: row 7")
    begin(layout)
    append_failure(layout.run_dir, failure_from(DataError("row 8"), "gen", 2))
    assert failure_of(layout.run_dir) == "lost: data in gen after step 2: row 8"


def test_stop_after_last_step_shows_until_the_rest_is_done(layout: RunLayout, config: RunConfig) -> None:
    begin(layout)
    with AttemptLog(layout.run_dir / ATTEMPTS_FILE) as attempts:
        attempts.add(End("FINISHED", time.time()))
    assert status_of(layout.run_dir).state == "finished"
    with pytest.raises(KeyboardInterrupt), _record_early_end(layout.run_dir):
        raise KeyboardInterrupt
    found = status_of(layout.run_dir)
    assert (found.state, found.note) == ("stopped", f"all steps are trained, and results are missing; {SAME_COMMAND}")
    with _record_early_end(layout.run_dir):
        pass
    assert status_of(layout.run_dir).state == "finished"


def test_lost_run_without_failure(layout: RunLayout) -> None:
    begin(layout)
    assert failure_of(layout.run_dir) == f"lost: its process has ended; {SAME_COMMAND}"
    with HeldLock(layout.run_dir / RUN_LOCK, what="the run"):
        assert failure_of(layout.run_dir) == ""


def test_size_of_folder(tmp_path: Path) -> None:
    (tmp_path / "run" / "deep").mkdir(parents=True)
    (tmp_path / "run" / "a").write_bytes(b"x" * 10)
    (tmp_path / "run" / "deep" / "b").write_bytes(b"x" * 5)
    (tmp_path / "large").write_bytes(b"x" * 4_000)
    link = tmp_path / "run" / "link"
    link.symlink_to(tmp_path / "large")
    assert size_of(tmp_path / "run") == 15 + link.lstat().st_size
