"""Files in the row schema: the scorer by data source, and ground truths that a scorer cannot use."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.custom import require_sound_rows
from data.references import check_references
from data.sources import mapped_rows, parquet_rows
from data.tasks import build_dataset
from rlcore.config import MappedData, RewardConfig
from rlcore.config.data import ParquetData
from rlcore.errors import DataError
from rlcore.rollout.by_part import score, with_scorer


def row(source: str, truth: object, number: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"{source} {number}: what?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": f"{number}-a"},
        **more,
    }


def files(folder: Path, *rows: dict[str, Any], **settings: str) -> ParquetData:
    """Training rows as given; the held-out ones have other prompts."""
    held_out = [one | {"prompt": [{"role": "user", "content": f"held out {n}"}]} for n, one in enumerate(rows)]
    for name, content in (("train", list(rows)), ("test", held_out)):
        pq.write_table(pa.Table.from_pylist(content), folder / f"{name}.parquet")
    return ParquetData(
        train_file=str(folder / "train.parquet"), validation_file=str(folder / "test.parquet"), **settings
    )


def check(folder: Path, data: ParquetData) -> str:
    return check_references(data, 1, RewardConfig(), folder)


def test_rows_of_several_sources_are_judged_each_by_its_own_scorer(tmp_path: Path) -> None:
    """`\\frac12` is a number to the scorer of mathematics alone."""
    data = files(tmp_path, row("openai/gsm8k", "18"), row("math_dapo", r"\frac12"), row("gsm8k", "7", 1))
    require_sound_rows(data, 1, tmp_path, each_once=True)
    assert check(tmp_path, data) == ""
    for scorer, unmet in (("data.gsm8k:score", 1), ("data.countdown:score", 3)):
        with pytest.raises(DataError, match=rf"{scorer} does not for {unmet} of 3 rows of train"):
            check(tmp_path, data.model_copy(update={"scorer": scorer}))


@pytest.mark.parametrize("source", ["codeforces", "gsm8k_hard", "mathematics"])
def test_a_source_without_a_known_scorer_is_refused_by_its_name(tmp_path: Path, source: str) -> None:
    data = files(tmp_path, row("gsm8k", "7"), row(source, "7"))
    with pytest.raises(DataError, match=rf"data\.scorer: must be given for .*train\.parquet: .* data_source {source},"):
        require_sound_rows(data, 1, tmp_path, each_once=True)
    build_dataset(data, seed=1, root=tmp_path)
    with pytest.raises(DataError, match=rf"for the data source '{source}' \(.*train\.parquet: row 1\)"):
        check(tmp_path, data)
    own = data.model_copy(update={"scorer": "data.math:score"})
    require_sound_rows(own, 1, tmp_path, each_once=True)
    assert check(tmp_path, own) == ""


COUNTDOWN = {"target": 5, "numbers": [2, 3]}
PROGRAM = '{"inputs": ["1"], "outputs": ["2"]}'


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
def test_a_ground_truth_that_the_scorer_cannot_use_is_refused_with_its_row(
    tmp_path: Path, scorer: str, truth: object
) -> None:
    data = files(tmp_path, *(row("mine", truth, n) for n in range(3)), scorer=scorer)
    told = rf"{scorer} does not for 3 of 3 rows of train \(100\.0%\) .*:\n.*train\.parquet: row 0: reference"
    with pytest.raises(DataError, match=told):
        check(tmp_path, data)


def test_answers_go_to_the_scorer_of_their_row() -> None:
    for scorer, truth, answer, expected in (
        ("data.gsm8k:score", {"answer": "7"}, "#### 7", 1.0),
        ("data.gsm8k:score", {"answer": "7"}, r"\boxed{7}", 0.0),
        ("data.math:score", {"answer": "7"}, r"\boxed{7}", 1.0),
        ("data.countdown:score", COUNTDOWN, "<answer>2 + 3</answer>", 1.0),
    ):
        found = score(answer, json.loads(with_scorer(json.dumps(truth), scorer)))
        assert (found if isinstance(found, float) else found.total) == expected
    with pytest.raises(ValueError, match=r"data\.scorer: must be given, for none is known"):
        score("7", {"answer": "7"})


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_nan_and_infinity_are_no_references(tmp_path: Path, number: str) -> None:
    values = [1.0, float(number)]
    for kind in ("jsonl", "parquet"):
        folder = tmp_path / kind
        folder.mkdir()
        for split in ("train", "test"):
            if kind == "jsonl":
                lines = (
                    f'{{"question": "{split} {n}", "answer": {value}}}\n' for n, value in enumerate(("1.0", number))
                )
                (folder / f"{split}.jsonl").write_text("".join(lines))
            else:
                table = pa.table({"question": [f"{split} {n}" for n in range(2)], "answer": values})
                pq.write_table(table, folder / f"{split}.parquet")
        settings = MappedData(source=str(folder))
        with pytest.raises(DataError, match=r"(line 2|row 1): column answer: must be .* a number, got -?(nan|inf) "):
            require_sound_rows(settings, 1, tmp_path, each_once=True)
        with pytest.raises(DataError, match=r"(line 2|row 1): column answer"):
            list(mapped_rows(settings, 1).splits["train"])
    data = files(tmp_path, *(row("gsm8k", value, n) for n, value in enumerate(values)))
    with pytest.raises(DataError, match=r"train\.parquet: row 1: reward_model\.ground_truth must have a value, got"):
        list(parquet_rows(data, 1).splits["train"])
