"""Records of data files, and which files a split has."""

import codecs
import csv
import gzip
import io
import json
import re
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import records as record_files
from data.records import Record, digests, local_files, records, records_of
from rlcore.errors import DataError


def test_a_column_is_text_or_number_by_a_dotted_name() -> None:
    values = {"a": {"b": " one "}, "n": 3, "t": True, "e": "  ", "z": 0, "l": [{"c": "x"}, {"c": ["y"]}], "d.e": "flat"}
    record = Record("x: line 1", values)
    texts = {"a.b": " one ", "n": "3", "z": "0", "l.0.c": "x", "l.-1.c.0": "y", "l.-2.c": "x", "d.e": "flat"}
    assert {name: record.text(name) for name in texts} == texts
    columns = "a, n, t, e, z, l, d.e"
    for name, got in (("t", "True"), ("e", "'  '")):
        told = (
            f"x: line 1: column {name}: must be a text that is not empty or a number, got {got} (columns: {columns}); "
            "repair or remove it, or name another column"
        )
        with pytest.raises(DataError, match=f"^{re.escape(told)}$"):
            record.text(name)
    for name, part in (("a", "a.b"), ("l", "l.0"), ("l.1.c", "l.1.c.0")):
        with pytest.raises(DataError, match=rf"column {name}: must be a text .*; name a part of it, such as {part}$"):
            record.text(name)
    for name, has in (
        ("g", f"columns: {columns}"),
        ("a.c", "a has b"),
        ("a.b.c", "a.b is ' one '"),
        ("l.2.c", "l has 2 entries"),
        ("l.-3", "l has 2 entries"),
        ("l.c", "l has 2 entries"),
    ):
        told = f"x: line 1: there is no column {name} ({has}); name another, or repair the row"
        with pytest.raises(DataError, match=f"^{re.escape(told)}$"):
            record.text(name)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (2.5, "2.5"),
        (0.1, "0.1"),
        (76.0, "76"),
        (1e-05, "0.00001"),
        (-1.5e-7, "-0.00000015"),
        (1e16, "10000000000000000"),
        (1e23, "100000000000000000000000"),
        (12345678901234567890, "12345678901234567890"),
    ],
)
def test_numbers_are_written_as_people_write_them(number: float, text: str) -> None:
    assert Record("x", {"a": number}).text("a") == text
    assert type(number)(text) == number


