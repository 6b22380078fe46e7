"""Room on disk: looked at, waited for, told."""

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

import pytest

from rlcore.config import CheckpointConfig
from rlcore.errors import DiskSpaceError, UnwritableError
from rlcore.storage.disk import (
    DiskNeed,
    RoomReport,
    check_needs,
    check_room,
    checkpoint_bytes,
    free_bytes,
    is_out_of_room,
    num_checkpoints_at_once,
    reserve_bytes,
    unwritable,
)
from rlcore.storage.publish import write_text_atomically
from tests.storage.small_disk import SMALL_DISK_MIB, fill, mounted


def test_free_bytes_are_those_of_the_file_system_that_will_be_written(small_disk):
    assert free_bytes(small_disk / "not" / "yet" / "there") == SMALL_DISK_MIB * 2**20
    fill(small_disk, leave_bytes=8192)
    assert free_bytes(small_disk) == 8192


def test_used_up_inodes_are_told_as_such_and_not_as_free_bytes(tmp_path):
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


def test_a_report_counts_the_reserve():
    report = RoomReport(Path("/x"), needed_bytes=70, reserve_bytes=50, free_bytes=100)
    assert report.missing_bytes == 20
    assert not report.enough
    assert report.metrics == {"disk/free_gb": 1e-7, "disk/needed_gb": 1.2e-7}
    assert RoomReport(Path("/x"), 50, 50, 100).enough


def test_too_little_room_says_how_much_is_missing_and_where(small_disk):
    fill(small_disk, leave_bytes=8192)
    assert check_room(small_disk, 4096, 4096).enough
    report = check_room(small_disk / "x", 8192, 100)
    assert not report.enough
    assert str(report).startswith(f"{small_disk}/x: 100 bytes are missing: 8,192 to write and 100 in reserve")


def test_needs_are_added_up_for_each_file_system(small_disk, tmp_path):
    reports = check_needs(
        [
            DiskNeed("checkpoints", small_disk / "a", 5 * 2**20),
            DiskNeed("samples", tmp_path / "b", 1000),
            DiskNeed("journal", small_disk / "c", 4 * 2**20),
        ],
        reserve_bytes=10,
    )
    assert [report.needed_bytes for report in reports] == [9 * 2**20, 1000]
    assert [report.enough for report in reports] == [False, True]


def test_only_a_full_disk_counts_as_one():
    device = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="No space left") as caught:
        os.write(device, b"x")
    os.close(device)
    outer = RuntimeError("writer failed")
    outer.__cause__ = caught.value
    assert is_out_of_room(outer)
    assert not is_out_of_room(OSError(13, "Permission denied"))
    assert not is_out_of_room(MemoryError())
    assert not is_out_of_room(None)


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.EACCES, "Make the folder writable"), (errno.EMFILE, r"Too many open files.*Mend that")]
)
def test_only_a_folder_that_may_not_be_written_is_to_be_made_writable(tmp_path, code, remedy):
    with pytest.raises(UnwritableError, match=remedy):
        raise unwritable(tmp_path, OSError(code, os.strerror(code)))


@pytest.mark.timeout(20)
def test_a_chain_of_errors_that_bites_its_tail_has_an_end():
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_room(first)


def test_estimates():
    assert checkpoint_bytes(10**9) == pytest.approx(12e9, rel=0.02)
    assert checkpoint_bytes(10**9) > 12 * 10**9
    assert reserve_bytes(CheckpointConfig(reserve_gb=0.5)) == 500_000_000


@pytest.mark.parametrize(
    ("keep_every_steps", "total_steps", "expected"), [(0, 100, 4), (0, 40, 2), (40, 200, 9), (20, 100, 5)]
)
def test_checkpoints_on_disk_at_one_time(keep_every_steps, total_steps, expected):
    config = CheckpointConfig(keep_last=2, keep_best=1, keep_every_steps=keep_every_steps)
    assert num_checkpoints_at_once(config, total_steps=total_steps, steps_per_chunk=20) == expected
