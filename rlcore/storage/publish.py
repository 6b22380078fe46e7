"""Directories that are whole or absent.

A finished directory is written beside its place, hashed, flushed to the disk and published by one rename, with
`manifest.json` written last inside it. So whoever sees the directory sees all of it, and whoever reads it can check
every byte.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic import JsonValue

from rlcore.errors import DataError, DiskSpaceError, MillraceError
from rlcore.storage.disk import is_out_of_room, out_of_room
from rlcore.storage.exchange import exchange
from rlcore.storage.finished import tell_other_bytes
from rlcore.storage.locks import FileLock
from rlcore.storage.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    in_threads,
    manifest_text,
    read_manifest,
    verify_directory,
)
from rlcore.storage.temporary import OWNER, remove_stale_temporaries, remove_tree, size_bytes, temporary_beside

__all__ = [
    "FileEntry",
    "Manifest",
    "published_directory",
    "read_manifest",
    "remove_stale_temporaries",
    "verify_directory",
    "write_json_atomically",
    "write_text_atomically",
]

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
    """Write a directory: yields a temporary one beside `target`, and renames it into place at the end of the block.

    A killed process leaves a `.tmp-` folder at most, which `remove_stale_temporaries` knows. `manifest` is read after
    the block, so the block may still fill it. If another process has published `target` meanwhile, theirs stays and
    ours is dropped; with `replace` ours takes its place. After an exception nothing is left of the temporary directory
    and the exception goes on. `at` hears what is begun, with its path: a file system that hangs says nothing.

    Raises:
        DiskSpaceError: a write in the block, or the publishing, found no room.
        error: `target` is in the way (not a finished directory), or cannot be written.
    """
    if not replace:
        _require_free_or_finished(target, error)
    temporary, owner = _make_temporary(target, error)
    try:
        yield temporary
        _publish(temporary, target, manifest, replace=replace, error=error, at=at)
        tell_other_bytes(target)
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
        remove_tree(temporary)  # already gone where it was published; the former target where that was replaced


def _make_temporary(target: Path, error: type[MillraceError]) -> tuple[Path, FileLock]:
    temporary = temporary_beside(target)
    owner = FileLock(temporary / OWNER)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        _take(owner)
    except OSError as reason:
        remove_tree(temporary)
        if is_out_of_room(reason):
            raise out_of_room(target, reason) from reason
        raise error(
            f"{target.parent}: cannot be written ({reason}). Make the folder writable, or choose another paths.root."
        ) from reason
    return temporary, owner


def _take(owner: FileLock) -> None:
    """Mark the temporary as alive. Without locks on this file system its process id alone says so."""
    try:
        owner.try_acquire()
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
        _write_file(temporary / MANIFEST, manifest_text(values, entries))
        (temporary / OWNER).unlink(missing_ok=True)
        _flush_directory(temporary)
        at(f"renaming {temporary} to {target.name}")
        _rename_into_place(temporary, target, replace=replace, error=error)
        at(f"flushing the folder {target.parent}")
        _flush_directory(target.parent)
    except OSError as reason:
        if is_out_of_room(reason):
            raise
        raise error(
            f"{target}: cannot be published ({reason}). Was the folder removed, made read-only, or mounted over during "
            "the run? Nothing was changed in it; run again when it is writable."
        ) from reason


def _hash_and_flush(directory: Path, error: type[MillraceError]) -> tuple[FileEntry, ...]:
    """Every file below as the manifest lists it, on the disk together with its folder."""

    def entry_of(path: Path) -> FileEntry:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
            return FileEntry(path.relative_to(directory).as_posix(), os.fstat(file.fileno()).st_size, digest)

    paths = sorted(directory.rglob("*"))
    for path in paths:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise error(f"{path}: only ordinary files can be published; copy what the link points to")
    if (directory / MANIFEST) in paths:
        raise error(f"{directory / MANIFEST}: is written by the publishing itself; leave it out")
    entries = in_threads(entry_of, [path for path in paths if path.is_file() and path != directory / OWNER])
    for folder in [path for path in paths if path.is_dir()]:
        _flush_directory(folder)
    return tuple(sorted(entries, key=lambda entry: entry.name))


def _rename_into_place(temporary: Path, target: Path, *, replace: bool, error: type[MillraceError]) -> None:
    if replace and target.exists():
        if not exchange(temporary, target):
            aside = temporary_beside(target)
            target.rename(aside)
            temporary.rename(target)
            remove_tree(aside)
        return
    try:
        temporary.rename(target)  # fails on a directory that is not empty: a finished one is never overwritten
    except OSError:
        _require_free_or_finished(target, error)
        theirs, ours = read_manifest(target, error=error), read_manifest(temporary, error=error)
        if theirs is None or ours is None:
            raise
        if theirs.files != ours.files:
            log.warning("%s was published by another process meanwhile, with other bytes; theirs is kept", target)


def _require_free_or_finished(target: Path, error: type[MillraceError]) -> None:
    in_the_way = os.path.lexists(target) and not target.is_dir()
    unfinished = target.is_dir() and not os.path.lexists(target / MANIFEST) and _holds_anything(target)
    if in_the_way or unfinished:
        raise error(
            f"{target}: is in the way: it is no finished directory (it has no {MANIFEST}), and may be yours. "
            "Move or delete it, then run again."
        )


def _holds_anything(directory: Path) -> bool:
    try:
        return any(directory.iterdir())
    except OSError:
        return True


def write_text_atomically(path: Path, text: str) -> None:
    """Replace a file by one rename after a flush: a reader sees the old text or the new one, never a part.

    Raises:
        DiskSpaceError: no room; the old file is untouched.
    """
    temporary = temporary_beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_file(temporary, text)
        temporary.replace(path)
        _flush_directory(path.parent)
    except BaseException as reason:
        temporary.unlink(missing_ok=True)
        if is_out_of_room(reason):
            raise out_of_room(path, reason, needed_bytes=len(text.encode())) from reason
        raise


def write_json_atomically(path: Path, value: JsonValue) -> None:
    """`write_text_atomically` of indented JSON. NaN and infinity are no JSON: ValueError."""
    write_text_atomically(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _write_file(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