def test_a_split_is_one_file_or_ordered_shards(tmp_path: Path) -> None:
    assert local_files("owner/name", ["train"]) is None
    for name in (
        "b.csv.gz",
        "a-00001-of-00002.parquet",
        "a-00000-of-00002.parquet",
        "ab.jsonl",
        "a_more.json",
        "c.txt",
    ):
        (tmp_path / name).write_text(name)
    for number in range(1, 12):  # some count from 1, without zeros before
        (tmp_path / f"d-{number}-of-11.jsonl").touch()
    found = local_files(str(tmp_path), ["a", "b", "d", "a_more"])
    assert found == {
        "a": (tmp_path / "a-00000-of-00002.parquet", tmp_path / "a-00001-of-00002.parquet"),
        "b": (tmp_path / "b.csv.gz",),
        "d": tuple(tmp_path / f"d-{number}-of-11.jsonl" for number in range(1, 12)),
        "a_more": (tmp_path / "a_more.json",),
    }
    assert digests(str(tmp_path), ["b", "ab"]).keys() == {"b.csv.gz", "ab.jsonl"}
    for subset, named in (("main", "owner/name/main"), ("", "owner/name")):
        assert digests("owner/name", ["a"], subset, "a" * 40) == {"hub": named, "commit": "a" * 40}
    for number in range(1, 12):
        (tmp_path / f"d-{number}-of-11.jsonl").unlink()
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "c.csv").touch()
    with pytest.raises(DataError) as error:
        local_files(str(tmp_path), ["c", "a", "e"])
    assert str(error.value) == (
        f"data.source: {tmp_path} lacks c and e, as .jsonl, .json, .csv (each also .gz or .zst), .parquet or .arrow. "
        "Its data files: a-00000-of-00002.parquet, a-00001-of-00002.parquet, a_more.json, ab.jsonl, b.csv.gz, "
        "inner/c.csv. Put the files there, rename them, or give the folder that has them"
    )
    with pytest.raises(DataError) as error:
        local_files("no/such/folder", ["c", "d"])
    assert str(error.value) == (
        "data.source: must be a folder or a hub id (owner/name), got 'no/such/folder', which is neither. Give the "
        "folder that holds c and d as .jsonl, .json, .csv (each also .gz or .zst), .parquet or .arrow"
    )


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            ["a-00000-of-00005.parquet"],
            "holds 1 of the 5 shards of a; missing: a-00001-of-00005.parquet, a-00002-of-00005.parquet, "
            "a-00003-of-00005.parquet, a-00004-of-00005.parquet. Fetch them, or write the rows that shall count into "
            "one file a.parquet",
        ),
        (
            ["a-00000-of-00003.jsonl.gz", "a-00002-of-00003.jsonl.gz"],
            "holds 2 of the 3 shards of a; missing: a-00001-of-00003.jsonl.gz. Fetch them",
        ),
        (["a-0-of-20.csv"], "missing: a-1-of-20.csv, a-2-of-20.csv, a-3-of-20.csv, a-4-of-20.csv, a-5-of-20.csv, "
                            "a-6-of-20.csv, a-7-of-20.csv, a-8-of-20.csv and 11 more. Fetch"),
        (
            ["a-00000-of-00002.parquet", "a-00001-of-00002.parquet", "a-00000-of-00001.parquet"],
            "a must be one file or folder, or all shards of one count and kind, got a-00000-of-00001.parquet, "
            "a-00000-of-00002.parquet, a-00001-of-00002.parquet. Move elsewhere what does not count",
        ),
        (["a.jsonl", "a.parquet"], "got a.jsonl, a.parquet. Move elsewhere"),
        (["a-00000-of-00001.parquet", "a-00000-of-00001.jsonl"], "got a-00000-of-00001.jsonl, a-00000-of-00001.par"),
        (["a.jsonl", "a-00000-of-00001.parquet"], "got a-00000-of-00001.parquet, a.jsonl. Move"),
        (["a.jsonl", "a (1).jsonl"], "got a (1).jsonl, a.jsonl. Move"),
        (["a-00000-of-00001.parquet", "a-more.parquet"], "got a-00000-of-00001.parquet, a-more.parquet. Move"),
        (["a_01.json", "a2.csv"], "got a2.csv, a_01.json. Move"),
        (["a.csv", "a/state.json"], "got a.csv, a/. Move"),
        (["a-00000-of-00002.parquet", "a-00002-of-00002.parquet"], "missing: a-00001-of-00002.parquet. Fetch"),
        (["a-00000-of-00001.csv", "a-00001-of-00001.csv"], "got a-00000-of-00001.csv, a-00001-of-00001.csv. Move"),
    ],
)  # fmt: skip
def test_an_incomplete_or_ambiguous_split_is_refused(names: list[str], told: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(DataError) as error:
        local_files(str(tmp_path), ["a"])
    assert told in str(error.value)
    assert str(error.value).startswith(f"data.source: {tmp_path}")


@pytest.mark.parametrize("name", ["a_extra.parquet", "a_old.jsonl", "data-00000-of-00001.parquet", "part-0.csv"])
def test_a_stray_file_of_rows_is_refused(name: str, tmp_path: Path) -> None:
    for each in ("a.parquet", "b.parquet", "other.jsonl", "abc.csv", "notes.txt"):
        (tmp_path / each).touch()
    assert digests(str(tmp_path), ["a", "b"]).keys() == {"a.parquet", "b.parquet"}
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=rf"^data.source: {tmp_path}: {name} would be ignored next to .* a and b"):
        digests(str(tmp_path), ["a", "b"])


def test_a_shard_with_a_digest_behind_its_count_is_read(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"a-0000{number}-of-00002-abcdef012345678{number}.parquet").touch()
    (found,) = local_files(str(tmp_path), ["a"]).values()
    assert [path.name[:7] for path in found] == ["a-00000", "a-00001"]
    found[1].unlink()
    with pytest.raises(DataError, match=r"holds 1 of the 2 shards of a; missing: a-00001-of-00002\.parquet"):
        local_files(str(tmp_path), ["a"])


ROWS = [{"q": 'What, "7"?\nNow.', "a": "007"}, {"q": "ä?", "a": "0.10"}]


