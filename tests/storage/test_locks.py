"""Locks with real processes: one holder at a time, and a crash releases the lock."""

import errno
import fcntl
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rlcore.errors import CheckpointError, DataError, DiskSpaceError, RunInUseError
from rlcore.storage import locks
from rlcore.storage.locks import (
    UNKNOWN_HOLDER,
    FileLock,
    HeldLock,
    Holder,
    RunLock,
    holder_of,
    process_of,
    read_holder,
    start_time_of,
)
from tests.helpers.published import num_open
from tests.storage.small_disk import fill, mounted

IMPORTS = """
import os, signal, sys
from pathlib import Path
from rlcore.storage.locks import RunLock
"""
HOLD = """
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""

# Takes the lock, forks a child that lives on, and dies without letting go.
FORK_AND_DIE = """
RunLock(Path(sys.argv[1])).__enter__()
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

# Counts in a file under the lock: a lost update shows as a number too small.
COUNT = """
counter = Path(sys.argv[1], "counter")
for _ in range(25):
    with RunLock(counter.parent, wait_s=60):
        counter.write_text(str(int(counter.read_text()) + 1))
"""


def start(script: str, run_dir: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", IMPORTS + script, str(run_dir)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextmanager
def holder(run_dir: Path) -> Iterator["subprocess.Popen[str]"]:
    with start(HOLD, run_dir) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def take(run_dir: Path, wait_s: float = 0.0) -> None:
    with RunLock(run_dir, wait_s=wait_s):
        pass


def test_held_lock_error_names_holder_and_time(tmp_path):
    with holder(tmp_path / "demo-s1") as process:
        with pytest.raises(RunInUseError) as caught:
            take(tmp_path / "demo-s1")
        message = str(caught.value)
        assert f"run demo-s1 is in use by process {process.pid} on {socket.gethostname()} since 20" in message
        assert "RunLock(Path(sys.argv[1]))" in message, "its command line"
        assert str(pickle.loads(pickle.dumps(caught.value))) == message


def test_killed_holder_frees_the_lock(tmp_path):
    with holder(tmp_path) as process:
        held = read_holder(tmp_path / "run.lock")
        assert held.process() == psutil.Process(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert held.process() is None, "it has ended, and no one has read its exit code"
        process.wait()
        take(tmp_path)
    assert read_holder(tmp_path / "run.lock").pid == os.getpid()


def test_waiting_takes_a_freed_lock(tmp_path):
    with holder(tmp_path) as process:
        with pytest.raises(RunInUseError):
            take(tmp_path, wait_s=0.2)
        timer = threading.Timer(0.3, lambda: (process.stdin.write("\n"), process.stdin.flush()))
        timer.start()
        take(tmp_path, wait_s=60)
        timer.join()


def test_forked_child_does_not_keep_the_lock(tmp_path):
    with start(FORK_AND_DIE, tmp_path) as process:
        child = int(process.stdout.readline())
        process.wait()
        os.kill(child, 0)  # lives
        take(tmp_path, wait_s=60)  # the child lets go as its first act, which may come after the parent's death
        process.stdin.close()


def test_contention_loses_no_update(tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    with start(COUNT, tmp_path) as first, start(COUNT, tmp_path) as second, start(COUNT, tmp_path) as third:
        pass
    assert [writer.returncode for writer in (first, second, third)] == [0, 0, 0]
    assert counter.read_text() == "75"


def test_lock_on_a_full_disk_or_in_an_impossible_folder(tmp_path, small_disk):
    fill(small_disk)
    take(small_disk)
    with mounted(tmp_path / "few", options="nr_inodes=1") as disk, pytest.raises(DiskSpaceError, match="no room"):
        take(disk)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=rf"run: must be a folder, and {tmp_path}/file is none\. Move that away"):
        take(tmp_path / "file" / "run")


def test_lock_file_deleted_during_acquire_is_replaced(tmp_path, monkeypatch):
    """Otherwise two processes would each hold a lock on a separate file."""
    flock = fcntl.flock
    deleted = []

    def delete_first(descriptor: int, operation: int) -> None:
        if not deleted:
            deleted.append(True)
            (tmp_path / "run.lock").unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    before = num_open()
    with RunLock(tmp_path):
        assert deleted
        assert num_open() <= before + 1
        with pytest.raises(RunInUseError):
            take(tmp_path)


def test_starting_child_keeps_no_released_lock(tmp_path):
    lock, again = FileLock(tmp_path / "slot.lock"), FileLock(tmp_path / "slot.lock")
    assert lock.try_acquire()
    copy = os.dup(lock.fileno())  # as a child has it between fork and exec
    lock.release(everywhere=True)
    assert again.try_acquire()
    again.release()
    assert lock.try_acquire()
    os.close(copy)
    copy = os.dup(lock.fileno())
    lock.release()
    assert not again.try_acquire(), "a child that was given the descriptor keeps the lock"
    os.close(copy)


def test_lock_is_released_where_holder_is_unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(lock: FileLock, contents: bytes) -> None:
        raise OSError(errno.EIO, "a broken disk")

    with monkeypatch.context() as patched:
        patched.setattr(FileLock, "write", broken)
        with pytest.raises(OSError, match="a broken disk"):
            take(tmp_path)
    take(tmp_path)


def test_holder_of_a_lock_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    before = num_open()
    assert holder_of(path) is None
    with RunLock(tmp_path):
        held = holder_of(path)
        assert held == read_holder(path)
        assert (held.pid, held.host, held.born) == (os.getpid(), socket.gethostname(), start_time_of(psutil.Process()))
        assert held.process() == psutil.Process()
        path.write_text("")
        assert holder_of(path) == UNKNOWN_HOLDER
        with pytest.raises(RunInUseError, match=f"run {tmp_path.name} is in use by another process"):
            take(tmp_path)
    assert holder_of(path) is None
    assert holder_of(path / "below") is None
    assert num_open() <= before


def test_holder_text_names_an_ended_process() -> None:
    me, host, dead = os.getpid(), socket.gethostname(), 2**22 + 1  # above the largest process id that Linux gives
    text, since = "process {} on {} since then (python x){}", ("python x", "then")
    assert str(Holder(me, host, *since)) == text.format(me, host, "")
    assert str(Holder(dead, host, *since)) == text.format(dead, host, ", which has ended, but a child of it still runs")
    assert str(Holder(dead, "another", *since)) == text.format(dead, "another", ""), "its state is unknown here"
    assert Holder(me, host, *since).process() is None, "this process was not born in 1970"


def test_process_identity_without_a_boot_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BOOT_ID", tmp_path / "absent")
    born = psutil.Process().create_time()
    for seconds, is_it in ((0, True), (1.9, True), (-1.9, True), (2.1, False), (-2.1, False)):
        assert (process_of(os.getpid(), born + seconds) is not None) == is_it
    assert process_of(2**22 + 1, born) is None
    me = Holder.me()
    assert me.process() == psutil.Process()
    assert replace(me, host="another").process() is None


def test_process_identity_depends_on_boot_not_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = Holder.me()
    begun = psutil.Process().create_time()
    assert 2**32 <= me.born < 2**33 + 1e9
    assert me.process() == psutil.Process()
    assert replace(me, born=begun).process() is None, "a time of day"
    assert replace(me, born=me.born + 0.01).process() is None, "a tick later"
    # Setting the clock by an hour changes the boot time that the kernel reports.
    lines = [
        f"btime {psutil.boot_time() + 3600:.0f}" if "btime" in line else line
        for line in Path("/proc/stat").read_text().split("\n")
    ]
    (tmp_path / "stat").write_text("\n".join(lines))
    (tmp_path / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
        assert abs(psutil.Process().create_time() - begun - 3600) < 2
        assert me.process() is not None
    (tmp_path / "boot_id").write_text("ffffffff-0000\n")
    monkeypatch.setattr(locks, "BOOT_ID", tmp_path / "boot_id")
    assert me.process() is None
    monkeypatch.setattr(locks, "BOOT_ID", tmp_path / "absent")
    assert start_time_of(psutil.Process()) == begun, "as on other systems"


def test_lock_file_content_is_replaced_whole(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "x.lock")
    assert lock.try_acquire()
    lock.write(b"a long text")
    lock.write(b"short")
    assert lock.path.read_bytes() == b"short"
    lock.release()
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "absent").try_acquire(create=False)
    assert not (tmp_path / "absent").exists()


def test_failed_acquire_closes_its_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLock(tmp_path):
        before = num_open()
        assert not FileLock(tmp_path / "run.lock").try_acquire()
        assert num_open() <= before

    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    before = num_open()
    for error in (RunInUseError, CheckpointError):
        lock = HeldLock(tmp_path / "x.lock", what="the folder", error=error)
        with pytest.raises(
            error, match=r"/x\.lock: cannot be locked .*No locks.*whether the folder is in use\. Put paths"
        ):
            lock.__enter__()
    assert num_open() <= before
