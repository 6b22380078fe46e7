"""Inspection of datasets: statistics, rows and leakage, as tables and as JSON."""

import json
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from data.filter import filter_dataset
from data.inspect import LONGEST_SHOWN_CHARS, Leakage, as_rich, inspect_dataset
from data.tasks import build_dataset
from rlcore.config import CountdownData, FilterConfig
from rlcore.errors import DataError

SMALL = CountdownData(
    train_size=80, validation_size=20, max_numbers=3, number_high=9, target_high=20, operations=("+", "-"),
    template="bare",
)  # fmt: skip


@pytest.fixture
def filtered(scratch_tokenizer, artifacts_root):
    dataset = build_dataset(SMALL, seed=1, root=artifacts_root)
    return filter_dataset(dataset.directory, scratch_tokenizer, FilterConfig(), root=artifacts_root)


def as_text(report):
    console = Console(file=StringIO(), width=200)
    console.print(as_rich(report))
    return console.file.getvalue()


def write(file, *rows):
    pq.write_table(pa.Table.from_pylist(list(rows)), file)


def test_filtered_datasets_have_token_statistics(filtered):
    report = inspect_dataset(filtered.directory, num_rows=2)
    train, validation = report.splits
    assert (train.name, train.num_rows, validation.name, validation.num_rows) == ("train", 80, "validation", 20)
    assert (train.problem, train.length_unit) == (None, "tokens")
    assert (train.lengths.min_tokens, train.lengths.max_tokens) == (6, 6)
    assert (train.difficulty, train.data_sources) == ({"2": 80}, {"countdown": 80})
    assert (train.num_with_solution, train.num_duplicates, len(train.rows)) == (80, 0, 2)
    assert train.provenance["fingerprint"] == filtered.fingerprint
    assert [(pair.num_prompts, pair.num_multisets) for pair in report.leakage] == [(0, 0)]


def test_seed_chooses_the_rows(filtered):
    path = filtered.directory / "train.parquet"
    first, again = (inspect_dataset(path, num_rows=5).splits[0] for _ in range(2))
    [other] = inspect_dataset(path, num_rows=5, seed=1).splits
    assert first.rows == again.rows != other.rows
    table = pq.read_table(path).to_pylist()
    assert all({**table[row["row"]], "row": row["row"]} == row for row in first.rows)


def test_tables_and_json_have_the_same_values(filtered):
    report = inspect_dataset(filtered.directory, num_rows=1)
    document, [prompt] = json.loads(report.as_json()), report.splits[0].rows[0]["prompt"]
    assert [split["num_rows"] for split in document["splits"]] == [80, 20]
    assert document["splits"][0]["rows"][0]["prompt"] == [prompt]
    text = as_text(report)
    shown = ("countdown (80)", "6 to 6, mean 6.0", prompt["content"], filtered.fingerprint, "share 0 prompts")
    assert [value for value in (*shown, "6 tokens: [") if value not in text] == []


def test_tables_have_the_statistics_of_the_file(tmp_path: Path) -> None:
    def row(index: int, text: str, **extra: object) -> dict[str, object]:
        return {
            "data_source": "sums" if index else "words",
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": {"größe": index}},
            "extra_info": {"split": "train", "index": index, "difficulty": 10 - index, "solution": "", **extra},
        }

    long = "x" * (LONGEST_SHOWN_CHARS + 1)
    rows = [row(0, "a", solution="7"), row(1, "bbb"), row(2, "bbb"), row(3, long)]
    write(tmp_path / "train.parquet", *rows)
    write(tmp_path / "validation.parquet", *rows[:2])
    report = inspect_dataset(tmp_path, num_rows=9)
    train, size = report.splits[0], (tmp_path / "train.parquet").stat().st_size
    assert (train.num_rows, train.size_bytes, train.path) == (4, size, str(tmp_path / "train.parquet"))
    assert [one["row"] for one in train.rows] == [0, 1, 2, 3]
    text = "".join(" ".join(line.strip("│┃ ").split()) + "\n" for line in as_text(report).splitlines())
    for name, value in {
        "rows": f"4 ({size / 1e6:.2f} MB)",
        "source": "sums (3), words (1)",
        "prompt characters": "10 to 610, mean 161.0, median 12, p95 610",
        "difficulty": "7: 1, 8: 1, 9: 1, 10: 1",
        "with a solution": "1",
        "duplicate prompts": "1",
        "prompt (system)": "Be brief.",
        "prompt (user)": "bbb",
        "ground_truth": '{"größe": 0}',
        "solution": "7",
        "ability": "math",
    }.items():
        assert f"\n{name} │ {value}\n" in text
    assert f"({LONGEST_SHOWN_CHARS + 1:,} characters)" in text
    assert "train and validation share 3 prompts, 0 multisets" in text
    assert len(inspect_dataset(tmp_path).splits[0].rows) == 3
    assert str(Leakage("a", "b", 0, 1_200)) == "a and b share 0 prompts, 1,200 multisets"


