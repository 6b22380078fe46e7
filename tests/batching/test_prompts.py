"""Reading of filtered files."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcore.batching.prompts import Demonstration, is_chat, read_demonstrations, read_prompts, read_solutions
from rlcore.errors import DataError
from rlcore.types import Prompt

REMEDY = "Give a file that the filter has written (filtered/<fingerprint>/<split>.parquet), or run the filter again."
COLUMNS = {"prompt_ids": [[5, 6], [7]], "ground_truth_json": ["{}", "[]"], "data_source": ["mine", "other"]}


def message(file: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_prompts(file)
    return str(caught.value)


def test_missing_or_damaged_file_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    assert message(file) == f"{file}: no such file. {REMEDY}"
    file.write_bytes(b"PAR1 and no more")
    text = message(file)
    assert text.startswith(f"{file}: cannot be read as parquet (")
    assert text.endswith(f"); it is damaged or cut short. {REMEDY}")


def test_wrong_column_is_reported_with_expected_type(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    for column, kind, given, found in (
        ("prompt_ids", "list of integers", [[5.0], [6.0]], "list<element: double>"),
        ("prompt_ids", "list of integers", [5, 6], "int64"),
        ("data_source", "string", None, "nothing"),
        ("ground_truth_json", "string", [1, 2], "int64"),
        ("extra_info", "struct", ["7", "8"], "string"),
    ):
        columns = {**COLUMNS, "extra_info": [{"index": 7}, {"index": 8}]}
        columns.pop(column)
        pq.write_table(pa.table(columns if given is None else {**columns, column: given}), file)
        assert message(file) == f"{file}: column {column}: expected {kind}, got {found}. {REMEDY}"
    pq.write_table(pa.table({**COLUMNS, "extra_info": [{"split": "a"}, {"split": "b"}]}), file)
    assert message(file) == f"{file}: column extra_info.index: expected integer, got nothing. {REMEDY}"


def test_large_types_are_read_in_order(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    large = pa.table(
        {
            "prompt_ids": pa.array([[5, 6], [7]], pa.large_list(pa.int32())),
            "ground_truth_json": pa.array(["{}", "[]"], pa.large_string()),
            "data_source": ["mine", "other"],
            "extra_info": [{"difficulty": None, "index": 7}, {"difficulty": 3, "index": 2}],
        }
    )
    pq.write_table(large, file)
    assert read_prompts(file) == [Prompt(7, (5, 6), "mine", "{}", 0), Prompt(2, (7,), "other", "[]", 3)]
    pq.write_table(pa.table({**COLUMNS, "extra_info": [{"index": 7}, {"index": 2}]}), file)
    assert [prompt.difficulty for prompt in read_prompts(file)] == [0, 0]


@pytest.mark.parametrize(("said", "expected"), [
    (None, True),
    (b"{}", True),
    (b'{"origin": {}}', True),
    (b'{"origin": {"prompt_form": "chat"}}', True),
    (b'{"origin": {"prompt_form": "text"}}', False),
])  # fmt: skip
def test_is_chat_unless_metadata_says_text(tmp_path: Path, said: bytes | None, expected: bool) -> None:
    table = pa.table(COLUMNS)
    pq.write_table(
        table if said is None else table.replace_schema_metadata({b"millrace": said}), tmp_path / "a.parquet"
    )
    assert is_chat(tmp_path / "a.parquet") is expected


def test_solutions_have_targets_and_distractors(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    columns = {"prompt_ids": [[5, 6], [7], [8]], "solution_ids": [[1, 2], [], [3]], "distractor_ids": [[4], [4], []]}
    pq.write_table(pa.table(columns, pa.schema([(name, pa.list_(pa.int64())) for name in columns])), file)
    assert read_solutions(file) == [
        Demonstration([5, 6, 1, 2], [False, False, True, True], Demonstration([5, 6, 4], [False, False, True])),
        Demonstration([8, 3], [False, True]),
    ]


def test_demonstration_targets_are_every_second_length(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    pq.write_table(pa.table({"token_ids": [[5, 6, 7, 8, 9], [5]], "answer_lengths": [[1, 2, 0, 2], [0, 1]]}), file)
    assert read_demonstrations(file) == [
        Demonstration([5, 6, 7, 8, 9], [False, True, True, True, True]),
        Demonstration([5], [True]),
    ]
