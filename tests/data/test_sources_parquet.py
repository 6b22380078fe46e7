"""Rows of parquet files in the row schema."""

import math
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import sources
from data.rows import Message, Row
from data.schema import provenance_metadata, row_schema
from data.sources import build_parquet
from rlcore.config.data import ParquetData
from rlcore.errors import DataError


def written(path: Path, rows: list[dict[str, object]], truth: pa.DataType, **document: str) -> Path:
    table = pa.Table.from_pylist(rows, schema=row_schema(truth))
    pq.write_table(table.replace_schema_metadata(provenance_metadata(document)), path)
    return path


ROW: dict[str, object] = {
    "data_source": "own",
    "prompt": [{"role": "system", "content": ""}, {"role": "user", "content": "What?"}],
    "ability": None,
    "reward_model": {"style": "rule", "ground_truth": 7},
    "extra_info": {"split": "train", "index": 0, "difficulty": 3, "solution": "7", "distractor": None},
}


def test_parquet_rows_are_kept_and_broken_ones_refused_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "ROWS_PER_GROUP", 1)
    bare = ROW | {"extra_info": None, "data_source": None, "ability": "logic"}
    train = written(tmp_path / "mine.parquet", [ROW, bare], pa.int64(), prompt_form="text")
    held_out = written(tmp_path / "held.parquet", [bare], pa.int64(), prompt_form="text")
    settings = ParquetData(train_file=str(train), validation_file=str(held_out))
    task = build_parquet(settings, 0)
    assert (task.data_source, task.ability, task.prompt_form) == ("mine", "math", "text")
    assert task.ground_truth_type == pa.int64()
    messages = (Message("system", ""), Message("user", "What?"))
    assert list(task.splits["train"]) == [
        Row(messages, 7, difficulty=3, solution="7", data_source="own", where=f"{train}: row 0"),
        Row(messages, 7, ability="logic", where=f"{train}: row 1"),
    ]
    assert build_parquet(settings.model_copy(update={"template": "chat"}), 0).prompt_form == "chat"
    for broken, told in (
        (
            {"prompt": [{"role": "user", "content": "x"}, None]},
            "row 1: prompt must be messages with role and content, ",
        ),
        ({"prompt": []}, "row 1: prompt must be messages with role and content, got []; repair it"),
        ({"prompt": [{"role": "", "content": "x"}]}, "row 1: prompt must be messages with role and content, got [{"),
        ({"prompt": [{"role": "user", "content": None}]}, "row 1: prompt must be messages with role and content, got"),
        (
            {"reward_model": {"ground_truth": None}},
            "row 1: reward_model.ground_truth must have a value, got nothing; repair or remove the",
        ),
        (
            {"reward_model": None},
            "row 1: reward_model.ground_truth must have a value, got nothing; repair or remove the",
        ),
    ):
        written(train, [ROW, ROW | broken], pa.int64(), prompt_form="text")
        with pytest.raises(DataError, match=f"^{re.escape(f'{train}: {told}')}"):
            list(build_parquet(settings, 0).splits["train"])


def test_two_parquet_files_of_different_kinds_are_refused(tmp_path: Path) -> None:
    train = written(tmp_path / "a.parquet", [ROW], pa.int64(), prompt_form="text")
    settings = ParquetData(train_file=str(train), validation_file=str(tmp_path / "b.parquet"))
    with pytest.raises(DataError, match=r"^data\.validation_file: must be a parquet file that exists, got '/.*b\.parq"):
        build_parquet(settings, 0)
    for truth, form, got in (
        (pa.int64(), "chat", "int64, chat and text"),
        (pa.int32(), "text", "int32 and int64, text"),
    ):
        other = written(tmp_path / "b.parquet", [ROW], truth, prompt_form=form)
        with pytest.raises(DataError) as error:
            build_parquet(settings, 0)
        assert str(error.value) == (
            f"{train} and {other}: must have one type of ground truth and one form of prompt, got {got}; make both "
            "from one task"
        )


@pytest.mark.parametrize("text", ["NaN", "nan", "inf", "-Infinity", "None", "null", "<NA>"])
def test_the_text_of_a_missing_value_is_no_reference(text: str, tmp_path: Path) -> None:
    row = ROW | {"reward_model": {"style": "rule", "ground_truth": text}}
    named = str(written(tmp_path / "x.parquet", [row], pa.string()))
    with pytest.raises(DataError, match=rf"x.parquet: row 0: reward_model.ground_truth must have a value, got {text}"):
        list(build_parquet(ParquetData(train_file=named, validation_file=named), 1).splits["train"])


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_no_references(tmp_path: Path, number: float) -> None:
    row = ROW | {"reward_model": {"style": "rule", "ground_truth": number}}
    named = str(written(tmp_path / "x.parquet", [row], pa.float64()))
    with pytest.raises(
        DataError, match=r"x.parquet: row 0: reward_model.ground_truth must have a value, got -?(nan|inf)"
    ):
        list(build_parquet(ParquetData(train_file=named, validation_file=named), 1).splits["train"])
