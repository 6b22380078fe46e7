"""The publication of directories, which appear under their final names only when they are complete.

A directory is written under a temporary name, hashed, flushed to disk and renamed into place, with `manifest.json`."""

import ctypes
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO

import psutil
from pydantic import JsonValue

from rlcore.errors import DataError, DiskSpaceError, MillraceError
from rlcore.storage.disk import is_out_of_room, out_of_room, unwritable
from rlcore.storage.documents import flush_to_disk, sha256_of, temporary_sibling
from rlcore.storage.locks import FileLock
from rlcore.storage.manifest import MANIFEST, FileEntry, in_threads, manifest_text, read_manifest

OWNER = ".owner.lock"
TEMPORARY = re.compile(r"^\.tmp-.+-(?P<pid>\d+)-[0-9a-f]{8}$")
YOUNG_S = 60.0
"""An unlocked temporary folder older than this many seconds is stale, even if a running process has the id in the
folder's name. The creator of a younger folder may not have locked it yet."""
YOUNG_FILE_S = 3_600.0
CHECK_INTERVAL_S = 0.001
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

log = logging.getLogger(__name__)


@contextmanager
def published_directory(
    target: Path,
    manifest: Mapping[str, JsonValue],
    *,
    replace: bool = False,
    error: type[MillraceError] = DataError,
    at: Callable[[str], None] = lambda what: None,
) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to `target` at the end of the `with` block.

    A kill leaves at most a `.tmp-` folder, which `remove_stale_temporaries` removes. If another process publishes
    `target` during the block, the other process's directory is kept, unless `replace` is true. `manifest`: values for
    `manifest.json`. They are read after the block, so the block can change them. `at`: a function that is called with
    the description of each stage of the publication. Raises DiskSpaceError if there is no room. Raises `error` if
    `target` cannot be written, or if it exists and is not a finished directory."""
    if not replace:
        _require_free_or_finished(target, error)
    temporary, owner = _make_temporary(target, error)
    try:
        yield temporary
        _publish(temporary, target, manifest, replace=replace, error=error, at=at)
    except DiskSpaceError:
        raise
    except BaseException as reason:
        if not is_out_of_room(reason):
            raise
        written = size_bytes(temporary)
        remove_tree(temporary)
        raise out_of_room(target, reason, needed_bytes=written or None) from reason
    finally:
        owner.release()
        remove_tree(temporary)  # holds the former target where that was replaced


def _make_temporary(target: Path, error: type[MillraceError]) -> tuple[Path, FileLock]:
    remove_stale_temporaries(target.parent, of=target.name)
    temporary = temporary_sibling(target)
    owner = FileLock(temporary / OWNER)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        _take(owner)
    except OSError as reason:
        remove_tree(temporary)
        if is_out_of_room(reason):
            raise out_of_room(target, reason) from reason
        raise unwritable(target.parent, reason, error) from reason
    return temporary, owner


def _take(owner: FileLock) -> None:
    """Lock the temporary folder. If the file system does not support locks, do nothing. Other processes then recognize
    the owner only by the process id in the folder's name."""
    try:
        while not owner.try_acquire():  # another process checks whether it is stale
            time.sleep(CHECK_INTERVAL_S)
    except OSError as reason:
        if is_out_of_room(reason):
            raise
        log.debug("no lock on %s: %s", owner.path, reason)


def _publish(
    temporary: Path,
    target: Path,
    values: Mapping[str, JsonValue],
    *,
    replace: bool,
    error: type[MillraceError],
    at: Callable[[str], None],
) -> None:
    try:
        at(f"hashing and flushing the files in {temporary}")
        entries = _hash_and_flush(temporary, error)
        (temporary / MANIFEST).write_text(manifest_text(values, entries), encoding="utf-8", newline="\n")
        flush_to_disk(temporary / MANIFEST)
        (temporary / OWNER).unlink(missing_ok=True)
        flush_to_disk(temporary)
        at(f"renaming {temporary} to {target.name}")
        _rename_into_place(temporary, target, replace=replace, error=error)
        at(f"flushing the folder {target.parent}")
        flush_to_disk(target.parent)
    except OSError as reason:
        if is_out_of_room(reason):
            raise
        raise error(
            f"{target}: cannot be published ({reason}). Was the folder removed, made read-only, or mounted over during "
            "the run? Nothing was changed in it; run again when it is writable."
        ) from reason


def _hash_and_flush(directory: Path, error: type[MillraceError]) -> tuple[FileEntry, ...]:
    def entry_of(path: Path) -> FileEntry:
        entry = FileEntry(path.relative_to(directory).as_posix(), path.stat().st_size, sha256_of(path))
        flush_to_disk(path)
        return entry

    paths = sorted(directory.rglob("*"))
    for path in paths:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise error(f"{path}: only ordinary files can be published; copy the file that the link points to")
    if (directory / MANIFEST) in paths:
        raise error(f"{directory / MANIFEST}: is written by the publishing itself; leave it out")
    entries = in_threads(entry_of, [path for path in paths if path.is_file() and path != directory / OWNER])
    for folder in [path for path in paths if path.is_dir()]:
        flush_to_disk(folder)
    return tuple(sorted(entries, key=lambda entry: entry.name))


