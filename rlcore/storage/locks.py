"""Locks by `flock` on an open file. The kernel releases a lock when the process that holds it ends.

This module does not use the package filelock, which truncates a lock file when opening it. A waiting process would then
erase the holder's name from the file."""

import errno
import fcntl
import json
import os
import socket
import sys
import time
from dataclasses import KW_ONLY, asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import psutil

from rlcore.errors import MillraceError, RunInUseError
from rlcore.storage.disk import is_out_of_room, out_of_room, unwritable

POLL_S = 0.1
BIRTH_TOLERANCE_S = 2.0
"""The difference in seconds below which two start times from psutil count as equal. psutil's value for one process can
vary."""
MAX_COMMAND_CHARS = 300
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RUN_LOCK = "run.lock"


class FileLock:
    """A lock by `flock` on a file. A release does not delete the file. After a deletion, one process could hold a lock
    on the deleted file while another process locks a new file at the same path.

    A forked child closes its copy of the descriptor immediately. A child started by exec gets no copy."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def try_acquire(self, *, create: bool = True) -> bool:
        """Acquire the lock without waiting. Return False if another open file holds the lock. Raises OSError if the
        file cannot be opened or its file system does not support locks."""
        assert self._descriptor is None, f"{self.path} is locked by this object already"
        descriptor = os.open(self.path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as reason:
            os.close(descriptor)
            if isinstance(reason, BlockingIOError):
                return False
            raise
        if not self._is_the_file_at_path(descriptor):  # deleted between open and lock
            os.close(descriptor)
            return self.try_acquire(create=create)
        self._descriptor = descriptor
        _held.add(self)
        return True

    def _is_the_file_at_path(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def fileno(self) -> int:
        """Return the file descriptor, which a child process can inherit (`pass_fds`) to keep the lock."""
        assert self._descriptor is not None, "fileno needs the lock"
        return self._descriptor

    def write(self, content: bytes) -> None:
        """Replace the content of the locked file."""
        assert self._descriptor is not None, "write needs the lock"
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, content, 0)

    def release(self, *, everywhere: bool = False) -> None:
        """Release the lock. A child process that has inherited the file descriptor keeps the lock, unless `everywhere`
        is true."""
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self)
        if descriptor is not None:
            if everywhere:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


_held: set[FileLock] = set()
"""References to the acquired locks. They keep each lock alive after all other references to it are gone."""


def _drop_inherited() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_drop_inherited)  # a copy would keep the lock after the holder's death


def start_time_of(process: psutil.Process) -> float:
    """Return a number that distinguishes a process from a later process with the same id.

    On Linux, the number is the seconds from the boot to the start of the process, plus a number derived from the boot
    id, which differs between boots. On other systems, the number is the start time in seconds since 1970."""
    try:
        boot = int(BOOT_ID.read_text()[:8], 16)
        ticks = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return process.create_time()
    return (1 << 32) + boot + ticks / os.sysconf("SC_CLK_TCK")  # above all times of day


def process_of(pid: int, born: float) -> psutil.Process | None:
    """Return the process on this host with this id and start time (`start_time_of`), or None if it has ended."""
    try:
        process = psutil.Process(pid)
        found = start_time_of(process)
        is_same = found == born or (max(found, born) < 1 << 32 and abs(found - born) < BIRTH_TOLERANCE_S)
        return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock. `since`: when it acquired the lock, in UTC and ISO 8601. `born`: the start time of
    the process (`start_time_of`)."""

    pid: int
    host: str
    command: str
    since: str
    born: float = 0.0

    @classmethod
    def me(cls) -> "Holder":
        """Return a `Holder` that describes the current process."""
        command = " ".join(sys.orig_argv)[:MAX_COMMAND_CHARS]
        since = datetime.now(UTC).isoformat("T", "seconds")
        return cls(os.getpid(), socket.gethostname(), command, since, start_time_of(psutil.Process()))

    def process(self) -> psutil.Process | None:
        """Return the holder's process, or None if it has ended or runs on another host."""
        return process_of(self.pid, self.born) if self.host == socket.gethostname() else None

    def __str__(self) -> str:
        # The lock outlives its taker only in a child that was not forked by Python.
        gone = self.host == socket.gethostname() and not psutil.pid_exists(self.pid)
        kept = ", which has ended, but a child of it still runs" if gone else ""
        return f"process {self.pid} on {self.host} since {self.since} ({self.command}){kept}"


UNKNOWN_HOLDER = Holder(0, "an unknown host", "another process that has not written its name yet", "")


def read_holder(path: Path) -> Holder | None:
    """Return the holder that is recorded in a lock file, or None if none is recorded. The holder may have released the
    lock in the meantime."""
    try:
        return Holder(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def holder_of(path: Path) -> Holder | None:
    """Return the current holder of a lock, or None if the lock is free. The lock file need not be writable."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shorter than `HeldLock` tries
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BlockingIOError:
        return read_holder(path) or UNKNOWN_HOLDER
    finally:
        os.close(descriptor)
    return None


@dataclass(eq=False)
class HeldLock(FileLock):
    """A lock whose file records the process that holds it or held it last. Use it as a context manager. A crash
    releases the lock.

    `is_named`: whether this process is recorded in the file. `what`: the name of the locked object in error
    messages."""

    path: Path
    _: KW_ONLY
    what: str
    wait_s: float = 0.0
    error: type[MillraceError] = RunInUseError
    is_named: bool = True

    def __post_init__(self) -> None:
        super().__init__(self.path)

    def __enter__(self) -> Self:
        """Acquire the lock. If it is not free, wait at most `wait_s` seconds, or `POLL_S` if that is longer.
        `POLL_S` is the minimum because `holder_of` in another process takes the lock for a moment.

        Raises `error` if another process still holds the lock, or if the file system does not support locks. Raises
        UnwritableError if the folder cannot be written, and DiskSpaceError if the disk has no room for an empty
        file."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as reason:
            raise unwritable(self.path.parent, reason) from reason
        deadline = time.monotonic() + max(self.wait_s, POLL_S)
        while not self._try():
            if time.monotonic() >= deadline:
                holder = read_holder(self.path) or UNKNOWN_HOLDER.command
                raise self.error(
                    f"{self.what} is in use by {holder}. Wait for it to end, or stop it; lock file: {self.path}"
                )
            time.sleep(POLL_S)
        if self.is_named:
            try:
                self.write(json.dumps(asdict(Holder.me())).encode())
            except OSError as reason:
                # On a full disk the run must still start, since pruning makes room. The lock holds without a text.
                if not is_out_of_room(reason):
                    self.release()
                    raise
        return self

    def _try(self) -> bool:
        try:
            return self.try_acquire()
        except OSError as reason:
            if reason.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR):
                raise unwritable(self.path.parent, reason) from reason
            if is_out_of_room(reason):
                raise out_of_room(self.path, reason) from reason
            raise self.error(
                f"{self.path}: cannot be locked ({reason}), so it is unknown whether {self.what} is in use. Put "
                "paths.root on a file system with locks."
            ) from reason

    def __exit__(self, *error: object) -> None:
        self.release()


class RunLock(HeldLock):
    """The lock of a run's folder. Only one command at a time can hold it. A trainer process can inherit it from the
    command that starts the trainer."""

    def __init__(self, run_dir: Path, *, wait_s: float = 0.0, is_named: bool = True) -> None:
        super().__init__(run_dir / RUN_LOCK, what=f"run {run_dir.name}", wait_s=wait_s, is_named=is_named)
