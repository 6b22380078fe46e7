"""Runs by name, their status from their files and locks, and operations on them."""

import json
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, replace
from html import escape
from pathlib import Path

import pytest

from flows.commands.runs import stop
from flows.stack.state import FLOW_RUN_COMMAND
from flows.stages.outputs import write_report
from flows.work import runs
from flows.work.open_run import _record_early_end, open_run, record_stop_request, with_absolute_paths
from flows.work.runs import SAME_COMMAND, STOP_FILE, failure_of, find_folder, find_run, resume_hint, status_of
from rlcore.config import RunConfig, TrackingConfig
from rlcore.config.compose import load_config
from rlcore.errors import ConfigError, DataError, StopRequestedError
from rlcore.run.layout import RunLayout
from rlcore.run.watchdog import append_failure, failure_from, read_failures
from rlcore.storage.disk import PAUSED, RESUMED
from rlcore.storage.documents import READ_BLOCK_BYTES
from rlcore.storage.locks import RUN_LOCK, HeldLock, Holder
from rlcore.tracking.attempts import ATTEMPTS_FILE, Attempt, AttemptLog, Destination, End
from rlcore.tracking.journal import GPU_SECONDS, Journal
from rlcore.tracking.lineage import Origin
from tests.flows.conftest import commit

REWARD = "critic/score/mean"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config([f"paths.root={tmp_path}", "trainer.total_steps=50"], experiment="debug")


def begin(layout: RunLayout, *finish: str, ended_at: float | None = None) -> None:
    """Write the files that a trainer leaves after three steps, with the given ends of the attempt."""
    with Journal(layout.journal) as journal, AttemptLog(layout.run_dir / ATTEMPTS_FILE) as attempts:
        attempts.add(Attempt(0, 0, 1.0, Holder.me(), Destination("", "", "", {}, {})))
        for step in (1, 2, 3):
            journal.append_step(step, {REWARD: step / 10})
        for status in finish:
            attempts.add(End(status, ended_at or round(time.time(), 3)))  # type: ignore[arg-type]


def state_of(layout: RunLayout) -> tuple[str, str]:
    found = status_of(layout.run_dir)
    return found.state, found.note


def test_status_of_new_run(layout, config):
    os.utime(layout.run_json, (1_000.5, 1_000.5))
    found = status_of(layout.run_dir)
    known = {
        "run_id": layout.run_dir.name, "run_dir": str(layout.run_dir), "name": config.name, "state": "not begun",
        "step": 0, "total_steps": 50, "changed": 1_000.5, "size_bytes": layout.run_json.stat().st_size, "note": "",
    }  # fmt: skip
    assert asdict(found) == known | dict.fromkeys(("score", "reward", "tokens_per_s", "gpu_seconds"))
    message = replace(found, changed=time.time() - 90).to_json()
    assert 90 <= message.pop("age_s") < 3_600
    assert message == asdict(replace(found, changed=message["changed"]))


def test_status_has_latest_metrics(layout, config):
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
        journal.append_event("note", 4, {"text": "x" * 2 * READ_BLOCK_BYTES})
        journal.append_step(5, {"loss": 1.0})
    assert (status_of(layout.run_dir).step, status_of(layout.run_dir).reward) == (5, None), "read from its end alone"
    for step, score in {1: 0.5, 2: 0.25, 3: None}.items():
        commit(config, step, {} if score is None else {"val/reward": score})
    assert status_of(layout.run_dir).score == 0.25, "of the latest checkpoint with a score"


def test_state_of_a_run_that_is_worked_on(layout, capsys):
    begin(layout)
    with HeldLock(layout.run_dir / RUN_LOCK, what="the run"), Journal(layout.journal) as journal:
        running, paused = ("running", f"process {os.getpid()} on {Holder.me().host}"), ("waiting", "no room")
        assert (state_of(layout), failure_of(layout.run_dir)) == (running, "")
        for name, text, expected in (
            ("alarm", "entropy", running), (PAUSED, "no room", paused), ("alarm", "entropy", paused),
            (RESUMED, "room", running), (PAUSED, "no room", paused),
        ):  # fmt: skip
            journal.append_event(name, 3, {"text": text})
            assert state_of(layout) == expected
        journal.append_step(4, {})
        assert state_of(layout) == running
        record_stop_request(layout.run_dir, Holder.me())
        assert status_of(layout.run_dir).state == "stopping"
    assert failure_of(layout.run_dir) == f"lost: its process has ended; {SAME_COMMAND}"
    stop([str(layout.run_dir)])  # the lock's file still names this process
    assert "no process works on it" in capsys.readouterr().out


