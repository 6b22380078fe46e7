"""`millrace runs`, `logs`, `stop` and `metrics`: a run's state by its files and locks, and its stop."""

import errno
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flows.cli import exit_code
from flows.commands.runs import logs, stop
from flows.commands.stack import prometheus_text
from flows.stack.state import FLOW_RUN_ID
from flows.work.open_run import with_absolute_paths
from flows.work.runs import STOP_FILE, all_runs, compare, find_run, resume_hint, status_of, sync
from flows.work.slots import Slots
from flows.work.trainer import MAX_READ_BYTES
from rlcore.config.compose import load_config
from rlcore.errors import DataError, RunInUseError, TrackingError
from rlcore.responses.query import Query, find_responses
from rlcore.run.layout import RunLayout
from rlcore.storage.locks import RUN_LOCK, HeldLock, Holder, holder_of, read_holder
from rlcore.tracking.attempts import ATTEMPTS_FILE, Attempt, AttemptLog, Destination
from rlcore.tracking.delivery import STATE_FILE, delivery_lock
from rlcore.tracking.journal import Journal
from tests.flows.conftest import REPOSITORY, changed, ended, in_this_process, journal, wait_until
from tests.helpers.reports import write_run


def worked_on(layout: RunLayout) -> HeldLock:
    return HeldLock(layout.run_dir / RUN_LOCK, what="the run")


@pytest.mark.parametrize(
    ("uri", "kept"), [("sqlite:///x.db", "sqlite:///{}/x.db"), ("http://a:1", "http://a:1"), (None, None)]
)
def test_the_settings_of_a_run_name_the_same_store_everywhere(layout, uri, kept, monkeypatch):
    monkeypatch.chdir(layout.root)
    config = changed(load_config(["paths.root=."], experiment="debug"), "tracking", uri=uri)
    found = with_absolute_paths(config, layout)
    assert (found.paths.root, found.tracking.uri) == (str(layout.root), kept and kept.format(layout.root))


def test_a_run_of_the_stack_resumes_by_prefect(layout, capsys):
    """Prefect starts the process by its environment, so its command line does not name the flow run."""
    holding = (
        "import sys, time; from pathlib import Path; from rlcore.storage.locks import HeldLock\n"
        "with HeldLock(Path(sys.argv[1]), what='the run'): time.sleep(600)\n"
    )
    lock = layout.run_dir / RUN_LOCK
    words = [sys.executable, "-c", holding, str(lock), "-m", "prefect.engine"]
    with subprocess.Popen(words, env=os.environ | {FLOW_RUN_ID: "0b5c-7"}):
        wait_until(lambda: holder_of(lock) is not None and read_holder(lock) is not None, "the run is worked on")
        found = read_holder(lock)
        lock.write_text(json.dumps(asdict(replace(found, command="/bin/python -m prefect.engine"))))
        stop([str(layout.run_dir)])
    how = resume_hint(layout.run_dir)
    assert "`prefect flow-run retry 0b5c-7`" in how
    reported = capsys.readouterr().out.splitlines()[-1]
    assert reported == f"run {layout.run_dir.name}: stopped; it has no checkpoint yet; {how}"
    found = status_of(layout.run_dir)
    assert (found.state, found.note) == ("stopped", how)


@pytest.mark.parametrize("other", [{"born": time.time() - 900}, {"host": "elsewhere"}], ids=["born", "host"])
def test_a_process_that_is_not_the_runs_is_never_signalled(layout, other):
    with subprocess.Popen(["sleep", "600"]) as stranger:
        with worked_on(layout):
            holder = replace(Holder.me(), pid=stranger.pid, **other)
            (layout.run_dir / RUN_LOCK).write_text(json.dumps(asdict(holder)))
            with pytest.raises(RunInUseError, match="that process cannot be signalled from"):
                stop([str(layout.run_dir)])
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.parametrize("settings", ['{"settings": {"trainer": null}}', '{"settings": {"trainer": "none"}}', None])
def test_a_run_that_somebody_has_damaged_or_deletes_is_listed(layout, settings):
    (layout.run_dir / STOP_FILE).write_text('{"time": "today"}')
    layout.run_json.unlink()
    if settings is not None:
        layout.run_json.write_text(settings)
    found = status_of(layout.run_dir)
    assert (found.state, found.total_steps) == ("not begun", None)


