"""Measurements of disk space, the wait for free space, and errors about too little space."""

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.errors import DiskSpaceError, MillraceError, StopRequestedError, UnwritableError

if TYPE_CHECKING:
    from rlcore.config import CheckpointConfig  # without it, completion in a shell is fast

BYTES_PER_GB = 1e9
BYTES_PER_TRAINED_PARAMETER = 4 + 8
CHECKPOINT_SLACK_BYTES = 4 * 2**20
"""The estimated size, in bytes, of a checkpoint's headers, index, trainer state and manifest."""
CHECKPOINT_SLACK_SHARE = 0.01
"""The share of a checkpoint's tensor bytes that is added for partly filled blocks of the file system."""
NO_FILES = "that file system can hold no further file, whatever its free bytes: its inodes are used up (df -i)"
NO_ROOM_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
NO_ROOM_TEXTS = ("no space left on device", "disk quota exceeded", "os error 28)", "os error 122)")
"""Substrings of the messages with which Rust and C++ libraries (safetensors, torch) report a full disk. These errors
have no errno."""
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))

PAUSED, RESUMED = "paused_for_disk", "disk_room"  # the events at the start and the end of a wait for disk space
POLL_S = 1.0


def unit_for(num_bytes: float) -> tuple[float, str]:
    """Return the size and the name of a suitable unit: the largest unit in which the number of bytes is at least 0.1.
    For 0 bytes, this is GB."""
    if not num_bytes:
        return UNITS[0]
    return next((unit for unit in UNITS if num_bytes >= unit[0] / 10), UNITS[-1])


def size(num_bytes: float) -> str:
    """Format a number of bytes with a unit.

    >>> size(77.4e9), size(4_200_000), size(0)
    ('77.4 GB', '4.2 MB', '0.0 GB')
    """
    scale, unit = unit_for(num_bytes)
    return f"{num_bytes / scale:.1f} {unit}"


def nearest_existing(path: Path) -> Path:
    """Return the path if it exists, otherwise its closest existing parent."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def free_bytes(path: Path) -> int:
    """Return the number of bytes that an ordinary user may still write on the file system of `path`."""
    stats = os.statvfs(nearest_existing(path))
    return stats.f_bavail * stats.f_frsize


def free_files(path: Path) -> int | None:
    """Return the number of files that the file system of `path` can still hold, or None if it has no limit."""
    stats = os.statvfs(nearest_existing(path))
    return stats.f_favail if stats.f_files else None


def is_out_of_room(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes says that the disk is full or a quota is exhausted."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, DiskSpaceError) or (isinstance(error, OSError) and error.errno in NO_ROOM_ERRNOS):
            return True
        if any(text in str(error).lower() for text in NO_ROOM_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def find_obstacle(folder: Path) -> Path | None:
    """Return the file or broken link that occupies the path of `folder` or of one of its parents. Return None if there
    is no such obstacle."""
    folder = folder.absolute()
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    return None if nearest.is_dir() else nearest


def unwritable(folder: Path, reason: OSError, error: type[MillraceError] = UnwritableError) -> MillraceError:
    """Return the error for a folder that cannot be written."""
    if (obstacle := find_obstacle(folder)) is not None:
        return error(f"{folder}: must be a folder, and {obstacle} is none. Move that away, or choose another folder.")
    remedy = "Make the folder writable, or choose another paths.root"
    if reason.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        remedy = "Correct that, or choose another paths.root"
    return error(f"{folder}: cannot be written ({reason}). {remedy}.")


def out_of_room(path: Path, reason: BaseException, *, needed_bytes: int | None = None) -> DiskSpaceError:
    """Return the error for a write that failed because the disk is full. `needed_bytes`: the size of the write, if
    known."""
    needed = "" if needed_bytes is None else f"at least {needed_bytes} bytes were to be written, "
    free = f"{free_bytes(path)} bytes are free on that file system"
    error = DiskSpaceError(
        f"{path}: no room to write ({reason}): {needed}{NO_FILES if free_files(path) == 0 else free}. Nothing "
        "half-written was left. Free some room, lower checkpoint.keep_last, or set paths.root to a larger disk."
    )
    error.needed_bytes = needed_bytes or 0
    return error


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """A number of bytes that a run will write below a path."""

    what: str
    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RoomReport:
    """The space on the file system of `path`. `free_files` is None if the number of files has no limit."""

    path: Path
    needed_bytes: int
    reserve_bytes: int
    free_bytes: int
    free_files: int | None = None

    @property
    def missing_bytes(self) -> int:
        """The number of bytes that must be freed so that `needed_bytes` and the reserve fit on the disk, or 0."""
        return max(0, self.needed_bytes + self.reserve_bytes - self.free_bytes)

    @property
    def enough(self) -> bool:
        """True if the needed bytes and the reserve fit on the disk, and the file system can hold another file."""
        return self.missing_bytes == 0 and self.free_files != 0

    @property
    def problem(self) -> str:
        """A text that explains how much space is missing. Use it only if `enough` is False."""
        if not self.missing_bytes:
            return f"{self.path}: {NO_FILES}"
        return (
            f"{self.path}: {size(self.missing_bytes)} are missing: {size(self.needed_bytes)} to write and "
            f"{size(self.reserve_bytes)} in reserve (checkpoint.reserve_gb), and {size(self.free_bytes)} are free"
        )

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics `disk/free_gb` and `disk/needed_gb`, in GB of 1e9 bytes. The needed space includes
        `reserve_bytes`."""
        return {
            "disk/free_gb": self.free_bytes / BYTES_PER_GB,
            "disk/needed_gb": (self.needed_bytes + self.reserve_bytes) / BYTES_PER_GB,
        }

    def __str__(self) -> str:
        return (
            f"{self.problem}. Free some room, lower checkpoint.keep_last or checkpoint.keep_best, or set paths.root to "
            "a larger disk."
        )