def test_resume_hint_names_command_or_flow_run(layout):
    run_dir, me = layout.run_dir, Holder.me()
    assert resume_hint(run_dir) == SAME_COMMAND == "the same command resumes it"
    (run_dir / RUN_LOCK).write_text(json.dumps(asdict(me)))
    assert resume_hint(run_dir) == SAME_COMMAND
    (run_dir / RUN_LOCK).write_text(json.dumps(asdict(replace(me, command=f"python {FLOW_RUN_COMMAND}"))))
    more = " resumes it, or Resume on the page if it is suspended (first `millrace up` if the stack is down)"
    unknown = f"Retry on its Prefect page{more}"
    known = f"Retry on its Prefect page or `prefect flow-run retry 7f`{more}"
    assert resume_hint(run_dir) == unknown
    for process, expected in (([me.pid, me.born], known), ([1, me.born], unknown), ([me.pid, me.born + 1], unknown)):
        (run_dir / STOP_FILE).write_text(json.dumps({"process": process, "time": 1.0, "flow_run": "7f"}))
        assert resume_hint(run_dir) == expected
    (run_dir / STOP_FILE).write_text("[]")
    assert resume_hint(run_dir) == unknown


def test_state_of_an_idle_run(layout):
    begin(layout)
    found = status_of(layout.run_dir)
    assert (found.state, found.step, found.total_steps, found.reward) == ("lost", 3, 50, 0.3)
    begin(layout, "KILLED")
    assert state_of(layout) == ("stopped", SAME_COMMAND)
    append_failure(layout.run_dir, failure_from(DataError("row 7: has no answer\nmore"), "gen", 3))
    begin(layout, "FAILED")
    assert state_of(layout) == ("failed", "data in gen after step 3: row 7: has no answer")
    begin(layout, "FINISHED")
    assert state_of(layout) == ("finished", "")


def test_later_of_stop_and_failure_counts(layout):
    (layout.run_dir / STOP_FILE).write_text('{"time": 5.0}')
    assert (state_of(layout)[0], failure_of(layout.run_dir)) == ("stopped", "")
    append_failure(layout.run_dir, replace(failure_from(DataError("old"), "", 0), time=4.0))
    assert state_of(layout)[0] == "stopped"
    append_failure(layout.run_dir, replace(failure_from(DataError("row 7\nmore"), "", 0), time=5.0))
    assert (state_of(layout)[0], failure_of(layout.run_dir)) == ("failed", "failed: data after step 0: row 7")


def test_state_of_a_run_ended_before_its_first_step(layout, config):
    def state_after(error: BaseException) -> tuple[str, str]:
        with pytest.raises(type(error)), open_run(config):
            raise error
        return state_of(layout)

    assert state_after(DataError("suite sums: no rows")) == ("failed", "data after step 0: suite sums: no rows")
    assert state_after(KeyboardInterrupt()) == ("stopped", SAME_COMMAND)
    assert state_after(StopRequestedError("stopped while it waited")) == ("stopped", SAME_COMMAND)
    with suppress(DataError), open_run(config):
        append_failure(layout.run_dir, failure_from(DataError("of the trainer"), "gen", 0))
        raise DataError("of the trainer")
    assert state_after(OSError("disk")) == ("failed", "error after step 0: disk")
    known = [(failure.phase, failure.message, failure.step) for failure in read_failures(layout.run_dir)]
    assert known == [("", "suite sums: no rows", 0), ("gen", "of the trainer", 0), ("", "disk", 0)], "each once"
    begin(layout, "FINISHED")
    state_after(DataError("after the first step the trainer's own record counts"))
    assert len(read_failures(layout.run_dir)) == 3
    assert status_of(layout.run_dir).state == "finished"


def test_stop_after_last_step_shows_until_the_rest_is_done(layout):
    begin(layout, "FINISHED", ended_at=1.0)
    with pytest.raises(KeyboardInterrupt), _record_early_end(layout.run_dir):
        raise KeyboardInterrupt
    assert state_of(layout) == ("stopped", f"all steps are trained, and results are missing; {SAME_COMMAND}")
    with _record_early_end(layout.run_dir):
        pass
    assert state_of(layout) == ("finished", "")


