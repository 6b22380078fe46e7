"""Tables of held-out problems."""

from dataclasses import replace

import pytest

from rlcore.evaluation.result import ValidationResult, compare
from rlcore.evaluation.stats import Interval
from rlcore.report import document
from rlcore.report.held_out import section_of
from rlcore.report.page import sample_table
from rlcore.report.record import read_run
from tests.helpers.reports import FEW, page_of, record_of, table, write_run

pytestmark = pytest.mark.slow


def test_held_out_metrics_match_validation_files(grpo_run, grpo_report):
    before, after = (ValidationResult.read(grpo_run / "validation" / f"{name}.json") for name in ("before", "after"))
    rows = table(grpo_report, "held_out")
    shown = page_of(grpo_report).tables["held_out"][1:]
    for row, cells, found in zip(rows, shown, compare(before, after), strict=True):
        name = f"val-core/countdown/{found.statistic}"
        for column, result in (("Before", before), ("After", after)):
            summary = result.metrics()
            value = {"value": summary[name], "low": summary[f"{name}/ci_low"], "high": summary[f"{name}/ci_high"]}
            assert row[column] == value
            assert document.interval(Interval(**value)) in cells
        assert row["Paired difference"]["value"] == found.paired.difference.value
        assert (row["Better on"], row["Worse on"]) == (found.paired.wins, found.paired.losses)
    meanings = {row["Metric"]: row["Meaning"] for row in rows}
    assert meanings["reward/pass_all_at_4"] == "all of 4 samples are correct (unbiased)"


def test_pass_at_k_and_difficulty_tables(grpo_run, grpo_report):
    after = ValidationResult.read(grpo_run / "validation" / "after.json")
    curve = table(grpo_report, "pass_at_k")
    assert [row["k"] for row in curve] == [1, 2, 4]
    assert curve[-1]["pass_at_k, after"]["value"] == after.metrics()["val-core/countdown/reward/pass_at_4"]
    levels = table(grpo_report, "difficulty")
    assert [row["Difficulty"] for row in levels] == [2, 3]
    assert "By difficulty" in page_of(grpo_report).words
    assert sum(row["Problems"] for row in levels) == len(after.problems)
    means = sum(row["mean_at_4, after"]["value"] * row["Problems"] for row in levels) / len(after.problems)
    assert means == pytest.approx(after.metrics()["val-core/countdown/reward/mean_at_4"])


def test_unscored_responses_are_excluded(tmp_path):
    config = write_run(tmp_path, num_steps=2, num_problems=12, only=FEW)
    file = tmp_path / "validation" / "after.json"
    result = ValidationResult.read(file)
    failed = [
        replace(problem, greedy=unscored(problem.greedy), samples=tuple(map(unscored, problem.samples)))
        for problem in result.problems[:8]
    ]
    replace(result, problems=(*failed, *result.problems[8:])).write(file)
    record = read_run(tmp_path)
    wanted = {problem.prompt_text for problem in result.problems[8:]}
    shown = {row[1].text for row in sample_table(record).rows}
    assert shown
    assert shown <= wanted
    alone = record_of({}, validations={"after": record.after}, config=config)
    (held_out,) = [
        found for found in section_of({"alone": alone}, lambda charts: None).blocks if found.name == "held_out"
    ]
    assert held_out.note.startswith("4 held-out problems;")


def unscored(answer):
    return replace(answer, score=0.0, parts={}, failure="the judge was away")
