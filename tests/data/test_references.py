"""Each reference is scored against itself: what is counted, shown and refused, and what is not checked."""

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


def folder(tmp_path: Path, train: list[Any], test: list[Any] | None = None, **more: list[str]) -> Path:
    found = tmp_path / "rows"
    found.mkdir(exist_ok=True)
    for split, answers in (("train", train), ("test", test or train[:1])):
        rows = [
            {"question": f"{split} {n}", "answer": answer} | {name: values[n] for name, values in more.items()}
            for n, answer in enumerate(answers)
        ]
        (found / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return found


def check(tmp_path: Path, data: Any, **reward: Any) -> str:
    return check_references(data, 1, RewardConfig(**reward), tmp_path / "root")


def test_readable_references_earn_full_marks_and_the_result_is_kept(tmp_path: Path) -> None:
    data = MappedData(source=str(folder(tmp_path, ["18", "1/2", "x+1"])), scorer="data.math:score")
    assert check(tmp_path, data) == ""
    (kept,) = (tmp_path / "root" / "datasets").glob("references-*.json")
    assert json.loads(kept.read_text()) == {"rows": {"train": 3, "validation": 1}, "total": 4, "unmet": {}, "shown": []}
    before = kept.stat().st_mtime_ns
    assert check(tmp_path, data) == ""
    assert kept.stat().st_mtime_ns == before
    folder(tmp_path, ["18", "1/2", "x+2"])
    check(tmp_path, data)
    assert len(list(kept.parent.glob("references-*.json"))) == 2, "other rows are checked"


def test_an_unreadable_reference_is_refused_with_file_line_and_reference(tmp_path: Path) -> None:
    rows = folder(tmp_path, ["18", '[{"input": "1", "output": "2"}]', "7"])
    with pytest.raises(DataError) as refused:
        check(tmp_path, MappedData(source=str(rows), scorer="data.math:score"))
    text = str(refused.value)
    assert text.startswith("data.scorer: must give full marks to the reference of each row and to its solution; ")
    assert "data.math:score does not for 1 of 3 rows of train (33.3%):" in text
    assert f"{rows}/train.jsonl: line 2: reference" in text
    assert "reward.max_unmet_references=0.01 is the share of a split that is accepted. Repair or remove" in text


def test_below_the_share_rows_are_reported(tmp_path: Path) -> None:
    rows = folder(tmp_path, ["18", "{}", "7", "4"])
    data = MappedData(source=str(rows), scorer="data.gsm8k:score")
    told = check(tmp_path, data, max_unmet_references=0.25)
    assert told.startswith("warning: data.scorer: must give full marks")
    assert "data.gsm8k:score does not for 1 of 4 rows of train (25.0%)" in told
    assert "line 2" in told
    assert check(tmp_path, data, max_unmet_references=0.25) == told, "a later start reports it too"
    with pytest.raises(DataError, match=r"1 of 4 rows"):
        check(tmp_path, data, max_unmet_references=0.24)


def test_held_out_rows_do_not_vanish_among_many_training_rows(tmp_path: Path) -> None:
    rows = folder(tmp_path, [str(n) for n in range(600)], ["1", "{}", "{}"])
    with pytest.raises(DataError, match=r"does not for 2 of 3 rows of validation \(66\.7%\):\n.*test\.jsonl: line 2"):
        check(tmp_path, MappedData(source=str(rows), scorer="data.gsm8k:score"))


def test_a_plan_writes_nothing_and_checks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, root = MappedData(source=str(folder(tmp_path, ["18", "{}"]))), tmp_path / "root"
    lenient = RewardConfig(max_unmet_references=1)
    told = check_references(data, 1, lenient, root, keep=False)
    assert "1 of 2 rows of train" in told
    assert not root.exists()
    monkeypatch.setattr(references, "ScoringPool", lambda *_, **__: pytest.fail("checked twice"))
    assert check_references(data, 1, lenient, root) == told
    monkeypatch.setattr(references, "KNOWN", {})
    assert check_references(data, 1, lenient, root) == told, "another process reads it"


def test_solutions_in_another_form_count_only_if_they_are_taught(tmp_path: Path, gsm8k_folder: Path) -> None:
    data, root = Gsm8kData(source=str(gsm8k_folder), scorer="own_scorers:tagged"), tmp_path / "root"
    assert check_references(data, 1, RewardConfig(max_unmet_references=0), root) == ""
    with pytest.raises(DataError, match=r"own_scorers:tagged does not for .* rows of train \(100\.0%\)"):
        check_references(data, 1, RewardConfig(), root, is_taught=True)


def test_a_slow_scorer_ends_the_check_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "BUDGET_S", 1.0)
    data = MappedData(source=str(folder(tmp_path, ["18", "7"])), scorer="own_scorers:never_ends")
    told = check(tmp_path, data, deadline_s=600.0)
    assert told == "warning: data.scorer: own_scorers:never_ends has scored no reference in 1 s, so none is checked"


