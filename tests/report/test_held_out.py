"""Tables of held-out problems."""

import pytest

from rlcore.evaluation.result import ValidationResult, compare
from rlcore.evaluation.stats import Interval
from rlcore.report import document
from rlcore.report.held_out import section_of
from rlcore.report.page import sample_table
from tests.helpers import validations
from tests.helpers.reports import page_of, record_of, table
from tests.helpers.validations import FAILED, problem

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


def test_single_difficulty_has_no_table():
    alike = validations.result([problem(1, [1.0, 0.0]), problem(2, [0.0, 0.0])])
    section = section_of({"run": record_of({}, validations={"after": alike})}, lambda charts: None)
    assert [block.name for block in section.blocks] == ["held_out", "pass_at_k"]


def test_unscored_responses_are_excluded():
    before = [problem(number, [0.0, 0.0], greedy=0.0) for number in range(12)]
    scored = [problem(number, [1.0, 0.0], greedy=1.0) for number in range(2)]
    failed = [problem(number, [FAILED, FAILED], greedy=FAILED) for number in range(2, 12)]
    found = {"before": validations.result(before, name="before", step=0), "after": validations.result(scored + failed)}
    shown = sample_table(record_of({}, validations=found)).rows
    assert [row[1].text for row in shown] == ["problem 0", "problem 1"]
    alone = record_of({}, validations={"after": found["after"]})
    held_out, *_ = section_of({"alone": alone}, lambda charts: None).blocks
    assert held_out.note.startswith("2 held-out problems;")
