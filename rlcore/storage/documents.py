"""Reading of small files that may be damaged: whatever is wrong with one is an OSError or a ValueError."""

import errno
import hashlib
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from rlcore.errors import DataError

T = TypeVar("T")

READ_BLOCK_BYTES = 1 << 20


def open_ordinary(path: Path) -> BinaryIO:
    """An ordinary file, open for reading.

    Raises:
        OSError: it cannot be opened, or is none: opening a FIFO would wait for a writer, a device may never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no ordinary file", str(path))
    return os.fdopen(descriptor, "rb")


def read_ordinary(path: Path) -> bytes:
    """The content of an ordinary file; raises as `open_ordinary` does."""
    with open_ordinary(path) as file:
        return file.read()


def files_of(folder: Path, pattern: str) -> list[Path]:
    """The files that a pattern finds in a folder; none where it is not there.

    Raises:
        OSError: the folder may not be read, of which `Path.glob` says nothing.
    """
    if folder.is_dir():
        os.close(os.open(folder, os.O_RDONLY))
    return list(folder.glob(pattern))


def find_obstacle(folder: Path) -> Path | None:
    """What takes the place of a folder or of one above it: a file, a link that leads nowhere. None: nothing does."""
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    return None if there.is_dir() else there


def sha256_of(path: Path, num_bytes: int | None = None) -> str:
    """Hex digest of an ordinary file, or of its first `num_bytes`; of all where it is shorter.

    Raises:
        OSError: as `open_ordinary`.
    """
    digest = hashlib.sha256()
    left = sys.maxsize if num_bytes is None else num_bytes
    with open_ordinary(path) as file:
        while left > 0 and (block := file.read(min(READ_BLOCK_BYTES, left))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def parse_json(content: str | bytes) -> Any:
    """The JSON value. Nesting so deep that Python's parser gives up is a ValueError like any other damage."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def read_document(path: Path, kind: TypeAdapter[T], remedy: str = "") -> T | None:
    """A JSON file as a typed value; None where there is no file.

    Raises:
        DataError: it cannot be read, or is of another form. `remedy`: what to do, or what happens without it.
    """
    try:
        return kind.validate_json(read_ordinary(path))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        told = f"{path}: cannot be read ({first_problem(error)})"
        raise DataError(f"{told}; {remedy}" if remedy else told) from error


def first_problem(error: Exception) -> str:
    """What is wrong with a file, in a line: of a ValidationError the first place and its message."""
    if not isinstance(error, ValidationError):
        return str(error)
    detail = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, detail['loc'])) or 'content'}: {detail['msg']}"
