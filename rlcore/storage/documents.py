"""Functions that read small files, and addresses of sqlite files. Damaged files raise OSError or ValueError."""

import errno
import hashlib
import json
import os
import stat
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, unquote

from pydantic import TypeAdapter, ValidationError

from rlcore.errors import DataError

T = TypeVar("T")

READ_BLOCK_BYTES = 1 << 20
SQLITE = "sqlite:///"
_URI_QUERY = "file:"


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


def find_obstacle(folder: Path) -> Path | None:
    """Return the file or broken link at the path of a folder or of one of its parents, or None."""
    folder = folder.absolute()
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    return None if nearest.is_dir() else nearest


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
    """Return the sha256 of a file. In a process, the file is read again only if its size or change time has changed."""
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


def read_document(path: Path, kind: TypeAdapter[T], remedy: str = "") -> T | None:
    """Return a JSON file as a typed value, or None if it is missing. Raises DataError with `remedy` if damaged."""
    try:
        return kind.validate_json(read_ordinary(path))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        problem = f"{path}: cannot be read ({first_problem(error)})"
        raise DataError(f"{problem}; {remedy}" if remedy else problem) from error


def first_problem(error: Exception) -> str:
    """Describe an error in one line. A ValidationError is described by its first location and message."""
    if not isinstance(error, ValidationError):
        return str(error)
    detail = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, detail['loc'])) or 'content'}: {detail['msg']}"


def sqlite_address(file: Path, scheme: str = SQLITE) -> str:
    """Return the SQLAlchemy address of an sqlite file at an absolute path. `scheme` may name a driver.

    SQLAlchemy ends a path at a `?`, so a path that contains `?` is written in sqlite's URI form, with slashes escaped
    for MLflow.

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
