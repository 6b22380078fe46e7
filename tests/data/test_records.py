"""Records of data files, and the files of a split."""

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

VALUES = {"a": {"b": " one "}, "n": 3, "t": True, "e": "  ", "z": 0, "l": [{"c": "x"}, {"c": ["y"]}], "d.e": "flat"}
COLUMNS = "a, n, t, e, z, l, d.e"


def test_columns_are_named_by_dotted_paths() -> None:
    texts = {"a.b": " one ", "n": "3", "z": "0", "l.0.c": "x", "l.-1.c.0": "y", "l.-2.c": "x", "d.e": "flat"}
    assert {name: Record("x: line 1", VALUES).text(name) for name in texts} == texts


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        *((name, f"column {name}: must be a text that is not empty or a number, got {got} (columns: {COLUMNS}); repair "
           "or remove it, or name another column") for name, got in (("t", "True"), ("e", "'  '"))),
        *((name, f"column {name}: must be a text .*; name a part of it, such as {part}")
          for name, part in (("a", "a.b"), ("l", "l.0"), ("l.1.c", "l.1.c.0"))),
        *((name, f"there is no column {name} ({has}); name another, or repair the row") for name, has in (
            ("g", f"columns: {COLUMNS}"), ("a.c", "a has b"), ("a.b.c", "a.b is ' one '"), ("l.2.c", "l has 2 entries"),
            ("l.-3", "l has 2 entries"), ("l.c", "l has 2 entries"),
        )),
    ],
)  # fmt: skip
def test_missing_and_unusable_columns_are_refused(name: str, problem: str) -> None:
    match = re.escape(f"x: line 1: {problem}").replace(r"\.\*", ".*")
    with pytest.raises(DataError, match=f"^{match}$"):
        Record("x: line 1", VALUES).text(name)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (2.5, "2.5"), (0.1, "0.1"), (76.0, "76"), (1e-05, "0.00001"), (-1.5e-7, "-0.00000015"),
        (1e16, "10000000000000000"), (1e23, "100000000000000000000000"), (12345678901234567890, "12345678901234567890"),
    ],
)  # fmt: skip
def test_numbers_are_written_without_exponents(number: float, text: str) -> None:
    assert Record("x", {"a": number}).text("a") == text
    assert type(number)(text) == number


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()


def test_splits_are_one_file_or_ordered_shards(tmp_path: Path) -> None:
    assert local_files("owner/name", ["train"]) is None
    touch(tmp_path, "b.csv.gz", "a-00001-of-00002.parquet", "a-00000-of-00002.parquet", "ab.jsonl", "a_more.json")
    touch(tmp_path, "c.txt", *(f"d-{number}-of-11.jsonl" for number in range(1, 12)))  # some writers count from 1
    touch(tmp_path, *(f"e-0000{number}-of-00002-abcdef012345678{number}.parquet" for number in range(2)))
    found = local_files(str(tmp_path), ["a", "b", "d", "a_more", "e"])
    assert found is not None
    assert {split: [path.name for path in paths] for split, paths in found.items()} == {
        "a": ["a-00000-of-00002.parquet", "a-00001-of-00002.parquet"],
        "b": ["b.csv.gz"],
        "d": [f"d-{number}-of-11.jsonl" for number in range(1, 12)],
        "a_more": ["a_more.json"],
        "e": [f"e-0000{number}-of-00002-abcdef012345678{number}.parquet" for number in range(2)],
    }
    assert digests(str(tmp_path), ["b", "ab"]).keys() == {"b.csv.gz", "ab.jsonl"}
    for subset, named in (("main", "owner/name/main"), ("", "owner/name")):
        assert digests("owner/name", ["a"], subset, "a" * 40) == {"hub": named, "commit": "a" * 40}


KINDS = ".jsonl, .json, .csv (each also .gz or .zst), .parquet or .arrow"


def test_missing_files_are_listed_with_the_others(tmp_path: Path) -> None:
    touch(tmp_path, "a-00000-of-00002.parquet", "a-00001-of-00002.parquet", "ab.jsonl", "c.txt", "inner/c.csv")
    with pytest.raises(DataError) as error:
        local_files(str(tmp_path), ["c", "a", "e"])
    assert str(error.value) == (
        f"data.source: {tmp_path} lacks c and e, as {KINDS}. Its data files: a-00000-of-00002.parquet, "
        "a-00001-of-00002.parquet, ab.jsonl, inner/c.csv. Put the files there, rename them, or give the folder that "
        "has them"
    )
    with pytest.raises(DataError) as error:
        local_files("no/such/folder", ["c", "d"])
    assert str(error.value) == (
        "data.source: must be a folder or a hub id (owner/name), got 'no/such/folder', which is neither. Give the "
        f"folder that holds c and d as {KINDS}"
    )


