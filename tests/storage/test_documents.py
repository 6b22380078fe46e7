"""Small files that may be damaged, and files of lines that survive a kill and a full disk."""

import hashlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from rlcore.errors import DataError, DiskSpaceError, TrackingError
from rlcore.storage import documents
from rlcore.storage.disk import find_obstacle
from rlcore.storage.documents import (
    content_digest,
    files_of,
    first_problem,
    open_ordinary,
    parse_json,
    read_document,
    read_ordinary,
    sha256_of,
)
from rlcore.tracking.journal import Journal, iter_lines, load_journal, read_journal
from tests.helpers.published import num_open
from tests.storage.small_disk import fill

NUMBERS = TypeAdapter(dict[str, list[int]])


@contextmanager
def limited(what: int, limit: int) -> Iterator[None]:
    """Lower a limit of this process inside the block."""
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


full_disk = partial(limited, resource.RLIMIT_FSIZE)
"""Lets writes beyond a size of a file fail, as on a full disk."""


def test_open_ordinary_refuses_other_kinds(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = num_open()
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(OSError, match="is no ordinary file") as refused:
            open_ordinary(path)
        assert str(refused.value) == f"[Errno 22] is no ordinary file: '{path}'"
    assert num_open() <= before


def test_files_of_an_unreadable_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "a.json").touch()
    (tmp_path / "b.txt").touch()
    before = num_open()
    assert files_of(tmp_path, "*.json") == [tmp_path / "a.json"]
    assert files_of(tmp_path / "absent", "*.json") == []
    assert num_open() <= before
    with limited(resource.RLIMIT_NOFILE, 0), pytest.raises(OSError, match="Too many open files"):
        files_of(tmp_path, "*.json")


@pytest.mark.parametrize(("size", "hashed"), [(None, 10), (0, 0), (4, 4), (10, 10), (11, 10)])
def test_sha256_of_the_first_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None, hashed: int
) -> None:
    monkeypatch.setattr("rlcore.storage.documents.READ_BLOCK_BYTES", 3)
    (tmp_path / "x").write_bytes(b"0123456789")
    assert sha256_of(tmp_path / "x", size) == hashlib.sha256(b"0123456789"[:hashed]).hexdigest()


def test_find_obstacle_returns_the_nearest_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert find_obstacle(tmp_path / "new" / "er") is None
    assert find_obstacle(tmp_path) is None
    assert find_obstacle(tmp_path / "file" / "new") == tmp_path / "file"
    assert find_obstacle(tmp_path / "link") == tmp_path / "link"


