"""The files that a build of one's own has read: a change of one is another dataset.

They are known once the build has run, so their paths are noted beside the datasets, by the build. Seen is
what the build's thread opens through Python; what other processes or native code read (pyarrow, given a path) is not. A
file that is named in `data.options` counts too.
"""

import json
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rlcore.storage.documents import sha256_of
from rlcore.storage.publish import write_json_atomically

_NOT_DATA = (
    "/proc",
    "/sys",
    "/dev",
    *(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib")),
)
_listening: dict[int, tuple[frozenset[str], set[Path]]] = {}
"""By thread: whose reads count, and the files opened so far."""
_is_hooked = False


@contextmanager
def noted_reads(sources: Iterable[str]) -> Iterator[set[Path]]:
    """Inside the block, the set fills with the files, code apart, that functions of these source files open to read.

    They may do it through others, in this thread.
    """
    global _is_hooked
    if not _is_hooked:  # such a hook can never be removed
        sys.addaudithook(_hear)
        _is_hooked = True
    thread = threading.get_ident()
    found = set[Path]()
    _listening[thread] = frozenset(map(os.path.realpath, sources)), found
    try:
        yield found
    finally:
        del _listening[thread]
        found -= {path for path in found if not path.is_file()}


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open" or threading.get_ident() not in _listening:
        return
    path, _, flags = arguments
    if not isinstance(path, str | bytes | os.PathLike) or not isinstance(flags, int) or flags & os.O_ACCMODE:
        return
    sources, found = _listening[threading.get_ident()]
    file = Path(os.path.realpath(os.fsdecode(path)))
    if file.suffix not in (".py", ".pyc") and not str(file).startswith(_NOT_DATA) and _is_called_by(sources):
        found.add(file)


def _is_called_by(sources: frozenset[str]) -> bool:
    """Whether a function of one of these files is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and os.path.realpath(frame.f_code.co_filename) not in sources:
        frame = frame.f_back
    return frame is not None


def known_reads(root: Path, build: str) -> set[Path]:
    """The files that a build (by its fingerprint) read when it last ran under this root."""
    try:
        return {Path(name) for name in json.loads(_file(root, build).read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError):
        return set()


def keep_reads(root: Path, build: str, files: Iterable[Path]) -> None:
    """Note what a build has read."""
    write_json_atomically(_file(root, build), [str(file) for file in sorted(files)])


def _file(root: Path, build: str) -> Path:
    return root / "datasets" / f"reads-{build}.json"


def digests_of(files: Iterable[Path], beside: Path) -> dict[str, str]:
    """sha256 of each file, `missing` where it is gone, by its path below the folder `beside`, or by its name alone."""
    found = {}
    for file in sorted(files):
        name = file.relative_to(beside).as_posix() if file.is_relative_to(beside) else file.name
        found[name] = _sha256(file)
    return found


def _sha256(file: Path) -> str:
    try:
        return sha256_of(file)
    except OSError:
        return "missing"
