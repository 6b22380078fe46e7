"""`manifest.json`: what a published directory says of itself, and the check that it is true."""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import JsonValue

from rlcore.errors import DataError, MillraceError
from rlcore.storage.documents import parse_json, read_ordinary, sha256_of

S = TypeVar("S")
R = TypeVar("R")

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
PARTS_KEY = "parts"
"""Entry of a mixture's manifest: names of the folders beside it that it stands for, in order."""
# What the manifest says itself; a publisher's values may not use these names.
RESERVED = frozenset({"format_version", "files", "manifest_sha256"})
# sha256 lets go of the interpreter's lock: more threads read a large checkpoint at the disk's speed.
MAX_HASH_THREADS = 8


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a published directory: its path inside (with /), size and sha256."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `manifest.json` says: the publisher's own values, and every file."""

    values: Mapping[str, Any]
    files: tuple[FileEntry, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all listed files."""
        return sum(entry.size_bytes for entry in self.files)


def manifest_text(values: Mapping[str, JsonValue], entries: tuple[FileEntry, ...]) -> str:
    """The manifest as it is written, with a digest of itself."""
    taken = RESERVED & set(values)
    assert not taken, f"manifest keys {sorted(taken)} are the manifest's own"
    document: dict[str, JsonValue] = {
        **values,
        "format_version": FORMAT_VERSION,
        "files": [{"name": entry.name, "size_bytes": entry.size_bytes, "sha256": entry.sha256} for entry in entries],
    }
    document["manifest_sha256"] = manifest_digest(document)
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def manifest_digest(document: Mapping[str, Any]) -> str:
    """Digest of the manifest but for itself, independent of layout: a flipped bit in the manifest is found too."""
    body = {key: value for key, value in document.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def read_manifest(directory: Path, *, error: type[MillraceError] = DataError) -> Manifest | None:
    """What the directory says of itself; None where there is no manifest, so no finished directory.

    Raises:
        error: the manifest cannot be read, is damaged, or of a newer format.
    """
    path = directory / MANIFEST
    try:
        content = read_ordinary(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as reason:
        raise error(
            f"{path}: cannot be read ({reason}). Give it back as an ordinary file that may be read, or delete "
            f"{directory} and make it again."
        ) from reason
    try:
        document = parse_json(content)
        version = document["format_version"]
    except (ValueError, KeyError, TypeError) as reason:
        raise error(f"{path}: is damaged: not a manifest ({reason!r}). Delete {directory} and make it again.") from None
    if version != FORMAT_VERSION:
        raise error(
            f"{path}: format_version must be {FORMAT_VERSION}, got {version!r}. Read it with the version of Millrace "
            f"that wrote it, or delete {directory} and make it again."
        )
    try:
        if document["manifest_sha256"] != manifest_digest(document):
            raise ValueError("manifest_sha256 does not fit its content")
        files = tuple(FileEntry(**entry) for entry in document["files"])
    except (ValueError, KeyError, TypeError) as reason:
        raise error(f"{path}: is damaged: {reason}. Delete {directory} and make it again.") from None
    values = {key: value for key, value in document.items() if key not in RESERVED}
    return Manifest(MappingProxyType(values), files)


def newer_format(directory: Path, name: str = MANIFEST, known: int = FORMAT_VERSION) -> int | None:
    """The format version of a directory that a newer Millrace has written, by a file in it; None for any other."""
    try:
        version = parse_json(read_ordinary(directory / name))["format_version"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, int) and version > known else None


def verify_directory(directory: Path, *, hashes: bool = True, error: type[MillraceError] = DataError) -> Manifest:
    """Check every listed file: presence, size, and (with `hashes`) its sha256.

    Raises:
        error: names the file, the rule it breaks, the value found, and what to do.
    """
    manifest = read_manifest(directory, error=error)
    if manifest is None:
        raise error(f"{directory}: missing: {MANIFEST}, so it was never finished. Delete the folder and make it again.")
    in_threads(lambda entry: _verify_file(directory, entry, hashes=hashes, error=error), manifest.files)
    return manifest


def _verify_file(directory: Path, entry: FileEntry, *, hashes: bool, error: type[MillraceError]) -> None:
    path, remedy = directory / entry.name, f"Delete {directory} and make it again, or restore the file."
    inside = PurePosixPath(entry.name)
    if inside.is_absolute() or ".." in inside.parts:
        raise error(f"{directory / MANIFEST}: file names must lie inside the directory, got {entry.name!r}. {remedy}")
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise error(f"{path}: must be an ordinary file. {remedy}")
        if found.st_size != entry.size_bytes:
            raise error(f"{path}: size must be {entry.size_bytes} bytes, got {found.st_size}. {remedy}")
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
    """`do` of every item, results in order; the first error in that order is raised."""
    with ThreadPoolExecutor(min(MAX_HASH_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(do, items))


def part_directories(directory: Path) -> tuple[Path, ...]:
    """The folders that a mixture of datasets stands for; of any other folder, itself."""
    manifest = read_manifest(directory)
    names = [] if manifest is None else manifest.values.get(PARTS_KEY, [])
    return tuple(directory.parent / str(name) for name in names) or (directory,)