def test_splits_are_listed_in_order(tmp_path: Path) -> None:
    for name in ("validation", "other", "train"):
        write(tmp_path / f"{name}.parquet", {"x": 1})
    assert [split.name for split in inspect_dataset(tmp_path).splits] == ["train", "validation", "other"]


def test_markup_in_rows_and_names_is_shown_as_text(tmp_path):
    content = "[red]<script>alert(1)</script>[/nothing]"
    folder = tmp_path / "ds[v1][" / "x]"
    folder.mkdir(parents=True)
    write(folder / "<img src=x>.parquet", {"prompt": [{"role": "user", "content": content}], "note": "[/]"})
    text = as_text(inspect_dataset(folder))
    assert content in text
    assert "ds[v1][/x]" in text


def test_leaks_and_duplicates_are_counted(tmp_path):
    def row(text):
        truth = {"target": 1, "numbers": [3, len(text)]}
        return {"prompt": [{"role": "user", "content": text}], "reward_model": {"style": "rule", "ground_truth": truth}}

    write(tmp_path / "train.parquet", *map(row, ["a", "bb", "bb", "cccc"]))
    write(tmp_path / "validation.parquet", *map(row, ["bb", "d"]))
    report = inspect_dataset(tmp_path)
    assert report.splits[0].num_duplicates == 1
    assert [(pair.num_prompts, pair.num_multisets) for pair in report.leakage] == [(2, 3)]
    assert report.splits[0].problem is not None
    assert "column data_source: expected string, got nothing" in as_text(report)


QUESTION = {"role": "user", "content": "how many?"}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"prompt": "how many?"}, "how many?"),
        ({"prompt": [{"content": "how many?"}]}, "how many?"),
        ({"prompt": [{"role": "user", "content": [{"text": "how many?"}]}]}, "how many?"),
        ({"prompt": [QUESTION, None]}, "prompt (None)"),
        ({"prompt_ids": "17 4"}, "prompt (user)"),
        ({"extra_info": "easy", "reward_model": "a ground_truth", "data_source": ["a", "b"]}, "easy"),
    ],
)
def test_rows_outside_the_schema_are_shown(tmp_path, changes, shown):
    row = {
        "data_source": "mine",
        "prompt": [QUESTION],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"split": "train", "index": 0},
    }
    write(tmp_path / "train.parquet", row | changes)
    report = inspect_dataset(tmp_path)
    assert shown in as_text(report)
    json.loads(report.as_json())


def test_files_of_another_schema_are_shown(tmp_path):
    pq.write_table(pa.table({"x": [1, 2, 3], "y": ["a", None, "c"]}), tmp_path / "other.parquet")
    [split] = inspect_dataset(tmp_path / "other.parquet", num_rows=2).splits
    assert split.columns == (("x", "int64"), ("y", "string"))
    assert (split.lengths, len(split.rows)) == (None, 2)
    as_text(inspect_dataset(tmp_path))
    table = pa.table({"prompt_ids": [[1, 2], None]}).replace_schema_metadata({"millrace": "no JSON"})
    pq.write_table(table, tmp_path / "other.parquet")
    [split] = inspect_dataset(tmp_path).splits
    assert (split.lengths.num_prompts, split.provenance) == (1, {})


def test_missing_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="no parquet file there"):
        inspect_dataset(tmp_path)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        inspect_dataset(tmp_path)
