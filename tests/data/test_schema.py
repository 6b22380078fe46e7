"""Types and metadata of the row schema, and ground truths as JSON."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.schema import (
    PROMPT_TYPE,
    find_type,
    ground_truth_json,
    ground_truth_type,
    provenance,
    provenance_metadata,
    row_schema,
)
from rlcore.errors import DataError


@pytest.mark.parametrize("truth", ["ö\"'", 3, 1.5, True, [[1, 2], []], {"b": 1, "a": "x"}, {"a": [1, None]}])
def test_a_ground_truth_is_one_json_object(truth: object) -> None:
    expected = truth if isinstance(truth, dict) else {"answer": truth}
    assert ground_truth_json(truth) == json.dumps(expected, sort_keys=True, ensure_ascii=False)


def test_a_type_follows_from_an_example() -> None:
    for example, expected in (
        (True, pa.bool_()),
        (3, pa.int64()),
        (2.5, pa.float64()),
        ("x", pa.string()),
        ((1, 2), pa.list_(pa.int64())),
        ({"a": ["x"]}, pa.struct([("a", pa.list_(pa.string()))])),
    ):
        assert ground_truth_type(example) == expected
    for example in ([], None, {"a": []}):
        with pytest.raises(
            DataError, match=r"^ground_truth: must be a string, a number, a non-empty list .*, got (None|\[\])\."
        ):
            ground_truth_type(example)


def test_a_field_is_found_by_its_path() -> None:
    schema = row_schema(pa.struct([("numbers", pa.large_list(pa.int8()))]))
    assert find_type(schema, "prompt") == PROMPT_TYPE
    assert find_type(schema, "prompt.[].role") == pa.string()
    assert find_type(schema, "reward_model.ground_truth.numbers.[]") == pa.int8()
    for name in ("promt", "prompt.role", "prompt.[].name", "ability.x", "extra_info.[]", "extra_info.hint"):
        assert find_type(schema, name) is None


def test_metadata_that_is_no_object_counts_for_nothing(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    for metadata, found in (
        ({"millrace": "[1]"}, {}),
        ({"other": "1"}, {}),
        (None, {}),
        ({"millrace": '{"a": 1}'}, {"a": 1}),
    ):
        pq.write_table(pa.table({"x": [1]}).replace_schema_metadata(metadata), file)
        assert provenance(file) == found
    with pytest.raises(ValueError, match="not JSON compliant"):
        provenance_metadata({"x": float("nan")})
    assert provenance_metadata({"b": "ö", "a": 1}) == {b"millrace": '{"a": 1, "b": "ö"}'.encode()}


def test_nan_is_no_ground_truth() -> None:
    with pytest.raises(
        DataError, match=r"^ground_truth: NaN and infinity are no references, got \{'a': \[nan\]\}; rep"
    ):
        ground_truth_json({"a": [math.nan]})
