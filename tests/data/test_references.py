"""References are scored against themselves: which rows are counted, reported, refused and unchecked."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from data import references
from data.references import check_references
from data.tasks import build_dataset
from rlcore.config import RewardConfig
from rlcore.config.data import CountdownData, CustomData, Gsm8kData, MappedData, ParquetData
from rlcore.errors import ConfigError, DataError

OWN = """
import time
from data.rows import Message, Row, TaskRows

def exact(response, truth):
    return float(response == truth["answer"])
def never_full(response, truth):
    return 0.5 * (response == truth["answer"])
def long_words(response, truth):
    return min(1.0, len(response) / 1000)
def tagged(response, truth):
    return float(f"<answer>{truth['answer']}</answer>" in response)
def never_ends(response, truth):
    time.sleep(600)
def raises_at_seven(response, truth):
    return {"7": None}.get(truth["answer"], 1.0)

def build(settings, seed):
    rows = [Row((Message("user", str(n)),), {"n": n}, 1, "" if n == 3 else f"it is {n}") for n in range(10)]
    return TaskRows("own", "math", "text", {"train": rows, "validation": rows[:1]})
def says_n(response, truth):
    return float(response == f"it is {truth['n']}" and truth["n"] != 7)
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_scorers.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_scorers", raising=False)


def mapped(
    tmp_path: Path, scorer: str, train: list[str], test: list[str] | None = None, solutions: list[str] | None = None
) -> MappedData:
    """Return settings with these references, in files with a line for each."""
    folder = tmp_path / "rows"
    folder.mkdir(exist_ok=True)
    for split, answers in (("train", train), ("test", test or train[:1])):
        rows = [{"question": f"{split} {n}", "answer": answer} for n, answer in enumerate(answers)]
        rows = [row | ({"solution": solutions[n]} if solutions else {}) for n, row in enumerate(rows)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return MappedData(source=str(folder), scorer=scorer, solution="solution" if solutions else "")


def check(tmp_path: Path, data: Any, **reward: Any) -> str:
    return check_references(data, 1, RewardConfig(**reward), tmp_path / "root")


def test_full_scores_are_stored_by_rows(tmp_path: Path) -> None:
    data = mapped(tmp_path, "data.math:score", ["18", "1/2", "x+1"])
    assert check(tmp_path, data) == ""
    (stored,) = (tmp_path / "root" / "datasets").glob("references-*.json")
    result = {"rows": {"train": 3, "validation": 1}, "total": 4, "unmet": {}, "shown": []}
    assert json.loads(stored.read_text()) == result
    before = stored.stat().st_mtime_ns
    assert check(tmp_path, data) == ""
    assert stored.stat().st_mtime_ns == before
    check(tmp_path, mapped(tmp_path, "data.math:score", ["18", "1/2", "x+2"]))
    assert len(list(stored.parent.glob("references-*.json"))) == 2, "other rows are checked"


def test_unreadable_references_are_refused_with_their_line(tmp_path: Path) -> None:
    data = mapped(tmp_path, "data.math:score", ["18", '[{"input": "1", "output": "2"}]', "7"])
    with pytest.raises(DataError) as error:
        check(tmp_path, data)
    text = str(error.value)
    assert text.startswith("data.scorer: must give full marks to the reference of each row and to its solution; ")
    assert "data.math:score does not for 1 of 3 rows of train (33.3%):" in text
    assert f"{data.source}/train.jsonl: line 2: reference" in text
    assert "reward.max_unmet_references=0.01 is the share of a split that is accepted. Repair or remove" in text


def test_rows_below_the_share_are_reported(tmp_path: Path) -> None:
    data = mapped(tmp_path, "data.gsm8k:score", ["18", "{}", "7", "4"])
    report = check(tmp_path, data, max_unmet_references=0.25)
    assert report.startswith("warning: data.scorer: must give full marks")
    assert "data.gsm8k:score does not for 1 of 4 rows of train (25.0%)" in report
    assert "line 2" in report
    assert check(tmp_path, data, max_unmet_references=0.25) == report, "a later start reports it too"
    with pytest.raises(DataError, match=r"1 of 4 rows"):
        check(tmp_path, data, max_unmet_references=0.24)


def test_shares_are_computed_for_each_split(tmp_path: Path) -> None:
    data = mapped(tmp_path, "data.gsm8k:score", [str(n) for n in range(600)], ["1", "{}", "{}"])
    with pytest.raises(DataError, match=r"does not for 2 of 3 rows of validation \(66\.7%\):\n.*test\.jsonl: line 2"):
        check(tmp_path, data)


def test_solutions_in_another_form_count_only_if_trained_on(tmp_path: Path, gsm8k_folder: Path) -> None:
    data, root = Gsm8kData(source=str(gsm8k_folder), scorer="own_scorers:tagged"), tmp_path / "root"
    assert check_references(data, 1, RewardConfig(max_unmet_references=0), root) == ""
    with pytest.raises(DataError, match=r"own_scorers:tagged does not for .* rows of train \(100\.0%\)"):
        check_references(data, 1, RewardConfig(), root, is_taught=True)


def test_slow_scorers_end_the_check_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "BUDGET_S", 1.0)
    report = check(tmp_path, mapped(tmp_path, "own_scorers:never_ends", ["18", "7"]), deadline_s=600.0)
    assert report == "warning: data.scorer: own_scorers:never_ends has scored no reference in 1 s, so none is checked"


