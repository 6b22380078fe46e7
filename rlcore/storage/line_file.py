"""A file of lines, one JSON value each, that survives a kill, a full disk and a torn last line."""

import errno
import itertools
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from rlcore.errors import DiskSpaceError, TrackingError
from rlcore.storage.disk import free_bytes, is_out_of_room, out_of_room
from rlcore.storage.documents import READ_BLOCK_BYTES, parse_json
from rlcore.storage.publish import flush_to_disk, temporary_beside

log = logging.getLogger(__name__)


class LineFile:
    """A file that grows by whole lines, each in a single unbuffered write at its end.

    A line that finds no room stays in memory and is written with the next one, so that a full disk costs no value;
    `sync` is where the lack of room is told.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._pending: list[bytes] = []
        self._failure: OSError | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = self._open()
        self._cut_torn_line()

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _cut_torn_line(self) -> None:
        """The next line must not be glued to the half line that a killed process left."""
        size = self.size_bytes
        whole = _end_of_last_line(self.path, size)
        if whole < size:
            log.warning("%s: cut %d bytes of a line that was never finished", self.path, size - whole)
            os.ftruncate(self._fd, whole)

    @property
    def size_bytes(self) -> int:
        """Bytes on disk. Lines that found no room are not in it."""
        return os.fstat(self._fd).st_size

    def append(self, value: Mapping[str, object]) -> None:
        """Add one line. Never raises for lack of room."""
        line = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with self._lock:
            self._pending.append(line)
            self._write_pending()

    def require_written(self) -> None:
        """Write what found no room before.

        Raises:
            DiskSpaceError: lines are still in memory because they could not be written.
        """
        with self._lock:
            self._write_pending()
            if self._pending:
                size = sum(map(len, self._pending))
                error = DiskSpaceError(
                    f"{self.path}: {size} bytes could not be written: {self._failure}. "
                    f"{free_bytes(self.path)} bytes are free on that disk; make room. "
                    "The lines are kept in memory and written as soon as there is room."
                )
                error.needed_bytes = size
                raise error

    def sync(self) -> int:
        """Force everything to the disk and return the size in bytes; raises as `require_written` does."""
        self.require_written()
        with self._lock:
            os.fsync(self._fd)
            return self.size_bytes

    def _write_pending(self) -> None:
        """Write all that waits. After a failed or short write the file is as before: no reader sees half a line."""
        if not self._pending:
            return
        data, before = b"".join(self._pending), self.size_bytes
        try:
            if os.write(self._fd, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._fd, before)
            self._failure = error
            return
        self._pending.clear()

    def close(self) -> None:
        """Write what waits, if there is room, and let go of the file."""
        with self._lock:
            if self._fd >= 0:
                self._write_pending()
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> "LineFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def truncate(self, to_bytes: int) -> Path | None:
        """Go back to the first `to_bytes` bytes. What is cut is kept beside, in `metrics.abandoned-<k>.jsonl`; lines
        that found no room are dropped.

        The shortened journal is a new file put in the place of the old one, so that a reader that has the old one open
        reads on undisturbed.

        Returns:
            The file with the cut lines; None if nothing was cut.

        Raises:
            TrackingError: the journal is shorter, or no line ends at that byte.
            DiskSpaceError: no room for what is cut; the journal is as it was.
        """
        with self._lock:
            self._write_pending()
            size = self.size_bytes
            if to_bytes == size:
                self._pending.clear()
                return None
            if to_bytes > size or _end_of_last_line(self.path, to_bytes) != to_bytes:
                raise TrackingError(
                    f"{self.path}: asked to go back to byte {to_bytes} (a checkpoint's), but the file has {size} bytes "
                    "or no line ends there. The file was changed or replaced since that checkpoint; put it back."
                )
            names = (f"{self.path.stem}.abandoned-{k}{self.path.suffix}" for k in itertools.count(1))
            aside = next(path for name in names if not (path := self.path.with_name(name)).exists())
            shortened = temporary_beside(self.path)
            try:
                _copy_range(self.path, to_bytes, size, aside)
                _copy_range(self.path, 0, to_bytes, shortened)
            except OSError as reason:
                for unfinished in (aside, shortened):
                    unfinished.unlink(missing_ok=True)
                if is_out_of_room(reason):
                    raise out_of_room(self.path, reason, needed_bytes=size) from reason
                raise
            os.close(self._fd)
            shortened.replace(self.path)
            flush_to_disk(self.path.parent)
            self._fd = self._open()
            self._pending.clear()
            return aside


def iter_json(fd: int, start: int) -> Iterator[tuple[object, int]]:
    """Each whole line from a byte on as (its JSON value, the byte after it); the value is None if unreadable."""
    rest, offset = b"", start
    while block := os.pread(fd, READ_BLOCK_BYTES, offset + len(rest)):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            offset += len(line) + 1
            value = None
            with suppress(ValueError):
                value = parse_json(line)
            yield value, offset


def _end_of_last_line(path: Path, size: int) -> int:
    """The byte after the last newline within the first `size` bytes."""
    with path.open("rb") as file:
        end = size
        while end > 0:
            start = max(0, end - READ_BLOCK_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def _copy_range(source: Path, start: int, stop: int, target: Path) -> None:
    with source.open("rb") as reader, target.open("wb") as writer:
        reader.seek(start)
        left = stop - start
        while left > 0 and (block := reader.read(min(READ_BLOCK_BYTES, left))):
            writer.write(block)
            left -= len(block)
        writer.flush()
        os.fsync(writer.fileno())