def test_report_shows_a_failure_until_the_run_resumes(layout):
    def failure_in_report() -> tuple[str, str, bool]:
        files = write_report(layout)
        failure = json.loads(files.html.with_suffix(".json").read_text())["failure"]
        return failure, files.html.read_text().partition("<nav>")[0], files.cached

    begin(layout)
    append_failure(layout.run_dir, failure_from(DataError("row 7: has <no> answer\nmore"), "gen", 3))
    assert failure_in_report()[0] == "lost: data in gen after step 3: row 7: has <no> answer"
    begin(layout, "FAILED")
    why = "failed: data in gen after step 3: row 7: has <no> answer"
    failure, head, cached = failure_in_report()
    assert (failure, escape(why) in head, cached) == (why, True, False)
    assert failure_in_report() == (why, head, True)
    with HeldLock(layout.run_dir / RUN_LOCK, what="the run"):
        assert failure_in_report()[0] == ""
    assert failure_in_report()[0] == why
    begin(layout, "FINISHED")
    failure, head, _ = failure_in_report()
    assert (failure, "failed" in head) == ("", False)


def test_size_of_folder(tmp_path):
    (tmp_path / "run" / "deep").mkdir(parents=True)
    (tmp_path / "run" / "a").write_bytes(b"x" * 10)
    (tmp_path / "run" / "deep" / "b").write_bytes(b"x" * 5)
    (tmp_path / "large").write_bytes(b"x" * 4_000)
    link = tmp_path / "run" / "link"
    link.symlink_to(tmp_path / "large")
    assert runs.size_of(tmp_path / "run") == 15 + link.lstat().st_size


def make_run(root: Path, run_id: str) -> Path:
    config = load_config([f"paths.root={root}", f"run_id={run_id}"], experiment="debug")
    layout = RunLayout.of(config)
    layout.run_dir.mkdir(parents=True)
    Origin(with_absolute_paths(config, layout)).write(layout.run_dir)
    return layout.run_dir


def test_run_is_named_by_folder_id_or_prefix(tmp_path):
    one, two, long = (make_run(tmp_path, name) for name in ("sum-1", "sum-2", "sum-10"))
    (tmp_path / "runs" / "empty").mkdir()
    assert runs.all_runs(tmp_path) == [one, long, two]
    found = [find_folder(name, tmp_path) for name in (str(one), "sum-1", "sum-10", "sum-2")]
    assert found == [one, one, long, two]
    only = tmp_path / "other" / "runs" / "div-7"
    only.mkdir(parents=True)
    (only / "run.json").touch()
    assert {find_folder(name, tmp_path / "other") for name in ("d", "div-")} == {only}
    for name, problem in (
        ("sum", "sum: is a prefix of several run ids"),
        ("div", "div: is neither the folder nor the id of a run"),
        ("", "'': is neither the folder nor the id of a run"),
    ):
        known = f"{tmp_path}/runs has: sum-1, sum-10, sum-2. "
        known += "Name one of them, or another workspace (--root, paths.root)."
        with pytest.raises(DataError, match=f"^{re.escape(f'{problem}; {known}')}$"):
            find_folder(name, tmp_path)
    for root, count, named in (
        (tmp_path / "nothing", 0, r"none\. Name"),
        (tmp_path, 5, r"run-0, .*, run-4, .*, sum-2\. Name"),
        (tmp_path, 8, r"run-0, .*, run-7 and 3 more \(millrace runs lists them\)\. Name"),
    ):
        for number in range(count):
            (tmp_path / "runs" / f"run-{number}").mkdir(exist_ok=True)
            (tmp_path / "runs" / f"run-{number}" / "run.json").touch()
        with pytest.raises(DataError, match=rf"{root}/runs has: {named}"):
            find_folder("other", root)


def test_run_is_found_by_name_or_settings(tmp_path):
    run_dir = make_run(tmp_path, "sum-1")
    for words in (["sum-1"], [str(run_dir)], ["experiment=debug", "run_id=sum-1"]):
        config, found = find_run(words, tmp_path)
        assert (config.run_id, found.run_dir, found.root) == ("sum-1", run_dir, tmp_path)
    for words in (["sum-1", "sum-2"], ["experiment=debug", "sum-1"]):
        with pytest.raises(ConfigError, match=f"^RUN: must be one run, .*; got {' '.join(words)}$"):
            find_run(words, tmp_path)
    with pytest.raises(DataError, match=r"runs/sum-3: there is no such run with these settings"):
        find_run(["experiment=debug", "run_id=sum-3"], tmp_path)
    odd = shutil.copytree(run_dir, tmp_path / "runs" / "seed=1")
    assert find_run([str(odd)], None)[1].run_dir == odd


def test_root_without_store(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run_dir = make_run(tmp_path, "sum-1")
    message = f"--search 'x': there is no MLflow store ({uri}) to search; name another --root"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        runs.find_runs([], "x", tmp_path, TrackingConfig())
    assert runs.find_runs(["sum-1", "sum-1"], "", tmp_path, TrackingConfig()) == [run_dir]
    assert not (tmp_path / "mlflow.db").exists()
