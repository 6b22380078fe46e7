"""Countdown: templates, solutions and scorer."""

from collections import Counter
from fractions import Fraction
from operator import add, mul, sub, truediv

import pytest

from data.countdown import build, score, tagged_answer
from rlcore.config import CountdownData
from tests.helpers.countdown import LARGE

TRUTH = {"target": 10, "numbers": [2, 3, 8]}


def tagged(equation):
    return f"<answer> {equation} </answer>"


@pytest.mark.parametrize("template", ["bare", "base", "qwen-instruct", "chat", "few-shot"])
def test_prompts_show_the_problem_and_solutions_score_one(template):
    settings = CountdownData(train_size=20, validation_size=5, template=template)
    task = build(settings, seed=1)
    assert task.prompt_form == ("chat" if template == "chat" else "text")
    for row in task.splits["train"]:
        [message] = row.prompt
        assert message.role == "user"
        assert message.content.endswith("\n<think>") is (template in ("base", "qwen-instruct"))
        assert all(str(n) in message.content for n in [*row.ground_truth["numbers"], row.ground_truth["target"]])
        assert score(row.solution, row.ground_truth).total == 1.0
        assert not row.distractor or score(row.distractor, row.ground_truth).parts == {"correct": 0.0, "format": 1.0}


def test_search_solutions_have_wrong_equations_before_the_right_one():
    settings = LARGE.model_copy(update={"template": "chat", "search_tries": 5})
    tries = Counter()
    for row in build(settings, seed=1).splits["train"]:
        *wrong, right = row.solution.removeprefix("<think> ").partition(" </think>")[0].split("\n")
        assert score(row.solution, row.ground_truth).total == 1.0
        assert not row.distractor or score(row.distractor, row.ground_truth).parts == {"correct": 0.0, "format": 1.0}
        distances = []
        for line in [one.removesuffix(", no") for one in wrong] + [right]:
            used = Counter(row.ground_truth["numbers"])
            for step in line.split(", "):
                left, sign, other, equals, result = step.split(" ")
                a, b, c = map(Fraction, (left, other, result))
                assert equals == "="
                assert c == {"+": add, "-": sub, "*": mul, "/": truediv}[sign](a, b)
                used.subtract([a, b])
                used[c] += 1
            assert +used == {c: 1}, "each number and each intermediate value is used once"
            distances.append(abs(c - row.ground_truth["target"]))
        assert distances == sorted(distances, reverse=True)
        assert distances.count(0) == 1
        tries[len(wrong)] += 1
    assert set(tries) == set(range(6))
    assert min(tries.values()) > 100


@pytest.mark.parametrize(
    ("response", "total"),
    [
        (tagged("(8 - 3) * 2"), 1.0),
        ("so <answer>2*(8-3)</answer>", 1.0),
        ("<think> hm <answer> 1 </answer> no </think>" + tagged("(8-3)*2") + "\nthat is it.", 1.0),
        (tagged("(8 - 3) * 2") + " or <answer> 8", 1.0),
        (tagged("(8 - 3) * 2") + " or " + tagged("8 + 3"), 0.1),
        *((tagged(text), 0.1) for text in ("8 + 3 + 2", "8 + 2", "(8 - 3) * 2 + 2 - 2", "8 / (3 - 3)", "10")),
        ("(8 - 3) * 2", 0.0),
        ("<answer> (8 - 3) * 2", 0.0),
        ("</answer> (8 - 3) * 2 <answer>", 0.0),
        *((tagged(text), 0.0) for text in ("(8 - 3) * 2 = 10", "", "-3 + 8", "2 ** 3", "8 // 3", "8 % 3", "5.0 * 2")),
        *((tagged(text), 0.0) for text in ("__import__('os').abort()", "\u0668 - 3", "8 \u2212 3", "9**9**9")),
        (tagged("(" * 10_000 + "8" + ")" * 10_000), 0.0),
        (tagged("8 + " * 250_000 + "8"), 0.0),
        ("<answer>" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_tagged_responses_are_scored(response, total):
    assert score(response, TRUTH).total == total


@pytest.mark.parametrize(
    ("response", "total", "well_formed"),
    [("(8 - 3) * 2", 1.0, 1.0), (" 2*(8-3)\n", 1.0, 1.0), ("8 + 3 + 2", 0.0, 1.0), (tagged("(8 - 3) * 2"), 0.0, 0.0)],
)
def test_bare_responses_are_scored(response, total, well_formed):
    found = score(response, {**TRUTH, "form": "bare"})
    assert (found.total, found.parts["format"]) == (total, well_formed)


def test_first_answer_counts_after_a_few_shot_prompt():
    response = tagged("(8 - 3) * 2") + "\n\nNumbers: 1, 2\nTarget: 3\nAnswer: " + tagged("1 + 2")
    first, last = score(response, {**TRUTH, "form": "first"}), score(response, TRUTH)
    assert (first.total, last.total) == (1.0, 0.1)
    assert first.said != last.said
    assert tagged_answer("</answer> <answer> 1 </answer>", first=True) == " 1 "


def test_values_are_exact():
    truth = {"target": 1, "numbers": [1, 3, 1, 3, 1, 3], "form": "bare"}
    assert score("1 / 3 + 1 / 3 + 1 / 3", truth).total == 1.0
    huge = 10**200
    assert score(f"{huge + 1} - {huge}", {"target": 0, "numbers": [huge + 1, huge], "form": "bare"}).total == 0.0
