"""Runs by name, their status from their files and locks, and operations on them."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flows.stack.state import FLOW_RUN_COMMAND
from flows.work.open_run import _record_early_end, record_stop_request, with_absolute_paths
from flows.work.runs import (
    SAME_COMMAND,
    STOP_FILE,
    Outcome,
    all_runs,
    failure_of,
    find_named_runs,
    find_run,
    find_runs,
    is_stop_requested,
    read_settings,
    resume_hint,
    size_of,
    status_of,
    sync,
    worker_of,
)
from rlcore.config import RunConfig, TrackingConfig
from rlcore.config.compose import load_config
from rlcore.errors import ConfigError, DataError
from rlcore.run.layout import RunLayout
from rlcore.run.watchdog import append_failure, failure_from
from rlcore.storage.disk import PAUSED, RESUMED
from rlcore.storage.documents import READ_BLOCK_BYTES
from rlcore.storage.locks import RUN_LOCK, HeldLock, Holder, RunLock
from rlcore.tracking.attempts import ATTEMPTS_FILE, Attempt, AttemptLog, Destination, End
from rlcore.tracking.journal import GPU_SECONDS, Journal
from rlcore.tracking.lineage import Origin
from tests.flows.conftest import commit

REWARD = "critic/score/mean"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config([f"paths.root={tmp_path}", "trainer.total_steps=50"], experiment="debug")


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


Made = Callable[..., RunLayout]


@pytest.fixture
def make_run(tmp_path: Path) -> Made:

    def make(run_id: str, *overrides: str) -> RunLayout:
        config = load_config([f"paths.root={tmp_path}", f"run_id={run_id}", *overrides], experiment="debug")
        layout = RunLayout.of(config)
        layout.run_dir.mkdir(parents=True)
        Origin(with_absolute_paths(config, layout)).write(layout.run_dir)
        return layout

    return make


def test_run_is_named_by_folder_id_or_prefix(make_run: Made, tmp_path: Path) -> None:
    one, two, long = (make_run(name).run_dir for name in ("sum-1", "sum-2", "sum-10"))
    (tmp_path / "runs" / "empty").mkdir()
    assert all_runs(tmp_path) == [one, long, two]
    assert find_named_runs([str(one), "sum-1", "sum-10", "sum-2"], tmp_path) == [one, one, long, two]
    only = tmp_path / "other" / "runs" / "div-7"
    only.mkdir(parents=True)
    (only / "run.json").touch()
    assert find_named_runs(["d", "div-"], tmp_path / "other") == [only, only]
    runs = tmp_path / "runs"
    for name, problem in (
        ("sum", "sum: is a prefix of several run ids"),
        ("div", "div: is neither the folder nor the id of a run"),
        ("", "'': is neither the folder nor the id of a run"),
    ):
        message = (
            f"{problem}; {runs} has: sum-1, sum-10, sum-2. Name one of them, or another root (--root or paths.root)."
        )
        with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
            find_named_runs([name], tmp_path)
    for root, count, named in (
        (tmp_path / "nothing", 0, r"none\. Name"),
        (tmp_path, 5, r"run-0, .*, run-4, .*, sum-2\. Name"),
        (tmp_path, 8, r"run-0, .*, run-7 and 3 more \(millrace runs lists them\)\. Name"),
    ):
        for number in range(count):
            (runs / f"run-{number}").mkdir(exist_ok=True)
            (runs / f"run-{number}" / "run.json").touch()
        with pytest.raises(DataError, match=rf"{root}/runs has: {named}"):
            find_named_runs(["other"], root)


def test_run_is_found_by_name_or_settings(make_run: Made, tmp_path: Path) -> None:
    layout = make_run("sum-1")
    for words in (["sum-1"], [str(layout.run_dir)], ["experiment=debug", "run_id=sum-1"]):
        config, found = find_run(words, tmp_path)
        assert (config.run_id, found.run_dir, found.root) == ("sum-1", layout.run_dir, tmp_path)
    for words in (["sum-1", "sum-2"], ["experiment=debug", "sum-1"]):
        with pytest.raises(ConfigError, match=f"^RUN: must be one run, .*; got {' '.join(words)}$"):
            find_run(words, tmp_path)
    with pytest.raises(DataError, match=r"runs/sum-3: there is no such run with these settings"):
        find_run(["experiment=debug", "run_id=sum-3"], tmp_path)
    odd = shutil.copytree(layout.run_dir, tmp_path / "runs" / "seed=1")
    assert find_run([str(odd)], None)[1].run_dir == odd


def test_settings_of_another_version_are_reported_with_file(make_run: Made) -> None:
    layout = make_run("sum-1")
    layout.run_json.write_text('{"settings": {"from_tomorrow": 1}}')
    message = rf"^{layout.run_json}: cannot be read \(.*\); use the version of Millrace that wrote it"
    with pytest.raises(DataError, match=message):
        read_settings(layout.run_dir)


def test_run_that_has_not_begun_is_not_delivered(make_run: Made) -> None:
    assert sync(make_run("sum-1").run_dir, None) == Outcome("sum-1", "has not begun", ok=True)


def test_root_without_store(make_run: Made, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    make_run("sum-1")
    message = f"--search 'x': there is no MLflow store ({uri}) to search; name another --root"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        find_runs([], "x", tmp_path, TrackingConfig())
    assert find_runs(["sum-1", "sum-1"], "", tmp_path, TrackingConfig()) == [tmp_path / "runs" / "sum-1"]
    assert not (tmp_path / "mlflow.db").exists()
