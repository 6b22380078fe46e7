"""References are scored against themselves, also those of the suites of conf/suite."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from data import references
from data.references import check_references
from data.tasks import build_dataset, task_of
from rlcore.config import RunConfig, SuiteConfig
from rlcore.config.check import read_suites, suite_settings
from rlcore.config.data import CountdownData, CustomData, Gsm8kData, MappedData, ParquetData
from rlcore.config.problems import Findings
from rlcore.errors import ConfigError, DataError
from rlcore.rollout.scoring import ScoringPool
from tests.data.conftest import settings_in
from tests.helpers.file_shapes import write_rows

OWN = """
import time
from data.rows import Message, Row, TaskRows

def exact(response, truth): return float(response == truth["answer"])
def never_full(response, truth): return 0.5 * (response == truth["answer"])
def long_words(response, truth): return min(1.0, len(response) / 1000)
def tagged(response, truth): return float(f"<answer>{truth['answer']}</answer>" in response)
def never_ends(response, truth): time.sleep(600)
def raises_at_seven(response, truth): return {"7": None}.get(truth["answer"], 1.0)

def build(settings, seed):
    rows = [Row((Message("user", str(n)),), {"n": n}, 1, "" if n == 3 else f"it is {n}") for n in range(10)]
    return TaskRows("own", "math", "text", {"train": rows, "validation": rows[:1]})
