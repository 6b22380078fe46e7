"""Kept answers are found as a plain loop over all rows finds them."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rlcore.answers.query import EVERYTHING, SORTS, KeptAnswers, Query
from rlcore.answers.store import AnswerWriter, parts_of
from rlcore.config import AnswersConfig
from rlcore.errors import ConfigError, DataError
from tests.answers.made import Made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    writer = AnswerWriter(folder, AnswersConfig())
    for step in range(1, 7):
        writer.add(Made(step, groups=90).of_step(step))  # several row groups a part
        if step % 3 == 0:
            writer.begin_part()
    writer.settle()
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
        and (query.prompt_id is None or row["prompt_id"] == query.prompt_id)
        and within(row["step"], *query.steps)
        and within(row["score"], *query.scores)
        and query.text.lower() in row["answer"].lower()
    ]
    sign = -1 if query.descending else 1
    found.sort(key=lambda row: row["step"])
    found.sort(key=lambda row: (row[query.sort] is None, sign * (row[query.sort] or 0)))
    return found


@pytest.mark.parametrize(
    "query",
    [
        Query(),
        Query(kind="training", sort="score", descending=True),
        Query(kind="validation"),
        Query(steps=(2, 4), prompt_id=1),
        Query(scores=(0.25, None), sort="num_tokens"),
        Query(scores=(None, 0.5), steps=(None, 3), sort="gap", descending=True),
        Query(text="1 3", sort="prompt_id"),
        Query(text="no such answer"),
        *(Query(sort=sort, descending=True) for sort in SORTS),
    ],
)
def test_found_as_by_a_loop(folder: Path, query: Query) -> None:
    answers = KeptAnswers(folder)
    numbers = answers.find(query).to_pylist()
    found = answers.rows(numbers, EVERYTHING)
    keys = [row.pop("key") for row in found]
    assert [answers.one(key, EVERYTHING) for key in keys[:2]] == [
        {"key": key, **row} for key, row in zip(keys, found[:2], strict=False)
    ]
    assert found == naive(folder, query)
    assert answers.light(answers.find(query))["score"].to_pylist() == [row["score"] for row in found]


def test_parts_that_come_are_seen(tmp_path: Path) -> None:
    answers = KeptAnswers(tmp_path / "none yet")
    assert len(answers.find(Query())) == 0
    writer = AnswerWriter(tmp_path / "none yet", AnswersConfig())
    writer.add(Made(1).of_step(1))
    writer.begin_part()
    writer.settle()
    assert len(answers.find(Query())) == 8
    writer.cut(0)
    assert len(answers.find(Query())) == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"step": "two"}, r"step: must be a number or LOW\.\.HIGH.*'two'"),
        ({"score": "nan"}, "score: must be a number"),
        ({"step": "3..1"}, r"step: must have the lower bound first, as in 1\.\.3; got '3\.\.1'"),
        ({"kind": "held-out"}, "kind: must be all, training or validation, got 'held-out'"),
        ({"sort": "-beauty"}, "sort: must be one of step, score, .*, got '-beauty'"),
    ],
)
def test_wrong_filters_are_told(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Query.read(**given)


def test_what_cannot_be_is_told(folder: Path, tmp_path: Path) -> None:
    answers = KeptAnswers(folder)
    answers.find(Query())
    for key in ("train-000001-000003.parquet:99999", "../settings.json:0", "train-000001-000003.parquet:-1", "x"):
        with pytest.raises(DataError, match="there is no such answer"):
            answers.one(key)
    (tmp_path / "train-000001-000002.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"train-000001-000002\.parquet: cannot be read as kept answers"):
        KeptAnswers(tmp_path).find(Query())
