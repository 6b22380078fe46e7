"""The row schema: types, ground truths, written files with their provenance, and cards."""

import json
import math
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import schema
from data.rows import Message, Row, TaskRows
from data.schema import find_type, ground_truth_json, provenance, provenance_metadata, write_dataset_card, write_splits
from rlcore.errors import DataError


def row(number: int, **more: object) -> Row:
    return Row((Message("user", f"{number} ="),), {"sum": number}, **more)  # type: ignore[arg-type]


def task_of(*truths: object, **more: object) -> TaskRows:
    rows = [Row((Message("user", "x"),), truth) for truth in truths]  # type: ignore[arg-type]
    return TaskRows("t", "math", "text", {"train": rows, "validation": rows[:1]}, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("truth", ["ö\"'", 3, 1.5, True, [[1, 2], []], {"b": 1, "a": "x"}, {"a": [1, None]}])
def test_ground_truths_are_json_objects(truth: object) -> None:
    expected = truth if isinstance(truth, dict) else {"answer": truth}
    assert ground_truth_json(truth) == json.dumps(expected, sort_keys=True, ensure_ascii=False)
    with pytest.raises(DataError, match=r"^ground_truth: NaN and infinity are no references, got \{'a': \[nan\]\}; re"):
        ground_truth_json({"a": [math.nan]})


def test_types_are_inferred_from_examples() -> None:
    for example, expected in (
        (True, pa.bool_()), (3, pa.int64()), (2.5, pa.float64()), ("x", pa.string()), ((1, 2), pa.list_(pa.int64())),
        ({"a": ["x"]}, pa.struct([("a", pa.list_(pa.string()))])),
    ):  # fmt: skip
        assert schema.ground_truth_type(example) == expected
    message = r"^ground_truth: must be a string, a number, a non-empty list .*, got (None|\[\])\."
    for example in ([], None, {"a": []}):
        with pytest.raises(DataError, match=message):
            schema.ground_truth_type(example)


def test_fields_are_found_by_path() -> None:
    found = schema.row_schema(pa.struct([("numbers", pa.large_list(pa.int8()))]))
    assert find_type(found, "prompt") == schema.PROMPT_TYPE
    assert find_type(found, "prompt.[].role") == pa.string()
    assert find_type(found, "reward_model.ground_truth.numbers.[]") == pa.int8()
    for name in ("promt", "prompt.role", "prompt.[].name", "ability.x", "extra_info.[]", "extra_info.hint"):
        assert find_type(found, name) is None


def test_provenance_is_a_json_object(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    for metadata, document in (({"millrace": "[1]"}, {}), ({"other": "1"}, {}), (None, {}),
                               ({"millrace": '{"a": 1}'}, {"a": 1})):  # fmt: skip
        pq.write_table(pa.table({"x": [1]}).replace_schema_metadata(metadata), file)
        assert provenance(file) == document
    with pytest.raises(ValueError, match="not JSON compliant"):
        provenance_metadata({"x": float("nan")})
    assert provenance_metadata({"b": "ö", "a": 1}) == {b"millrace": '{"a": 1, "b": "ö"}'.encode()}


def test_damaged_pages_are_reported_with_the_rows_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "ROWS_PER_GROUP", 10)
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"number": range(30)}), path, row_group_size=10, compression="none")
    place = pq.read_metadata(path).row_group(2).column(0).data_page_offset
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\xff" * 20)
    with pytest.raises(DataError, match=r"train.parquet: damaged after row 20 "):
        list(schema.read_batches(path))


def test_rows_are_numbered_and_counted_by_difficulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "ROWS_PER_GROUP", 2)
    first = row(1, difficulty=10, solution="1", distractor="2")
    train = [first, row(2, difficulty=9, data_source="own", ability="logic"), row(3, difficulty=9)]
    task = TaskRows("t", "math", "text", {"train": iter(train), "validation": train[:1]})
    assert write_splits(tmp_path, task, {"seed": 7}) == {"train": 3, "validation": 1}
    file = pq.ParquetFile(tmp_path / "train.parquet")
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [2, 1]
    column = file.metadata.row_group(0).column(0)
    assert (column.compression, column.is_stats_set, column.has_dictionary_page) == ("ZSTD", False, False)
    rows = file.read().to_pylist()
    assert rows[0] == {
        "data_source": "t", "prompt": [{"role": "user", "content": "1 ="}], "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": {"sum": 1}},
        "extra_info": {"split": "train", "index": 0, "difficulty": 10, "solution": "1", "distractor": "2"},
    }  # fmt: skip
    assert [(one["data_source"], one["ability"]) for one in rows[1:]] == [("own", "logic"), ("t", "math")]
    assert rows[2]["extra_info"] == {"split": "train", "index": 2, "difficulty": 9, "solution": "", "distractor": ""}
    counts = {"rows": 3, "by_difficulty": {"9": 2, "10": 1}}
    document = {"seed": 7, "split": "train", "data_source": "t", "prompt_form": "text", "counts": counts}
    assert provenance(tmp_path / "train.parquet") == document


