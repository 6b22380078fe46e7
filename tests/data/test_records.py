"""Records of data files and of hub datasets, by the hub's protocol from a local server, and from the cache."""

import io
import json
import re
from itertools import product
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.records import Record, commit_of, digests, local_files, records, records_of, snapshot
from data.schema import provenance
from data.tasks import build_dataset
from rlcore.config import Gsm8kData, MappedData
from rlcore.errors import DataError
from tests.helpers.file_shapes import write_rows
from tests.helpers.hub_server import Repository, serving, use_hub

VALUES = {"a": {"b": " one "}, "n": 3, "t": True, "e": "  ", "z": 0, "l": [{"c": "x"}, {"c": ["y"]}], "d.e": "flat"}
COLUMNS, KINDS = "a, n, t, e, z, l, d.e", ".jsonl, .json or .parquet"
ROWS = [{"q": 'What, "7"?\nNow.', "a": "007"}, {"q": "ä?", "a": "0.10"}]
OLD, NEW = "a" * 40, "b" * 40
# The published dataset has two subsets and no default.
FILES = "[{{split: train, path: {0}/train-*}}, {{split: test, path: {0}/test-*}}]"
SUBSETS = ("main", "socratic")
CARD = "---\nconfigs:" + "".join(f"\n- config_name: {name}\n  data_files: {FILES.format(name)}" for name in SUBSETS)


def test_columns_are_named_by_dotted_paths() -> None:
    texts = {"a.b": " one ", "n": "3", "z": "0", "l.0.c": "x", "l.-1.c.0": "y", "l.-2.c": "x", "d.e": "flat"}
    assert {name: Record("x: line 1", VALUES).text(name) for name in texts} == texts


@pytest.mark.parametrize(("name", "problem"), [
    *((name, f"column {name}: must be a text that is not empty or a number, got {got} (columns: {COLUMNS}); repair "
       "or remove it, or name another column") for name, got in (("t", "True"), ("e", "'  '"))),
    *((name, f"column {name}: must be a text .*; name a part of it, such as {part}")
      for name, part in (("a", "a.b"), ("l", "l.0"), ("l.1.c", "l.1.c.0"))),
    *((name, f"there is no column {name} ({has}); name another, or repair the row") for name, has in (
        ("g", f"columns: {COLUMNS}"), ("a.c", "a has b"), ("a.b.c", "a.b is ' one '"), ("l.2.c", "l has 2 entries"),
        ("l.-3", "l has 2 entries"), ("l.c", "l has 2 entries"),
    )),
])  # fmt: skip
def test_missing_and_unusable_columns_are_refused(name: str, problem: str) -> None:
    match = re.escape(f"x: line 1: {problem}").replace(r"\.\*", ".*")
    with pytest.raises(DataError, match=f"^{match}$"):
        Record("x: line 1", VALUES).text(name)


@pytest.mark.parametrize(("number", "text"), [
    (0.1, "0.1"), (76.0, "76"), (-1.5e-7, "-0.00000015"), (1e23, "100000000000000000000000"),
    (12345678901234567890, "12345678901234567890"),
])  # fmt: skip
def test_numbers_are_written_without_exponents(number: float, text: str) -> None:
    assert Record("x", {"a": number}).text("a") == text
    assert type(number)(text) == number


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()


def test_splits_are_one_file_or_ordered_shards(tmp_path: Path) -> None:
    assert local_files("owner/name", ["train"]) is None
    touch(tmp_path, "b.parquet", "a-00001-of-00002.parquet", "a-00000-of-00002.parquet", "ab.jsonl", "a_more.json")
    touch(tmp_path, "c.txt", *(f"d-{number}-of-11.jsonl" for number in range(1, 12)))  # some writers count from 1
    touch(tmp_path, *(f"e-0000{number}-of-00002-abcdef012345678{number}.parquet" for number in range(2)))
    found = local_files(str(tmp_path), ["a", "b", "d", "a_more", "e"])
    assert {split: [path.name for path in paths] for split, paths in found.items()} == {
        "a": [f"a-0000{number}-of-00002.parquet" for number in range(2)], "b": ["b.parquet"],
        "d": [f"d-{number}-of-11.jsonl" for number in range(1, 12)], "a_more": ["a_more.json"],
        "e": [f"e-0000{number}-of-00002-abcdef012345678{number}.parquet" for number in range(2)],
    }  # fmt: skip
    assert digests(str(tmp_path), ["b", "ab"]).keys() == {"b.parquet", "ab.jsonl"}
    for subset, named in (("main", "owner/name/main"), ("", "owner/name")):
        assert digests("owner/name", ["a"], subset, "a" * 40) == {"hub": named, "commit": "a" * 40}


