"""Rows as parquet with their provenance, lengths of prompts as figures and pictures, and the cards beside them."""

import json
import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data import write
from data.rows import Message, Row, TaskRows
from data.schema import provenance
from data.write import (
    LengthSummary,
    as_markdown,
    as_svg,
    summarize,
    write_dataset_card,
    write_filter_card,
    write_splits,
)
from rlcore.errors import DataError

SUMMARY = LengthSummary(5, 10, 12.25, 11, 14, 14, ((10, 11, 4), (12, 13, 0), (14, 14, 1)))


def row(number: int, **more: object) -> Row:
    return Row((Message("user", f"{number} ="),), {"sum": number}, **more)  # type: ignore[arg-type]


def test_rows_are_numbered_through_all_groups_and_counted_by_difficulty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "ROWS_PER_GROUP", 2)
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


def test_a_row_of_another_type_is_told_with_the_rows_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "ROWS_PER_GROUP", 2)
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


def test_a_summary_has_the_quantiles_and_bins_of_equal_width() -> None:
    assert summarize(Counter({10: 1, 11: 18, 20: 1})) == LengthSummary(
        20, 10, 11.4, 11, 11, 20, tuple((n, n, {10: 1, 11: 18, 20: 1}.get(n, 0)) for n in range(10, 21))
    )
    found = summarize(Counter({10: 1, 11: 17, 20: 2}))
    assert found is not None
    assert (found.p50_tokens, found.p95_tokens) == (11, 20)
    found = summarize(Counter({1: 1, 24: 2}))
    assert found is not None
    assert (len(found.bins), found.bins[-1]) == (24, (24, 24, 2))
    found = summarize(Counter({1: 1, 25: 2, 3: 4}))
    assert found is not None
    assert (len(found.bins), found.bins[:2], found.bins[-1]) == (13, ((1, 2, 1), (3, 4, 4)), (25, 25, 2))
    assert found.mean_tokens == round(63 / 7, 3)
    found = summarize(Counter({1: 2, 2: 1}))
    assert found is not None
    assert (found.mean_tokens, found.p50_tokens) == (1.333, 1)


def test_a_histogram_is_a_table_whose_longest_bar_has_twenty_blocks() -> None:
    assert as_markdown(SUMMARY) == (
        "| tokens | prompts | |\n"
        "| ---: | ---: | :--- |\n"
        f"| 10 to 11 | 4 | {'█' * 20} |\n"
        "| 12 to 13 | 0 |  |\n"
        f"| 14 to 14 | 1 | {'█' * 5} |"
    )


def test_a_histogram_is_a_picture_with_a_bar_for_each_bin() -> None:
    assert as_svg(SUMMARY, "Lengths <x>") == (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 240" font-family="sans-serif" font-size="12">'
        '<text x="50" y="20">Lengths &lt;x&gt;: 5 prompts, mean 12.2, p95 14, longest 14 tokens</text>'
        '<rect x="50.0" y="50.0" width="189.0" height="150.0" fill="#3b6ea5"><title>10 to 11 tokens: 4</title></rect>'
        '<rect x="240.0" y="200.0" width="189.0" height="0.0" fill="#3b6ea5"><title>12 to 13 tokens: 0</title></rect>'
        '<rect x="430.0" y="162.5" width="189.0" height="37.5" fill="#3b6ea5"><title>14 to 14 tokens: 1</title></rect>'
        '<text x="50" y="218">10</text><text x="620" y="218" text-anchor="end">14 tokens</text>'
        '<text x="44" y="60" text-anchor="end">4</text></svg>\n'
    )
    assert ": 1</title>" in as_svg(SUMMARY, "x", unit="characters")
    assert ">14 characters</text>" in as_svg(SUMMARY, "x", unit="characters")


@pytest.mark.parametrize(
    ("limit", "place"), [(None, None), (9, None), (10, 164.0), (12, 392.0), (13, 506.0), (14, None)]
)
def test_the_limit_is_a_line_where_it_lies_among_the_lengths(limit: int | None, place: float | None) -> None:
    line = '<path d="M{:.1f} 40V200" stroke="#b3261e" stroke-dasharray="4 3"/>'
    found = re.findall(r"<path.*?/>", as_svg(SUMMARY, "x", limit))
    assert found == ([] if place is None else [line.format(place)])


def test_bars_of_many_bins_are_wide_enough_to_be_seen() -> None:
    bins = tuple((n, n, 1) for n in range(570))
    assert 'width="1.0"' in as_svg(LengthSummary(570, 0, 1.0, 1, 1, 569, bins), "x")


def test_the_card_of_a_dataset_says_what_the_rows_are(tmp_path: Path) -> None:
    document = {
        "fingerprint": "abc",
        "task": "sums",
        "seed": 7,
        "generator_version": "v1",
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
        "# t\n\nFingerprint `abc`, task `sums`, seed 7, generator `v1`, prompts as chat.\n\n"
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


def test_the_card_of_a_filtered_dataset_says_what_was_left_out(tmp_path: Path) -> None:
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
        "| train/overlong | 5 |\n\n## Prompt lengths of train\n\n1,205 prompts before the filter: mean 12.2, median "
        f"11, p95 14, longest 14 tokens.\n\n{as_markdown(SUMMARY)}\n\n![lengths](lengths-train.svg)\n"
    )
