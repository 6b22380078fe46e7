"""Deadlines, hangs, stacks, recorded failures, and the immediate end of a process."""

import faulthandler
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from rlcore import errors, stacks
from rlcore.config import RunConfig
from rlcore.run import watchdog
from rlcore.run.layout import RunLayout
from rlcore.run.stop import StopFlag
from rlcore.run.watchdog import append_failure, as_known_error, failure_from, read_failures


class Watch(watchdog.Watchdog):
    """A watchdog whose thread does not run, with its events and errors. `stop_s`: the seconds since a stop request."""

    def __init__(self, folder: Path, stop_s: float | None = None, **runtime: Any) -> None:
        self.events: list[Mapping[str, object]] = []
        self.errors: list[errors.MillraceError] = []
        self.is_abandoned = threading.Event()
        (folder / "run").mkdir(exist_ok=True)
        stop = StopFlag(lambda: None)
        stop.seconds_since_request = lambda: stop_s
        named = {"stop": stop, "report": self.events.append, "abandon": self.end, "step": lambda: 7}
        super().__init__(RunConfig(runtime=runtime), RunLayout(folder, folder / "run"), **named)

    def end(self, error: errors.MillraceError) -> None:
        self.errors.append(error)
        self.is_abandoned.set()


def test_each_phase_has_the_deadline_of_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, armed = [100.0], list[float | None]()

    def arm(seconds: float, *, exit: bool, file: object) -> None:
        assert exit
        armed.append(seconds)

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(faulthandler, "dump_traceback_later", arm)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: armed.append(None))
    keys = sorted(set(watchdog.DEADLINE_OF.values()))
    limits = {key: 1000.0 + place for place, key in enumerate(keys)}
    watch = Watch(tmp_path, deadlines=limits)
    for phase, key in watchdog.DEADLINE_OF.items():
        armed.clear()
        with watch.phase(phase):
            assert armed == [None, limits[key] + 60]
        assert armed == [None, limits[key] + 60, None], "no timer is left"
    with watch.phase("testing"):
        now[0] += 400.0
        with watch.phase("gen"):
            now[0] += 100.0
        assert armed[-1] == limits["validate_s"] - 500 + 60, "the outer phase has what is left of its time"
        with watch.phase("gen"):
            now[0] += 5000.0
        assert armed[-1] == 60


def test_slow_step_is_abandoned_before_its_update(tmp_path: Path) -> None:
    for phase, requested_s_ago in (("gen", 50.0), ("gen", None), ("update_actor", 99.0)):
        with Watch(tmp_path, requested_s_ago, stop_deadline_s=100.0).phase(phase):
            pass
    rule = "^the step was abandoned before gen: a stop was requested 50 s ago$"
    watch = Watch(tmp_path, 50.5, stop_deadline_s=100.0)
    with pytest.raises(watchdog.StepAbandonedError, match=rule), watch.phase("gen"):
        pytest.fail("it was started")


def test_hang_names_the_stage_of_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch(tmp_path)
    watch.aside = lambda: "checkpoint of step 3: renaming x"
    watch._on_hang("commit", 61.4)
    (fault,) = read_failures(tmp_path / "run")
    message = f"runtime.deadlines.save_s: hang in commit after step 7: no end after 61 s; {watch.aside()}"
    assert (fault.kind, fault.phase, fault.step, fault.message) == ("hang", "commit", 7, message)
    assert str(fault.stacks).startswith(f"{tmp_path}/run/failures/stacks-20")
    assert Path(str(fault.stacks)).read_text().startswith(f"hang in commit after step 7\n{message}\n\n")
    (error,) = watch.errors
    assert isinstance(error, errors.HangError)
    assert str(error) == f"{message}. Stacks of every process: {fault.stacks}"
    text = f"hang in commit after step 7; stacks: {fault.stacks}"
    assert watch.events == [{"event": "fault", "text": text, "kind": "hang", "phase": "commit", "step": 7}]
    assert f"failure: hang in commit after step 7: {message}" in caplog.text
    watch.record_failure(errors.WorkerLostError("its rank was ended"))
    assert len(read_failures(tmp_path / "run")) == 1, "errors after a hang are its consequences"


