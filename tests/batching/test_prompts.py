"""Prompts as they are read from a filtered file."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcore.batching.prompts import read_prompts
from rlcore.errors import DataError
from rlcore.types import Prompt


@pytest.mark.parametrize(("more", "difficulty"), [({}, 0), ({"difficulty": 3}, 3)], ids=str)
def test_a_row_whose_difficulty_nobody_has_said_is_of_difficulty_zero(
    tmp_path: Path, more: dict[str, int], difficulty: int
) -> None:
    columns = {"prompt_ids": [[5, 6]], "ground_truth_json": ["{}"], "data_source": ["mine"]}
    pq.write_table(pa.table({**columns, "extra_info": [{"index": 7, **more}]}), tmp_path / "train.parquet")
    assert read_prompts(tmp_path / "train.parquet") == [Prompt(7, (5, 6), "mine", "{}", difficulty)]


@pytest.mark.parametrize("prompt_ids", [[[5.0, 6.0]], [5], ["5 6"]], ids=["list of numbers", "number", "text"])
def test_prompts_that_are_no_lists_of_integers_are_refused_by_their_column(
    tmp_path: Path, prompt_ids: list[object]
) -> None:
    columns = {"prompt_ids": prompt_ids, "ground_truth_json": ["{}"], "data_source": ["mine"]}
    pq.write_table(pa.table({**columns, "extra_info": [{"index": 7}]}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match="column prompt_ids: expected list of integers, got"):
        read_prompts(tmp_path / "train.parquet")