@pytest.mark.parametrize(("truths", "message"), [
    ([{"sum": 1}] * 3 + [{"sun": 1}],
     "rows 2 to 3 of train .* (row 3 has the field 'sun', which the first row has not)"),
    ([{"sum": 1}, "a text"], "rows 0 to 1 of train do not all have the types of the first row"),
    ([{"sum": 1}, {"sum": {"sum": 1}}], "rows 0 to 1 of train do not all have the types of the first row"),
    ([{"a": {"sum": 1}}, {"a": {"sum": 1, "word": "1"}}], "row 1 has the field 'word'"),
    ([{"a": [{"sum": 1}]}, {"a": [{"sum": 1}, {"sum": 1, "word": "1"}]}], "row 1 has the field 'word'"),
    ([{"sum": 1}, {"sum": 2**63}], "whole numbers at most 64 bits"),
    ([], "t: the train split has no row; raise data.train_size or check the source"),
])  # fmt: skip
def test_ground_truths_of_another_type_are_refused(tmp_path, monkeypatch, truths, message):
    monkeypatch.setattr(schema, "ROWS_PER_GROUP", 2)
    with pytest.raises(DataError, match=re.escape(message).replace(r"\.\*", ".*")):
        write_splits(tmp_path, task_of(*truths), {}, ["train"])


def test_ground_truths_and_tasks_may_lack_parts(tmp_path: Path) -> None:
    for kind, words in ((pa.struct([("sum", pa.int64()), ("word", pa.string())]), ["b", None]), (None, ["b", None])):
        write_splits(tmp_path, task_of({"sum": 2, "word": "b"}, {"sum": 1}, ground_truth_type=kind), {})
        rows = pq.read_table(tmp_path / "train.parquet").column("reward_model").to_pylist()
        assert [row["ground_truth"]["word"] for row in rows] == words
    with pytest.raises(DataError, match=r"^t: the task's rows have no split \['validation'\]; give both train and val"):
        write_splits(tmp_path, TaskRows("t", "math", "text", {"train": [row(1)]}), {})


def test_dataset_card_describes_the_rows(tmp_path: Path) -> None:
    document = {"fingerprint": "abc", "task": "sums", "seed": 7, "task_version": 3, "settings": {"größe": 3},
                "inputs": {"train.jsonl": "0123", "test.jsonl": "4567"}}  # fmt: skip
    task = TaskRows("t", "math", "chat", {"train": [row(1, difficulty=2)] * 1_200, "validation": [row(5)]})
    write_splits(tmp_path, task, document)
    write_dataset_card(tmp_path)
    head, first, second = (tmp_path / "README.md").read_text(encoding="utf-8").split("## First row of ")
    assert head == (
        "# t\n\nFingerprint `abc`, task `sums`, seed 7, version `3`, prompts as chat.\n\n"
        "| split | rows | by difficulty |\n| --- | ---: | --- |\n| train | 1,200 | 2: 1,200 |\n"
        "| validation | 1 | 0: 1 |\n"
        "\nMade from these files (sha256):\n\n- `test.jsonl` 4567\n- `train.jsonl` 0123\n"
        '\n## Settings\n\n```json\n{\n  "größe": 3\n}\n```\n\n'
    )
    for text, split, number in ((first, "train", 1), (second, "validation", 5)):
        name, _, rest = text.partition("\n\n```json\n")
        shown = json.loads(rest.partition("\n```\n")[0])
        assert (name, shown["reward_model"]["ground_truth"]) == (split, {"sum": number})
    write_splits(tmp_path, task, document | {"inputs": {}})
    write_dataset_card(tmp_path)
    assert "Made from these files" not in (tmp_path / "README.md").read_text(encoding="utf-8")