@pytest.mark.parametrize(("text", "problem"), [
    ("[]", "content: Input should be an object"),
    ('{"a": ["x", "y"]}', "a.0: Input should be a valid integer, unable to parse string as an integer"),
])  # fmt: skip
def test_invalid_document_error_has_the_first_problem(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(DataError) as refused:
        read_document(file, NUMBERS, "delete it")
    assert str(refused.value) == f"{file}: cannot be read ({problem}); delete it"


def test_read_document_of_present_and_absent_files(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": [1]}')
    assert read_ordinary(tmp_path / "x.json") == b'{"a": [1]}'
    assert read_document(tmp_path / "x.json", NUMBERS, "") == {"a": [1]}
    assert read_document(tmp_path / "absent.json", NUMBERS, "") is None
    with pytest.raises(DataError, match=r"cannot be read \(\[Errno 22\] is no ordinary file"):
        read_document(tmp_path, NUMBERS, "")
    with pytest.raises(ValueError, match=r"^is nested too deeply$"):
        parse_json("[" * 200_000)
    assert first_problem(OSError(5, "Input/output error")) == "[Errno 5] Input/output error"


def test_changed_content_of_equal_size_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    os.utime(file, (0, 0))
    before, seen = content_digest(file), file.stat()
    while file.stat().st_ctime_ns == seen.st_ctime_ns:  # until the file system's clock ticks
        file.write_bytes(b"two")
        os.utime(file, (0, 0))
    assert content_digest(file) == hashlib.sha256(b"two").hexdigest() != before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.mark.parametrize("before", [[1], []], ids=["after a whole one", "alone"])
@pytest.mark.parametrize("block_bytes", [7, 1 << 20])
def test_open_cuts_a_torn_line(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, before: list[int], block_bytes: int
):
    monkeypatch.setattr(documents, "READ_BLOCK_BYTES", block_bytes)
    with Journal(path) as journal:
        for step in before:
            journal.append_step(step, {"a": 1.0})
    with path.open("ab") as file:
        file.write(b'{"step":2,"time":1.0,"metr')
    with Journal(path) as journal:
        journal.append_step(3, {"a": 3.0})
    assert caplog.messages == [f"{path}: cut 26 bytes of a line that was never finished"]
    contents = load_journal(path)
    assert [record.step for record in contents.steps] == [*before, 3]
    assert (contents.torn_bytes, contents.num_damaged_lines) == (0, 0)


@pytest.mark.parametrize("block_bytes", [7, 1 << 20])
def test_truncate_keeps_cut_lines(path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int):
    monkeypatch.setattr(documents, "READ_BLOCK_BYTES", block_bytes)
    with Journal(path) as journal:
        journal.append_step(1, {"a": 1.0})
        at_checkpoint = journal.sync()
        journal.append_step(2, {"a": 2.0})
        head, tail = path.read_bytes()[:at_checkpoint], path.read_bytes()[at_checkpoint:]
        first = journal.truncate(at_checkpoint)
        journal.append_step(2, {"a": 2.5})
        second = journal.truncate(at_checkpoint)
        assert path.read_bytes() == head
        journal.append_step(2, {"a": 2.75})
    assert (first.name, second.name) == ("metrics.abandoned-1.jsonl", "metrics.abandoned-2.jsonl")
    assert first.read_bytes() == tail
    assert [record.metrics["a"] for record in read_journal(path)] == [1.0, 2.75]


def test_truncate_on_a_full_disk_changes_nothing(small_disk: Path):
    with Journal(small_disk / "metrics.jsonl") as journal:
        journal.append_step(0, {"a": 1.0})
        at_checkpoint = journal.size_bytes
        for step in range(1, 40):
            journal.append_step(step, {f"m{number}": 1.0 for number in range(100)})
        whole = journal.sync()
        ballast = fill(small_disk, leave_bytes=4096)
        with pytest.raises(DiskSpaceError, match=r"metrics\.jsonl: no room"):
            journal.truncate(at_checkpoint)
        assert sorted(small_disk.iterdir()) == [ballast, journal.path]
        assert journal.size_bytes == whole
        ballast.unlink()
        assert journal.truncate(at_checkpoint) is not None
        assert [record.step for record in read_journal(journal.path)] == [0]


@pytest.mark.parametrize("offset", [1, -1])
def test_truncate_inside_a_line_is_refused(path: Path, offset: int):
    with Journal(path) as journal:
        journal.append_step(1, {"a": 1.0})
        before = path.read_bytes()
        with pytest.raises(TrackingError, match=r"metrics\.jsonl: cannot be cut to byte"):
            journal.truncate(journal.size_bytes + offset)
        assert journal.truncate(journal.size_bytes) is None
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_sync_and_truncate_flush_to_disk(path: Path, monkeypatch: pytest.MonkeyPatch):
    forced: list[tuple[bool, int]] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        stat = os.fstat(descriptor)
        forced.append((stat.st_ino == path.parent.stat().st_ino, stat.st_size))
        fsync(descriptor)

    with Journal(path) as journal:
        journal.append_step(1, {"a": 1.0})
        kept = journal.size_bytes
        journal.append_step(2, {"a": 2.0, "b": 3.0})
        whole = journal.size_bytes
        monkeypatch.setattr(os, "fsync", watched)
        assert journal.sync() == whole
        assert forced == [(False, whole)]
        forced.clear()
        journal.truncate(kept)
    assert [size for is_folder, size in forced if not is_folder] == [whole - kept, kept], "both files, when whole"
    assert [is_folder for is_folder, _ in forced] == [False, False, True]


def test_open_reader_continues_after_truncate(path: Path):
    with Journal(path) as journal:
        for step in (1, 2, 3):
            journal.append_step(step, {"a": float(step)})
        with path.open("rb") as reader:
            _, end = next(iter_lines(reader.fileno(), 0))
            journal.truncate(end)
            journal.append_step(9, {"a": 9.0})
            seen = [record for record, _ in iter_lines(reader.fileno(), end)]
    assert [record.step for record in seen if record is not None] == [2, 3]
    assert [record.step for record in read_journal(path)] == [1, 9]


def test_threads_and_writers_never_mix_lines(path: Path):
    """Two writers (a run that is validated while it trains) never overwrite each other."""
    with Journal(path) as first, Journal(path) as second:

        def write(thread: int) -> None:
            for step in range(200):
                (first, second)[thread % 2].append_step(step, {f"thread/{thread}/{i}": 1.0 for i in range(20)})

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(4)))
        assert first.size_bytes == second.size_bytes == path.stat().st_size
    contents = load_journal(path)
    assert contents.num_damaged_lines == 0
    assert len(contents.steps) == 200
    assert all(len(record.metrics) == 80 for record in contents.steps)


def test_truncate_drops_pending_lines(path: Path):
    with Journal(path) as journal:
        journal.append_step(1, {"a": 1.0})
        saved = journal.sync()
        with full_disk(saved):
            journal.append_step(2, {"a": 2.0, "of the abandoned steps": 2.0})
            assert journal.truncate(saved) is None
        journal.append_step(2, {"a": 3.0})
        kept = journal.sync()
        journal.append_step(3, {"a": 4.0})
        with full_disk(journal.sync()):
            journal.append_step(4, {"a": 4.0})
            assert journal.truncate(kept) is not None
        journal.append_step(3, {"a": 5.0})
    assert [record.metrics for record in read_journal(path)] == [{"a": 1.0}, {"a": 3.0}, {"a": 5.0}]


def test_full_disk_loses_no_value(path: Path):
    with Journal(path) as journal:
        journal.append_step(1, {"a": 1.0})
        with full_disk(journal.size_bytes + 20):  # room for half of the next line
            journal.append_step(2, {"a": 2.0})
            assert b'"step":2' not in path.read_bytes(), "half a line is on disk"
            with pytest.raises(DiskSpaceError, match="make room") as failed:
                journal.sync()
        journal.append_step(3, {"a": 3.0})
        assert journal.sync() == path.stat().st_size
    second = path.read_bytes().splitlines(keepends=True)[1]
    assert str(failed.value).startswith(f"{path}: {len(second)} bytes could not be written")
    assert failed.value.needed_bytes == len(second)
    assert [record.step for record in read_journal(path)] == [1, 2, 3]


KILLED = """
import sys
from pathlib import Path
from rlcore.tracking.journal import Journal

journal = Journal(Path(sys.argv[1]))
step = 0
while True:
    step += 1
    journal.append_step(step, {f"m{i}": step / 7 for i in range(100)})
    print(step, flush=True)
"""


def test_written_lines_survive_a_kill(path: Path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    with process:
        for line in process.stdout:
            if int(line) >= 300:
                break
        process.send_signal(signal.SIGKILL)
        printed = [int(line), *(int(each) for each in process.stdout)]
    steps = [record.step for record in read_journal(path)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= printed[-1] >= 300