def test_the_newest_log_and_a_run_without_one(layout, capsys):
    def last_lines(number: int) -> list[str]:
        logs([str(layout.run_dir)], num_lines=number)
        return capsys.readouterr().out.splitlines()[1:]

    with pytest.raises(DataError, match="holds no trainer's log"):
        last_lines(2)
    layout.logs.mkdir()
    for number in (9, 10):
        (layout.logs / f"trainer-{number}.log").write_text(f"{number}.1\n{number}.2\n{number}.3\ntorn")
    assert last_lines(2) == ["10.2", "10.3", "torn"]
    last = layout.logs / "trainer-13.log"
    last.write_text("\x1b[36m(rank 0)\x1b[0m wrote a\x1b]0;title\x07b\n")
    assert last_lines(1) == [r"(rank 0) wrote a\x1b]0;title\x07b"], "a terminal obeys nothing"
    last.write_bytes(b"x" * (2 * MAX_READ_BYTES) + b"\nthe end\n")
    assert last_lines(1) == ["the end"]


def test_following_shows_all_lines_of_all_trainers(layout, capsys, monkeypatch):
    first, second = (layout.logs / f"trainer-{number}.log" for number in (1, 2))
    layout.logs.mkdir()
    first.write_text("begun\n")
    lost = b"x" * (2 * MAX_READ_BYTES) + b"\nlost\nits last words"

    def wait(seconds: float) -> None:
        if second.exists():
            second.write_bytes(b"again\n" + lost)
            work.close()
        else:
            first.write_bytes(b"begun\n" + lost)
            second.write_text("again\n")

    with ExitStack() as work, monkeypatch.context() as patched:
        work.enter_context(worked_on(layout))
        patched.setattr("flows.commands.runs.time.sleep", wait)
        logs([str(layout.run_dir)], num_lines=1, follow=True)
    said = [line for line in capsys.readouterr().out.splitlines() if len(line) < MAX_READ_BYTES]
    last = ["lost", "its last words"]
    assert said == [f"{first}:", "begun", *last, f"{second}:", "again", *last]


def test_an_interrupt_ends_following_without_a_word(layout, capsys, monkeypatch):
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    layout.logs.mkdir()
    (layout.logs / "trainer-1.log").write_text("a line\n")
    with worked_on(layout), monkeypatch.context() as patched:
        patched.setattr("flows.commands.runs.time.sleep", interrupt)
        assert exit_code(lambda: logs([str(layout.run_dir)], num_lines=1, follow=True)) == 0
    assert capsys.readouterr() == (f"{layout.logs}/trainer-1.log:\na line\n", "")


def test_what_may_not_be_read_is_not_taken_for_absent(layout, monkeypatch):
    def refuse(path: Path, *flags: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    root = layout.run_dir.parents[1]
    assert all_runs(root) == [layout.run_dir]
    layout.answers.mkdir()
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DataError, match=r"run\.json: cannot be read .*Permission denied.*make it readable"):
        find_run([str(layout.run_dir)], None)
    for look in (lambda: all_runs(root), lambda: find_responses(layout.answers, Query())):
        with pytest.raises(PermissionError):
            look()


def test_a_root_without_runs_is_reported(tmp_path, capsys):
    done = in_this_process(capsys, "runs", f"--root={tmp_path}")
    assert done.err == f"{tmp_path / 'runs'}: no run; --root names another workspace\n"


def test_a_comparison_is_written_without_mlflow(tmp_path, caplog):
    """MLflow has the runs in a store that is absent, or of a kind that is not installed."""
    there, here = (tmp_path / name for name in ("there", "here"))
    folders = [there / "runs" / name for name in ("one", "two")]
    for seed, folder in enumerate(folders, start=1):
        write_run(folder, experiment="debug", seed=seed, num_steps=2, num_problems=4)
        (folder / STATE_FILE).write_text('{"format_version": 2, "mlflow_run_id": "1"}')
    for root in (here, there):
        found, _ = compare(folders, root)
        assert {found.html.parents[1], found.json.parents[1]} == {root / "comparisons"}
        said = f"The comparison is not uploaded to MLflow: {folders[0]} is not in the MLflow store of {root}"
        assert caplog.messages == [said]
        assert not (root / "mlflow.db").exists()
        caplog.clear()
    (here / "mlflow.db").touch()
    assert compare(folders, here)[1] == []
    assert caplog.messages[-1].endswith(f"is not in the MLflow store of {here}")
    more = ("tracking.uri=oddsql://host/runs",)
    for seed, folder in enumerate(folders, start=1):
        write_run(folder, experiment="debug", overrides=more, seed=seed, num_steps=2, num_problems=4)
    (folders[1] / STATE_FILE).unlink()
    assert compare(folders, tmp_path)[0].html.is_file()
    assert "The comparison is not uploaded to MLflow: tracking.uri oddsql://host/runs: " in caplog.text


