"""The immediate end of a process, hangs, and dumps of stacks."""

import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcore import stacks
from rlcore.config import RunConfig
from rlcore.config.trainer import DeadlineConfig, RuntimeConfig
from rlcore.errors import WorkerLostError
from rlcore.run.layout import RunLayout
from rlcore.run.stop import StopFlag
from rlcore.run.watchdog import Watchdog, read_failures

WAIT_S = 60
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


def num_waiting(descriptor: int) -> int:
    """Return the unread bytes in a pipe."""
    return struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0]


def test_second_signal_ends_a_blocked_process() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen([sys.executable, "-c", FULL_PIPE], stdout=subprocess.PIPE, env=environment) as process:
        try:
            deadline = time.monotonic() + WAIT_S
            while num_waiting(process.stdout.fileno()) < fcntl.fcntl(process.stdout, fcntl.F_GETPIPE_SZ):
                assert time.monotonic() < deadline, "the pipe does not get full"
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 75
        finally:
            process.kill()


def test_immediate_exit_flushes_output_and_keeps_delivery() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen([sys.executable, "-c", ENDS], stdout=subprocess.PIPE, env=environment, text=True) as process:
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
    layout = RunLayout(tmp_path, tmp_path / "run")
    layout.run_dir.mkdir()
    layout.failures.touch()  # a file in the folder's place
    events: list[Any] = []
    named = {"report": events.append, "abandon": lambda error: None, "step": lambda: 7}
    guard = Watchdog(RunConfig(), layout, stop=StopFlag(lambda: None), **named)
    lost = WorkerLostError("a worker actor died")
    with guard:
        assert guard.record_failure(lost) is lost
    (failure,) = read_failures(layout.run_dir)
    assert (failure.step, failure.stacks) == (7, None)
    assert "a worker actor died" in failure.message
    assert [one["event"] for one in events] == ["fault"]


def test_phase_beyond_its_deadline_is_a_hang(tmp_path: Path) -> None:
    ended, errors = threading.Event(), list[Exception]()

    def abandon(error: Exception) -> None:
        errors.append(error)
        ended.set()

    config = RunConfig(runtime=RuntimeConfig(deadlines=DeadlineConfig(save_s=0.1)))
    layout = RunLayout(tmp_path, tmp_path / "run")
    guard = Watchdog(config, layout, stop=StopFlag(lambda: None), report=lambda event: None, abandon=abandon)
    with guard, guard.phase("commit"):
        assert ended.wait(WAIT_S)
    (error,) = errors
    assert str(error).startswith("runtime.deadlines.save_s: hang in commit after step 0: no end after 0 s. Stacks of ")
    (failure,) = read_failures(layout.run_dir)
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
