"""The file `manifest.json` of a published directory, its verification, and the reuse of finished directories.

A directory's files are hashed at its first verification in a process. Later verifications hash them again only if a
size, time or inode has changed."""

import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import JsonValue

from rlcore.errors import DataError, MillraceError
from rlcore.storage.documents import parse_json, read_ordinary, sha256_of

S = TypeVar("S")
R = TypeVar("R")
Stamp = tuple[int, int, int, int]

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
PARTS_KEY = "parts"
"""The manifest key for the names of the sibling folders that a data mixture combines, in order."""
FINGERPRINT = "fingerprint"
"""The manifest key for the directory's fingerprint, which must equal the directory's name."""
FILE_SHA256 = "file_sha256"
"""The manifest key for the SHA-256 digest of the file from which tokenized demonstrations were built."""
RESERVED = frozenset({"format_version", "files", "manifest_sha256"})
MAX_HASH_THREADS = 8
SETTLED_NS = 1_000_000_000
"""The minimum age in nanoseconds at which a file's hash is remembered. A younger file can change again without a new
time stamp."""
DAMAGED, LEFT = "damaged", "left"
"""The labels that `set_aside` adds to folder names: for damaged folders, and for results of steps that a resumed run
repeats."""

log = logging.getLogger(__name__)
_hashed: dict[Path, list[Stamp]] = {}


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a published directory: its path in the directory (with /), its size and its sha256."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `manifest.json`: the list of all files, and the values that the publisher has added."""

    values: Mapping[str, Any]
    files: tuple[FileEntry, ...]

    @property
    def size_bytes(self) -> int:
        """The total bytes of the listed files."""
        return sum(entry.size_bytes for entry in self.files)


