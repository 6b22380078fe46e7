"""Manifests: damage is found, and finished directories are hashed at their first use."""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from rlcore.errors import CheckpointError, DataError
from rlcore.storage.manifest import (
    MANIFEST,
    FileEntry,
    manifest_text,
    newer_format,
    part_directories,
    read_finished,
    read_finished_or_reason,
    read_finished_or_set_aside,
    read_manifest,
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


# ---------------------------------------------------------------- damage


def test_verify_finds_every_flipped_byte(tmp_path):
    target = publish(tmp_path / "x", kind="demo", reward=0.5)
    for path in [target / "a.txt", target / "sub" / "b.bin", target / "manifest.json"]:
        whole = path.read_bytes()
        for position in range(len(whole)):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << (position % 8)
            with suppress(ValueError):
                if path.name == "manifest.json" and json.loads(bytes(damaged)) == json.loads(whole):
                    continue  # layout only, such as a space turned into a tab
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=path.name):
                verify_directory(target, error=CheckpointError)
        path.write_bytes(whole)
    verify_directory(target)


@pytest.mark.parametrize("name", ["a.txt", "sub/b.bin", "manifest.json"])
@pytest.mark.parametrize("keep_bytes", [0, 1, -1])
def test_verify_finds_every_truncation(tmp_path, name, keep_bytes):
    path = publish(tmp_path / "x") / name
    content = path.read_bytes()
    # The manifest's last byte is the end of its last line: nothing is lost with it.
    path.write_bytes(content[: keep_bytes - 1 if keep_bytes < 0 else keep_bytes])
    with pytest.raises(DataError, match=r"size must be|is damaged"):
        verify_directory(tmp_path / "x", hashes=False)


def test_verify_without_hashes_checks_sizes_only(tmp_path):
    (publish(tmp_path / "x") / "a.txt").write_text("abd")
    verify_directory(tmp_path / "x", hashes=False)
    meant, found = (hashlib.sha256(text).hexdigest()[:12] for text in (b"abc", b"abd"))
    message = rf"/x/a\.txt: hash must be sha256 {meant}\.\.\., got {found}\.\.\. Delete .*/x and make it again, or"
    with pytest.raises(DataError, match=message):
        verify_directory(tmp_path / "x")


@pytest.mark.parametrize("name", ["/etc/hostname", "../outside", "sub/../../outside"])
def test_manifest_cannot_name_outside_files(tmp_path, name):
    edit_manifest(publish(tmp_path / "x"), files=[{"name": name, "size_bytes": 0, "sha256": ""}])
    with pytest.raises(DataError, match="must be inside"):
        verify_directory(tmp_path / "x")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format_version": 1}', "\x00\xff"])
def test_invalid_manifest_is_damaged(tmp_path, text):
    (publish(tmp_path / "x") / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match="is damaged"):
        read_manifest(tmp_path / "x")


def test_manifest_is_independent_of_layout(tmp_path: Path) -> None:
    text = manifest_text({"name": "grüße"}, (FileEntry("a.txt", 3, "00"),))
    (tmp_path / "manifest.json").write_text(json.dumps(dict(reversed(json.loads(text).items()))))
    manifest = read_manifest(tmp_path)
    assert (dict(manifest.values), manifest.files) == ({"name": "grüße"}, (FileEntry("a.txt", 3, "00"),))
    with pytest.raises(ValueError, match="JSON compliant"):
        manifest_text({"reward": float("nan")}, ())
    with pytest.raises(AssertionError, match=r"manifest keys \['files'\] are the manifest's own"):
        manifest_text({"files": 1}, ())


def test_unreadable_file_error_has_the_reason(tmp_path: Path) -> None:
    target = publish(tmp_path / "x")
    (target / "a.txt").unlink()
    (target / "a.txt").symlink_to("/proc/self/mem")  # its first byte is an input/output error, its size 0
    edit_manifest(target, files=[{"name": "a.txt", "size_bytes": 0, "sha256": ""}])
    verify_directory(target, hashes=False)
    with pytest.raises(DataError, match=r"/a\.txt: cannot be read \(\[Errno 5\] Input/output error\)\. Delete "):
        verify_directory(target)


def test_newer_format_is_a_version_above_ours(tmp_path: Path) -> None:
    found = []
    for version in (0, 1, 2, "3"):
        (tmp_path / "manifest.json").write_text(json.dumps({"format_version": version}))
        found.append(newer_format(tmp_path))
    assert found == [None, None, 2, None]
    (tmp_path / "state.json").write_text('{"format_version": 7}')
    assert (newer_format(tmp_path, "state.json", 6), newer_format(tmp_path, "state.json", 7)) == (7, None)
    assert newer_format(tmp_path / "absent") is None


def test_parts_of_a_mixture_are_sibling_folders(tmp_path: Path) -> None:
    mixture = publish(tmp_path / "mixture", parts=["b", "a"])
    assert part_directories(mixture) == (tmp_path / "b", tmp_path / "a")
    assert part_directories(publish(tmp_path / "a")) == (tmp_path / "a",)
    assert part_directories(tmp_path / "absent") == (tmp_path / "absent",)