def _rename_into_place(temporary: Path, target: Path, *, replace: bool, error: type[MillraceError]) -> None:
    if replace and target.exists():
        if not exchange(temporary, target):
            aside = temporary_sibling(target)
            target.rename(aside)
            temporary.rename(target)
            remove_tree(aside)
        return
    try:
        temporary.rename(target)  # fails on a directory with content: a finished one is never overwritten
    except OSError:
        _require_free_or_finished(target, error)
        theirs, ours = read_manifest(target, error=error), read_manifest(temporary, error=error)
        if theirs is None or ours is None:
            raise
        if theirs.files != ours.files:
            log.warning("%s was published by another process meanwhile, with other bytes; theirs is kept", target)


def _require_free_or_finished(target: Path, error: type[MillraceError]) -> None:
    is_file = os.path.lexists(target) and not target.is_dir()
    is_unfinished = target.is_dir() and not os.path.lexists(target / MANIFEST) and _has_content(target)
    if is_file or is_unfinished:
        raise error(
            f"{target}: is in the way: it is no finished directory (it has no {MANIFEST}), and may be yours. "
            "Move or delete it, then run again."
        )


def _has_content(directory: Path) -> bool:
    try:
        return any(directory.iterdir())
    except OSError:
        return True


# ---------------------------------------------------------------- single files


@contextmanager
def replaced_file(path: Path, needed_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Yield a new file, which is flushed to disk at the end of the block and then renamed to `path`.

    If an error occurs, the old file at `path` stays unchanged. Raises DiskSpaceError, whose message contains
    `needed_bytes`, if there is no room. Raises UnwritableError if the folder cannot be written."""
    temporary = temporary_sibling(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        flush_to_disk(path.parent)
    except BaseException as reason:
        with suppress(OSError):
            temporary.unlink()
        if is_out_of_room(reason):
            raise out_of_room(path, reason, needed_bytes=needed_bytes) from reason
        if isinstance(reason, OSError) and not isinstance(reason, IsADirectoryError):
            raise unwritable(path.parent, reason) from reason
        raise


def write_text_atomically(path: Path, text: str) -> None:
    """Replace the content of a file by a UTF-8 text. The old content is kept if an error occurs (`replaced_file`)."""
    content = text.encode()
    with replaced_file(path, len(content)) as file:
        file.write(content)


def write_json_atomically(path: Path, value: JsonValue) -> None:
    """Replace the content of a file by indented JSON, as `write_text_atomically` does. Raises ValueError if the value
    contains NaN or infinity."""
    write_text_atomically(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_secret_once(path: Path, secret: str) -> None:
    """Write `secret` into a new file that only its owner can read. If the file already exists, do nothing."""
    with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=path.name) as file:  # of mode 0600
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
        try:
            os.link(file.name, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as own:
                own.write(secret)


def remove_tree(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):  # unlink on a read-only file system fails for a missing file too
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def size_bytes(directory: Path) -> int:
    """Return the total bytes of all files below a folder."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def remove_stale_temporaries(parent: Path, *, of: str | None = None) -> tuple[Path, ...]:
    """Remove the temporary files and folders (`.tmp-*`) that ended processes have left in `parent`, and return their
    paths. `of`: remove only those that were made for this target name."""
    if not parent.is_dir():
        return ()
    prefix = ".tmp-" if of is None else f".tmp-{of}-"
    stale = [path for path in sorted(parent.iterdir()) if path.name.startswith(prefix) and _is_stale(path)]
    for path in stale:
        log.info("removing %s, left by a process that has ended", path)
        remove_tree(path)
    return tuple(stale)


def _is_stale(path: Path) -> bool:
    """Return whether a temporary path can be removed: it is unlocked, and it is old or the process that created it has
    ended."""
    match = TEMPORARY.match(path.name)
    if match is None:
        return False
    dead = not psutil.pid_exists(int(match["pid"]))
    if path.is_dir() and (path / OWNER).exists():
        owner = FileLock(path / OWNER)
        try:
            if not owner.try_acquire(create=False):
                return False
        except FileNotFoundError:  # it is being published now
            return False
        except OSError:
            return dead
        owner.release()
    try:
        return dead or time.time() - path.stat().st_mtime > (YOUNG_S if path.is_dir() else YOUNG_FILE_S)
    except FileNotFoundError:  # published or removed meanwhile
        return False


def exchange(a: Path, b: Path) -> bool:
    """Swap two paths of one file system atomically (Linux renameat2). Return False if the system cannot do this."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0)
