"""Finished directories are hashed at their first use, and renamed if they are damaged."""

import os
import shutil
from pathlib import Path

import pytest

from rlcore.errors import DataError
from rlcore.storage.manifest import (
    MANIFEST,
    read_finished,
    read_finished_or_reason,
    read_finished_or_set_aside,
    verify_directory,
)
from tests.helpers.published import edit_manifest, flip, publish
from tests.storage.small_disk import mounted


def test_read_finished_of_whole_and_absent(tmp_path):
    manifest = read_finished(publish(tmp_path / "x", kind="demo"))
    assert manifest is not None
    assert manifest.values["kind"] == "demo"
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "a").touch()
    for name in ("nothing", "unfinished"):
        assert read_finished(tmp_path / name) is None
        assert read_finished_or_reason(tmp_path / name) == (None, "")
        with pytest.raises(DataError, match="never finished"):
            verify_directory(tmp_path / name)


def test_unchanged_directory_is_hashed_once(tmp_path, monkeypatch):
    target = publish(tmp_path / "x")
    monkeypatch.setattr("rlcore.storage.manifest.SETTLED_NS", -(10**12))  # in place of a second's wait
    assert read_finished(target) is not None
    with monkeypatch.context() as patched:
        patched.setattr("rlcore.storage.manifest.verify_directory", lambda *_, **__: pytest.fail("hashed again"))
        assert read_finished(target) is not None
    file = target / "a.txt"
    before = file.stat().st_ctime_ns
    flip(file)
    while file.stat().st_ctime_ns == before:  # a file system's clock ticks every few milliseconds
        os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    assert read_finished_or_reason(target)[0] is None


def test_recently_changed_directory_is_hashed_again(tmp_path):
    """Two changes within one tick of the file system's clock have the same time."""
    target = publish(tmp_path / "x")
    for _ in range(50):
        assert read_finished(target) is not None
        whole = (target / "a.txt").read_bytes()
        flip(target / "a.txt")
        assert read_finished_or_reason(target)[0] is None
        (target / "a.txt").write_bytes(whole)


def test_damaged_directory_is_set_aside(tmp_path, caplog):
    target = tmp_path / "x"
    for number in (1, 2, 3):
        publish(target)
        caplog.clear()
        assert read_finished_or_set_aside(target) is not None
        assert caplog.text == ""
        flip(target / "a.txt")
        damaged = (target / "a.txt").read_bytes()
        assert read_finished_or_set_aside(target) is None
        assert "a.txt: hash must be" in caplog.text
        assert f"kept as x.damaged.{number}" in caplog.text
        assert not target.exists()
        assert (tmp_path / f"x.damaged.{number}" / "a.txt").read_bytes() == damaged


OTHER_KINDS = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
    "unreadable": lambda path: path.symlink_to("/proc/self/mem"),  # its first byte is an input/output error
    "nested deeply": lambda path: path.write_text("[" * 200_000),
}


@pytest.mark.parametrize("other", OTHER_KINDS)
def test_manifest_of_another_kind_is_damage(tmp_path, other):
    target = publish(tmp_path / "x")
    path = target / MANIFEST
    path.unlink()
    OTHER_KINDS[other](path)
    with pytest.raises(DataError, match=r"manifest\.json: (cannot be read|is damaged)"):
        read_finished(target)
    assert read_finished_or_set_aside(target) is None
    assert not os.path.lexists(target)
    (publish(target) / "a.txt").unlink()
    os.mkfifo(target / "a.txt")
    assert "a.txt: must be an ordinary file" in read_finished_or_reason(target)[1]


def test_renamed_directory_is_refused(tmp_path):
    publish(tmp_path / "x", fingerprint="x")
    shutil.copytree(tmp_path / "x", tmp_path / "y")
    assert read_finished(tmp_path / "x") is not None
    with pytest.raises(DataError, match="is the folder of x under another name"):
        read_finished(tmp_path / "y")


def test_newer_format_is_not_damage(tmp_path):
    edit_manifest(publish(tmp_path / "x"), format_version=2)
    with pytest.raises(DataError, match=r"format_version must be 1, got 2.*version of Millrace"):
        read_finished_or_set_aside(tmp_path / "x")
    assert (tmp_path / "x").is_dir()


def test_damaged_directory_that_cannot_be_renamed(small_disk):
    """The directory is a mount point, which cannot be renamed."""
    target = publish(small_disk / "x")
    flip(target / "a.txt")
    content = {path.name: path.read_bytes() for path in target.iterdir() if path.is_file()}
    with mounted(target):
        for name, text in content.items():
            (target / name).write_bytes(text)
        with pytest.raises(DataError, match=r"It is made again now; .* cannot be renamed"):
            read_finished_or_set_aside(target)