def says_n(response, truth): return float(response == f"it is {truth['n']}" and truth["n"] != 7)
"""
PUBLISHED = Path(__file__).parent / "published"
BWRAP = pytest.mark.program("bwrap")


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_scorers.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_scorers", raising=False)


def mapped(tmp_path, scorer, train, test=None, solutions=None):
    """Return settings with these references, in files with a line for each."""
    folder = tmp_path / "rows"
    for split, answers in (("train", train), ("test", test or train[:1])):
        rows = [{"question": f"{split} {n}", "answer": answer} for n, answer in enumerate(answers)]
        rows = [row | ({"solution": solutions[n]} if solutions else {}) for n, row in enumerate(rows)]
        write_rows(folder / f"{split}.jsonl", rows)
    return MappedData(source=str(folder), scorer=scorer, solution="solution" if solutions else "")


def check(tmp_path: Path, data: Any, *, is_taught: bool = False, **reward: Any) -> str:
    config = settings_in(tmp_path / "root", data=data, reward=reward, warm_start={"enabled": is_taught})
    return check_references(config)


def test_full_scores_are_stored_by_rows(tmp_path: Path) -> None:
    data = mapped(tmp_path, "data.math:score", ["18", "1/2", "x+1"])
    assert check(tmp_path, data) == ""
    (stored,) = (tmp_path / "root" / "datasets").glob("references-*.json")
    result = {"rows": {"train": 3, "validation": 1}, "total": 4, "unmet": {}, "shown": []}
    assert json.loads(stored.read_text()) == result
    before = stored.stat().st_mtime_ns
    assert (check(tmp_path, data), stored.stat().st_mtime_ns) == ("", before)
    check(tmp_path, mapped(tmp_path, "data.math:score", ["18", "1/2", "x+2"]))
    assert len(list(stored.parent.glob("references-*.json"))) == 2, "other rows are checked"


def test_unreadable_references_are_reported_and_refused_above_the_share(tmp_path: Path) -> None:
    data = mapped(tmp_path, "data.gsm8k:score", ["18", "{}", "7", "4"])
    report = check(tmp_path, data, max_unmet_references=0.25)
    first = "data.scorer: must give full marks to the reference of each row and to its solution; data.gsm8k:score"
    assert report.startswith(f"warning: {first} does not for 1 of 4 rows of train (25.0%):\n")
    assert f"{data.source}/train.jsonl: line 2: reference" in report
    assert check(tmp_path, data, max_unmet_references=0.25) == report, "a later start reports it too"
    match = r"(?s)1 of 4 rows.*max_unmet_references=0\.24 is the share of a split that is acc"
    with pytest.raises(DataError, match=match):
        check(tmp_path, data, max_unmet_references=0.24)
    data = mapped(tmp_path, "data.gsm8k:score", [*map(str, range(600)), "{}"], ["1", "{}", "{}"])
    with pytest.raises(DataError, match=r"(?s) and 2 of 3 rows of validation \(66\.7%\):\n.*test\.jsonl: line 2"):
        check(tmp_path, data)


def test_solutions_in_another_form_count_only_if_trained_on(tmp_path: Path, gsm8k_folder: Path) -> None:
    data = Gsm8kData(source=str(gsm8k_folder), scorer="own_scorers:tagged")
    assert check(tmp_path, data, max_unmet_references=0) == ""
    with pytest.raises(DataError, match=r"own_scorers:tagged does not for .* rows of train \(100\.0%\)"):
        check(tmp_path, data, is_taught=True)


def test_slow_scorers_end_the_check_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "BUDGET_S", 1.0)
    report = check(tmp_path, mapped(tmp_path, "own_scorers:never_ends", ["18", "7"]), deadline_s=600.0)
    assert report == "warning: data.scorer: own_scorers:never_ends has scored no reference in 1 s, so none is checked"


def test_weights_of_unknown_parts_are_refused(tmp_path: Path) -> None:
    match = r"^reward\.weights: must name parts of the score, got len\. .*data\.gsm8k:score"
    with pytest.raises(ConfigError, match=match):
        check(tmp_path, mapped(tmp_path, "data.gsm8k:score", ["18"]), weights={"len": 1.0})


def test_solutions_of_rows_and_own_builds_need_full_scores_too(tmp_path: Path) -> None:
    data = mapped(tmp_path, "data.math:score", ["18", "7"], solutions=[r"so \boxed{18}", r"so \boxed{8}"])
    with pytest.raises(DataError, match=r"line 2: reference \"7\": the answer .so .*boxed.8.. scores 0"):
        check(tmp_path, data)
    data = CustomData(build="own_scorers:build", scorer="own_scorers:says_n")
    build_dataset(data, seed=1, root=tmp_path / "root")
    report = check(tmp_path, data, max_unmet_references=1)
    assert "1 of 10 rows of train" in report
    assert "train.parquet: row 7: reference {\"n\": 7}: the answer 'it is 7' scores 0" in report


@pytest.mark.parametrize("scorer", ["data.gsm8k:score", "data.gsm8k:score_numeric"])
def test_all_references_of_gsm8k_earn_full_scores(gsm8k_folder: Path, tmp_path: Path, scorer: str) -> None:
    assert check(tmp_path, Gsm8kData(source=str(gsm8k_folder), scorer=scorer), max_unmet_references=0.0) == ""


@pytest.mark.parametrize("scorer", ["exact", "never_full", "long_words", "raises_at_seven"])
def test_own_scorers_are_checked_in_their_form(tmp_path: Path, scorer: str) -> None:
    """A scorer that does not read plain references is accepted, one that fails at a row is not."""
    unmet = int(scorer == "raises_at_seven")
    data = mapped(tmp_path, f"own_scorers:{scorer}", ["18", "7", "a word", "4"], ["18"])
    report = check(tmp_path, data, max_unmet_references=1)
    assert (f"{unmet} of 4 rows of train" in report) == bool(report) == bool(unmet), report


def test_programs_are_checked_on_a_sample(tmp_path: Path) -> None:
    source = MappedData(source=mapped(tmp_path, "", ["no tests"] * 200).source)
    made = build_dataset(source, seed=1, root=tmp_path).directory
    files = {f"{split}_file": str(made / f"{split}.parquet") for split in ("train", "validation")}
    with pytest.raises(DataError, match=r"data.code:score does not for 50 of 50 rows of train \(100\.0%\)"):
        check(tmp_path, ParquetData(scorer="data.code:score", **files))


def test_generated_problems_judges_and_environments_are_unchecked(tmp_path: Path) -> None:
    rows = mapped(tmp_path, "", ["{}"]).source
    scorers = {"scorer": "data.judge:score"}, {"environment": "data.number_guessing:Game"}
    for data in (CountdownData(), *(MappedData(source=rows, **scorer) for scorer in scorers)):
        assert check(tmp_path, data) == ""
    assert not list(tmp_path.glob("root/datasets/references-*.json"))


def settings_of(entry: str, root: Path) -> RunConfig:
    """Return the settings of a suite in an evaluation."""
    findings = Findings()
    (given,) = read_suites([entry], findings)
    assert not findings.problems
    return suite_settings(settings_in(root, reward={"num_processes": 1}), SuiteConfig.model_validate(given))


def prepared(entry: str, root: Path) -> tuple[RunConfig, list[dict[str, Any]]]:
    """Make the rows of a suite as an evaluation does, and check its references."""
    settings = settings_of(entry, root)
    made = build_dataset(settings.data, seed=1, root=root, splits=("validation",))
    assert check_references(settings, ("validation",)) == ""
    return settings, pq.read_table(made.directory / "validation.parquet").to_pylist()


@pytest.mark.parametrize(("suite", "files", "right", "wrong"), [
    ("math500", "math500", ["So \\boxed{7\\sqrt2}.", "The answer is $\\frac{3}{8}$."], ["\\boxed{7}", "0.37"]),
    ("aime24", "aime24", ["\\boxed{15}", "\\boxed{032}", "\\boxed{625}"], ["\\boxed{16}", "32 or 33", "\\boxed{}"]),
    ("aime25", "aime25", ["\\boxed{015}", "\\boxed{32}"], ["\\boxed{15.5}", "\\boxed{232}"]),
    ("ifeval", "ifeval", ["A lake lies still.", f"Kettle, kettle! {'And tea. ' * 20}"], ["Wide, deep.", "Tea."]),
    pytest.param("humaneval", "humaneval", ["```python\ndef twice(x):\n    return x + x\n```"], ["    return x"],
                 marks=BWRAP),
    pytest.param("humaneval_base", "humaneval", ["    return x + x\n"], ["    return x\n"], marks=BWRAP),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_published_form_is_read_and_scored(suite, files, right, wrong, artifacts_root):
    if suite == "ifeval":
        pytest.importorskip("langdetect")
    settings, rows = prepared(f"{suite}={PUBLISHED / files}", artifacts_root)
    assert len(rows) == 12
    truths = [json.dumps(row["reward_model"]["ground_truth"]) for row in rows]
    with ScoringPool(settings.data.scorer, settings.reward) as pool:
        assert [one.solved for one in pool.score(right, truths[: len(right)])] == [True] * len(right)
        assert [one.solved for one in pool.score(wrong, truths[: len(wrong)])] == [False] * len(wrong)


def test_base_suite_prompts_with_the_function_alone(artifacts_root: Path) -> None:
    function = 'def twice(x: int) -> int:\n    """ Return two times x.\n    """'
    for suite, form, more in (("humaneval", "chat", "\n \nComplete the function."), ("humaneval_base", "text", "")):
        data = settings_of(f"{suite}={PUBLISHED / 'humaneval'}", artifacts_root).data
        rows = task_of(data).build(data, 1)
        prompt = next(iter(rows.splits["validation"])).prompt[0].content
        assert (rows.prompt_form, prompt[: len(function + more)]) == (form, function + more)
    assert prompt == function


@pytest.mark.parametrize(("suite", "column", "value", "message"), [
    ("math500", "problem", None, r"^data\.question: .*test\.jsonl: line 1 \(columns: solution, .*; got problem\."),
    ("ifeval", "kwargs", None, r"^data\.columns: must name a column of .*train\.jsonl: line 1 .*; got kwargs\."),
    ("humaneval", "test", None, r"^data\.columns: .*test\.jsonl: line 1 \(columns: task_id, .*; got test\."),
    ("ifeval", "instruction_id_list", ["punctuation:no_dots"], r"line 1.*no_dots.*repair or remove the row"),
    pytest.param("humaneval", "canonical_solution", "    return 0\n", r"must give full marks.*line 1: ", marks=BWRAP),
    ("math500", "answer", "\\approx 3", r"must give full marks.*line 1: reference .*approx 3"),
])  # fmt: skip
def test_unusable_row_is_refused_with_file_and_line(suite, column, value, message, tmp_path, artifacts_root):
    shutil.copytree(PUBLISHED / suite, tmp_path / suite)
    (file,) = (tmp_path / suite).iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    del rows[0][column]
    if value is not None:
        rows[0][column] = value
    write_rows(file, rows)
    with pytest.raises(DataError if value else ConfigError, match=f"(?s){message}"):
        prepared(f"{suite}={tmp_path / suite}", artifacts_root)
