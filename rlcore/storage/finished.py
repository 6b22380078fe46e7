"""Is it finished, and is every byte of it as it was published? Asked here of whatever a run takes from disk.

A folder is hashed at its first use in a process, at the speed of the disk; after that its files' sizes, times and
inodes are compared, and it is hashed again where one of them differs.
"""

import logging
import os
import time
from itertools import count
from pathlib import Path

from rlcore.errors import DataError, MillraceError
from rlcore.storage.manifest import MANIFEST, Manifest, newer_format, read_manifest, verify_directory

log = logging.getLogger(__name__)

SETTLED_NS = 1_000_000_000
"""A file system's clock ticks every few milliseconds: a file may change twice at one time. So what was changed less
than this before it was hashed is hashed again at its next use."""
DAMAGED, LEFT = "damaged", "left"
"""In the name of what was set aside: for a new one, and because the run continues from an earlier step."""
FINGERPRINT = "fingerprint"
"""Entry of a manifest: the name under which the directory was published, where its maker says it."""
Stamp = tuple[int, int, int, int]
_hashed: dict[Path, list[Stamp]] = {}


def read_finished(directory: Path, *, error: type[MillraceError] = DataError) -> Manifest | None:
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


def read_finished_or_reason(directory: Path, *, error: type[MillraceError] = DataError) -> tuple[Manifest | None, str]:
    """As `finished`, and why it is to be made again: '' where it is whole, or nothing was ever finished.

    Raises:
        error: it is of a newer format, so it is no damage.
    """
    try:
        return read_finished(directory, error=error), ""
    except error as damage:
        if newer_format(directory) is not None:
            raise
        return None, str(damage)


def read_finished_or_set_aside(directory: Path, *, error: type[MillraceError] = DataError) -> Manifest | None:
    """As `finished`, for its maker: what is damaged gets another name, which is logged, and the result is None.

    Raises:
        error: it is of a newer format, or cannot be renamed.
    """
    manifest, damage = read_finished_or_reason(directory, error=error)
    if damage:
        set_aside(directory, DAMAGED, f"{damage} It is made again now", error=error)
    return manifest


def set_aside(path: Path, label: str, why: str, *, error: type[MillraceError] = DataError) -> Path:
    """Rename a file or folder to `<name>.<label>.<k>`: it is kept, and never taken for one of that name. Logs why;
    returns the new path.

    Raises:
        error: it cannot be renamed.
    """
    names = (path.with_name(f"{path.name}.{label}.{number}") for number in count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    try:
        path.rename(aside)
    except OSError as reason:
        raise error(f"{why}; {path} cannot be renamed ({reason}). Move it away, then run again.") from reason
    log.warning("%s: it is kept as %s", why, aside.name)
    return aside


def _stamps(directory: Path, manifest: Manifest) -> list[Stamp]:
    """Change time, modification time, inode and size of each file; none where one cannot be looked at."""
    try:
        found = [(directory / name).stat() for name in (MANIFEST, *(entry.name for entry in manifest.files))]
    except OSError:
        return []
    return [(each.st_ctime_ns, each.st_mtime_ns, each.st_ino, each.st_size) for each in found]
