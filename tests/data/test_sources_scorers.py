"""Rows of data=parquet without data.scorer are scored by what is known for their data source."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.filter import filter_dataset
from data.references import check_references
from data.sources import build_parquet
from data.tasks import build_dataset
from data.trial import first_row, validate_rows
from rlcore.config import FilterConfig, ParquetData, RewardConfig, RunConfig
from rlcore.config.data import scorer_of_row, scorers_of
from rlcore.errors import DataError
from rlcore.rollout.scoring import ScoringPool
from rlcore.run.inputs import RunInputs
from rlcore.run.problems import Problems


def row(source: str | None, truth: object, number: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"content": f"{source} {number}?", "role": "user"}],
        "reward_model": {"ground_truth": truth},
        **more,
    }


def settings(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> ParquetData:
    for split in ("train", "test"):
        table = pa.Table.from_pylist([{**one, "prompt": [*one["prompt"]]} for one in rows])
        if split == "test":
            asked = [[{"content": f"held out {n}?", "role": "user"}] for n in range(len(rows))]
            table = table.set_column(1, "prompt", pa.array(asked, table.schema.field("prompt").type))
        pq.write_table(table, folder / f"{split}.parquet")
    return ParquetData(
        train_file=str(folder / "train.parquet"), validation_file=str(folder / "test.parquet"), **changes
    )


@pytest.mark.parametrize(
    ("sources", "scorer"),
    [
        (("openai/gsm8k", "gsm8k"), "data.gsm8k:score"),
        (("countdown",), "data.countdown:score"),
        (
            ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math_dapo", "math",
             "math_dapo_reasoning", "aime2024", "aime_2025", "numina_cn_k12", "numina_olympiads"),
            "data.math:score",
        ),
        (("codecontests", "apps", "taco", "codeforces", "hiyouga/geometry3k", "searchR1_nq", "", "mathematics"), None),
    ],
)  # fmt: skip
def test_a_scorer_follows_from_the_names_that_the_field_writes(sources: tuple[str, ...], scorer: str | None) -> None:
    assert {scorer_of_row(ParquetData(), source) for source in sources} == {scorer}
    assert {scorer_of_row(ParquetData(scorer="a.b:c"), source) for source in sources} == {"a.b:c"}
    assert scorer is None or scorer in scorers_of(ParquetData())
    assert scorers_of(ParquetData(scorer="a.b:c")) == ("a.b:c",)


def test_rows_are_scored_by_their_data_source(tmp_path: Path, artifacts_root: Path, chat_tokenizer: Path) -> None:
    rows = [row("openai/gsm8k", "18"), row("math_dapo", "\\frac{1}{2}", 1, extra_info={"index": "9a9b-uuid"})]
    data = settings(tmp_path, rows)
    assert validate_rows(data, 1, artifacts_root, each_once=True) is None
    dataset = build_dataset(data, seed=1, root=artifacts_root)
    filtered = filter_dataset(dataset.directory, chat_tokenizer, FilterConfig(), root=artifacts_root)
    problems = Problems.read(RunConfig(data=data), RunInputs(filtered.directory, chat_tokenizer))
    assert [prompt.data_source for prompt in problems.train[0]] == ["openai/gsm8k", "math_dapo"]
    truths = [prompt.ground_truth_json for prompt in (*problems.train[0], *problems.validation)]
    answers = ["#### 18", r"Answer: $0.5$", r"\boxed{18}", "#### 0.5"]
    with ScoringPool(data.scorer, RewardConfig(num_processes=1)) as pool:
        scores = pool.score(answers, truths)
    assert [(score.total, score.failure) for score in scores] == [(1.0, None), (1.0, None), (0.0, None), (0.0, None)]
    assert "strict" in scores[0].parts
    assert "strict" not in scores[1].parts


def test_rows_of_an_unknown_source_are_refused(tmp_path: Path, artifacts_root: Path) -> None:
    rows = [row("openai/gsm8k", "18"), *(row(name, '{"inputs": ["1"]}', n) for n, name in enumerate(("taco", "apps")))]
    data = settings(tmp_path, rows)
    told = (
        f"data.scorer: must be given for {tmp_path}/train.parquet: its rows have the data_source apps, taco, for which "
        "no scorer is known. Set data.scorer,"
    )
    with pytest.raises(DataError, match=f"^{re.escape(told)}"):
        validate_rows(data, 1, artifacts_root, each_once=True)
    with pytest.raises(DataError, match=r"for .*/test\.parquet: its rows have the data_source apps, taco, for"):
        validate_rows(data, 1, artifacts_root, ("validation",), each_once=True)
    own = data.model_copy(update={"scorer": "my.own:score"})
    assert validate_rows(own, 1, artifacts_root, each_once=True) is None
    with ScoringPool(data.scorer, RewardConfig(num_processes=0)) as pool:
        (score,) = pool.score(["1"], ['{"answer": "1"}'])
    assert "data.scorer: must be given, for none is known for the row's data_source" in score.failure


def test_the_first_row_names_its_scorer(tmp_path: Path, artifacts_root: Path) -> None:
    data = settings(tmp_path, [row("countdown", {"target": 3, "numbers": [1, 2]})])
    before = first_row(data, 1, artifacts_root)
    assert before is not None
    assert '"scorer": "data.countdown:score"' in before.ground_truth_json
    build_dataset(data, seed=1, root=artifacts_root)
    assert first_row(data, 1, artifacts_root) == before
    own = first_row(data.model_copy(update={"scorer": "my.own:score"}), 1, artifacts_root)
    assert own is not None
    assert "scorer" not in own.ground_truth_json


def test_what_nothing_reads_may_be_of_any_type_or_missing(tmp_path: Path) -> None:
    plain = settings(tmp_path, [row("math", "1"), row(None, "1")])
    found = list(build_parquet(plain, 0).splits["train"])
    assert [(one.data_source, one.ability) for one in found] == [("math", ""), ("", "")]
    for more in (
        {"extra_info": {"index": "9a9b6eb4", "split": 3}, "ability": "MATH", "uid": 7},
        {"extra_info": None, "ability": None},
    ):
        found = list(build_parquet(settings(tmp_path, [row("math", "1", **more)]), 0).splits["train"])
        assert [one.ground_truth for one in found] == ["1"]


COUNTDOWN = {"target": 5, "numbers": [2, 3]}
PROGRAM = '{"inputs": ["1"], "outputs": ["2"]}'


def check(folder: Path, data: ParquetData) -> str:
    return check_references(data, 1, RewardConfig(), folder)


def test_references_are_checked_by_the_scorer_of_their_row(tmp_path: Path) -> None:
    """`\\frac12` is a number to the scorer of mathematics alone."""
    data = settings(tmp_path, [row("openai/gsm8k", "18"), row("math_dapo", r"\frac12"), row("gsm8k", "7", 1)])
    assert check(tmp_path, data) == ""
    with pytest.raises(DataError, match=r"data\.gsm8k:score does not for 1 of 3 rows of train"):
        check(tmp_path, data.model_copy(update={"scorer": "data.gsm8k:score"}))
    unknown = settings(tmp_path, [row("gsm8k", "7"), row("mathematics", "7")])
    build_dataset(unknown, seed=1, root=tmp_path)
    with pytest.raises(DataError, match=r"for the data source 'mathematics' \(.*train\.parquet: row 1\)"):
        check(tmp_path, unknown)


@pytest.mark.parametrize(
    ("scorer", "truth"),
    [
        ("data.countdown:score", "18"),
        ("data.countdown:score", PROGRAM),
        ("data.gsm8k:score", PROGRAM),
        ("data.gsm8k:score", COUNTDOWN),
        ("data.gsm8k:score_numeric", COUNTDOWN),
        ("data.math:score", COUNTDOWN),
        ("data.code:score", "18"),
    ],
)
def test_an_unusable_ground_truth_is_refused_with_its_row(tmp_path: Path, scorer: str, truth: object) -> None:
    data = settings(tmp_path, [row("mine", truth, n) for n in range(3)], scorer=scorer)
    told = rf"{scorer} does not for 3 of 3 rows of train \(100\.0%\) .*:\n.*train\.parquet: row 0: reference"
    with pytest.raises(DataError, match=told):
        check(tmp_path, data)
