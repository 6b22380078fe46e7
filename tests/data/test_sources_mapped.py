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


def test_rows_are_named_after_their_folder(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"q": "What?", "a": 2, "s": "It is 2"}\n')
    names = {"source": str(tmp_path), "question": "q", "answer": "a"}
    plain = build_mapped(MappedData(**names), 0)
    assert plain.data_source == tmp_path.name
    assert list(plain.splits["validation"]) == [
        Row((Message("user", "What?"),), "2", where=f"{tmp_path}/test.jsonl: line 1")
    ]
    more = build_mapped(MappedData(**names, data_source="own", instruction="Think.", solution="s"), 0)
    assert (more.data_source, more.ability) == ("own", "math")
    train = f"{tmp_path}/train.jsonl: line 1"
    assert list(more.splits["train"]) == [Row((Message("user", "What? Think."),), "2", solution="It is 2", where=train)]


def test_further_columns_reach_the_scorer_as_text(tmp_path: Path, artifacts_root: Path) -> None:
    line = {"question": "What?", "answer": 2, "unit": "m", "kinds": ["a", {"b": None}], "limit": 3.0, "none": None}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({**line, "question": split}) + "\n")
    settings = MappedData(source=str(tmp_path), columns=("unit", "kinds", "kinds.0", "limit"), scorer="my_reward:score")
    made = build_dataset(settings, seed=1, root=artifacts_root)
    (row,) = pq.read_table(made.directory / "validation.parquet").to_pylist()
    assert row["reward_model"]["ground_truth"] == {
        "answer": "2", "unit": "m", "kinds": '["a", {"b": null}]', "kinds.0": "a", "limit": "3",
    }  # fmt: skip
    for column, message in (("none", "column none: must be a text"), ("kind", "there is no column kind ")):
        with pytest.raises(DataError, match=rf"train.jsonl: line 1: {message}"):
            list(build_mapped(settings.model_copy(update={"columns": (column,)}), 0).splits["train"])


@pytest.mark.parametrize("text", ["NaN", "nan", "inf", "-Infinity", "None", "null", "<NA>"])
def test_texts_of_missing_values_are_refused(text: str, tmp_path: Path) -> None:
    for split in ("train", "test"):
        rows = [{"question": "None", "answer": "none"}, {"question": "b?", "answer": text}]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = build_mapped(MappedData(source=str(tmp_path)), 1)
    with pytest.raises(DataError, match=rf"^{tmp_path}/train.jsonl: line 2: column answer: .*'{text}' of a missing"):
        list(made.splits["train"])


def test_nan_and_infinity_are_refused(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "a?", "answer": 1}\n{"question": "b?", "answer": NaN}\n')
    with pytest.raises(DataError, match=rf"^{tmp_path}/train.jsonl: line 2: column answer: .*, got nan \(columns"):
        list(build_mapped(MappedData(source=str(tmp_path)), 0).splits["train"])
    (tmp_path / "train.jsonl").unlink()
    pq.write_table(pa.table({"question": ["a?", "b?"], "answer": [1.0, -math.inf]}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=rf"^{tmp_path}/train.parquet: row 1: column answer: .*, got -inf \(columns"):
        list(build_mapped(MappedData(source=str(tmp_path)), 0).splits["train"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question": "tsk.text"}, r"line 1: there is no column tsk.text \(columns: task, final, cut\)"),
        ({"question": "task"}, r"column task: must be a text"),
        ({"question": "cut"}, r"line 1: column cut: must be UTF-8 .*surrogates not allowed"),
        ({"source": ""}, r"data.source: must be a folder or a hub id"),
        ({"train_split": "train"}, r"lacks train, as \.jsonl, .* Its files: "),
    ],
)
def test_wrong_names_are_refused(tmp_path, artifacts_root, changes, message):
    for name in ("big", "small"):
        line = {"task": {"text": f"{name}: what?"}, "final": 1, "cut": "\ud83d"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line))
    names = {"question": "task.text", "answer": "final", "train_split": "big", "validation_split": "small"}
    with pytest.raises(DataError, match=message):
        build_dataset(MappedData(**{"source": str(tmp_path), **names, **changes}), seed=1, root=artifacts_root)
