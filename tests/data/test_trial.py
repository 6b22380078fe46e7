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
    with pytest.raises(
        DataError, match=rf"^{train}: line 5: the same prompt as {train}: line 2. Remove one of them, or"
    ):
        validate_rows(mapped, 1, root, each_once=True)
    with test.open("a") as file:
        file.write('{"question": "train 0?", "answer": "7"}\n')
    problem = (
        rf"^{test}: line 3: the same prompt as {train}: line 1, so validation would .* Remove it from one of the two"
    )
    with pytest.raises(DataError, match=problem):
        validate_rows(mapped, 1, root, each_once=False)
    assert validate_rows(CountdownData(), 1, root, each_once=True) is None
    assert validate_rows(CustomData(), 1, root, each_once=True) is None
    made = first_row(mapped, 1, root)
    dataset = build_dataset(mapped, seed=1, root=root)
    assert inputs_of(dataset.directory) == input_digests(mapped)
    assert made == first_row(mapped, 1, root)
    assert validate_rows(mapped, 1, root, each_once=True) == 4, "the rows of a finished dataset are not built"


def test_first_row_of_a_large_task_is_made_alone(tmp_path: Path) -> None:
    settings = CountdownData(train_size=10**9, template="bare", search_tries=None)
    found = first_row(settings, 7, tmp_path)
    assert isinstance(found, FirstRow)
    assert (found.prompt_form, json.loads(found.ground_truth_json)["form"]) == ("text", "bare")
