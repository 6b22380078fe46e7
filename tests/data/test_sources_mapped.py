"""Rows from columns of any dataset."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.rows import Message, Row
from data.sources import build_mapped
from data.tasks import build_dataset
from rlcore.config import MappedData
from rlcore.errors import DataError


def test_mapped_rows_are_named_after_their_folder(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"q": "What?", "a": 2, "s": "It is 2"}\n')
    names = {
        "source": str(tmp_path),
        "question": "q",
        "answer": "a",
        "train_split": "train",
        "validation_split": "test",
    }
    plain = build_mapped(MappedData(**names), 0)
    assert plain.data_source == tmp_path.name
    assert list(plain.splits["validation"]) == [
        Row((Message("user", "What?"),), "2", where=f"{tmp_path}/test.jsonl: line 1")
    ]
    more = build_mapped(MappedData(**names, data_source="own", instruction="Think.", solution="s"), 0)
    assert (more.data_source, more.ability) == ("own", "math")
    train = f"{tmp_path}/train.jsonl: line 1"
    assert list(more.splits["train"]) == [Row((Message("user", "What? Think."),), "2", solution="It is 2", where=train)]


@pytest.mark.parametrize("text", ["NaN", "nan", "inf", "-Infinity", "None", "null", "<NA>"])
def test_the_text_of_a_missing_value_is_no_reference(text: str, tmp_path: Path) -> None:
    for split in ("train", "test"):
        rows = [{"question": "None", "answer": "none"}, {"question": "b?", "answer": text}]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = build_mapped(MappedData(source=str(tmp_path)), 1)
    with pytest.raises(DataError, match=rf"^{tmp_path}/train.jsonl: line 2: column answer: .*'{text}' of a missing"):
        list(made.splits["train"])


def test_nan_and_infinity_are_no_references(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "a?", "answer": 1}\n{"question": "b?", "answer": NaN}\n')
    with pytest.raises(DataError, match=rf"^{tmp_path}/train.jsonl: line 2: column answer: .*, got nan \(columns"):
        list(build_mapped(MappedData(source=str(tmp_path)), 0).splits["train"])
    (tmp_path / "train.jsonl").unlink()
    pq.write_table(pa.table({"question": ["a?", "b?"], "answer": [1.0, -math.inf]}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=rf"^{tmp_path}/train.parquet: row 1: column answer: .*, got -inf \(columns"):
        list(build_mapped(MappedData(source=str(tmp_path)), 0).splits["train"])


@pytest.fixture
def folder(tmp_path):
    record = {"task": {"text": "What is half of two?"}, "final": 1, "worked": "Two halves make two. 1", "cut": "\ud83d"}
    for name, count in (("big", 5), ("small", 2)):
        lines = [json.dumps(record | {"task": {"text": f"{name} {i}: what?"}, "final": i}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def mapping(folder, **changes):
    names = {"question": "task.text", "answer": "final", "solution": "worked", "data_source": "puzzles"}
    return MappedData(source=str(folder), train_split="big", validation_split="small", **{**names, **changes})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"question": "tsk.text"}, r"line 1: there is no column tsk.text \(columns: task, final, worked, cut\)"),
        ({"question": "task"}, r"column task: must be a text"),
        ({"question": "cut"}, r"line 1: column cut: must be UTF-8 .*surrogates not allowed"),
        ({"source": ""}, r"data.source: must be a folder or a hub id"),
        ({"train_split": "train"}, r"lacks train, as \.jsonl, .* Its data files: "),
    ],
)
def test_wrong_names_are_told(folder, artifacts_root, changes, told):
    settings = mapping(folder).model_copy(update=changes)
    with pytest.raises(DataError, match=told):
        build_dataset(settings, seed=1, root=artifacts_root)
