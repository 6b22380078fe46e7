"""One process at a time, and a crash frees: with real processes."""

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
from pathlib import Path

import pytest

from rlcore.errors import DataError, RunInUseError
from rlcore.storage.locks import FileLock, RunLock, holder_of, read_holder
from tests.storage.small_disk import fill

HOLD = """
import sys
from pathlib import Path
from rlcore.storage.locks import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""

# Takes the lock, forks a child that lives on, and dies without letting go.
FORK_AND_DIE = """
import os, signal, sys, time
from pathlib import Path
from rlcore.storage.locks import RunLock
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
import sys
from pathlib import Path
from rlcore.storage.locks import RunLock
run, counter = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(25):
    with RunLock(run, wait_s=60):
        counter.write_text(str(int(counter.read_text()) + 1))
"""


@contextmanager
def holder(run_dir: Path) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def take(run_dir: Path, wait_s: float = 0.0) -> None:
    with RunLock(run_dir, wait_s=wait_s):
        pass


def test_the_second_taker_is_told_who_and_since_when(tmp_path):
    with holder(tmp_path / "demo-s1") as process:
        with pytest.raises(RunInUseError) as caught:
            take(tmp_path / "demo-s1")
        message = str(caught.value)
        assert "run demo-s1 is in use" in message
        assert f"process {process.pid} on {socket.gethostname()} since 20" in message
        assert "RunLock(Path(sys.argv[1]))" in message, "its command line"
        assert str(pickle.loads(pickle.dumps(caught.value))) == message


def test_a_killed_holder_frees_the_lock(tmp_path):
    with holder(tmp_path) as process:
        process.kill()
        process.wait()
        take(tmp_path)
    said = read_holder(tmp_path / "run.lock")
    assert said is not None
    assert said.pid == os.getpid()


def test_waiting_takes_the_lock_when_it_is_freed(tmp_path):
    with holder(tmp_path) as process:
        assert process.stdin is not None
        with pytest.raises(RunInUseError):
            take(tmp_path, wait_s=0.2)
        timer = threading.Timer(0.3, lambda: (process.stdin.write("\n"), process.stdin.flush()))
        timer.start()
        take(tmp_path, wait_s=60)
        timer.join()


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", FORK_AND_DIE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        child = int(process.stdout.readline())
        process.wait()
        os.kill(child, 0)  # lives
        take(tmp_path, wait_s=60)  # the child lets go as its first act, which may come after the parent's death
        process.stdin.close()


def test_no_update_is_lost_under_contention(tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    writers = [subprocess.Popen([sys.executable, "-c", COUNT, str(tmp_path / "run"), str(counter)]) for _ in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert counter.read_text() == "75"


def test_two_objects_of_one_process_exclude_each_other(tmp_path):
    with RunLock(tmp_path), pytest.raises(RunInUseError, match=f"process {os.getpid()} "):
        take(tmp_path)
    take(tmp_path)


def test_a_lock_file_without_text_still_names_the_run(tmp_path):
    with RunLock(tmp_path / "demo"):
        (tmp_path / "demo" / "run.lock").write_text("")
        with pytest.raises(RunInUseError, match="run demo is in use by another process"):
            take(tmp_path / "demo")


def test_the_lock_is_taken_on_a_full_disk(small_disk):
    fill(small_disk)
    take(small_disk)


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=rf"run: must be a folder, and {tmp_path}/file is none\. Move that away"):
        take(tmp_path / "file" / "run")


def test_a_lock_file_that_is_deleted_while_it_is_taken_is_not_the_lock(tmp_path, monkeypatch):
    """Else two takers would each hold a lock on a file of their own."""
    flock = fcntl.flock
    deleted = []

    def delete_first(descriptor: int, operation: int) -> None:
        if not deleted:
            deleted.append(True)
            (tmp_path / "run.lock").unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    with RunLock(tmp_path):
        assert deleted
        with pytest.raises(RunInUseError):
            take(tmp_path)


def test_a_child_that_another_thread_is_starting_keeps_no_lock_that_was_released_everywhere(tmp_path):
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


def test_a_look_at_a_lock_leaves_none_in_a_child_that_is_being_started(tmp_path, monkeypatch):
    path, copies = tmp_path / "run.lock", []
    path.touch()
    close = os.close
    monkeypatch.setattr(os, "close", lambda descriptor: (copies.append(os.dup(descriptor)), close(descriptor)))
    assert holder_of(path) is None
    monkeypatch.undo()
    lock = FileLock(path)
    assert lock.try_acquire()
    lock.release()
    for copy in copies:
        os.close(copy)


def test_a_lock_whose_holder_cannot_be_written_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But on a full disk, where the lock holds without a text."""

    def broken(lock: FileLock, contents: bytes) -> None:
        raise OSError(errno.EIO, "a broken disk")

    with monkeypatch.context() as patched:
        patched.setattr(FileLock, "write", broken)
        with pytest.raises(OSError, match="a broken disk"), RunLock(tmp_path):
            pass
    with RunLock(tmp_path):
        pass
