"""A real file system of a few MiB, which tests fill."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SMALL_DISK_MIB = 8


@contextmanager
def mounted(folder: Path, size_mib: int = SMALL_DISK_MIB, options: str = "mode=755") -> Iterator[Path]:
    """Mount a tmpfs at `folder` inside the block. `options`: more options of mount.

    The test is skipped if mounting is not permitted.
    """
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,{options}", "tmpfs", str(folder)]
    mount = subprocess.run(command, capture_output=True, text=True)
    if mount.returncode != 0:
        pytest.skip(f"a full disk cannot be made here: mounting a tmpfs was refused ({mount.stderr.strip()})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of 8 MiB."""
    with mounted(tmp_path / "small-disk") as folder:
        yield folder


def fill(disk: Path, leave_bytes: int = 0) -> Path:
    """Write a file that leaves the given number of bytes free. Delete the file to free the space."""
    ballast = disk / "ballast"
    page = b"\0" * 4096
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(page)
        except OSError:
            pass
        file.truncate(max(0, file.tell() - leave_bytes))
    return ballast