def test_failure_names_its_phase(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    with watch.phase("gen"):
        pass
    error = errors.DataError("no row")
    assert watch.record_failure(error) is error
    text = "data in gen after step 7"
    assert watch.events == [{"event": "fault", "text": text, "kind": "data", "phase": "gen", "step": 7}]
    watch.record_failure(errors.WorkerLostError("rank 1"))
    first, second = read_failures(tmp_path / "run")
    assert (first.kind, first.stacks) == ("data", None)
    assert second.kind == "lost worker"
    assert Path(str(second.stacks)).is_file()
    host = watch.record_failure(MemoryError("no"))
    assert str(host).startswith("host out of memory in gen: MemoryError: no\n")


@pytest.mark.parametrize("is_saving", [True, False])
def test_slow_stop_names_its_phase(tmp_path: Path, is_saving: bool) -> None:
    watch = Watch(tmp_path, stop_deadline_s=30.0)
    where = "its end"
    if is_saving:
        watch.aside = lambda: "checkpoint of step 3: renaming x"
        where = "gen; checkpoint of step 3: renaming x"
        with watch.phase("testing"), watch.phase("gen"):
            watch._stop_takes_too_long()
    else:
        watch._stop_takes_too_long()
    (error,) = watch.errors
    assert isinstance(error, errors.StopRequestedError)
    text = f"runtime.stop_deadline_s: the run had not ended 30 s after a stop request (in {where}), and was killed."
    assert str(error).startswith(text)


WAIT_S = 60
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
FULL_PIPE = """
import signal
from rlcore.run import watchdog
watchdog.FINAL_REPORT_S = 0.2
signal.signal(signal.SIGTERM, lambda number, frame: watchdog.exit_immediately(75))
print("x" * 1_000_000)
"""
NO_READER = """
import os
from rlcore.run import watchdog
watchdog.FINAL_REPORT_S = 0.2
reads, writes = os.pipe()
def say():
    while True:
        os.write(writes, bytes(65536))
watchdog.report_and_exit(say, 75)
"""
HANGS = """
import sys, time
from pathlib import Path
from rlcore.config import RunConfig
from rlcore.run import watchdog
from rlcore.run.layout import RunLayout
from rlcore.run.stop import StopFlag
watchdog.LAST_RESORT_S = 0.1
never = 1e9
folder = Path(sys.argv[1])
guard = watchdog.Watchdog(
    RunConfig(runtime={"deadlines": {"save_s": 0.1}}), RunLayout(folder, folder), stop=StopFlag(lambda: None),
    report=lambda event: None, abandon=lambda error: time.sleep(never),
)
with guard, guard.phase("commit"):
    with guard.phase("save_checkpoint"):
        pass
    time.sleep(never)
"""
ENDS = """
import subprocess, sys
from rlcore.run import watchdog
watchdog.FINAL_REPORT_S = 600
sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
started = [subprocess.Popen(sleeps), subprocess.Popen([*sleeps, watchdog.TRACKING_MODULE])]
print(*(process.pid for process in started))
watchdog.exit_immediately(3)
"""


def test_second_signal_ends_a_blocked_process() -> None:
    with subprocess.Popen([sys.executable, "-c", FULL_PIPE], stdout=subprocess.PIPE, env=BUFFERED) as process:
        try:
            deadline, size = time.monotonic() + WAIT_S, fcntl.fcntl(process.stdout, fcntl.F_GETPIPE_SZ)
            while struct.unpack("i", fcntl.ioctl(process.stdout, termios.FIONREAD, bytes(4)))[0] < size:
                assert time.monotonic() < deadline, "the pipe does not get full"
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 75
        finally:
            process.kill()


def test_immediate_exit_flushes_output_and_keeps_delivery() -> None:
    with subprocess.Popen([sys.executable, "-c", ENDS], stdout=subprocess.PIPE, env=BUFFERED, text=True) as process:
        child, delivery = (psutil.Process(int(pid)) for pid in process.stdout.readline().split())
        try:
            assert process.wait(WAIT_S) == 3
            psutil.wait_procs([child], WAIT_S)
            assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
            assert delivery.is_running()
            assert delivery.status() != psutil.STATUS_ZOMBIE
        finally:
            delivery.kill()


def test_failure_is_recorded_without_its_stacks(tmp_path: Path) -> None:
    watch, lost = Watch(tmp_path), errors.WorkerLostError("a worker actor died")
    (tmp_path / "run" / "failures").touch()  # a file in the folder's place
    with watch:
        assert watch.record_failure(lost) is lost
    (failure,) = read_failures(tmp_path / "run")
    assert (failure.step, failure.stacks) == (7, None)
    assert "a worker actor died" in failure.message
    assert [one["event"] for one in watch.events] == ["fault"]


def test_phase_beyond_its_deadline_is_a_hang(tmp_path: Path) -> None:
    watch = Watch(tmp_path, deadlines={"save_s": 0.1})
    with watch, watch.phase("commit"):
        assert watch.is_abandoned.wait(WAIT_S)
    (error,) = watch.errors
    assert str(error).startswith("runtime.deadlines.save_s: hang in commit after step 7: no end after 0 s. Stacks of ")
    (failure,) = read_failures(tmp_path / "run")
    assert (failure.kind, failure.phase) == ("hang", "commit")
    assert "test_watchdog.py" in Path(str(failure.stacks)).read_text()


def test_last_resort_ends_an_outer_phase(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HANGS, str(tmp_path)], timeout=WAIT_S, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Timeout" in done.stderr


def test_exit_does_not_wait_for_a_reader() -> None:
    assert subprocess.run([sys.executable, "-c", NO_READER], timeout=WAIT_S).returncode == 75


STRANGER = "import time; print(flush=True); time.sleep(600)"
RANK = f"from rlcore import stacks; stacks.register('rank-0'); {STRANGER}"


def test_stacks_are_requested_from_registered_processes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of an ended or remote process may have the id of any local process."""
    folder = tmp_path / "stacks"
    monkeypatch.setenv(stacks.FOLDER_VARIABLE, str(folder))
    stacks.open_folder(folder)
    commands = ([sys.executable, "-c", code] for code in (RANK, STRANGER))
    rank, stranger = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    try:
        for process in (rank, stranger):
            process.stdout.readline()
        (folder / f"rank-1-{stranger.pid}.txt").touch()
        _, of_rank, of_stranger = stacks.report(folder).split("=== rank-")
        assert 'File "<string>", line 1 in <module>' in of_rank
        assert of_stranger.startswith(f"1, process {stranger.pid}")
        assert "has ended, or is on another host" in of_stranger
        assert stranger.poll() is None, "it was ended by a signal for another process"
    finally:
        for process in (rank, stranger):
            process.kill()
            process.communicate()


ERRORS = {
    "host out of memory": MemoryError("no room for a copy"),
    "GPU out of memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "GPU out of memory, by CUDA": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported late"),
    "rank out of memory": errors.RankMemoryError(
        "a pass on one of 2 ranks (DefaultCPUAllocator: can't allocate memory)"
    ),
    "lost worker": errors.WorkerLostError("rank 1 has ended"),
    "hang": errors.HangError("no end after 60 s"),
    "disk": errors.DiskSpaceError("no room"),
    "data": errors.DataError("a row breaks the schema"),
    "numbers": errors.NonFiniteError("the loss is nan"),
    "error": KeyError("a bug"),
}


@pytest.mark.parametrize("kind", list(ERRORS))
def test_failure_kind_and_phase_of_each_error(kind: str) -> None:
    found = failure_from(as_known_error(ERRORS[kind], "gen"), "gen", 7)
    assert str(found) == f"{kind.partition(',')[0]} in gen after step 7"


def test_failure_text_is_short() -> None:
    found = failure_from(KeyError("x" * 2000), "", 3)
    assert (str(found), len(found.message), found.stacks) == ("error after step 3", 1000, None)
    assert round(found.time, 3) == found.time > 1.7e9


def test_damaged_line_or_failed_write_loses_one_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failures = [failure_from(as_known_error(error, "gen"), "gen", step) for step, error in enumerate(ERRORS.values())]
    assert read_failures(tmp_path) == []
    for failure in failures[:2]:
        append_failure(tmp_path, failure)
    with (tmp_path / watchdog.FAILURES_FILE).open("ab") as file:
        file.write(b'{"kind": "\xff", "phase": "a bit has flipped"}\n{"kind": "ha')  # and a full disk
    for failure in failures[2:]:
        append_failure(tmp_path, failure)
    assert read_failures(tmp_path) == failures
    assert caplog.text.count(f"{tmp_path}/{watchdog.FAILURES_FILE}: a line is damaged and skipped: b'") == 2
    assert (tmp_path / watchdog.FAILURES_FILE).read_bytes().count(b"\n") == len(failures) + 2
    append_failure(tmp_path / "absent", failures[0])
    assert f"{tmp_path}/absent/{watchdog.FAILURES_FILE}: cannot be written: [Errno 2] No such file" in caplog.text
    assert not (tmp_path / "absent").exists()


def test_memory_errors_have_a_remedy() -> None:
    on_device = as_known_error(RuntimeError("CUDA out of memory. Tried to"), "gen")
    assert isinstance(on_device, errors.DeviceMemoryError)
    remedy = "Lower trainer.max_tokens_per_micro_batch or rollout.memory_share; neither changes the numbers."
    assert str(on_device) == f"GPU out of memory in gen: RuntimeError: CUDA out of memory. Tried to\n{remedy}"
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60)
    remedy = "Free memory on this host, or lower runtime.num_workers or reward.num_processes."
    for error in (MemoryError("no"), refused.value):
        on_host = as_known_error(error, "")
        assert isinstance(on_host, errors.HostMemoryError)
        assert str(on_host) == f"host out of memory: {type(error).__name__}: {error}\n{remedy}"
    of_worker = as_known_error(errors.DeviceMemoryError("a worker: std::bad_alloc"), "gen")
    assert isinstance(of_worker, errors.HostMemoryError)
    for error in (on_device, errors.DataError("MemoryError"), ValueError("no")):
        assert as_known_error(error, "gen") is error


def test_oom_kills_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tmp_path / "events", tmp_path / "vmstat"
    monkeypatch.setattr("rlcore.run.watchdog.OOM_COUNTERS", files)
    assert watchdog.num_oom_kills() == 0
    files[1].write_text("pgfault 9\noom_kill 7\n")
    assert watchdog.num_oom_kills() == 7
    for text, number in (("low 1\noom 2\noom_kill 3\noom_group_kill 4", 3), ("oom_kill many", 7), ("low 1", 7)):
        files[0].write_text(f"{text}\n")
        assert watchdog.num_oom_kills() == number