@pytest.mark.parametrize(("names", "problem"), [
    (["a-00000-of-00003.jsonl", "a-00002-of-00003.jsonl"],
     "holds 2 of the 3 shards of a; missing: a-00001-of-00003.jsonl. Fetch them, or write the rows"),
    (["a-0-of-20.json"], "a-7-of-20.json, a-8-of-20.json and 11 more. Fetch"),
    (["a-0-of-9.json"], "a-7-of-9.json, a-8-of-9.json. Fetch"),
    (["a-00000-of-00002.parquet", "a-00001-of-00002.parquet", "a-00000-of-00001.parquet"],
     "a must be one file, or all shards of one count and kind, got a-00000-of-00001.parquet, a-00000-of-00002.par"),
    (["a-00000-of-00001.parquet", "a-00000-of-00001.jsonl"], "got a-00000-of-00001.jsonl, a-00000-of-00001.par"),
    (["a.jsonl", "a-00000-of-00001.parquet"], "got a-00000-of-00001.parquet, a.jsonl. Move"),
    (["a.jsonl", "a (1).jsonl"], "got a (1).jsonl, a.jsonl. Move"),
    (["a_01.json", "a2.jsonl"], "got a2.jsonl, a_01.json. Move"),
    (["a-00000-of-00001.json", "a-00001-of-00001.json"], "got a-00000-of-00001.json, a-00001-of-00001.json. Move"),
    (["ab.jsonl", "in/c.csv"], f"lacks a, as {KINDS}. Its files: ab.jsonl, in/c.csv. Put the files"),
])  # fmt: skip
def test_missing_or_ambiguous_splits_are_refused(names: list[str], problem: str, tmp_path: Path) -> None:
    touch(tmp_path, *names)
    with pytest.raises(DataError, match=rf"^data\.source: {tmp_path}.*{re.escape(problem)}"):
        local_files(str(tmp_path), ["a"])


@pytest.mark.parametrize("name", ["a_extra.parquet", "data-00000-of-00001.parquet", "part-0.json"])
def test_stray_files_of_rows_are_refused(name: str, tmp_path: Path) -> None:
    touch(tmp_path, "a.parquet", "b.parquet", "other.jsonl", "abc.json", "notes.txt")
    assert digests(str(tmp_path), ["a", "b"]).keys() == {"a.parquet", "b.parquet"}
    touch(tmp_path, name)
    with pytest.raises(DataError, match=rf"^data.source: {tmp_path}: {name} would be ignored next to .* a and b"):
        digests(str(tmp_path), ["a", "b"])


def test_files_of_every_kind_have_the_same_records(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / f"x.{kind}", ROWS) for kind in ("jsonl", "json", "parquet")]
    (tmp_path / "lines.json").write_bytes(files[0].read_bytes())
    (tmp_path / "pretty.jsonl").write_bytes(b"\n" + files[1].read_bytes())
    for name, places in (
        ("x.jsonl", ["line 1", "line 2"]), ("lines.json", ["line 1", "line 2"]), ("x.parquet", ["row 0", "row 1"]),
        ("x.json", ["entry 0", "entry 1"]), ("pretty.jsonl", ["entry 0", "entry 1"]),
    ):  # fmt: skip
        found = list(records_of(tmp_path / name))
        assert [record.values for record in found] == ROWS, name
        assert [record.where for record in found] == [f"{tmp_path / name}: {place}" for place in places]


@pytest.mark.parametrize(("name", "content", "problem"), [
    ("x.json", b'[{"a": 1}, 2]', "entry 1: must be a JSON object, got '2'; repair or remove it"),
    ("x.jsonl", b'[\n{"a": 1},\n', "begins as a JSON array and is none (Expecting value: line 3"),
    ("x.jsonl", b'{"a": 1}\n[1]\n', "line 2: must be a JSON object, got '[1]'; repair or remove it"),
    ("x.jsonl", b'\n{"a": }\n', "line 2: is no JSON ("), ("x.txt", b"a", f"must be {KINDS}, by its name"),
])  # fmt: skip
def test_unreadable_files_are_refused_with_their_place(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"^{re.escape(f'{tmp_path / name}: {problem}')}"):
        list(records_of(tmp_path / name))


def test_places_count_empty_lines_and_rows_of_all_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tmp_path / "x.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \n{"a": "\\ud83d"}\n{"a": NaN}\n')
    found = [(record.where, record.values["a"]) for record in records_of(lines)]
    assert found[:2] == [(f"{lines}: line 1", 1), (f"{lines}: line 4", "\ud83d")]
    assert [where for where, _ in found[2:]] == [f"{lines}: line 5"]
    monkeypatch.setattr("data.schema.ROWS_PER_GROUP", 2)
    pq.write_table(pa.table({"a": [5, 6, 7]}), tmp_path / "y.parquet")
    expected = [(f"{tmp_path}/y.parquet: row {number}", {"a": number + 5}) for number in range(3)]
    assert [(record.where, record.values) for record in records(str(tmp_path), "y")] == expected


def gsm8k(commit):
    files = {"README.md": f"{CARD}\n---\nof {commit}".encode()}
    for subset, (split, rows) in product(SUBSETS, (("train", 4), ("test", 2))):
        questions = [f"{subset} {commit[0]} {split} {row}: what?" for row in range(rows)]
        answers = [f"It is\n#### {row}" for row in range(rows)]
        pq.write_table(pa.table({"question": questions, "answer": answers}), file := io.BytesIO())
        files[f"{subset}/{split}-00000-of-00001.parquet"] = file.getvalue()
    return files


