"""Inspection of datasets: figures, rows, leakage, as tables and as JSON."""

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
    train_size=80,
    validation_size=20,
    max_numbers=3,
    number_high=9,
    target_high=20,
    operations=("+", "-"),
    template="bare",
)


@pytest.fixture
def filtered(scratch_tokenizer, artifacts_root):
    dataset = build_dataset(SMALL, seed=1, root=artifacts_root)
    return filter_dataset(dataset.directory, scratch_tokenizer, FilterConfig(), root=artifacts_root)


def as_text(report):
    console = Console(file=StringIO(), width=200)
    console.print(as_rich(report))
    return console.file.getvalue()


def test_figures_of_a_filtered_dataset(filtered):
    report = inspect_dataset(filtered.directory, num_rows=2)
    train, validation = report.splits
    assert (train.name, train.num_rows, validation.name, validation.num_rows) == ("train", 80, "validation", 20)
    assert train.problem is None
    assert (train.length_unit, train.lengths.min_tokens, train.lengths.max_tokens) == ("tokens", 6, 6)
    assert (train.difficulty, train.data_sources) == ({"2": 80}, {"countdown": 80})
    assert (train.num_with_solution, train.num_duplicates) == (80, 0)
    assert train.provenance["fingerprint"] == filtered.fingerprint
    assert [(pair.num_prompts, pair.num_multisets) for pair in report.leakage] == [(0, 0)]
    assert len(train.rows) == 2


def test_the_seed_chooses_the_rows(filtered):
    path = filtered.directory / "train.parquet"
    [first] = inspect_dataset(path, num_rows=5).splits
    [again] = inspect_dataset(path, num_rows=5).splits
    [other] = inspect_dataset(path, num_rows=5, seed=1).splits
    assert first.rows == again.rows != other.rows
    table = pq.read_table(path).to_pylist()
    assert all({**table[row["row"]], "row": row["row"]} == row for row in first.rows)


def test_tables_and_json_have_the_same_figures(filtered):
    report = inspect_dataset(filtered.directory, num_rows=1)
    document = json.loads(report.as_json())
    assert [split["num_rows"] for split in document["splits"]] == [80, 20]
    assert document["splits"][0]["rows"][0]["prompt"] == report.splits[0].rows[0]["prompt"]
    prompt = report.splits[0].rows[0]["prompt"][0]["content"]
    text = as_text(report)
    for shown in ("countdown (80)", "6 to 6, mean 6.0", prompt, filtered.fingerprint, "share 0 prompts", "6 tokens: ["):
        assert shown in text


def test_tables_have_the_figures_of_the_file(tmp_path: Path) -> None:
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
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:2]), tmp_path / "validation.parquet")
    report = inspect_dataset(tmp_path, num_rows=9)
    train = report.splits[0]
    size = (tmp_path / "train.parquet").stat().st_size
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
        pq.write_table(pa.table({"x": [1]}), tmp_path / f"{name}.parquet")
    assert [split.name for split in inspect_dataset(tmp_path).splits] == ["train", "validation", "other"]


def test_markup_in_rows_does_no_harm(tmp_path):
    content = "[red]<script>alert(1)</script>[/nothing]"
    row = {"prompt": [{"role": "user", "content": content}], "note": "[/]"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    report = inspect_dataset(tmp_path)
    assert content in as_text(report)


def test_leaks_and_duplicates_are_counted(tmp_path):
    def table(questions):
        truth = [{"target": 1, "numbers": [3, len(text)]} for text in questions]
        return pa.Table.from_pylist(
            [
                {"prompt": [{"role": "user", "content": text}], "reward_model": {"style": "rule", "ground_truth": t}}
                for text, t in zip(questions, truth, strict=True)
            ]
        )

    pq.write_table(table(["a", "bb", "bb", "cccc"]), tmp_path / "train.parquet")
    pq.write_table(table(["bb", "d"]), tmp_path / "validation.parquet")
    report = inspect_dataset(tmp_path)
    assert report.splits[0].num_duplicates == 1
    assert [(pair.num_prompts, pair.num_multisets) for pair in report.leakage] == [(2, 3)]
    assert report.splits[0].problem is not None
    assert "column data_source: expected string, got nothing" in as_text(report)


def test_a_file_of_any_other_schema_is_shown_too(tmp_path):
    pq.write_table(pa.table({"x": [1, 2, 3], "y": ["a", None, "c"]}), tmp_path / "other.parquet")
    [split] = inspect_dataset(tmp_path / "other.parquet", num_rows=2).splits
    assert split.columns == (("x", "int64"), ("y", "string"))
    assert (split.lengths, len(split.rows)) == (None, 2)
    as_text(inspect_dataset(tmp_path))


FOREIGN = {
    "a prompt that is a text": ({"prompt": "how many?"}, "how many?"),
    "messages without a role": ({"prompt": [{"content": "how many?"}]}, "how many?"),
    "messages with a content of parts": (
        {"prompt": [{"role": "user", "content": [{"text": "how many?"}]}]},
        "how many?",
    ),
    "a missing message": ({"prompt": [{"role": "user", "content": "how many?"}, None]}, "prompt (None)"),
    "token ids as text": ({"prompt_ids": "17 4"}, "prompt (user)"),
    "other sections": ({"extra_info": "easy", "reward_model": "a ground_truth", "data_source": ["a", "b"]}, "easy"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_row_outside_the_schema_is_shown(tmp_path, what):
    own, shown = FOREIGN[what]
    row = {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": "x"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"split": "train", "index": 0},
    }
    pq.write_table(pa.Table.from_pylist([row | own]), tmp_path / "train.parquet")
    report = inspect_dataset(tmp_path)
    assert shown in as_text(report)
    json.loads(report.as_json())


def test_missing_token_ids_and_metadata_of_another_writer_count_nothing(tmp_path):
    table = pa.table({"prompt_ids": [[1, 2], None]}).replace_schema_metadata({"millrace": "no JSON"})
    pq.write_table(table, tmp_path / "train.parquet")
    [split] = inspect_dataset(tmp_path).splits
    assert (split.lengths.num_prompts, split.provenance) == (1, {})


def test_names_of_files_are_no_markup(tmp_path):
    folder = tmp_path / "ds[v1][" / "x]"
    folder.mkdir(parents=True)
    prompt = [{"role": "user", "content": "x"}]
    pq.write_table(pa.Table.from_pylist([{"prompt": prompt}]), folder / "<img src=x>.parquet")
    report = inspect_dataset(folder)
    assert "ds[v1][/x]" in as_text(report)


def test_nothing_to_inspect(tmp_path):
    with pytest.raises(DataError, match="no parquet file there"):
        inspect_dataset(tmp_path)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        inspect_dataset(tmp_path)
