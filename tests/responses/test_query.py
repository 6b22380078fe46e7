"""Search of stored responses, against a naive loop over all rows."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import pytest

from rlcore.config import AnswersConfig
from rlcore.errors import ConfigError, DataError
from rlcore.responses.query import (
    ALL_COLUMNS,
    SORTS,
    Query,
    find_responses,
    read_response,
    responses_to_same_prompt,
    to_finite_json,
)
from rlcore.responses.store import ResponseWriter, parts_of
from tests.helpers.answers import Made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    writer = ResponseWriter(folder, AnswersConfig())
    for step in range(1, 7):
        writer.add(Made(step, groups=90).of_step(step))  # several row groups a part
        if step % 3 == 0:
            writer.start_part()
    writer.wait()
    for name, step in (("step-000003", 3), ("after", 6)):
        writer.write_validation(name, Made(step + 20).of_validation(step, name))
    return folder


def naive(folder: Path, query: Query) -> list[dict[str, Any]]:
    rows = [row for part in parts_of(folder) for row in pq.read_table(part).to_pylist()]

    def within(value: float | None, low: float | None, high: float | None) -> bool:
        if low is None and high is None:
            return True
        return value is not None and (low is None or value >= low) and (high is None or value <= high)

    found = [
        row
        for row in rows
        if (query.kind == "all" or (query.kind == "validation") == (row["validation"] is not None))
        and (query.prompt is None or row["prompt_id"] == query.prompt)
        and within(row["step"], *query.step)
        and within(row["score"], *query.score)
        and query.search.lower() in (row["prompt"] + "\n") * query.in_prompts + row["answer"].lower()
    ]
    sign, column = (-1 if query.sort.startswith("-") else 1), query.sort.removeprefix("-")
    found.sort(key=lambda row: row["step"] if query.each == "answer" else -row["step"])
    values = {"change": lambda row: change(rows, row)}
    value = values.get(column, lambda row: row[column])
    found.sort(key=lambda row: (value(row) is None, sign * (value(row) or 0)))
    if query.each == "prompt":
        found = [
            row for at, row in enumerate(found) if row["prompt_id"] not in [one["prompt_id"] for one in found[:at]]
        ]
    return found


def change(rows: list[dict[str, Any]], row: dict[str, Any]) -> float | None:
    """Return the mean score of the prompt in its last validation minus that in its first."""
    scores: dict[int, list[float]] = {}
    for one in rows:
        if one["prompt_id"] == row["prompt_id"] and one["validation"] is not None and one["score"] is not None:
            scores.setdefault(one["step"], []).append(one["score"])
    means = [fmean(scores[step]) for step in sorted(scores)]
    return means[-1] - means[0] if means else None


@pytest.mark.parametrize(
    "query",
    [
        Query(),
        Query(kind="training", sort="-score"),
        Query(kind="validation"),
        Query(step=(2, 4), prompt=1),
        Query(score=(0.25, None), sort="num_tokens"),
        Query(score=(None, 0.5), step=(None, 3), sort="-gap"),
        Query(search="1 3", sort="prompt_id"),
        Query(search="no such response"),
        Query(search="2 3", in_prompts=True),
        Query(each="prompt"),
        Query(each="prompt", sort="-change", kind="validation"),
        *(Query(sort=f"-{sort}") for sort in SORTS),
    ],
)
def test_search_matches_naive_loop(folder: Path, query: Query) -> None:
    answers = find_responses(folder, query)
    found = answers.rows(range(len(answers)), ALL_COLUMNS)
    keys = [row.pop("key") for row in found]
    assert [read_response(folder, key) for key in keys[:2]] == [
        {"key": key, **row} for key, row in zip(keys, found[:2], strict=False)
    ]
    assert found == naive(folder, query)
    assert answers.light["score"].to_pylist() == [row["score"] for row in found]


def test_responses_to_same_prompt(folder: Path) -> None:
    rows = [row for part in parts_of(folder) for row in pq.read_table(part).to_pylist() if row["prompt_id"] == 2]
    chosen = find_responses(folder, Query(prompt=2, step=(6, 6), kind="validation")).rows(range(1))[0]
    answers, visits = responses_to_same_prompt(folder, chosen["key"])
    assert [(row["validation"], row["sample_index"]) for row in answers] == [("after", 0), ("after", 1)]
    assert [(visit["step"], visit["validation"]) for visit in visits] == list(
        dict.fromkeys((row["step"], row["validation"]) for row in sorted(rows, key=lambda row: row["step"]))
    )
    for visit in visits:
        scores = [row["score"] for row in rows if row["step"] == visit["step"]
                  and row["validation"] == visit["validation"] and row["score"] is not None]  # fmt: skip
        assert visit["score"] == pytest.approx(fmean(scores))


def test_new_parts_are_found(tmp_path: Path) -> None:
    assert len(find_responses(tmp_path / "none yet", Query())) == 0
    writer = ResponseWriter(tmp_path / "none yet", AnswersConfig())
    writer.add(Made(1).of_step(1))
    writer.start_part()
    writer.wait()
    assert len(find_responses(tmp_path / "none yet", Query())) == 8
    removed = tmp_path / "none yet" / "train-000001-000002.parquet"  # a running trainer has just removed it
    removed.symlink_to(tmp_path / "nowhere")
    assert len(parts_of(removed.parent)) == 2
    assert len(find_responses(removed.parent, Query())) == 8
    removed.unlink()
    writer.truncate(0)
    assert len(find_responses(tmp_path / "none yet", Query())) == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"step": "two"}, r"step: must be a number or LOW\.\.HIGH.*'two'"),
        ({"score": "nan"}, "score: must be a number"),
        ({"step": "3..1"}, r"step: must have the lower bound first, as in 1\.\.3; got '3\.\.1'"),
        ({"kind": "held-out"}, "kind: must be all, training or validation, got 'held-out'"),
        ({"prompt": 2**63}, r"prompt: must be from 0 to 9223372036854775807, got 9223372036854775808"),
        ({"prompt": -1}, "prompt: must be from 0 to"),
        ({"search": "a\udcff"}, r"search: must be UTF-8 text, got 'a\\udcff'"),
        ({"sort": "-beauty"}, "sort: must be one of step, score, .*, got '-beauty'"),
    ],
)
def test_invalid_filters_are_rejected(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Query.parse(**given)


def test_invalid_keys_and_parts_are_rejected(folder: Path, tmp_path: Path) -> None:
    for key in ("train-000001-000003.parquet:99999", "../settings.json:0", "train-000001-000003.parquet:-1", "x",
                f"train-000001-000003.parquet:{'9' * 5_000}"):  # fmt: skip
        with pytest.raises(DataError, match="no such response"):
            read_response(folder, key)
    (tmp_path / "train-000001-000002.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"train-000001-000002\.parquet: cannot be read as stored responses"):
        find_responses(tmp_path, Query())
    with pytest.raises(DataError, match=r"train-000001-000002\.parquet: cannot be read as stored responses"):
        read_response(tmp_path, "train-000001-000002.parquet:0")


def test_nonfinite_values_become_null():
    result = to_finite_json({"a": [1.0, float("nan")], "b": (float("inf"), 10**30, "x", None, True)})
    assert result == {"a": [1.0, None], "b": [None, 10**30, "x", None, True]}
