"""Locks that a crash frees: `flock` on an open file, so the kernel releases them when the holder dies.

Not the filelock package: it truncates the file when it opens it, and a contender would so erase who holds the lock.
"""

import errno
import fcntl
import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import psutil

from rlcore.errors import MillraceError, RunInUseError
from rlcore.storage.disk import is_out_of_room, out_of_room, unwritable

POLL_S = 0.1
BIRTH_TOLERANCE_S = 2.0
"""Of a time of day, which psutil computes from the time of boot that it reads each time."""
# A command line can hold a whole program; its beginning is enough to know it by.
MAX_COMMAND_CHARS = 300


class FileLock:
    """One `flock` on one file. The file stays on disk after release: deleting it would let two takers each lock a file.

    A forked child does not keep the lock: it closes its copy of the descriptor at once. A child that was started by
    exec never gets one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def try_acquire(self, *, create: bool = True) -> bool:
        """Take the lock without waiting; False where another open file holds it.

        Without `create` the file must be there.

        Raises:
            OSError: the file cannot be opened, or its file system has no locks.
        """
        assert self._descriptor is None, f"{self.path} is locked by this object already"
        descriptor = os.open(self.path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except BaseException:
            os.close(descriptor)
            raise
        if not self._is_the_file_at_path(descriptor):
            os.close(descriptor)  # it was deleted between open and lock: the next taker would lock a new one
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
        """The descriptor, for a child that shall keep the lock: `pass_fds` of a subprocess."""
        assert self._descriptor is not None, "fileno needs the lock"
        return self._descriptor

    def write(self, content: bytes) -> None:
        """Replace what the locked file says."""
        assert self._descriptor is not None, "write needs the lock"
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, content, 0)

    def release(self, *, everywhere: bool = False) -> None:
        """Release the lock; a child that was given its descriptor keeps it. Safe to call twice.

        `everywhere`: no child keeps it. One that another thread is starting has a copy until it runs its program.
        """
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self)
        if descriptor is not None:
            if everywhere:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


# Strong references: a descriptor outlives an object that nobody names any more.
_held: set[FileLock] = set()


def _drop_inherited() -> None:
    """In a forked child: a copy of the descriptor would keep the lock alive after the holder's death."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_drop_inherited)


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def start_time_of(process: psutil.Process) -> float:
    """A number by which a process is known from a later one with its id.

    Linux: the seconds from the boot to its start, plus a number made of the boot's id. Elsewhere it is the time of day
    at its start, which changes where the clock is set, as after a laptop's sleep.
    """
    try:
        boot = int(BOOT_ID.read_text()[:8], 16)
        ticks = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return process.create_time()
    return (1 << 32) + boot + ticks / os.sysconf("SC_CLK_TCK")  # beyond all times of day


def process_of(pid: int, born: float) -> psutil.Process | None:
    """The process of this host with that id, while it lives. Another process may have the id by now: that is not it.

    `born`: its `start_time_of`.
    """
    try:
        process = psutil.Process(pid)
        found = start_time_of(process)
        is_it = found == born or (max(found, born) < 1 << 32 and abs(found - born) < BIRTH_TOLERANCE_S)
        return process if is_it and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock. `since`: UTC, ISO 8601. `born`: see `process_of`."""

    pid: int
    host: str
    command: str
    since: str
    born: float = 0.0

    @classmethod
    def me(cls) -> "Holder":
        """This process as the holder of a lock."""
        command = " ".join(sys.orig_argv)[:MAX_COMMAND_CHARS]
        since = datetime.now(UTC).isoformat("T", "seconds")
        return cls(os.getpid(), socket.gethostname(), command, since, start_time_of(psutil.Process()))

    def process(self) -> psutil.Process | None:
        """The process itself, if it is one of this host and lives."""
        return process_of(self.pid, self.born) if self.host == socket.gethostname() else None

    def __str__(self) -> str:
        # The lock outlives its taker only in a child that was forked past Python's own fork.
        gone = self.host == socket.gethostname() and not psutil.pid_exists(self.pid)
        kept = ", which has ended, but a child of it lives on" if gone else ""
        return f"process {self.pid} on {self.host} since {self.since} ({self.command}){kept}"


def read_holder(path: Path) -> Holder | None:
    """What the lock file says; None where it says nothing (yet). The lock itself, not the text, is the truth."""
    try:
        return Holder(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


UNKNOWN_HOLDER = Holder(0, "an unknown host", "another process that has not said its name yet", "")


def holder_of(path: Path) -> Holder | None:
    """Who holds the lock now; None where nobody does. Waits for nothing, and needs no permission to write."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment; `HeldLock` tries longer than that
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BlockingIOError:
        return read_holder(path) or UNKNOWN_HOLDER
    finally:
        os.close(descriptor)
    return None


class HeldLock:
    """A lock whose file says who holds it, or did last. A context manager; a crash frees it."""

    def __init__(
        self,
        path: Path,
        *,
        what: str,
        wait_s: float = 0.0,
        error: type[MillraceError] = RunInUseError,
        is_named: bool = True,
    ) -> None:
        """`is_named`: the file says that this process holds the lock; otherwise it says who did before."""
        self.path = path
        self._is_named = is_named
        self._lock = FileLock(path)
        self._what = what
        self._wait_s = wait_s
        self._error = error

    def __enter__(self) -> Self:
        """Take the lock, waiting up to `wait_s` seconds, and at least as long as `holder_of` may have it.

        Raises:
            RunInUseError (or the class given): another process holds it, or this file system has no locks.
            DataError: the folder cannot be written.
            DiskSpaceError: not even an empty file finds room.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as reason:
            raise unwritable(self.path.parent, reason) from reason
        deadline = time.monotonic() + max(self._wait_s, POLL_S)
        while not self._try():
            if time.monotonic() >= deadline:
                holder = read_holder(self.path) or UNKNOWN_HOLDER.command
                raise self._error(
                    f"{self._what} is in use by {holder}. Wait for it to end, or stop it; lock file: {self.path}"
                )
            time.sleep(POLL_S)
        if self._is_named:
            self._write_holder()
        return self

    def fileno(self) -> int:
        """The descriptor, see `FileLock.fileno`."""
        return self._lock.fileno()

    def _try(self) -> bool:
        try:
            return self._lock.try_acquire()
        except OSError as reason:
            if reason.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR):
                raise unwritable(self.path.parent, reason) from reason
            if is_out_of_room(reason):
                raise out_of_room(self.path, reason) from reason
            raise self._error(
                f"{self.path}: cannot be locked ({reason}), so nothing can tell whether {self._what} is in use. Put "
                "paths.root on a file system with locks."
            ) from reason

    def _write_holder(self) -> None:
        try:
            self._lock.write(json.dumps(asdict(Holder.me())).encode())
        except OSError as reason:
            # On a full disk the run must still start: pruning is what makes room. The lock holds without a text.
            if not is_out_of_room(reason):
                self._lock.release()
                raise

    def __exit__(self, *error: object) -> None:
        self._lock.release()


RUN_LOCK = "run.lock"


class RunLock(HeldLock):
    """One command at a time works on a run: `run.lock` in its folder. A trainer process that the command starts
    inherits the lock (`fileno`), so it outlives the command until that process has ended."""

    def __init__(self, run_dir: Path, *, wait_s: float = 0.0, is_named: bool = True) -> None:
        super().__init__(run_dir / RUN_LOCK, what=f"run {run_dir.name}", wait_s=wait_s, is_named=is_named)