def puzzles(commit):
    lines = [json.dumps({"q": f"{commit[0]} {row}: what?", "a": row}) for row in range(4)]
    return {"train.jsonl": "\n".join(lines).encode(), "test.jsonl": "\n".join(lines[::2]).encode()}


@pytest.fixture
def reach(monkeypatch, tmp_path):
    """Reset the caches of the process, and use a hub at this port."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")

    def begin(port=None):
        commit_of.cache_clear()
        snapshot.cache_clear()
        if port:
            use_hub(monkeypatch, tmp_path, port)

    yield begin
    begin()


def questions(result):
    rows = pq.read_table(Path(result.directory) / "train.parquet").to_pylist()
    return [row["prompt"][0]["content"].partition(":")[0] for row in rows]


def test_second_start_needs_no_network(reach, artifacts_root, tmp_path):
    published = Repository({OLD: gsm8k(OLD), NEW: gsm8k(NEW)}, {"main": OLD, "v1": OLD})
    with serving({"datasets/openai/gsm8k": published}) as hub:
        reach(hub.port)
        first = build_dataset(Gsm8kData(), seed=1, root=artifacts_root)
        assert questions(first) == [f"main a train {row}" for row in range(4)]
        assert provenance(first.directory / "train.parquet")["inputs"] == {"hub": "openai/gsm8k/main", "commit": OLD}
        num_asked = len(hub.asked)
        assert build_dataset(Gsm8kData(revision=OLD), seed=1, root=artifacts_root).cached
        assert build_dataset(Gsm8kData(revision="v1"), seed=1, root=artifacts_root).cached
        assert hub.asked[num_asked:] == ["GET /api/datasets/openai/gsm8k/revision/v1"]
    reach(hub.port)  # the server is gone
    again = build_dataset(Gsm8kData(), seed=1, root=artifacts_root)
    assert (again.directory.name, again.cached) == (first.directory.name, True)
    elsewhere = build_dataset(Gsm8kData(), seed=1, root=tmp_path / "elsewhere")
    assert (elsewhere.directory.name, elsewhere.cached) == (first.directory.name, False)
    assert questions(elsewhere) == questions(first)


def test_moved_branches_make_new_datasets_and_commits_do_not(reach, artifacts_root):
    repository = Repository({OLD: puzzles(OLD), NEW: puzzles(NEW)}, {"main": OLD})
    settings = MappedData(source="somebody/puzzles", question="q", answer="a")
    with serving({"datasets/somebody/puzzles": repository}) as hub:
        reach(hub.port)
        before = build_dataset(settings, seed=1, root=artifacts_root)
        assert questions(before) == [f"a {row}" for row in range(4)]
        repository.refs["main"] = NEW
        assert build_dataset(settings, seed=1, root=artifacts_root).cached, "one process, one commit"
        reach(hub.port)
        after = build_dataset(settings, seed=1, root=artifacts_root)
        assert questions(after) == [f"b {row}" for row in range(4)]
        pinned = settings.model_copy(update={"revision": OLD})
        assert build_dataset(pinned, seed=1, root=artifacts_root).directory.name == before.directory.name
    reach(hub.port)
    assert build_dataset(settings, seed=1, root=artifacts_root).directory.name == after.directory.name


def test_moved_branch_keeps_the_resolved_commit(reach):
    repository = Repository({OLD: puzzles(OLD), NEW: puzzles(NEW)}, {"main": OLD})
    with serving({"datasets/somebody/puzzles": repository}) as hub:
        reach(hub.port)
        assert commit_of("somebody/puzzles", "") == OLD
        repository.refs["main"] = NEW
        assert (snapshot("somebody/puzzles", "") / "train.jsonl").read_bytes() == puzzles(OLD)["train.jsonl"]


def test_unavailable_datasets_are_refused_with_a_remedy(reach, artifacts_root):
    repository = Repository({OLD: puzzles(OLD)}, {"main": OLD})

    def refused(**settings):
        with pytest.raises(DataError) as caught:
            build_dataset(Gsm8kData(**settings), seed=1, root=artifacts_root)
        return str(caught.value)

    with serving({"datasets/somebody/puzzles": repository}) as hub:
        reach(hub.port)
        assert "no folder openai/gsm8k here, and the hub dataset of that name cannot be had (Repos" in refused()
        assert "of that name at v2 cannot be had (RevisionNotFound" in refused(source="somebody/puzzles", revision="v2")
        assert "somebody/puzzles/main, split train, cannot be read" in refused(source="somebody/puzzles")
    reach(hub.port)
    messages = refused(), refused(revision=NEW)
    assert "(hf download openai/gsm8k --repo-type dataset), or give data.source a folder" in messages[0]
    assert f"(hf download openai/gsm8k --repo-type dataset --revision {NEW}), or give" in messages[1]
    assert max(map(len, messages)) < 700
