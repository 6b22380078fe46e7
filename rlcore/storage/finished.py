"""Is it finished, and is every byte of it as it was published? Asked here of whatever a run takes from disk.

A folder is hashed at its first use in a process, at the speed of the disk; after that its files' sizes, times and
inodes are compared, and it is hashed again where one of them differs.
"""

import logging
import os
import time
from contextlib import ExitStack
from glob import escape
from itertools import count
from pathlib import Path

from rlcore.errors import DataError, MillraceError
from rlcore.storage.locks import HeldLock
from rlcore.storage.manifest import MANIFEST, Manifest, newer_format, read_manifest, verify_directory

log = logging.getLogger(__name__)

SETTLED_NS = 1_000_000_000
"""A file system's clock ticks every few milliseconds: a file may change twice at one time. So what was changed less
than this before it was hashed is hashed again at its next use."""
DAMAGED = "damaged"
"""In the name of what was set aside."""
FINGERPRINT = "fingerprint"
"""Entry of a manifest: the name under which the directory was published, where its maker says it."""
REPAIR_LOCK = ".repair.lock"
REPAIR_WAIT_S = 600.0
"""Seconds to wait for another process that hashes the same damaged folder."""

Stamp = tuple[int, int, int, int]
_hashed: dict[Path, list[Stamp]] = {}


def finished(directory: Path, *, error: type[MillraceError] = DataError) -> Manifest | None:
    """The manifest of a published directory that is whole; None where nothing was ever finished.

    Raises:
        error: it is damaged, cannot be read, or is of a newer format; names file, rule, value and remedy.
    """
    manifest = read_manifest(directory, error=error)
    if manifest is None:
        return None
    name = manifest.values.get(FINGERPRINT, directory.name)
    if name != directory.name:
        raise error(f"{directory}: is the folder of {name} under another name. Give it its name back, or delete it.")
    begun_ns = time.time_ns()
    stamps = _stamps(directory, manifest)
    if stamps and _hashed.get(directory) == stamps:
        return manifest
    verify_directory(directory, error=error)
    if stamps and max(max(changed, modified) for changed, modified, _, _ in stamps) < begun_ns - SETTLED_NS:
        _hashed[directory] = stamps
    return manifest


def finished_or_why(directory: Path, *, error: type[MillraceError] = DataError) -> tuple[Manifest | None, str]:
    """As `finished`, and why it is to be made again: '' where it is whole, or nothing was ever finished.

    Raises:
        error: it is of a newer format, so it is no damage.
    """
    try:
        return finished(directory, error=error), ""
    except error as damage:
        if newer_format(directory) is not None:
            raise
        return None, str(damage)


def finished_or_set_aside(directory: Path, *, error: type[MillraceError] = DataError) -> Manifest | None:
    """As `finished`, for its maker: what is damaged gets another name, which is logged, and the result is None.

    Raises:
        error: it is of a newer format, or cannot be renamed.
    """
    manifest, damage = finished_or_why(directory, error=error)
    if not damage:
        return manifest
    with ExitStack() as held:  # one process at a time: what another one has made again meanwhile stays
        try:
            lock = HeldLock(directory.parent / REPAIR_LOCK, what=f"the repair of {directory}", wait_s=REPAIR_WAIT_S)
            held.enter_context(lock)
        except MillraceError as reason:
            raise error(f"{damage} It cannot be made again: {reason}") from reason
        manifest, damage = finished_or_why(directory, error=error)
        if not damage:
            return manifest
        try:
            aside = set_aside(directory, DAMAGED)
        except OSError as reason:
            raise error(f"{damage} It was to be renamed and made again, which failed: {reason}") from reason
    log.warning("%s It is made again now; what is damaged is kept as %s", damage, aside.name)
    return None


def set_aside(path: Path, label: str) -> Path:
    """Rename a file or folder to `<name>.<label>.<k>`, so that a new one can have its place; the new path."""
    names = (path.with_name(f"{path.name}.{label}.{number}") for number in count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    path.rename(aside)
    return aside


def tell_other_bytes(directory: Path) -> None:
    """Warn where a directory that was made again differs from what the damaged one before it was meant to hold."""
    former = directory.parent.glob(f"{escape(directory.name)}.{DAMAGED}.*")
    newest = max(former, key=lambda path: (len(path.name), path.name), default=None)
    if newest is None:
        return
    try:
        before, now = read_manifest(newest), read_manifest(directory)
    except MillraceError:  # nobody can say any more what it held
        return
    if before is None or now is None or before.values.get("step") != now.values.get("step"):
        return
    others = sorted({entry.name for entry in set(before.files) ^ set(now.files)})
    if others:
        log.warning(
            "%s: was made again with other content than before: %s. A run that began with the former goes on with "
            "other numbers",
            directory,
            ", ".join(others),
        )


def _stamps(directory: Path, manifest: Manifest) -> list[Stamp]:
    """Change time, modification time, inode and size of each file; none where one cannot be looked at."""
    try:
        found = [(directory / name).stat() for name in (MANIFEST, *(entry.name for entry in manifest.files))]
    except OSError:
        return []
    return [(each.st_ctime_ns, each.st_mtime_ns, each.st_ino, each.st_size) for each in found]
