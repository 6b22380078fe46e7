"""What a run does where a disk is full: it prunes, says so, waits, and goes on by itself."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from rlcore.config import CheckpointConfig
from rlcore.errors import DiskSpaceError, StopRequestedError
from rlcore.run.events import GOES_ON, PAUSED
from rlcore.storage.disk import RoomReport, check_room, reserve_bytes

POLL_S = 1.0
"""Seconds between two looks at a full disk."""
MAX_RETRY_S = 30.0
"""Longest time between two attempts of a write that fails although there seems to be room (a quota, another writer)."""

Happened = Callable[[str, int, Mapping[str, object]], None]
"""Takes an event's name, its step and its data; `text` in the data is for people."""
R = TypeVar("R")


class Room:
    """Pauses the run while there is no room.

    Args:
        happened: hears of the pause and of its end.
        stop: whether the run was told to stop.
        prune: deletes what the retention rule does not keep.
    """

    def __init__(
        self, config: CheckpointConfig, *, happened: Happened, stop: Callable[[], bool], prune: Callable[[], object]
    ) -> None:
        self._config = config
        self._happened = happened
        self._stop = stop
        self._prune = prune

    def hold(self, do: Callable[[], R], *, step: int, path: Path, needed_bytes: int = 0) -> R:
        """The result of `do`, which is called when there is room for `needed_bytes` and the reserve at `path`.

        Without `needed_bytes` nothing is measured: `do` is a small write, and its failure tells. `do` is called again
        after a `DiskSpaceError`, so it must leave nothing behind then.

        Raises:
            DiskSpaceError: no room came in `checkpoint.wait_for_room_s`.
            StopRequestedError: a stop was asked for while the run waited. What is committed stays.
        """
        shortage = self._shortage_of(path, needed_bytes)
        deadline: float | None = None
        retry_s = POLL_S
        while True:
            if shortage is None:
                try:
                    result = do()
                    break
                except DiskSpaceError as reason:
                    shortage = _Shortage(self.look(path, max(1, needed_bytes)), str(reason))
            if deadline is None:
                deadline = time.monotonic() + self._config.wait_for_room_s
                self._happened(PAUSED, step, shortage.as_event())
            retry_s = min(MAX_RETRY_S, 2 * retry_s) if shortage.unseen else POLL_S
            self._wait(retry_s, deadline, shortage)
            shortage = self._shortage_of(path, needed_bytes)
        if deadline is not None:
            self._happened(GOES_ON, step, {"text": f"{path}: there is room again, going on", "path": str(path)})
        return result

    def _shortage_of(self, path: Path, needed_bytes: int) -> "_Shortage | None":
        if not needed_bytes:
            return None
        report = self.look(path, needed_bytes)
        if not report.enough:
            self._prune()
            report = self.look(path, needed_bytes)
        return None if report.enough else _Shortage(report, str(report))

    def look(self, path: Path, needed_bytes: int) -> RoomReport:
        """Room for so many bytes and the reserve at `path`."""
        return check_room(path, needed_bytes, reserve_bytes(self._config))

    def _wait(self, seconds: float, deadline: float, shortage: "_Shortage") -> None:
        until = min(time.monotonic() + seconds, deadline)
        while not self._stop() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, POLL_S))
        if self._stop():
            raise StopRequestedError(f"stopped while the run waited for room on a disk: {shortage.reason}")
        if time.monotonic() >= deadline:
            raise DiskSpaceError(
                f"{shortage.reason} Waited {self._config.wait_for_room_s:.0f} s for room "
                "(checkpoint.wait_for_room_s). What is committed stays; the same command goes on from there."
            )


class _Shortage:
    """Why there was no room. `unseen`: the write failed, though the file system says that there is room."""

    def __init__(self, report: RoomReport, reason: str) -> None:
        self.report = report
        self.reason = reason
        self.unseen = report.enough

    def as_event(self) -> Mapping[str, object]:
        missing = "an unknown number of" if self.unseen else f"{self.report.missing_bytes:,}"
        what = "inodes" if not self.unseen and not self.report.missing_bytes else f"{missing} bytes"
        return {
            "text": f"paused: {what} are missing at {self.report.path}: {self.reason}",
            "path": str(self.report.path),
            "missing_bytes": self.report.missing_bytes,
            "needed_bytes": self.report.needed_bytes + self.report.reserve_bytes,
            "free_bytes": self.report.free_bytes,
        }
