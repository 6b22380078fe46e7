"""Rows tried before a dataset is made: the first row, and all rows of local files."""

import json
from pathlib import Path

import pytest

from data.tasks import build_dataset, input_digests, inputs_of
from data.trial import FirstRow, first_row, validate_rows
from rlcore.config import CountdownData, CustomData, MappedData
from rlcore.errors import DataError


def test_repeated_prompts_are_refused_with_their_line(mapped: MappedData, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert validate_rows(mapped, 1, root, each_once=True) == 3
    assert validate_rows(mapped, 1, root, ("validation",), each_once=True) == 2
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    with train.open("a") as file:
        file.write('\n{"question": "train 1?", "answer": "7"}\n')
    assert validate_rows(mapped, 1, root, each_once=False) == 4
    with pytest.raises(DataError) as error:
        validate_rows(mapped, 1, root, each_once=True)
    assert str(error.value) == (
        f"{train}: line 5: the same prompt as {train}: line 2. Remove one of them, or set "
        "filter.duplicates to drop or keep"
    )
    with test.open("a") as file:
        file.write('{"question": "train 0?", "answer": "7"}\n')
    with pytest.raises(DataError) as error:
        validate_rows(mapped, 1, root, each_once=False)
    assert str(error.value) == (
        f"{test}: line 3: the same prompt as {train}: line 1, so validation would not measure what is new to the "
        "model. Remove it from one of the two files"
    )
    assert validate_rows(CountdownData(), 1, root, each_once=True) is None
    assert validate_rows(CustomData(), 1, root, each_once=True) is None


def test_rows_of_finished_datasets_are_read(mapped: MappedData, tmp_path: Path) -> None:
    root = tmp_path / "root"
    made = first_row(mapped, 1, root)
    assert made is not None
    assert (made.prompt_form, made.ground_truth_json, made.solution) == (mapped.template, '"0"', "")
    assert made.prompt[0]["content"].startswith("train 0?")
    dataset = build_dataset(mapped, seed=1, root=root)
    assert inputs_of(dataset.directory) == input_digests(mapped)
    assert first_row(mapped, 1, root) == made
    assert validate_rows(mapped, 1, root, each_once=True) == 3
    assert validate_rows(mapped, 1, root, ("validation", "train"), each_once=True) == 2


def test_first_row_of_a_large_task_is_made_alone(tmp_path: Path) -> None:
    settings = CountdownData(train_size=10**9, template="bare", search_tries=None)
    found = first_row(settings, 7, tmp_path)
    assert isinstance(found, FirstRow)
    assert (found.prompt_form, json.loads(found.ground_truth_json)["form"]) == ("text", "bare")
