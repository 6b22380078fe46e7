"""Validation results: metrics, files, parts, pairs."""

import dataclasses
import json

import pytest

from rlcore.errors import DataError
from rlcore.evaluation.result import ProblemResult, Response, ValidationResult, compare, pass_curve, vote
from rlcore.evaluation.stats import pass_at_k
from rlcore.tracking.connection import mlflow_name
from tests.helpers.forked import loaded_by
from tests.helpers.validations import FAILED, answer, problem, random_result, result


def test_import_loads_nothing_heavy():
    heavy = {"torch", "transformers", "ray", "prefect", "vllm", "mlflow", "matplotlib", "jinja2", "hydra", "pyarrow"}
    assert not heavy & loaded_by("import rlcore.evaluation.result")


def test_metrics_by_hand():
    found = result(
        [problem(1, [1.0, 0.1, 0.1, 0.0], greedy=1.0), problem(2, [0.0, 0.0, 0.0, 0.0], greedy=0.1)]
    ).metrics()
    assert found["val-core/countdown/reward/mean_at_4"] == pytest.approx(0.15)
    assert found["val-core/countdown/acc/mean_at_4"] == pytest.approx(0.125)
    assert found["val-core/countdown/reward/pass_at_4"] == pytest.approx(0.5)
    assert found["val-core/countdown/reward/pass_all_at_4"] == 0.0
    assert found["val-core/countdown/reward/maj_at_4"] == pytest.approx(0.125)  # four different answers: a tie of all
    assert found["val-core/countdown/reward/greedy"] == pytest.approx(0.55)
    assert found["val-core/countdown/acc/greedy"] == pytest.approx(0.5)


def test_unscored_responses_are_counted_only(tmp_path):
    evaluated = result(
        [
            problem(1, [1.0, FAILED, 0.5, 0.0], greedy=1.0),
            problem(2, [FAILED] * 4, greedy=1.0),
            problem(3, [1.0] * 4, greedy=FAILED),
            problem(4, [0.0, FAILED, 1.0, 1.0], greedy=0.0, difficulty=5),
        ]
    )
    found = evaluated.metrics()
    assert found["val-core/countdown/reward/mean_at_4"] == pytest.approx((0.5 + 2 / 3) / 2)
    assert found["val-core/countdown/acc/mean_at_4"] == pytest.approx(0.5)
    assert found["val-core/countdown/reward/pass_at_4"] == 1.0
    assert found["val-core/countdown/reward/pass_all_at_4"] == 0.0
    assert found["val-core/countdown/reward/maj_at_4"] == pytest.approx(0.5)  # each answer says something else: ties
    assert found["val-core/countdown/reward/greedy"] == 0.5
    assert found["val-aux/countdown/num_unscored"] == 7.0
    assert pass_curve(evaluated)[1].value == pytest.approx(0.5)
    assert [len(part.problems) for part in evaluated.by_difficulty().values()] == [1, 1]
    (pair, *_) = compare(result([problem(number, [0.0] * 4) for number in range(1, 5)]), evaluated)
    assert pair.num_problems == 2
    file = tmp_path / "after.json"
    evaluated.write(file)
    assert ValidationResult.read(file) == evaluated


def test_metrics_without_any_score():
    evaluated = result([problem(1, [FAILED, FAILED]), problem(2, [FAILED, FAILED])])
    assert evaluated.metrics() == {"val-aux/countdown/num_unscored": 4.0}
    assert (pass_curve(evaluated), evaluated.by_difficulty()) == ({}, {})


def test_every_metric_has_interval_and_valid_name():
    found = dict(random_result(0, 0.5).metrics())
    assert next(iter(found)) == "val/reward", "trackers show it first"
    assert found.pop("val/reward") == found["val-core/countdown/reward/mean_at_4"]
    names = [name for name in found if not name.endswith(("/ci_low", "/ci_high"))]
    assert len(found) == 3 * len(names)
    name = "val-core/countdown/reward/mean_at_4"
    assert random_result(0, 0.5, confidence=0.5).metrics()[f"{name}/ci_high"] < found[f"{name}/ci_high"]
    for name in names:
        assert found[f"{name}/ci_low"] <= found[name] <= found[f"{name}/ci_high"]
        assert mlflow_name(name)


def test_metrics_without_greedy_or_samples():
    sampled = result([problem(1, [1.0, 0.0])]).metrics()
    assert "val-core/countdown/reward/mean_at_2" in sampled
    assert "val-core/countdown/reward/greedy" not in sampled
    greedy = result([problem(1, [], greedy=1.0)]).metrics()
    assert set(greedy) == {"val/reward"} | {
        f"val-core/countdown/{kind}/greedy{end}" for kind in ("reward", "acc") for end in ("", "/ci_low", "/ci_high")
    }
    assert result([]).metrics() == {}


def test_problems_need_the_same_number_of_samples():
    with pytest.raises(DataError, match=r"same number of samples, got \[1, 2\]"):
        result([problem(1, [1.0]), problem(2, [1.0, 0.0])]).metrics()


@pytest.mark.parametrize(
    ("score", "parts", "solved"),
    [(0.1, {"correct": 0.0}, False), (1.0, {"correct": 1.0}, True), (1.0, {}, True), (0.9, {}, False),
     (3.0, {"correct": 0.0}, False), (0.6, {"passed": 3.0, "total": 5.0}, False), (sum([0.1] * 10), {}, True)],
)  # fmt: skip
def test_solved_is_part_correct_else_full_score(score, parts, solved):
    assert Response("x", score, parts, 1, "stop").solved is solved