def manifest_text(values: Mapping[str, JsonValue], entries: tuple[FileEntry, ...]) -> str:
    """Return the text of a manifest, including a digest of the manifest."""
    taken = RESERVED & set(values)
    assert not taken, f"manifest keys {sorted(taken)} are the manifest's own"
    files: list[JsonValue] = [asdict(entry) for entry in entries]
    document: dict[str, JsonValue] = {**values, "format_version": FORMAT_VERSION, "files": files}
    document["manifest_sha256"] = manifest_digest(document)
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def manifest_digest(document: Mapping[str, Any]) -> str:
    """Return the digest of a manifest without its entry `manifest_sha256`. The layout of the text has no effect."""
    body = {key: value for key, value in document.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def read_manifest(directory: Path, *, error: type[MillraceError] = DataError) -> Manifest | None:
    """Return the manifest of a directory, or None if the directory is unfinished. Raises `error` if the manifest cannot
    be read, is damaged, or has another format version."""
    path = directory / MANIFEST
    again = f"delete {directory} and make it again"
    try:
        content = read_ordinary(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as reason:
        raise error(f"{path}: cannot be read ({reason}). Restore it as a readable file, or {again}.") from reason
    try:
        document = parse_json(content)
        version = document["format_version"]
    except (ValueError, KeyError, TypeError) as reason:
        raise error(f"{path}: is damaged: not a manifest ({reason!r}). To continue, {again}.") from None
    if version != FORMAT_VERSION:
        raise error(
            f"{path}: format_version must be {FORMAT_VERSION}, got {version!r}. Read it with the version of Millrace "
            f"that wrote it, or {again}."
        )
    try:
        if document["manifest_sha256"] != manifest_digest(document):
            raise ValueError("manifest_sha256 does not fit its content")
        files = tuple(FileEntry(**entry) for entry in document["files"])
    except (ValueError, KeyError, TypeError) as reason:
        raise error(f"{path}: is damaged: {reason}. To continue, {again}.") from None
    values = {key: value for key, value in document.items() if key not in RESERVED}
    return Manifest(MappingProxyType(values), files)


def newer_format(directory: Path, name: str = MANIFEST, known: int = FORMAT_VERSION) -> int | None:
    """Return the format version in the file `name` of a directory if the version is above `known`. Return None for any
    other version, or if the file cannot be read."""
    try:
        version = parse_json(read_ordinary(directory / name))["format_version"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, int) and version > known else None


def verify_directory(directory: Path, *, hashes: bool = True, error: type[MillraceError] = DataError) -> Manifest:
    """Return the directory's manifest. Raise `error` unless every file in the manifest exists with the listed size and,
    if `hashes` is true, with the listed SHA-256."""
    manifest = read_manifest(directory, error=error)
    if manifest is None:
        raise error(f"{directory}: missing: {MANIFEST}, so it was never finished. Delete the folder and make it again.")
    in_threads(lambda entry: _verify_file(directory, entry, hashes=hashes, error=error), manifest.files)
    return manifest


def _verify_file(directory: Path, entry: FileEntry, *, hashes: bool, error: type[MillraceError]) -> None:
    path, remedy = directory / entry.name, f"Delete {directory} and make it again, or restore the file."
    inside = PurePosixPath(entry.name)
    if inside.is_absolute() or ".." in inside.parts:
        raise error(f"{directory / MANIFEST}: file names must be inside the directory, got {entry.name!r}. {remedy}")
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{path}: must be an ordinary file. {remedy}")
        if status.st_size != entry.size_bytes:
            raise error(f"{path}: size must be {entry.size_bytes} bytes, got {status.st_size}. {remedy}")
        if not hashes:
            return
        digest = sha256_of(path)
    except (FileNotFoundError, NotADirectoryError):
        raise error(f"{path}: missing: the manifest lists it. {remedy}") from None
    except OSError as reason:
        raise error(f"{path}: cannot be read ({reason}). {remedy}") from reason
    if digest != entry.sha256:
        raise error(f"{path}: hash must be sha256 {entry.sha256[:12]}..., got {digest[:12]}... {remedy}")


def in_threads(do: Callable[[S], R], items: Iterable[S]) -> list[R]:
    """Call `do` on each item in threads, and return the results in order. Raises the error of the first failed item."""
    with ThreadPoolExecutor(min(MAX_HASH_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(do, items))


def part_directories(directory: Path) -> tuple[Path, ...]:
    """Return the dataset folders that a data mixture combines, or only `directory` itself if it is not a mixture."""
    manifest = read_manifest(directory)
    names = [] if manifest is None else manifest.values.get(PARTS_KEY, [])
    return tuple(directory.parent / str(name) for name in names) or (directory,)


# ---------------------------------------------------------------- finished directories


def read_finished(directory: Path, *, error: type[MillraceError] = DataError) -> Manifest | None:
    """Return the manifest of an intact published directory, or None if it was never finished. Raises `error` if the
    directory is damaged, cannot be read, or has another format version."""
    manifest = read_manifest(directory, error=error)
    if manifest is None:
        return None
    name = manifest.values.get(FINGERPRINT, directory.name)
    if name != directory.name:
        raise error(f"{directory}: is the folder of {name} under another name. Rename it back, or delete it.")
    begun_ns = time.time_ns()
    stamps = _stamps(directory, manifest)
    if stamps and _hashed.get(directory) == stamps:
        return manifest
    verify_directory(directory, error=error)
    if stamps and max(max(changed, modified) for changed, modified, _, _ in stamps) < begun_ns - SETTLED_NS:
        _hashed[directory] = stamps
    return manifest


def read_finished_or_reason(directory: Path, *, error: type[MillraceError] = DataError) -> tuple[Manifest | None, str]:
    """Return (manifest, '') for an intact directory, (None, reason) for a damaged directory, and (None, '') for an
    unfinished directory. Raises `error` if the directory has a newer format, which is not damage."""
    try:
        return read_finished(directory, error=error), ""
    except error as damage:
        if newer_format(directory) is not None:
            raise
        return None, str(damage)


def read_finished_or_set_aside(directory: Path, *, error: type[MillraceError] = DataError) -> Manifest | None:
    """Return the manifest of an intact directory, otherwise None. A damaged directory is renamed (`set_aside`). Raises
    `error` for a newer format, or if the renaming fails."""
    manifest, damage = read_finished_or_reason(directory, error=error)
    if damage:
        set_aside(directory, DAMAGED, f"{damage} It is made again now", error=error)
    return manifest


def set_aside(path: Path, label: str, why: str, *, error: type[MillraceError] = DataError) -> Path:
    """Rename a path to `<name>.<label>.<k>` with the first free number k, log the reason, and return the new path.
    Raises `error` if the renaming fails."""
    names = (path.with_name(f"{path.name}.{label}.{number}") for number in count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    try:
        path.rename(aside)
    except OSError as reason:
        raise error(f"{why}; {path} cannot be renamed ({reason}). Move it away, then run again.") from reason
    log.warning("%s: it is kept as %s", why, aside.name)
    return aside


def _stamps(directory: Path, manifest: Manifest) -> list[Stamp]:
    try:
        files = [(directory / name).stat() for name in (MANIFEST, *(entry.name for entry in manifest.files))]
    except OSError:
        return []
    return [(file.st_ctime_ns, file.st_mtime_ns, file.st_ino, file.st_size) for file in files]