def test_a_run_that_cannot_be_delivered_is_reported(layout, capsys):
    with Journal(layout.journal) as journal, AttemptLog(layout.run_dir / ATTEMPTS_FILE) as attempts:
        attempts.add(Attempt(0, 0, 1.0, Holder.me(), Destination("", "", "", {}, {})))
        journal.append_step(1, {"a": 1.0})
    away, lock = "oddsql://host/runs", delivery_lock(layout.run_dir)
    with lock:
        assert sync(layout.run_dir, away) == "is being delivered by another process"
    with pytest.raises(TrackingError, match=rf"^{layout.run_dir}: not delivered: tracking\.uri {away}: "):
        sync(layout.run_dir, away)
    lock.path.unlink()
    lock.path.mkdir()
    done = in_this_process(capsys, "sync", f"--root={layout.root}", f"--uri={away}")
    assert (done.code, done.out.startswith(f"{layout.run_dir.name}: {layout.run_dir}: cannot be w")) == (1, True), done


@pytest.mark.slow
def test_a_run_is_listed_measured_followed_and_stopped(bare):
    small = ("warm_start.enabled=false", "tracking.enabled=false")
    Slots(bare.root).set_devices(["", ""])
    training = bare.start("train", "experiment=debug", "trainer.total_steps=20000", *small, spawned=True)
    bare.wait_for_step(1)
    root = f"--root={bare.root}"
    families = text_string_to_metric_families(prometheus_text(bare.root))
    shown = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    (found,) = json.loads(bare("runs", "--json", root).out)
    assert (found["state"], found["total_steps"]) == ("running", 20_000)
    figures = {name: shown[f"millrace_run_{name}", found["run_id"]] for name in ("step", "total_steps")}
    assert (shown["millrace_runs", "running"], shown["millrace_runs", "finished"]) == (1, 0)
    assert (1 <= figures["step"] <= found["step"], figures["total_steps"]) == (True, 20_000)
    assert shown["millrace_run_tokens_per_second", found["run_id"]] > 0
    assert shown["millrace_run_last_journal_timestamp_seconds", found["run_id"]] >= journal(bare.run_dir())[0]["time"]
    assert (shown["millrace_slots", "taken"], shown["millrace_slots", "free"]) == (1, 1)
    assert shown["millrace_disk_free_bytes",] > 0
    follower = bare.start("logs", found["run_id"][:5], "-f", root)
    stopped = bare("stop", found["run_id"], root)
    assert stopped.code == 0, stopped.err
    assert f"requested process {training.pid} on" in stopped.out
    assert "train experiment=debug trainer.total_steps=20000" in stopped.out.splitlines()[-1]
    assert ended(training).code == 75
    assert "trainer-1.log" in ended(follower).out
    (found,) = json.loads(bare("runs", "--json", root).out)
    assert found["state"] == "stopped"
    assert f"step {found['step']} is saved" in stopped.out
    after = prometheus_text(bare.root)
    assert 'millrace_runs{state="stopped"} 1.0' in after
    assert found["run_id"] not in after, "only living runs have separate metrics"


STOPPING = """
import os, sys
from pathlib import Path
import psutil
import flows.work.open_run, flows.work.runs  # another user cannot read the interpreter's files
from flows.commands.runs import stop
from rlcore.errors import RunInUseError
os.setuid(65534)
try:
    stop([sys.argv[1]])
except RunInUseError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process is needed")
def test_a_refused_stop_is_not_recorded():
    with TemporaryDirectory() as folder:  # tests' own folders are for one user
        run_dir = Path(folder) / "runs" / "theirs"
        write_run(run_dir, experiment="debug", overrides=(f"paths.root={folder}",), num_steps=2, num_problems=20)
        for one in (run_dir, *run_dir.parents[:2]):
            one.chmod(0o777)
        with HeldLock(run_dir / RUN_LOCK, what="the run"):
            command = [sys.executable, "-c", STOPPING, str(run_dir)]
            done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert "no stop was requested" in done.stdout, done.stderr
        assert not (run_dir / STOP_FILE).exists()