@pytest.mark.parametrize(
    ("names", "problem"),
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
        (
            ["a-00000-of-00002-abcdef0123456780.parquet"],
            "holds 1 of the 2 shards of a; missing: a-00001-of-00002.parquet",
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
def test_incomplete_or_ambiguous_splits_are_refused(names: list[str], problem: str, tmp_path: Path) -> None:
    touch(tmp_path, *names)
    with pytest.raises(DataError) as error:
        local_files(str(tmp_path), ["a"])
    assert problem in str(error.value)
    assert str(error.value).startswith(f"data.source: {tmp_path}")


@pytest.mark.parametrize("name", ["a_extra.parquet", "a_old.jsonl", "data-00000-of-00001.parquet", "part-0.csv"])
def test_stray_files_of_rows_are_refused(name: str, tmp_path: Path) -> None:
    touch(tmp_path, "a.parquet", "b.parquet", "other.jsonl", "abc.csv", "notes.txt")
    assert digests(str(tmp_path), ["a", "b"]).keys() == {"a.parquet", "b.parquet"}
    touch(tmp_path, name)
    with pytest.raises(DataError, match=rf"^data.source: {tmp_path}: {name} would be ignored next to .* a and b"):
        digests(str(tmp_path), ["a", "b"])


ROWS = [{"q": 'What, "7"?\nNow.', "a": "007"}, {"q": "ä?", "a": "0.10"}]


def saved(folder: Path) -> dict[str, Path]:
    """Write the rows to files of every kind."""
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
    files, places = saved(tmp_path), {}
    assert len(files) == 19
    for name, file in files.items():
        found = list(records_of(file))
        assert [record.values for record in found] == ROWS, name
        places[name] = [record.where.removeprefix(f"{file}: ") for record in found]
    assert places["x.jsonl.gz"] == places["lines.json"] == ["line 1", "line 2"]
    assert places["x.json"] == places["pretty.jsonl.zst"] == ["entry 0", "entry 1"]
    assert places["x.csv"] == ["line 2", "line 4"], "the first line of a row"
    assert places["x.arrow"] == places["x.parquet"] == ["row 0", "row 1"]


def test_folders_written_by_save_to_disk_are_read(tmp_path: Path) -> None:
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path, num_shards={"train": 2, "test": 1})
    assert [record.values for record in records(str(tmp_path), "train")] == ROWS
    assert [record.values for record in records(str(tmp_path), "test")] == ROWS[:1]
    shards = [f"train/data-0000{number}-of-00002.arrow" for number in range(2)]
    assert digests(str(tmp_path), ["train", "test"]).keys() == {*shards, "test/data-00000-of-00001.arrow"}
    (tmp_path / shards[1]).unlink()
    with pytest.raises(DataError, match=rf"lacks {shards[1]}, which .*/state\.json names"):
        local_files(str(tmp_path), ["train"])


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("x.csv", b"q,a\n1,2\n3\n", "line 3: must have a cell for each column, got 1 for q, a; repair it"),
        ("x.csv", b"q,a\n1,2\n\xff,3\n", "line 3: is no CSV ('utf-8' codec"),
        ("x.csv", b'q,a\n1,2\n"3,4\n', "line 3: is no CSV (unexpected end of data)"),
        ("x.csv", b"q,q\n1,2\n", "line 1: must name each column once, got q, q; rename one"),
        ("x.json", b'[{"a": 1}, 2]', "entry 1: must be a JSON object, got '2'; repair or remove it"),
        ("x.jsonl", b'[\n{"a": 1},\n', "begins as a JSON array and is none (Expecting value: line 3"),
        ("x.jsonl", b'{"a": 1}\n[1]\n', "line 2: must be a JSON object, got '[1]'; repair or remove it"),
        ("x.jsonl", b'\n{"a": }\n', "line 2: is no JSON ("),
        ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 9, mtime=0)[:-9], "cannot be read after line "),
        ("x.arrow", b"ARROW1 and no more", "cannot be read as Arrow"),
        ("x.txt", b"a", f"must be {KINDS}, by its name"),
    ],
)
def test_unreadable_files_are_refused_with_their_place(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"^{re.escape(f'{tmp_path / name}: {problem}')}"):
        list(records_of(tmp_path / name))


def test_places_count_empty_lines_and_rows_of_all_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tmp_path / "x.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \n{"a": "\\ud83d"}\n{"a": NaN}\n')
    found = list(records_of(lines))
    assert [record.where for record in found] == [f"{lines}: line {number}" for number in (1, 4, 5)]
    assert [record.values["a"] for record in found[:2]] == [1, "\ud83d"]
    monkeypatch.setattr(record_files, "ROWS_PER_GROUP", 2)
    pq.write_table(pa.table({"a": [5, 6, 7]}), tmp_path / "y.parquet")
    assert [(record.where, record.values) for record in records(str(tmp_path), "y")] == [
        (f"{tmp_path}/y.parquet: row {number}", {"a": number + 5}) for number in range(3)
    ]