def test_of_programs_without_solutions_some_are_tried(tmp_path: Path) -> None:
    """Each runs one."""
    made = build_dataset(MappedData(source=str(folder(tmp_path, ["no tests"] * 200))), seed=1, root=tmp_path)
    files = {f"{split}_file": str(made.directory / f"{split}.parquet") for split in ("train", "validation")}
    with pytest.raises(DataError, match=r"does not for 50 of 50 rows of train \(100\.0%\)"):
        check(tmp_path, ParquetData(scorer="data.code:score", **files))


def test_weights_of_what_is_no_part_are_named_as_such(tmp_path: Path) -> None:
    data = MappedData(source=str(folder(tmp_path, ["18"])), scorer="data.gsm8k:score")
    with pytest.raises(
        ConfigError, match=r"^reward\.weights: must name parts of the score, got len\. .*data\.gsm8k:score"
    ):
        check(tmp_path, data, weights={"len": 1.0})


def test_a_rows_own_solution_must_earn_full_marks_too(tmp_path: Path) -> None:
    rows = folder(tmp_path, ["18", "7"], solution=[r"so \boxed{18}", r"so \boxed{8}"])
    with pytest.raises(DataError, match=r"line 2: reference \"7\": the answer .so .*boxed.8.. scores 0"):
        check(tmp_path, MappedData(source=str(rows), scorer="data.math:score", solution="solution"))


def test_all_of_gsm8k_earns_full_marks(gsm8k_folder: Path, tmp_path: Path) -> None:
    for scorer in ("data.gsm8k:score", "data.gsm8k:score_numeric"):
        assert check(tmp_path, Gsm8kData(source=str(gsm8k_folder), scorer=scorer), max_unmet_references=0.0) == ""


@pytest.mark.parametrize(
    ("scorer", "unmet"), [("exact", 0), ("never_full", 0), ("long_words", 0), ("raises_at_seven", 1)]
)
def test_an_own_scorer_is_checked_in_its_form(tmp_path: Path, scorer: str, unmet: int) -> None:
    """A scorer for which a reference is no answer is not refused for that; one that fails at a row is."""
    rows = folder(tmp_path, ["18", "7", "a word", "4"], ["18"])
    told = check(tmp_path, MappedData(source=str(rows), scorer=f"own_scorers:{scorer}"), max_unmet_references=1)
    assert (f"{unmet} of 4 rows of train" in told) == bool(unmet), told
    assert bool(told) == bool(unmet)


def test_an_own_build_is_checked_by_its_solutions(tmp_path: Path) -> None:
    data = CustomData(build="own_scorers:build", scorer="own_scorers:says_n")
    assert check(tmp_path, data, max_unmet_references=1) == "", "no row is known yet"
    build_dataset(data, seed=1, root=tmp_path / "root")
    told = check(tmp_path, data, max_unmet_references=1)
    assert "1 of 10 rows of train" in told
    assert "train.parquet: row 7: reference {\"n\": 7}: the answer 'it is 7' scores 0" in told


def test_rows_of_another_kind_in_the_row_schema_are_refused(tmp_path: Path) -> None:
    """As code problems among mathematics: the rows at the end of a file too."""
    build_dataset(MappedData(source=str(folder(tmp_path, ["1", "2", '{"inputs": ["1"]}']))), seed=1, root=tmp_path)
    (made,) = (tmp_path / "datasets").glob("*/train.parquet")
    data = ParquetData(
        train_file=str(made), validation_file=str(made.with_name("validation.parquet")), scorer="data.math:score"
    )
    with pytest.raises(DataError, match=r"data\.math:score does not for 1 of 3 rows of train .*\n.*parquet: row 2"):
        check(tmp_path, data)


def test_drawn_problems_judges_and_environments_are_not_checked(tmp_path: Path) -> None:
    rows = str(folder(tmp_path, ["{}"]))
    for data in (
        CountdownData(),
        MappedData(source=rows, scorer="data.judge:score"),
        MappedData(source=rows, environment="data.number_guessing:Game"),
    ):
        assert check(tmp_path, data) == ""
    assert not list(tmp_path.glob("root/datasets/references-*.json"))
