"""Small files that may be damaged are read whole, or refused with a message of one line."""

import hashlib
import os
import resource
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from rlcore.errors import DataError
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
from tests.helpers.published import num_open

NUMBERS = TypeAdapter(dict[str, list[int]])


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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            files_of(tmp_path, "*.json")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
    for remedy, end in (("", ""), ("delete it", "; delete it")):
        with pytest.raises(DataError) as refused:
            read_document(file, NUMBERS, remedy)
        assert str(refused.value) == f"{file}: cannot be read ({problem}){end}"


def test_read_document_of_present_and_absent_files(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": [1]}')
    assert read_ordinary(tmp_path / "x.json") == b'{"a": [1]}'
    assert read_document(tmp_path / "x.json", NUMBERS) == {"a": [1]}
    assert read_document(tmp_path / "absent.json", NUMBERS) is None
    with pytest.raises(DataError, match=r"cannot be read \(\[Errno 22\] is no ordinary file"):
        read_document(tmp_path, NUMBERS)
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
