"""Records of files, rows in the row schema, and ground truths as JSON."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from data import sources
from data.rows import Message, Row
from data.schema import (
    PROMPT_TYPE,
    find_type,
    ground_truth_json,
    ground_truth_type,
    ground_truths_json,
    provenance,
    provenance_metadata,
    row_schema,
)
from data.sources import Record, digests, local_files, mapped_rows, parquet_rows, records, records_of
from data.stage import StageResult, publish_mixture
from rlcore.config import MappedData
from rlcore.config.data import KINDS_OF_FILES, ParquetData
from rlcore.errors import DataError


def test_a_column_is_a_text_or_a_number_and_may_be_a_field_of_another() -> None:
    record = Record("x: line 1", {"a": {"b": " one "}, "n": 3, "f": 2.5, "t": True, "e": "  ", "z": 0})
    assert [record.text(name) for name in ("a.b", "n", "f", "z")] == [" one ", "3", "2.5", "0"]
    for name, got, remedy in (
        ("t", "True", "repair or remove it, or name another column"),
        ("e", "'  '", "repair or remove it, or name another column"),
        ("a", "{'b': ' one '}", "name a part of it, such as a.b"),
    ):
        told = (
            f"x: line 1: column {name}: must be a text that is not empty or a number, got {got} "
            f"(columns: a, n, f, t, e, z); {remedy}"
        )
        with pytest.raises(DataError, match=f"^{re.escape(told)}$"):
            record.text(name)
    for name, has in (("a.b.c", "a.b is ' one '"), ("a.c", "a has b"), ("g", "columns: a, n, f, t, e, z")):
        with pytest.raises(DataError, match=rf"^x: line 1: there is no column {name} \({has}\); name another"):
            record.text(name)


def test_numbers_are_written_as_people_write_them_and_nan_is_none() -> None:
    numbers = {"a": 1e-05, "b": 1e16, "c": 76.0, "d": -0.1, "e": 1e22, "f": 12345678.9}
    record = Record("x: line 1", {**numbers, "nan": float("nan"), "inf": float("-inf")})
    assert [record.text(name) for name in numbers] == [
        "0.00001", "10000000000000000", "76", "-0.1", "1" + "0" * 22, "12345678.9",
    ]  # fmt: skip
    for name in ("nan", "inf"):
        with pytest.raises(DataError, match=rf"x: line 1: column {name}: must be .* a number, got -?(nan|inf) "):
            record.text(name)


def test_a_column_may_be_an_entry_of_a_list() -> None:
    record = Record("x: line 1", {"messages": [{"content": "a"}, {"content": "b"}], "a.b": "whole"})
    columns = ("messages.0.content", "messages.1.content", "messages.-1.content", "a.b")
    assert [record.text(column) for column in columns] == ["a", "b", "b", "whole"]
    with pytest.raises(DataError, match=r"there is no column messages\.2\.content \(messages has 2 entries\)"):
        record.text("messages.2.content")


def test_a_folder_has_a_split_as_lines_or_as_parquet_files_in_their_order(tmp_path: Path) -> None:
    assert local_files("owner/name", ["train"]) is None
    for name in ("b.jsonl", "a-00001-of-00002.parquet", "a-00000-of-00002.parquet", "ab.jsonl"):
        (tmp_path / name).write_text(name)
    found = local_files(str(tmp_path), ["a", "b"])
    assert found == {
        "a": (tmp_path / "a-00000-of-00002.parquet", tmp_path / "a-00001-of-00002.parquet"),
        "b": (tmp_path / "b.jsonl",),
    }
    assert digests(str(tmp_path), ["b", "ab"]).keys() == {"b.jsonl", "ab.jsonl"}
    for subset, named in (("main", "owner/name/main"), ("", "owner/name")):
        assert digests("owner/name", ["a"], subset, "a" * 40) == {"hub": named, "commit": "a" * 40}
    with pytest.raises(DataError) as error:
        local_files(str(tmp_path), ["c", "a", "d"])
    assert str(error.value) == (
        f"data.source: {tmp_path} lacks c and d, as {KINDS_OF_FILES}. Its data files: a-00000-of-00002.parquet, "
        "a-00001-of-00002.parquet, ab.jsonl, b.jsonl. Put the files there, "
        "rename them, or give the folder that has them"
    )
    with pytest.raises(DataError) as error:
        local_files("no/such/folder", ["c", "d"])
    assert str(error.value) == (
        "data.source: must be a folder or a hub id (owner/name), got 'no/such/folder', which is neither. Give the "
        f"folder that holds c and d as {KINDS_OF_FILES}"
    )


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a-00000-of-00005.parquet"], r"holds 1 of the 5 shards of a; missing: a-00001-of-00005\.parquet, .*Fetch"),
        (["a-00000-of-00003.parquet", "a-00002-of-00003.parquet"], r"holds 2 of the 3 .*missing: a-00001-of-00003\."),
        (["a-00000-of-00001.parquet", "a-00000-of-00002.parquet", "a-00001-of-00002.parquet"], r"of one count"),
        (["a.jsonl", "a.parquet"], r"got a\.jsonl, a\.parquet\. Move elsewhere what does not count"),
        (["a.csv", "a-00000-of-00001.csv"], r"must be one file or folder, or all shards"),
        (["a.jsonl", "a_1.jsonl"], r"got a\.jsonl, a_1\.jsonl"),
        (["data/a-00000-of-00001.parquet"], r"lacks a, .* Its data files: data/a-00000-of-00001\.parquet\."),
    ],
)
def test_a_split_that_is_not_whole_or_not_alone_is_refused(tmp_path: Path, names: list[str], told: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=told):
        local_files(str(tmp_path), ["a"])


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    rows = [{"q": f'a, "b" {n}\u00e9\nc', "a": f"0{n}.10"} for n in range(20)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = Dataset.from_list(rows)
    wanted = [row["a"] for row in rows]
    found = {}
    for kind in ("jsonl", "json", "jsonl.gz", "jsonl.zst", "json.gz", "csv", "csv.gz", "parquet", "arrow", "saved"):
        folder = tmp_path / kind
        folder.mkdir()
        file, raw = folder / f"train.{kind}", lines
        if kind == "saved":
            table.save_to_disk(folder / "train", num_shards=2)
        elif kind == "parquet":
            table.to_parquet(file)
        elif kind == "arrow":
            with pa.OSFile(str(file), "wb") as out, pa.ipc.new_file(out, table.data.table.schema) as writer:
                writer.write_table(table.data.table)
        else:
            if kind.startswith("json.") or kind == "json":
                raw = json.dumps(rows, indent=2).encode()
            if kind.startswith("csv"):
                raw = table.to_pandas().to_csv(index=False).encode()
            if kind.endswith(("gz", "zst")):
                raw = pa.compress(raw, "gzip" if kind.endswith("gz") else "zstd", asbytes=True)
            file.write_bytes(raw)
        found[kind] = [record.text("a") for record in records(str(folder), "train")]
    assert found == dict.fromkeys(found, wanted)


def test_a_compressed_file_under_a_plain_name_is_read_and_a_cut_one_refused(tmp_path: Path) -> None:
    raw = pa.compress(b'{"a": "1"}\n' * 1000, "gzip", asbytes=True)
    file = tmp_path / "train.jsonl"
    file.write_bytes(raw)
    assert len(list(records(str(tmp_path), "train"))) == 1000
    file.write_bytes(raw[:-20])
    with pytest.raises(DataError, match=r"train\.jsonl: .*(damaged|cut short|no JSON)"):
        list(records(str(tmp_path), "train"))


def test_lines_are_counted_with_the_empty_ones_and_rows_through_all_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "x.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \n{"a": "\\ud83d"}\n{"a": NaN}\n')
    found = list(records_of(lines))
    assert [record.where for record in found] == [f"{lines}: line {number}" for number in (1, 4, 5)]
    assert [record.values["a"] for record in found[:2]] == [1, "\ud83d"]
    lines.write_text('{"a": 1}\n[1]\n')
    with pytest.raises(DataError, match=rf"^{lines}: line 2: must be a JSON object, got '\[1\]'; repair or remove it"):
        list(records_of(lines))
    lines.write_text('\n{"a": }\n')
    with pytest.raises(DataError, match=rf"^{lines}: line 2: is no JSON \(.*\); repair or remove the line$"):
        list(records_of(lines))
    monkeypatch.setattr(sources, "ROWS_PER_GROUP", 2)
    pq.write_table(pa.table({"a": [5, 6, 7]}), tmp_path / "y.parquet")
    found = list(records(str(tmp_path), "y"))
    assert [(record.where, record.values) for record in found] == [
        (f"{tmp_path}/y.parquet: row {number}", {"a": number + 5}) for number in range(3)
    ]


def test_mapped_rows_are_named_after_their_folder_unless_the_settings_say_otherwise(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"q": "What?", "a": 2, "s": "It is 2"}\n')
    names = {
        "source": str(tmp_path),
        "question": "q",
        "answer": "a",
        "train_split": "train",
        "validation_split": "test",
    }
    plain = mapped_rows(MappedData(**names), 0)
    assert plain.data_source == tmp_path.name
    assert list(plain.splits["validation"]) == [Row((Message("user", "What?"),), "2")]
    more = mapped_rows(MappedData(**names, data_source="own", instruction="Think.", solution="s"), 0)
    assert (more.data_source, more.ability) == ("own", "math")
    assert list(more.splits["train"]) == [Row((Message("user", "What? Think."),), "2", solution="It is 2")]


def parquet(path: Path, rows: list[dict[str, object]], truth: pa.DataType, **document: str) -> Path:
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


def test_rows_of_parquet_files_are_as_they_are_and_broken_ones_told_by_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "ROWS_PER_GROUP", 1)
    bare = ROW | {"extra_info": None, "data_source": None, "ability": "logic"}
    train = parquet(tmp_path / "mine.parquet", [ROW, bare], pa.int64(), prompt_form="text")
    held_out = parquet(tmp_path / "held.parquet", [bare], pa.int64(), prompt_form="text")
    settings = ParquetData(train_file=str(train), validation_file=str(held_out))
    task = parquet_rows(settings, 0)
    assert (task.data_source, task.ability, task.prompt_form) == ("mine", "math", "text")
    assert task.ground_truth_type == pa.int64()
    messages = (Message("system", ""), Message("user", "What?"))
    assert list(task.splits["train"]) == [
        Row(messages, 7, difficulty=3, solution="7", data_source="own"),
        Row(messages, 7, ability="logic"),
    ]
    assert parquet_rows(settings.model_copy(update={"template": "chat"}), 0).prompt_form == "chat"
    for broken, told in (
        (
            {"prompt": [{"role": "user", "content": "x"}, None]},
            "row 1: prompt must be messages with role and content, ",
        ),
        ({"prompt": []}, "row 1: prompt must be messages with role and content, got []; repair it"),
        ({"prompt": [{"role": "", "content": "x"}]}, "row 1: prompt must be messages with role and content, got [{"),
        ({"prompt": [{"role": "user", "content": None}]}, "row 1: prompt must be messages with role and content, got"),
        (
            {"reward_model": None},
            "row 1: reward_model.ground_truth must have a value, got nothing; repair or remove the row",
        ),
    ):
        parquet(train, [ROW, ROW | broken], pa.int64(), prompt_form="text")
        with pytest.raises(DataError, match=f"^{re.escape(f'{train}: {told}')}"):
            list(parquet_rows(settings, 0).splits["train"])


def test_two_parquet_files_of_different_kinds_are_refused(tmp_path: Path) -> None:
    train = parquet(tmp_path / "a.parquet", [ROW], pa.int64(), prompt_form="text")
    settings = ParquetData(train_file=str(train), validation_file=str(tmp_path / "b.parquet"))
    with pytest.raises(DataError, match=r"^data\.validation_file: must be a parquet file that exists, got '/.*b\.parq"):
        parquet_rows(settings, 0)
    for truth, form, got in (
        (pa.int64(), "chat", "int64, chat and text"),
        (pa.int32(), "text", "int32 and int64, text"),
    ):
        other = parquet(tmp_path / "b.parquet", [ROW], truth, prompt_form=form)
        with pytest.raises(DataError) as error:
            parquet_rows(settings, 0)
        assert str(error.value) == (
            f"{train} and {other}: must have one type of ground truth and one form of prompt, got {got}; make both "
            "from one task"
        )


@pytest.mark.parametrize(
    "truths",
    [
        [1, 2, 3],
        ["a", "ö\"'", "a"],
        [[1, 2], [], [3]],
        [["a"], ["b"]],
        [1.5, 2.0],
        [True, False],
        [{"b": 1, "a": "x"}, {"b": 2, "a": "y"}],
        [{"numbers": [1, 2], "target": 3}, {"numbers": [4], "target": 5}],
        [{"a": 1}, {"a": None}],
        [{"a": {"b": 1}}],
        [{"a": [1, None]}, {"a": [2]}],
        [None, 3],
        [None, {"a": 1}],
    ],
)
def test_ground_truths_as_json_are_the_same_at_once_and_one_by_one(truths: list[object]) -> None:
    array = pa.array(truths)
    found = ground_truths_json(array)
    assert found.type == pa.string()
    assert found.to_pylist() == [ground_truth_json(truth) for truth in array.to_pylist()]
    first = array.to_pylist()[0]
    assert json.loads(found.to_pylist()[0]) == (first if isinstance(first, dict) else {"answer": first})


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


def test_a_mixture_names_its_parts_and_adds_up_their_rows(tmp_path: Path) -> None:
    parts = [
        StageResult(tmp_path / name, name, cached, {"train": rows, f"train/{name}": 1})
        for name, rows, cached in (("one", 1_200, True), ("two", 30, False))
    ]
    counts = {"train": 1_230, "train/one": 1, "train/two": 1}
    made = publish_mixture("dataset", tmp_path / "mix", parts)
    assert made == StageResult(tmp_path / "mix", "mix", False, counts)
    assert (tmp_path / "mix" / "README.md").read_text() == (
        "# Mixture of 2 datasets\n\n| part | rows |\n| --- | --- |\n| [one](../one) | 1,200 train, 1 train/one |\n"
        "| [two](../two) | 30 train, 1 train/two |\n"
    )
    assert publish_mixture("dataset", tmp_path / "mix", parts).cached is False
    assert publish_mixture("dataset", tmp_path / "mix", parts[:1]) == StageResult(
        tmp_path / "mix", "mix", True, {"train": 1_200, "train/one": 1}
    )
