"""Parts of stored responses: written in a thread, truncated, limited in size, and on a full disk."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcore.config import AnswersConfig
from rlcore.errors import DiskSpaceError, UnwritableError
from rlcore.responses.store import ResponseWriter, parts_of
from rlcore.storage.disk import free_bytes
from tests.helpers.answers import Made
from tests.storage.small_disk import mounted


def chunk(writer: ResponseWriter, *steps: int) -> None:
    for step in steps:
        writer.add(Made(step).of_step(step))
    writer.start_part()
    writer.wait()


def names(folder: Path) -> list[str]:
    return [path.name for path in sorted(folder.iterdir())]


def test_part_has_added_responses(tmp_path: Path) -> None:
    writer = ResponseWriter(tmp_path / "answers", AnswersConfig())
    chunk(writer, 1, 2)
    chunk(writer, 3)
    writer.start_part()  # nothing was added
    assert names(tmp_path / "answers") == ["train-000001-000002.parquet", "train-000003-000003.parquet"]
    written = pq.read_table(tmp_path / "answers" / "train-000001-000002.parquet")
    assert written.equals(pa.concat_tables([Made(1).of_step(1), Made(2).of_step(2)]))


def test_truncate_keeps_responses_of_checkpoint(tmp_path: Path) -> None:
    writer = ResponseWriter(tmp_path, AnswersConfig())
    chunk(writer, 1, 2)
    chunk(writer, 3, 4)
    for step in (2, 4):
        writer.write_validation(f"step-{step:06d}", Made(9).of_validation(step, f"step-{step:06d}"))
    writer.write_validation("after", Made(9).of_validation(4, "after"))
    (tmp_path / ".tmp-train-000005-000006.parquet-999999999-0123abcd").write_bytes(b"half")
    writer.add(Made(5).of_step(5))
    writer.truncate(3)
    assert names(tmp_path) == [
        "train-000001-000002.parquet", "train-000003-000003.parquet",
        "validation-after.parquet", "validation-step-000002.parquet",
    ]  # fmt: skip
    assert pq.read_table(tmp_path / "train-000003-000003.parquet").equals(Made(3).of_step(3))
    chunk(writer)
    assert len(names(tmp_path)) == 4, "truncate discards unwritten responses"


def test_truncate_during_write(tmp_path: Path) -> None:
    writer = ResponseWriter(tmp_path, AnswersConfig())
    writer.add(Made(1).of_step(1))
    writer.start_part()
    writer.truncate(0)
    assert names(tmp_path) == []


def test_steps_and_size_are_limited(tmp_path: Path) -> None:
    thinned = ResponseWriter(tmp_path, AnswersConfig(every_steps=5))
    assert [step for step in range(1, 12) if thinned.stores_step(step)] == [5, 10]
    none = ResponseWriter(tmp_path, AnswersConfig(every_steps=0))
    assert not none.stores_step(5)
    none.write_validation("after", Made(1).of_validation(1, "after"))
    assert names(tmp_path) == []

    chunk(ResponseWriter(tmp_path, AnswersConfig()), 1)
    size = (tmp_path / "train-000001-000001.parquet").stat().st_size
    bounded = ResponseWriter(tmp_path, AnswersConfig(max_gb=2.5 * size / 1e9))
    bounded.write_validation("before", Made(9).of_validation(0, "before"))
    for step in (2, 3, 4):
        chunk(bounded, step)
    left = names(tmp_path)
    assert {"train-000004-000004.parquet", "validation-before.parquet"} <= set(left)
    assert "train-000001-000001.parquet" not in left
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2.5 * size


def test_full_disk_keeps_part_in_memory(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 1) as disk:
        writer = ResponseWriter(disk / "answers", AnswersConfig())
        chunk(writer, 1)
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(free_bytes(disk)))
        with pytest.raises(DiskSpaceError, match=r"train-000002-000002\.parquet: no room"):
            chunk(writer, 2)
        writer.add(Made(3).of_step(3))
        with pytest.raises(DiskSpaceError):
            writer.start_part()
        assert names(disk / "answers") == ["train-000001-000001.parquet"]
        ballast.unlink()
        chunk(writer)
        assert len(parts_of(disk / "answers")) == 3


def test_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "answers").write_text("a file")
    writer = ResponseWriter(tmp_path / "answers", AnswersConfig())
    with pytest.raises(UnwritableError, match=r"answers: must be a folder, and .*answers is none"):
        chunk(writer, 1)