def saved(folder: Path) -> dict[str, Path]:
    """The rows in files of every kind."""
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    cells = io.StringIO(newline="")
    csv.writer(cells).writerows([["q", "a"], *(row.values() for row in ROWS)])
    plain = {"x.jsonl": lines, "x.json": json.dumps(ROWS, indent=2).encode(), "x.csv": cells.getvalue().encode()}
    plain["pretty.jsonl"], plain["lines.json"] = plain["x.json"], lines
    for name, content in list(plain.items()):
        plain[f"{name}.gz"] = gzip.compress(content[:20]) + gzip.compress(content[20:])
        plain[f"{name}.zst"] = pa.compress(content, codec="zstd", asbytes=True)
    plain["named_so.jsonl"] = plain["x.jsonl.gz"]
    plain["marked.csv"] = codecs.BOM_UTF8 + plain["x.csv"]
    for name, content in plain.items():
        (folder / name).write_bytes(content)
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "x.parquet")
    with pa.ipc.new_file(folder / "x.arrow", pa.schema([("q", pa.string()), ("a", pa.string())])) as writer:
        writer.write_table(pa.Table.from_pylist(ROWS))
    return {name: folder / name for name in (*plain, "x.parquet", "x.arrow")}


def test_files_of_every_kind_have_the_same_records(tmp_path: Path) -> None:
    files = saved(tmp_path)
    assert len(files) == 19
    for name, file in files.items():
        assert [record.values for record in records_of(file)] == ROWS, name
    places = {
        name: [record.where.removeprefix(f"{files[name]}: ") for record in records_of(files[name])] for name in files
    }
    assert places["x.jsonl.gz"] == places["lines.json"] == ["line 1", "line 2"]
    assert places["x.json"] == places["pretty.jsonl.zst"] == ["entry 0", "entry 1"]
    assert places["x.csv"] == ["line 2", "line 4"], "the line where a row begins"
    assert places["x.arrow"] == places["x.parquet"] == ["row 0", "row 1"]


def test_what_save_to_disk_writes_is_a_folder_with_splits(tmp_path: Path) -> None:
    both = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    )
    both.save_to_disk(tmp_path, num_shards={"train": 2, "test": 1})
    assert [record.values for record in records(str(tmp_path), "train")] == ROWS
    assert [record.values for record in records(str(tmp_path), "test")] == ROWS[:1]
    assert digests(str(tmp_path), ["train", "test"]).keys() == {
        "train/data-00000-of-00002.arrow", "train/data-00001-of-00002.arrow", "test/data-00000-of-00001.arrow",
    }  # fmt: skip
    (tmp_path / "train" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"lacks train/data-00001-of-00002\.arrow, which .*/state\.json names"):
        local_files(str(tmp_path), ["train"])


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.csv", b"q,a\n1,2\n3\n", "line 3: must have a cell for each column, got 1 for q, a; repair it"),
        ("x.csv", b"q,a\n1,2\n\xff,3\n", "line 3: is no CSV ('utf-8' codec"),
        ("x.csv", b'q,a\n1,2\n"3,4\n', "line 3: is no CSV (unexpected end of data)"),
        ("x.csv", b"q,q\n1,2\n", "line 1: must name each column once, got q, q; rename one"),
        ("x.json", b'[{"a": 1}, 2]', "entry 1: must be a JSON object, got '2'; repair or remove it"),
        ("x.jsonl", b'[\n{"a": 1},\n', ": begins as a JSON array and is none (Expecting value: line 3"),
        ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 9, mtime=0)[:-9], "cannot be read after line "),
        ("x.arrow", b"ARROW1 and no more", "cannot be read as Arrow"),
        ("x.txt", b"a", "must be .jsonl, .json, .csv (each also .gz or .zst), .parquet or .arrow, by its name"),
    ],
)
def test_an_unreadable_file_is_refused_with_its_place(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        list(records_of(tmp_path / name))
    assert told in str(error.value)
    assert str(error.value).startswith(f"{tmp_path / name}: ")


def test_places_count_empty_lines_and_rows_of_all_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(record_files, "ROWS_PER_GROUP", 2)
    pq.write_table(pa.table({"a": [5, 6, 7]}), tmp_path / "y.parquet")
    found = list(records(str(tmp_path), "y"))
    assert [(record.where, record.values) for record in found] == [
        (f"{tmp_path}/y.parquet: row {number}", {"a": number + 5}) for number in range(3)
    ]