def check_room(path: Path, needed_bytes: int, reserve_bytes: int = 0) -> RoomReport:
    """Measure the free space at a path. Quotas are not measured, so an exhausted quota is noticed only when a write
    fails."""
    return RoomReport(path, needed_bytes, reserve_bytes, free_bytes(path), free_files(path))


def check_needs(needs: Sequence[DiskNeed], reserve_bytes: int = 0) -> tuple[RoomReport, ...]:
    """Return one report for each file system that has a path of `needs`, in the order of the needs."""
    by_device: dict[int, list[DiskNeed]] = {}
    for need in needs:
        by_device.setdefault(nearest_existing(need.path).stat().st_dev, []).append(need)
    return tuple(
        check_room(group[0].path, sum(need.size_bytes for need in group), reserve_bytes) for group in by_device.values()
    )


def checkpoint_bytes(num_trained_parameters: int) -> int:
    """Estimate a checkpoint's size in bytes from the number of trained parameters. Frozen parameters are not saved."""
    tensors = num_trained_parameters * BYTES_PER_TRAINED_PARAMETER
    return int(tensors * (1 + CHECKPOINT_SLACK_SHARE)) + CHECKPOINT_SLACK_BYTES


def max_num_checkpoints(config: "CheckpointConfig", *, total_steps: int, steps_per_chunk: int) -> int:
    """Return the largest number of checkpoints on disk: the retained checkpoints, and one that is being written."""
    total = -(-total_steps // steps_per_chunk)
    kept = config.keep_last + config.keep_best
    if config.keep_every_steps:
        kept += total_steps // config.keep_every_steps
    return min(total, kept + 1)


def reserve_bytes(config: "CheckpointConfig") -> int:
    """Return `checkpoint.reserve_gb` in bytes."""
    return int(config.reserve_gb * BYTES_PER_GB)


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """A guard that waits until the disk of `path` has room for the next writes. `prune`: a function that deletes old
    checkpoints. `log_event`: a function that records an event, given its name, step and data. `stop`: a function that
    returns whether a stop is requested."""

    path: Path
    config: "CheckpointConfig"
    log_event: Callable[[str, int, Mapping[str, object]], None]
    stop: Callable[[], bool]
    prune: Callable[[], object]

    def wait(self, needed_bytes: int, step: int) -> None:
        """Wait until the disk has room for `needed_bytes` and the reserve. If it has no room, first delete old
        checkpoints. Raises DiskSpaceError after `checkpoint.wait_for_room_s` seconds, and StopRequestedError if a stop
        is requested."""
        report = self.check(needed_bytes)
        if not report.enough:
            self.prune()
            report = self.check(needed_bytes)
        if report.enough:
            return
        deadline = time.monotonic() + self.config.wait_for_room_s
        what = size(report.missing_bytes) if report.missing_bytes else "inodes"
        paused = {
            "text": f"paused: {what} are missing at {report.path}: {report}",
            "path": str(report.path),
            "missing_bytes": report.missing_bytes,
            "needed_bytes": report.needed_bytes + report.reserve_bytes,
            "free_bytes": report.free_bytes,
        }
        self.log_event(PAUSED, step, paused)
        while not (report := self.check(needed_bytes)).enough:
            if self.stop():
                raise StopRequestedError(f"stopped while the run waited for room on a disk: {report}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise DiskSpaceError(
                    f"{report} Waited {self.config.wait_for_room_s:.0f} s for room (checkpoint.wait_for_room_s). "
                    "Committed data stays; the same command resumes the run."
                )
            time.sleep(min(left, POLL_S))
        text = f"{self.path}: there is room again, the run continues"
        self.log_event(RESUMED, step, {"text": text, "path": str(self.path)})

    def check(self, needed_bytes: int) -> RoomReport:
        """Return a report of the free space, which says whether it suffices for `needed_bytes` and the reserve."""
        return check_room(self.path, needed_bytes, reserve_bytes(self.config))
