"""Rows as parquet with their provenance, summaries of prompt lengths, and the cards beside them."""

import json
import re
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import schema
from data.rows import Message, Row, TaskRows
from data.schema import LengthSummary, provenance, summarize, write_dataset_card, write_filter_card, write_splits
from rlcore.errors import DataError

SUMMARY = LengthSummary(5, 10, 12.25, 11, 14, 14)


def row(number: int, **more: object) -> Row:
    return Row((Message("user", f"{number} ="),), {"sum": number}, **more)  # type: ignore[arg-type]


def test_rows_are_numbered_through_all_groups_and_counted_by_difficulty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "ROWS_PER_GROUP", 2)
    train = [
        row(1, difficulty=10, solution="1", distractor="2"),
        row(2, difficulty=9, data_source="own", ability="logic"),
        row(3, difficulty=9),
    ]
    task = TaskRows("t", "math", "text", {"train": iter(train), "validation": train[:1]})
    assert write_splits(tmp_path, task, {"seed": 7}) == {"train": 3, "validation": 1}
    file = pq.ParquetFile(tmp_path / "train.parquet")
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [2, 1]
    column = file.metadata.row_group(0).column(0)
    assert (column.compression, column.is_stats_set, column.has_dictionary_page) == ("ZSTD", False, False)
    rows = file.read().to_pylist()
    assert rows[0] == {
        "data_source": "t",
        "prompt": [{"role": "user", "content": "1 ="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": {"sum": 1}},
        "extra_info": {"split": "train", "index": 0, "difficulty": 10, "solution": "1", "distractor": "2"},
    }
    assert [(one["data_source"], one["ability"]) for one in rows[1:]] == [("own", "logic"), ("t", "math")]
    assert rows[2]["extra_info"] == {"split": "train", "index": 2, "difficulty": 9, "solution": "", "distractor": ""}
    found = provenance(tmp_path / "train.parquet")
    assert found == {
        "seed": 7,
        "split": "train",
        "data_source": "t",
        "prompt_form": "text",
        "counts": {"rows": 3, "by_difficulty": {"9": 2, "10": 1}},
    }


def test_a_row_of_another_type_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "ROWS_PER_GROUP", 2)
    task = TaskRows("t", "math", "text", {"train": [row(1), row(2), row(3), Row((Message("user", "x"),), {"sun": 1})]})
    told = "t: rows 2 to 3 of train do not all have the types of the first row (row 3 has the field 'sun', which the"
    with pytest.raises(DataError, match=f"^{re.escape(told)}"):
        write_splits(tmp_path, task, {}, ["train"])
    for other in ("a text", [1], {"sum": {"sum": 1}}):
        task = TaskRows("t", "math", "text", {"train": [row(1), Row((Message("user", "x"),), other)]})
        with pytest.raises(DataError, match=r"^t: rows 0 to 1 of train do not all have the types of the first row"):
            write_splits(tmp_path, task, {}, ["train"])
    with pytest.raises(
        DataError, match=r"^t: the task's rows have no split \['validation'\]; give both train and valid"
    ):
        write_splits(tmp_path, task, {})
    with pytest.raises(DataError, match=r"^t: the train split has no row; raise data\.train_size or check the source$"):
        write_splits(tmp_path, TaskRows("t", "math", "text", {"train": []}), {}, ["train"])


@pytest.mark.parametrize("lengths", [{5: 1}, {1: 3, 2: 4}, {10: 1, 1_000: 99}, {n: n for n in range(1, 200)}])
def test_summaries_count_every_prompt_once(lengths: dict[int, int]) -> None:
    found = summarize(Counter(lengths))
    assert found is not None
    every = sorted(Counter(lengths).elements())
    assert found.num_prompts == len(every)
    assert (found.min_tokens, found.max_tokens) == (every[0], every[-1])
    assert found.mean_tokens == pytest.approx(sum(every) / len(every), abs=1e-3)
    assert found.p50_tokens == every[-(-len(every) // 2) - 1]
    assert found.p95_tokens == every[-(-len(every) * 95 // 100) - 1]


def test_no_lengths_have_no_summary() -> None:
    assert summarize(Counter()) is None


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (
            {"sum": 1},
            {"word": "1"},
            r"rows 0 to 1 of train .* \(row 1 has the field 'word', which the first row has not\)",
        ),
        ({"a": {"sum": 1}}, {"a": {"sum": 1, "word": "1"}}, "row 1 has the field 'word'"),
        ({"a": [{"sum": 1}]}, {"a": [{"sum": 1}, {"sum": 1, "word": "1"}]}, "row 1 has the field 'word'"),
        ([{"sum": 1}], [{"word": "1"}], "row 1 has the field 'word'"),
        ({"sum": 1}, {"sum": 2**63}, "whole numbers at most 64 bits"),
    ],
)
def test_a_ground_truth_that_would_lose_something_is_refused(tmp_path, first, second, told):
    rows = [Row((Message("user", "x"),), truth) for truth in (first, second)]
    task = TaskRows("t", "math", "text", {"train": rows, "validation": rows[:1]})
    with pytest.raises(DataError, match=told):
        write_splits(tmp_path, task, {})


def test_a_declared_type_may_have_more_fields_than_the_first_row(tmp_path):
    rows = [Row((Message("user", "x"),), truth) for truth in ({"sum": 1}, {"sum": 2, "word": "b"})]
    kind = pa.struct([("sum", pa.int64()), ("word", pa.string())])
    write_splits(
        tmp_path, TaskRows("t", "math", "text", {"train": rows, "validation": rows}, ground_truth_type=kind), {}
    )
    written = pq.read_table(tmp_path / "train.parquet").column("reward_model").to_pylist()
    assert [row["ground_truth"] for row in written] == [{"sum": 1, "word": None}, {"sum": 2, "word": "b"}]


def test_a_ground_truth_may_lack_a_field(tmp_path):
    rows = [Row((Message("user", "x"),), truth) for truth in ({"sum": 1, "words": [["a"], []]}, {"sum": 2})]
    write_splits(tmp_path, TaskRows("t", "math", "text", {"train": rows, "validation": rows[:1]}), {})
    found = pq.read_table(tmp_path / "train.parquet").column("reward_model").to_pylist()
    assert [row["ground_truth"] for row in found] == [{"sum": 1, "words": [["a"], []]}, {"sum": 2, "words": None}]


def test_the_card_of_a_dataset_says_what_the_rows_are(tmp_path: Path) -> None:
    document = {
        "fingerprint": "abc",
        "task": "sums",
        "seed": 7,
        "task_version": 3,
        "inputs": {"train.jsonl": "0123", "test.jsonl": "4567"},
        "settings": {"größe": 3},
    }
    task = TaskRows(
        "t", "math", "chat", {"train": [row(1, difficulty=2)] * 1_200, "validation": [row(5, ability="größe")]}
    )
    write_splits(tmp_path, task, document)
    write_dataset_card(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    head, first, second = card.split("## First row of ")
    assert head == (
        "# t\n\nFingerprint `abc`, task `sums`, seed 7, version `3`, prompts as chat.\n\n"
        "| split | rows | by difficulty |\n| --- | ---: | --- |\n| train | 1,200 | 2: 1,200 |\n"
        "| validation | 1 | 0: 1 |\n"
        "\nMade from these files (sha256):\n\n- `test.jsonl` 4567\n- `train.jsonl` 0123\n"
        '\n## Settings\n\n```json\n{\n  "größe": 3\n}\n```\n\n'
    )
    for text, split, number in ((first, "train", 1), (second, "validation", 5)):
        name, _, rest = text.partition("\n\n```json\n")
        shown, _, end = rest.partition("\n```\n")
        assert (name, end) == (split, "\n" if split == "train" else "")
        assert json.loads(shown)["reward_model"]["ground_truth"] == {"sum": number}
        assert shown.startswith('{\n  "data_source": "t",\n')
    assert '"ability": "größe"' in second
    write_splits(tmp_path, task, document | {"inputs": {}})
    write_dataset_card(tmp_path)
    assert "Made from these files" not in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_the_card_of_a_filtered_dataset_counts_dropped_rows(tmp_path: Path) -> None:
    settings = {"max_prompt_tokens": 64, "overlong": "drop", "duplicates": "keep", "decontaminate": "off"}
    lengths = {"train": {**{name: getattr(SUMMARY, name) for name in LengthSummary.__slots__}, "num_prompts": 1_205}}
    facts = {
        "fingerprint": "f",
        "dataset": "d",
        "tokenizer": "t",
        "settings": settings,
        "counts": {"train": 1_200, "train/overlong": 5},
        "lengths": lengths,
    }
    write_filter_card(tmp_path, facts)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == (
        "# Filtered dataset\n\nFingerprint `f`: dataset `d` tokenized by `t`, at most 64 tokens a prompt (overlong: "
        "drop, duplicates: keep, rows of suites: off).\n\n| what | rows |\n| --- | ---: |\n| train | 1,200 |\n"
        "| train/overlong | 5 |\n\n| prompts before the filter | number | mean | median | p95 | longest (tokens) |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |\n| train | 1,205 | 12.2 | 11 | 14 | 14 |\n"
    )