@pytest.mark.parametrize(("text", "said"), [
    ("<answer> 1 </answer> or <answer>2 + 3</answer>", "2+3"),
    ("<answer> 1 </answer> or <answer>2 + 3", "1"),
    ("first #### 4, no: #### 5", "5"),
    (" 3 + 4 ", "3+4"),
    ("", ""),
    # A pattern that tries every pair of tags would need 10^10 steps for this.
    ("<answer>" * 100_000, "<answer>" * 100_000),
], ids=range(6))  # fmt: skip
def test_votes(text, said):
    assert vote(text) == said


def test_majority_counts_equal_answers():
    said = [Response(text, score, {}, 3, "stop") for text, score in (("3 + 4", 1.0), ("3+4", 1.0), ("9", 0.0))]
    one = ProblemResult(1, 0, "", "{}", None, tuple(said))
    assert result([one]).metrics()["val-core/countdown/reward/maj_at_3"] == 1.0


def test_vote_is_answer_of_scorer(tmp_path):
    texts = (("#### 18", "18"), ("#### 18.", "18"), ("#### 7", "7"), ("#### 18", None))
    answers = tuple(Response(text, float(said == "18"), {}, 3, "stop", said=said) for text, said in texts)
    assert [each.vote for each in answers] == ["18", "18", "7", "18"]
    kept = result([ProblemResult(1, 0, "", "{}", None, answers[:3])])
    kept.write(tmp_path / "after.json")
    assert ValidationResult.read(tmp_path / "after.json").metrics()["val-core/countdown/reward/maj_at_3"] == 1.0


def test_validation_file_round_trip(tmp_path):
    text = '</script>\x00\u2028"\\\n</answer> Ünï 🦊'
    original = random_result(3, 0.4)
    hostile = dataclasses.replace(original.problems[0], prompt_text=text, greedy=answer(1.0, text))
    original = dataclasses.replace(original, problems=(hostile, *original.problems[1:]))
    file = tmp_path / "validation" / "after.json"
    original.write(file)
    again = ValidationResult.read(file)
    assert again == original
    assert again.metrics() == original.metrics()
    assert [path.name for path in file.parent.iterdir()] == ["after.json"]


@pytest.mark.parametrize(("damage", "message"), [
    (lambda text: text[: len(text) // 2], "is not a validation result"),
    (lambda text: "[]", "is not a validation result"),
    (lambda text: text.replace('"format_version": 1', '"format_version": 9'), "format_version must be 1, got 9"),
    (lambda text: text.replace('"data_source": "countdown"', '"data_source": 3'), "data_source"),
])  # fmt: skip
def test_damaged_file_is_reported_by_name(tmp_path, damage, message):
    file = tmp_path / "after.json"
    result([problem(1, [1.0])]).write(file)
    file.write_text(damage(file.read_text()))
    with pytest.raises(DataError, match=message) as caught:
        ValidationResult.read(file)
    assert str(file) in str(caught.value)
    with pytest.raises(DataError, match="nowhere"):
        ValidationResult.read(tmp_path / "nowhere.json")


def test_nan_score_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        result([problem(1, [float("nan")])]).write(tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


def test_difficulties_are_separate_results():
    parts = result(
        [
            problem(1, [1.0, 1.0], greedy=1.0, difficulty=1),
            problem(2, [1.0, 0.0], greedy=0.0, difficulty=3),
            problem(3, [0.0, 0.0], greedy=0.0, difficulty=3),
        ]
    ).by_difficulty()
    names = [f"reward/{name}" for name in ("mean_at_2", "pass_at_2", "greedy")]
    found = {n: (len(part.problems), *(part.intervals[name].value for name in names)) for n, part in parts.items()}
    assert found == {1: (1, 1.0, 1.0, 1.0), 3: (2, 0.25, 0.5, 0.0)}


def test_pass_curve_ends_at_pass_at_k():
    found = random_result(3, 0.4, num_samples=6)
    curve = pass_curve(found)
    assert list(curve) == [1, 2, 4, 6]
    assert curve[1].value == pytest.approx(found.intervals["acc/mean_at_6"].value)
    assert curve[6] == found.intervals["reward/pass_at_6"]
    counts = [sample.num_solved for sample in found.problems]
    assert curve[2].value == pytest.approx(pass_at_k([6] * len(counts), counts, 2).mean())


def test_comparison_ignores_order_of_problems():
    before, after = random_result(1, 0.3), random_result(2, 0.6)
    turned = dataclasses.replace(after, problems=after.problems[::-1])
    assert compare(before, turned) == compare(before, after)
    reward = compare(before, after)[0]
    assert reward.statistic == "reward/mean_at_4"
    assert reward.paired.difference.value == pytest.approx(reward.second.value - reward.first.value)
    assert reward.paired.difference.low > 0


def test_comparison_uses_common_problems():
    before, after = random_result(1, 0.3), random_result(2, 0.6)
    part = dataclasses.replace(after, problems=after.problems[10:])
    found = compare(before, part)[0]
    assert found.num_problems == 50
    assert found.first.value == pytest.approx(sum(p.mean_score for p in before.problems[10:]) / 50)


def test_comparison_rejects_other_problems():
    before = result([problem(1, [1.0])])
    with pytest.raises(DataError, match="share no problem that is scored in both"):
        compare(before, result([problem(2, [1.0])]))
    changed = json.dumps({"target": 7})
    other = result([dataclasses.replace(problem(1, [1.0]), ground_truth_json=changed)])
    with pytest.raises(DataError, match="problem 1 is not the same"):
        compare(before, other)