def test_weights_of_unknown_parts_are_refused(tmp_path: Path) -> None:
    message = r"^reward\.weights: must name parts of the score, got len\. .*data\.gsm8k:score"
    with pytest.raises(ConfigError, match=message):
        check(tmp_path, mapped(tmp_path, "data.gsm8k:score", ["18"]), weights={"len": 1.0})


def test_solutions_need_full_scores_too(tmp_path: Path) -> None:
    data = mapped(tmp_path, "data.math:score", ["18", "7"], solutions=[r"so \boxed{18}", r"so \boxed{8}"])
    with pytest.raises(DataError, match=r"line 2: reference \"7\": the answer .so .*boxed.8.. scores 0"):
        check(tmp_path, data)


@pytest.mark.parametrize("scorer", ["data.gsm8k:score", "data.gsm8k:score_numeric"])
def test_all_references_of_gsm8k_earn_full_scores(gsm8k_folder: Path, tmp_path: Path, scorer: str) -> None:
    assert check(tmp_path, Gsm8kData(source=str(gsm8k_folder), scorer=scorer), max_unmet_references=0.0) == ""


@pytest.mark.parametrize(
    ("scorer", "unmet"),
    [("exact", 0), ("never_full", 0), ("long_words", 0), ("raises_at_seven", 1)],
)
def test_own_scorers_are_checked_in_their_form(tmp_path: Path, scorer: str, unmet: int) -> None:
    """A scorer that does not read plain references is accepted, one that fails at a row is not."""
    data = mapped(tmp_path, f"own_scorers:{scorer}", ["18", "7", "a word", "4"], ["18"])
    report = check(tmp_path, data, max_unmet_references=1)
    assert (f"{unmet} of 4 rows of train" in report) == bool(report) == bool(unmet), report


def test_own_builds_are_checked_by_their_solutions(tmp_path: Path) -> None:
    data = CustomData(build="own_scorers:build", scorer="own_scorers:says_n")
    build_dataset(data, seed=1, root=tmp_path / "root")
    report = check(tmp_path, data, max_unmet_references=1)
    assert "1 of 10 rows of train" in report
    assert "train.parquet: row 7: reference {\"n\": 7}: the answer 'it is 7' scores 0" in report


@pytest.mark.parametrize(
    ("scorer", "answers", "message"),
    [
        # rows at the end of the file too
        ("data.math:score", ["1", "2", '{"inputs": ["1"]}'], r"for 1 of 3 rows of train .*\n.*parquet: row 2"),
        # each runs a program, so a sample is checked
        ("data.code:score", ["no tests"] * 200, r"for 50 of 50 rows of train \(100\.0%\)"),
    ],
)
def test_rows_of_another_kind_are_refused(tmp_path: Path, scorer: str, answers: list[str], message: str) -> None:
    source = MappedData(source=mapped(tmp_path, "", answers).source)
    made = build_dataset(source, seed=1, root=tmp_path).directory
    files = {f"{split}_file": str(made / f"{split}.parquet") for split in ("train", "validation")}
    with pytest.raises(DataError, match=rf"{scorer} does not {message}"):
        check(tmp_path, ParquetData(scorer=scorer, **files))


def test_generated_problems_judges_and_environments_are_unchecked(tmp_path: Path) -> None:
    rows = mapped(tmp_path, "", ["{}"]).source
    for data in (
        CountdownData(),
        MappedData(source=rows, scorer="data.judge:score"),
        MappedData(source=rows, environment="data.number_guessing:Game"),
    ):
        assert check(tmp_path, data) == ""
    assert not list(tmp_path.glob("root/datasets/references-*.json"))
