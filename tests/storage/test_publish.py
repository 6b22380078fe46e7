"""Published directories are complete or absent."""

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import CheckpointError, DataError, DiskSpaceError
from rlcore.storage.documents import temporary_sibling
from rlcore.storage.locks import FileLock
from rlcore.storage.manifest import verify_directory
from rlcore.storage.publish import (
    _is_stale,
    _take,
    published_directory,
    remove_stale_temporaries,
    remove_tree,
    size_bytes,
    write_json_atomically,
    write_secret_once,
    write_text_atomically,
)
from tests.helpers.published import num_open, publish
from tests.storage.small_disk import fill, mounted


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def publish_after(target: Path, act: Callable[[Path], object], **more: Any) -> None:
    with published_directory(target, {}, **more) as folder:
        (folder / "a").write_bytes(b"12345")
        act(folder)


def test_published_directory_has_files_and_manifest(tmp_path):
    values: dict[str, Any] = {"kind": "demo"}
    stages: list[str] = []
    with published_directory(tmp_path / "very" / "deep" / "x", values, at=stages.append) as folder:
        (folder / "a.txt").write_text("abc")
        (folder / "sub").mkdir()
        (folder / "sub" / "b.bin").write_bytes(bytes(256))
        values["reward"] = 0.25  # read after the block
        assert stages == []
    target = tmp_path / "very" / "deep" / "x"
    manifest = verify_directory(target)
    assert dict(manifest.values) == values
    assert [entry.name for entry in manifest.files] == ["a.txt", "sub/b.bin"]
    assert manifest.size_bytes == 259
    assert (names(target.parent), names(target)) == (["x"], ["a.txt", "manifest.json", "sub"])
    hashing = f"hashing and flushing the files in {folder}"
    assert stages == [hashing, f"renaming {folder} to x", f"flushing the folder {target.parent}"]


@pytest.mark.parametrize("leave_bytes", [0, 4096, 8192, 12288, 16384])
def test_full_disk_at_each_file_leaves_nothing(small_disk, leave_bytes):
    ballast = fill(small_disk, leave_bytes)
    try:
        publish(small_disk / "x")
    except DiskSpaceError:
        assert names(small_disk) == ["ballast"]
        ballast.unlink()
        publish(small_disk / "x")
    verify_directory(small_disk / "x")


def raising(reason: BaseException) -> Callable[[Path], None]:
    def fail(folder: Path) -> None:
        raise reason

    return fail


FULL = r"/x: no room .* at least 5 bytes were to be written, \d+ bytes are free"


@pytest.mark.parametrize(("act", "error", "message"), [
    (raising(KeyboardInterrupt("no")), KeyboardInterrupt, "^no$"),
    (raising(ValueError("no")), ValueError, "^no$"),
    (raising(OSError(errno.ENOSPC, "No space left on device")), DiskSpaceError, FULL),
    (raising(OSError(errno.EDQUOT, "Disk quota exceeded")), DiskSpaceError, FULL),
    (raising(RuntimeError("a Rust writer: No space left on device (os error 28)")), DiskSpaceError, FULL),
    (lambda folder: (folder / "manifest.json").touch(), DataError, r"/manifest\.json: is written by the publishing"),
    (lambda folder: (folder / "link").symlink_to("/etc/hostname"), DataError, "only ordinary files"),
])  # fmt: skip
def test_failed_block_leaves_nothing(tmp_path, act, error, message):
    with pytest.raises(error, match=message):
        publish_after(tmp_path / "x", act)
    assert names(tmp_path) == []


def test_directory_of_another_process_is_kept(tmp_path, caplog):
    with published_directory(tmp_path / "x", {"who": "slow"}) as folder:
        (folder / "a.txt").write_text("slow")
        publish(tmp_path / "x", "fast", who="fast")
    manifest = verify_directory(tmp_path / "x")
    assert manifest.values["who"] == "fast"
    assert names(tmp_path) == ["x"]
    assert "theirs is kept" in caplog.text


@pytest.mark.parametrize("can_exchange", [True, False])
def test_replace_exchanges_a_directory(tmp_path, monkeypatch, can_exchange):
    (tmp_path / "x").mkdir()
    publish(tmp_path / "x", "old")
    (tmp_path / "x" / "more").touch()
    if not can_exchange:
        monkeypatch.setattr("rlcore.storage.publish.exchange", lambda a, b: False)
    publish(tmp_path / "x", "new", replace=True)
    verify_directory(tmp_path / "x")
    assert (tmp_path / "x" / "a.txt").read_text() == "new"
    assert (names(tmp_path), names(tmp_path / "x")) == (["x"], ["a.txt", "manifest.json", "sub"])


