"""Small files, files of JSON lines, addresses of sqlite files, and names of temporary files."""

import errno
import hashlib
import itertools
import json
import logging
import os
import secrets
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, unquote

from pydantic import TypeAdapter, ValidationError

from rlcore.errors import DataError, DiskSpaceError, TrackingError
from rlcore.storage.disk import free_bytes, is_out_of_room, out_of_room

T = TypeVar("T")

READ_BLOCK_BYTES = 1 << 20
SQLITE = "sqlite:///"
_URI_QUERY = "file:"

log = logging.getLogger(__name__)


def open_ordinary(path: Path) -> BinaryIO:
    """Open an ordinary file for reading. Raises OSError for any other file, such as a FIFO."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no ordinary file", str(path))
    return os.fdopen(descriptor, "rb")


def read_ordinary(path: Path) -> bytes:
    """Return the content of an ordinary file. Raises OSError if it cannot be read or is not an ordinary file."""
    with open_ordinary(path) as file:
        return file.read()


def files_of(folder: Path, pattern: str) -> list[Path]:
    """Return the files in a folder, or [] if it does not exist. Raises OSError if the folder is unreadable."""
    if folder.is_dir():
        os.close(os.open(folder, os.O_RDONLY))
    return list(folder.glob(pattern))


def sha256_of(path: Path, num_bytes: int | None = None) -> str:
    """Return the hex digest of an ordinary file, or of its first `num_bytes`. Raises OSError if it cannot be read."""
    digest = hashlib.sha256()
    left = sys.maxsize if num_bytes is None else num_bytes
    with open_ordinary(path) as file:
        while left > 0 and (block := file.read(min(READ_BLOCK_BYTES, left))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def content_digest(file: Path) -> str:
    """Return the sha256 of a file. A process reads the file again only if the file's size or change time has
    changed."""
    path = file.expanduser().resolve()
    status = path.stat()
    return _digest(path, status.st_size, status.st_ctime_ns)


@lru_cache(maxsize=256)
def _digest(path: Path, size: int, time_ns: int) -> str:
    return sha256_of(path)


def parse_json(content: str | bytes) -> Any:
    """Parse JSON. Raises ValueError, instead of RecursionError, if the JSON is nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def read_document(path: Path, kind: TypeAdapter[T], remedy: str) -> T | None:
    """Return the content of a JSON file, validated and converted by `kind`. Return None if the file is missing. Raises
    DataError, whose message contains `remedy`, if the file is damaged."""
    try:
        return kind.validate_json(read_ordinary(path))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise DataError(f"{path}: cannot be read ({first_problem(error)}); {remedy}") from error


def first_problem(error: Exception) -> str:
    """Describe an error in one line. A ValidationError is described by its first location and message."""
    if not isinstance(error, ValidationError):
        return str(error)
    detail = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, detail['loc'])) or 'content'}: {detail['msg']}"


def sqlite_address(file: Path, scheme: str = SQLITE) -> str:
    """Return the SQLAlchemy address of an sqlite file at an absolute path. `scheme` may name a driver.

    SQLAlchemy ends a path at a `?`, so a path with `?` is written in sqlite's URI form. MLflow needs escaped slashes.

    >>> sqlite_address(Path("/why?/mlflow.db"))
    'sqlite:///file:%2Fwhy%3F%2Fmlflow.db?uri=true'
    """
    text = str(file)
    return f"{scheme}{_URI_QUERY}{quote(text, safe='')}?uri=true" if "?" in text else f"{scheme}{text}"


def sqlite_file(address: str) -> Path:
    """Return the file of an sqlite address.

    >>> sqlite_file("sqlite:///file:%2Fwhy%3F%2Fmlflow.db?uri=true"), sqlite_file("sqlite:///mlflow.db?timeout=5")
    (PosixPath('/why?/mlflow.db'), PosixPath('mlflow.db'))
    """
    text = address.partition(":///")[2].partition("?")[0]
    return Path(unquote(text.removeprefix(_URI_QUERY)) if text.startswith(_URI_QUERY) else text)


def flush_to_disk(path: Path) -> None:
    """Force the bytes of a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- temporaries


def temporary_sibling(path: Path) -> Path:
    """Return a new path `.tmp-<name>-<pid>-<8 hex>` in the folder of `path`, so that a rename to `path` is possible."""
    return path.with_name(f".tmp-{path.name}-{os.getpid()}-{secrets.token_hex(4)}")


class LineFile:
    """A file that grows by whole lines, each appended in a single unbuffered write.

    If the disk has no room for a line, the line stays in memory and is written with the next line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._pending: list[bytes] = []
        self._failure: OSError | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = self._open()
        size = self.size_bytes
        if (whole := _end_of_last_line(path, size)) < size:
            log.warning("%s: cut %d bytes of a line that was never finished", path, size - whole)
            os.ftruncate(self._fd, whole)

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    @property
    def size_bytes(self) -> int:
        """The size of the file on disk. Lines that remain in memory do not count."""
        return os.fstat(self._fd).st_size

    def append(self, value: Mapping[str, object]) -> None:
        """Append one line. On a full disk, keep the line in memory and raise no error."""
        line = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with self._lock:
            self._pending.append(line)
            self._write_pending()

    def require_written(self) -> None:
        """Write the lines that remain in memory after a full disk. Raises DiskSpaceError if lines still remain."""
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
        """Force all lines to the disk and return the size in bytes. Raises DiskSpaceError if lines remain in memory."""
        self.require_written()
        with self._lock:
            os.fsync(self._fd)
            return self.size_bytes

    def _write_pending(self) -> None:
        """Write the lines that remain in memory. A failed or incomplete write leaves the file unchanged."""
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
        """Close the file. If lines remain in memory because the disk was full, first try once more to write them."""
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
        """Truncate the file, and drop the lines in memory. Return a file `<name>.abandoned-<k>.jsonl` with the removed
        lines, or None if no lines are removed.

        A rename replaces the file, so a process that has opened the old file can still read it. Raises TrackingError if
        no line ends at byte `to_bytes`, and DiskSpaceError if there is no room. An error leaves the file unchanged."""
        with self._lock:
            self._write_pending()
            size = self.size_bytes
            if to_bytes == size:
                self._pending.clear()
                return None
            if to_bytes > size or _end_of_last_line(self.path, to_bytes) != to_bytes:
                raise TrackingError(
                    f"{self.path}: cannot be cut to byte {to_bytes} (a checkpoint's), since it has {size} bytes or no "
                    "line ends there. The file was changed or replaced after that checkpoint; restore it."
                )
            names = (f"{self.path.stem}.abandoned-{k}{self.path.suffix}" for k in itertools.count(1))
            aside = next(path for name in names if not (path := self.path.with_name(name)).exists())
            shortened = temporary_sibling(self.path)
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
    """Yield the JSON value (None if unreadable) and the end offset of each complete line from byte `start` on."""
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
