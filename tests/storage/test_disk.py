"""Disk space: measurements, estimates, errors and the wait for room."""

import errno
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlcore.config import CheckpointConfig
from rlcore.errors import DiskSpaceError, StopRequestedError, UnwritableError
from rlcore.storage import disk
from rlcore.storage.disk import (
    DiskNeed,
    DiskRoom,
    RoomReport,
    check_needs,
    check_room,
    checkpoint_bytes,
    free_bytes,
    free_files,
    is_out_of_room,
    max_num_checkpoints,
    out_of_room,
    reserve_bytes,
    unwritable,
)
from rlcore.storage.publish import write_text_atomically
from tests.storage.small_disk import SMALL_DISK_MIB, fill, mounted


def test_free_and_missing_bytes_of_a_future_path(small_disk):
    assert free_bytes(small_disk / "not" / "yet" / "there") == SMALL_DISK_MIB * 2**20
    fill(small_disk, leave_bytes=8192)
    assert free_bytes(small_disk) == 8192
    assert check_room(small_disk, 4096, 4096).enough
    report = check_room(small_disk / "x", 8192, 100)
    assert not report.enough
    assert str(report).startswith(f"{small_disk}/x: 0.1 kB are missing: 8.2 kB to write and 0.1 kB in reserve")


def test_used_up_inodes_are_reported_as_such(tmp_path):
    with mounted(tmp_path / "few", options="nr_inodes=8") as disk:
        assert check_room(disk, 4096).enough
        taken = []
        with suppress(OSError):
            for number in range(8):
                (disk / str(number)).touch()
                taken.append(disk / str(number))
        report = check_room(disk, 4096)
        assert not report.enough
        assert re.match(rf"{disk}: that file system can hold no further file.*inodes.*df -i", str(report))
        with pytest.raises(DiskSpaceError, match=r"no room to write .*No space left.*inodes are used up"):
            write_text_atomically(disk / "x", "text")
        taken[0].unlink()
        assert check_room(disk, 4096).enough


def test_metrics_of_room_count_the_reserve():
    report = RoomReport(Path("/x"), needed_bytes=70, reserve_bytes=50, free_bytes=100)
    assert report.metrics == {"disk/free_gb": 1e-7, "disk/needed_gb": 1.2e-7}


def test_out_of_room_names_needed_and_free_bytes():
    reason = OSError(errno.ENOSPC, "No space left on device")
    known, unknown = (out_of_room(Path("/proc/self/x"), reason, needed_bytes=size) for size in (7, None))
    assert str(known).startswith(
        "/proc/self/x: no room to write ([Errno 28] No space left on device): at least 7 bytes were to be written, "
        "0 bytes are free on that file system. Nothing half-written was left."
    )
    assert "device): 0 bytes are free" in str(unknown)
    assert (known.needed_bytes, unknown.needed_bytes) == (7, 0)
    assert free_files(Path("/proc/self")) is None, "it has no limit"
    assert check_room(Path("/proc/self"), 0).enough


def test_needs_are_summed_by_file_system(small_disk, tmp_path):
    needs = ((small_disk / "a", 5 * 2**20), (tmp_path / "b", 1000), (small_disk / "c", 4 * 2**20))
    reports = check_needs([DiskNeed("files", *need) for need in needs], reserve_bytes=10)
    assert [(report.path, report.needed_bytes, report.reserve_bytes, report.enough) for report in reports] == [
        (small_disk / "a", 9 * 2**20, 10, False), (tmp_path / "b", 1000, 10, True)
    ]  # fmt: skip
    assert check_needs([DiskNeed("samples", tmp_path, 7)])[0].reserve_bytes == 0
    assert check_room(tmp_path, 7).reserve_bytes == 0


def test_out_of_room_is_recognized_in_causes():
    with pytest.raises(OSError, match="No space left") as caught:
        Path("/dev/full").write_text("x")
    for link in ("__cause__", "__context__"):
        outer = RuntimeError("writer failed")
        setattr(outer, link, caught.value)
        assert is_out_of_room(outer)
    assert is_out_of_room(OSError(errno.EDQUOT, "a quota"))
    assert is_out_of_room(RuntimeError("Disk quota exceeded (os error 122)"))
    assert not is_out_of_room(OSError(13, "Permission denied"))
    assert not is_out_of_room(MemoryError())
    assert not is_out_of_room(None)
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_room(first)


@pytest.mark.parametrize(("code", "remedy"), [
    (errno.EROFS, r"\. Make the folder writable, or choose another paths\.root\.$"),
    (errno.EMFILE, r"Too many open files\)\. Correct that, or choose another paths\.root\.$"),
])  # fmt: skip
def test_unwritable_remedy_depends_on_the_error(tmp_path, code, remedy):
    with pytest.raises(UnwritableError, match=remedy):
        raise unwritable(tmp_path, OSError(code, os.strerror(code)))