@pytest.mark.parametrize("num_inodes", [1, 2])
def test_disk_without_inodes_is_a_full_disk(tmp_path: Path, num_inodes: int) -> None:
    with mounted(tmp_path / "few", options=f"nr_inodes={num_inodes}") as disk:
        with pytest.raises(DiskSpaceError, match=r"x: no room to write \(\[Errno 28\]"):
            publish(disk / "x")
        assert names(disk) == []


def test_publishing_closes_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    caplog.set_level("DEBUG")
    before = num_open()
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refused)
        verify_directory(publish(tmp_path / "x"))
    assert ".owner.lock: [Errno 37] No locks available" in caplog.text
    publish(tmp_path / "x", replace=True)
    write_text_atomically(tmp_path / "y", "text")
    dead = tmp_path / f".tmp-x-{2**22 + 1}-0123abcd"
    dead.mkdir()
    (dead / ".owner.lock").touch()
    assert remove_stale_temporaries(tmp_path) == (dead,)
    assert num_open() <= before


@pytest.mark.parametrize("in_the_way", ["file", "folder"])
def test_unfinished_target_is_never_overwritten(tmp_path, in_the_way):
    def obstruct(folder: Path | None = None) -> None:
        if in_the_way == "file":
            (tmp_path / "x").write_text("precious")
        else:
            (tmp_path / "x").mkdir()
            (tmp_path / "x" / "precious").touch()

    with pytest.raises(DataError, match="in the way"):
        publish_after(tmp_path / "x", obstruct)
    with pytest.raises(DataError, match="in the way"):
        published_directory(tmp_path / "x", {}).__enter__()  # before anything is written
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x").is_file() or names(tmp_path / "x") == ["precious"]


def test_unusable_parent_folder_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file: must be a folder, and .*/file is none\. Move"):
        published_directory(tmp_path / "file" / "x", {}, error=CheckpointError).__enter__()
    with pytest.raises(CheckpointError, match="cannot be published"):
        publish_after(tmp_path / "a" / "x", lambda _: (tmp_path / "a").rename(tmp_path / "b"), error=CheckpointError)
    # A mount point cannot be renamed.
    with mounted(tmp_path / "x"), pytest.raises(DataError, match=r"x: cannot be published \(\[Errno 16\]"):
        publish(tmp_path / "x")
    assert names(tmp_path) == ["b", "file", "x"]
    with pytest.raises(DataError, match=r"^/sys: cannot be written .* paths\.root") as caught:  # not even by root
        write_text_atomically(Path("/sys/x.txt"), "content")
    assert isinstance(caught.value, OSError), "a caller that does not need the text may continue"


# ---------------------------------------------------------------- single files


def test_text_and_json_are_replaced_whole(tmp_path):
    write_text_atomically(tmp_path / "new" / "x", "grüße\n")
    assert (tmp_path / "new" / "x").read_bytes() == "grüße\n".encode()
    write_json_atomically(tmp_path / "very" / "deep" / "x", {"a": ["ü"]})
    assert (tmp_path / "very" / "deep" / "x").read_text(encoding="utf-8") == '{\n  "a": [\n    "ü"\n  ]\n}\n'
    with pytest.raises(ValueError, match="JSON"):
        write_json_atomically(tmp_path / "new" / "x", float("nan"))
    with pytest.raises(IsADirectoryError):
        write_text_atomically(tmp_path / "very" / "deep", "content")
    assert (names(tmp_path / "new"), names(tmp_path / "very")) == (["x"], ["deep"])


def test_full_disk_keeps_the_old_text(small_disk):
    write_text_atomically(small_disk / "x", "old")
    fill(small_disk)
    with pytest.raises(DiskSpaceError, match="x: no room"):
        write_text_atomically(small_disk / "x", "new" * 10_000)
    assert (small_disk / "x").read_text() == "old"
    assert names(small_disk) == ["ballast", "x"]


# ---------------------------------------------------------------- temporaries