@pytest.mark.parametrize(
    ("keep_every_steps", "total_steps", "expected"),
    [(0, 100, 4), (0, 40, 2), (0, 41, 3), (40, 200, 9), (40, 79, 4), (20, 100, 5)],
)
def test_estimates_of_checkpoints(keep_every_steps, total_steps, expected):
    config = CheckpointConfig(keep_last=2, keep_best=1, keep_every_steps=keep_every_steps)
    assert max_num_checkpoints(config, total_steps=total_steps, steps_per_chunk=20) == expected
    assert checkpoint_bytes(10**9) == 12_120_000_000 + 4 * 2**20, "weights, two moments, 1 % and what is no tensor"
    assert reserve_bytes(CheckpointConfig(reserve_gb=0.5)) == 500_000_000


Events = list[tuple[str, int, Mapping[str, object]]]


def room_of(
    path: Path,
    events: Events,
    *,
    stop: Callable[[], bool] = lambda: False,
    prune: Callable[[], object] = lambda: None,
    wait_for_room_s: float = 3600.0,
    reserve_gb: float = 0.0,
) -> DiskRoom:
    config = CheckpointConfig(reserve_gb=reserve_gb, wait_for_room_s=wait_for_room_s)
    return DiskRoom(path, config, log_event=lambda *one: events.append(one), stop=stop, prune=prune)


def test_pause_names_missing_bytes_with_the_reserve(small_disk: Path) -> None:
    events: Events = []
    fill(small_disk, leave_bytes=8192)
    room = room_of(small_disk, events, reserve_gb=0.001, stop=lambda: bool(events))
    with pytest.raises(StopRequestedError) as stopped:
        room.wait(5_000, 3)
    ((name, step, data),) = events
    assert (name, step, data["path"]) == ("paused_for_disk", 3, str(small_disk))
    lacks = f"{small_disk}: 1.0 MB are missing: 5.0 kB to write and 1.0 MB in reserve (checkpoint.reserve_gb)"
    assert str(data["text"]).startswith(f"paused: 1.0 MB are missing at {small_disk}: {lacks}, and 8.2 kB are")
    figures = {name: data[name] for name in ("missing_bytes", "needed_bytes", "free_bytes")}
    assert figures == {"missing_bytes": 996_808, "needed_bytes": 1_005_000, "free_bytes": 8192}
    assert str(stopped.value).startswith(f"stopped while the run waited for room on a disk: {lacks}")


def test_pause_names_missing_inodes(tmp_path: Path) -> None:
    events: Events = []
    with mounted(tmp_path / "few", options="nr_inodes=1") as folder:
        with pytest.raises(StopRequestedError):
            room_of(folder, events, stop=lambda: bool(events)).wait(5, 3)
        assert str(events[0][2]["text"]).startswith(f"paused: inodes are missing at {folder}: {folder}: that file")


def test_wait_prunes_before_a_pause(small_disk: Path) -> None:
    events: Events = []
    ballast = fill(small_disk, leave_bytes=8192)
    room_of(small_disk, events, prune=ballast.unlink, stop=lambda: bool(events)).wait(8193, 3)
    assert free_bytes(small_disk) > 8192
    assert events == []


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each sleep, on a fake clock."""
    found: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 + sum(found), sleep=found.append)
    monkeypatch.setattr(disk, "time", clock)
    return found


def test_pause_ends_when_there_is_room(small_disk: Path, sleeps: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    ballast = fill(small_disk, leave_bytes=8192)
    events: Events = []
    check = DiskRoom.check

    def checked(room: DiskRoom, needed_bytes: int) -> RoomReport:
        if len(sleeps) == 3:
            ballast.unlink(missing_ok=True)
        return check(room, needed_bytes)

    monkeypatch.setattr(DiskRoom, "check", checked)
    room_of(small_disk, events).wait(8193, 3)
    assert sleeps == [1, 1, 1]
    assert [(name, step) for name, step, _ in events] == [("paused_for_disk", 3), ("disk_room", 3)]
    assert events[1][2] == {"text": f"{small_disk}: there is room again, the run continues", "path": str(small_disk)}


@pytest.mark.parametrize(("wait_for_room_s", "slept"), [(0, []), (2, [1, 1]), (2.5, [1, 1, 0.5])])
def test_pause_without_room_in_time_is_an_error(
    small_disk: Path, sleeps: list[float], wait_for_room_s: float, slept: list[float]
) -> None:
    fill(small_disk, leave_bytes=8192)
    events: Events = []
    with pytest.raises(DiskSpaceError, match=" are missing") as failed:
        room_of(small_disk, events, wait_for_room_s=wait_for_room_s).wait(8193, 3)
    assert f" Waited {wait_for_room_s:.0f} s for room (checkpoint.wait_for_room_s). " in str(failed.value)
    assert sleeps == slept
    assert [name for name, _, _ in events] == ["paused_for_disk"]