def test_remove_tree_keeps_targets_of_links(tmp_path: Path) -> None:
    folder = publish(tmp_path / "x")
    assert size_bytes(folder / "sub") == 256
    assert size_bytes(tmp_path / "absent") == 0
    (tmp_path / "link").symlink_to(folder)
    for path in (tmp_path / "link", folder / "a.txt", folder / "a.txt", folder / "manifest.json" / "below"):
        remove_tree(path)
    assert names(tmp_path) == ["x"]
    assert names(folder) == ["manifest.json", "sub"]
    remove_tree(folder)
    assert names(tmp_path) == []


def test_stale_temporaries_of_dead_processes_are_removed(tmp_path, caplog):
    caplog.set_level("INFO")
    dead = 2**22 + 1  # above the largest process id that Linux gives
    (tmp_path / f".tmp-x-{dead}-0123abcd").mkdir()
    (tmp_path / f".tmp-x-{dead}-0123abcd" / "big").touch()
    (tmp_path / f".tmp-y.json-{dead}-0123abcd").touch()
    (tmp_path / f".tmp-x-{os.getpid()}-0123abcd").mkdir()
    (tmp_path / f"x-{dead}-0123abcd").mkdir()
    (tmp_path / ".tmp-mine").mkdir()
    with published_directory(tmp_path / "live", {}) as folder:
        removed = remove_stale_temporaries(tmp_path)
        assert folder.exists()
    assert sorted(path.name for path in removed) == [f".tmp-x-{dead}-0123abcd", f".tmp-y.json-{dead}-0123abcd"]
    for path in removed:
        assert f"removing {path}, left by a process that has ended" in caplog.text
    assert names(tmp_path) == [".tmp-mine", f".tmp-x-{os.getpid()}-0123abcd", "live", f"x-{dead}-0123abcd"]


def test_stale_temporary_with_reused_process_id_is_removed(tmp_path):
    """A restarted trainer in a container often has the id of the killed one."""
    young, old, file, old_file = (temporary_sibling(tmp_path / name) for name in ("w", "x", "y", "z"))
    # A file has no lock: it may be in use for an hour.
    for path, make, age_s in (
        (young, Path.mkdir, 40), (old, Path.mkdir, 70), (file, Path.touch, 3_500), (old_file, Path.touch, 3_700)
    ):  # fmt: skip
        make(path)
        os.utime(path, (time.time() - age_s,) * 2)
    with published_directory(tmp_path / "live", {}) as folder:
        os.utime(folder, (1, 1))  # an hour in one write: its lock says that it lives
        assert remove_stale_temporaries(tmp_path) == (old, old_file)
        assert folder.exists()
    assert remove_stale_temporaries(tmp_path / "absent") == ()
    assert not _is_stale(temporary_sibling(tmp_path / "published meanwhile"))


def test_temporary_is_locked_after_a_concurrent_check(tmp_path):
    looking = FileLock(tmp_path / "owner")

    class Owner(FileLock):
        def try_acquire(self, *, create: bool = True) -> bool:
            is_taken = super().try_acquire(create=create)
            looking.release()
            return is_taken

    assert looking.try_acquire()
    _take(owner := Owner(looking.path))
    assert not FileLock(looking.path).try_acquire()
    owner.release()


@pytest.fixture
def flushed(monkeypatch):
    """Return the paths that were flushed to the disk, in order."""
    found, fsync = [], os.fsync

    def watched(descriptor):
        found.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    return found


def test_publishing_flushes_before_and_after_the_rename(tmp_path, flushed):
    publish(tmp_path / "x")
    *before, last = flushed
    assert last == tmp_path, "the folder that holds the new name"
    (temporary,) = {path for path in before if path.parent == tmp_path}
    parts = {path.relative_to(temporary).as_posix() for path in before}
    assert parts == {".", "a.txt", "sub", "sub/b.bin", "manifest.json"}
    assert before[-1] == temporary, "a folder after what it holds"


@pytest.mark.parametrize("has_links", [True, False])
def test_secret_is_private_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool) -> None:
    def refused(source: str, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", refused)
    secret = tmp_path / "secret"
    write_secret_once(secret, "grüße")
    assert secret.read_text(encoding="utf-8") == "grüße"
    assert secret.stat().st_mode & 0o777 == 0o600
    if has_links:
        write_secret_once(secret, "another")
        assert secret.read_text(encoding="utf-8") == "grüße"
    assert names(tmp_path) == ["secret"]
