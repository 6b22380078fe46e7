"""Countdown: templates, solutions and scorer."""

from collections import Counter
from fractions import Fraction
from operator import add, mul, sub, truediv

import pytest

from data.calculator import Countdown
from data.countdown import CALCULATOR, TURN_END, build, score, tagged_answer
from rlcore.config import CountdownData
from rlcore.models.tokenizer import EOS_TOKEN
from tests.helpers.countdown import LARGE


@pytest.mark.parametrize("template", ["bare", "base", "qwen-instruct", "chat", "few-shot"])
def test_every_template_shows_the_problem_and_its_solution_scores_one(template):
    settings = CountdownData(train_size=20, validation_size=5, template=template)
    task = build(settings, seed=1)
    assert task.prompt_form == ("chat" if template == "chat" else "text")
    for row in task.splits["train"]:
        [message] = row.prompt
        assert message.role == "user"
        assert all(str(n) in message.content for n in [*row.ground_truth["numbers"], row.ground_truth["target"]])
        assert score(row.solution, row.ground_truth).total == 1.0
        assert not row.distractor or score(row.distractor, row.ground_truth).parts == {"correct": 0.0, "format": 1.0}


def test_a_search_shows_wrong_equations_and_then_the_right_one():
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
            assert +used == {c: 1}, "each number is used once, each value on the way too"
            distances.append(abs(c - row.ground_truth["target"]))
        assert distances == sorted(distances, reverse=True)
        assert distances.count(0) == 1
        tries[len(wrong)] += 1
    assert set(tries) == set(range(6))
    assert min(tries.values()) > 100


def test_a_bare_solution_with_a_calculator_shows_turns():
    shown = {"template": "bare", "search_tries": 3, "environment": CALCULATOR}
    settings = LARGE.model_copy(update=shown)
    num_turns = Counter()
    for row in build(settings, seed=1).splits["train"]:
        game = Countdown()
        game.reset(row.ground_truth)
        *missed, right = row.solution.split(f" {TURN_END} ")
        reply = ""
        for text in missed:
            assert text.startswith(reply)
            turn = game.step(text.removeprefix(reply))
            reply = f"{turn.reply} "
            assert (turn.done, turn.reward) == (False, 0.0)
        assert right.startswith(reply)
        assert game.step(right.removeprefix(reply)).done
        num_turns[len(missed)] += 1
    assert set(num_turns) == set(range(4))
    assert EOS_TOKEN == TURN_END
    plain = build(settings.model_copy(update={"environment": ""}), seed=1).splits["train"]
    assert all(TURN_END not in row.solution for row in plain)


@pytest.mark.parametrize("template", ["base", "qwen-instruct"])
def test_the_prompt_ends_inside_the_thoughts(template):
    task = build(CountdownData(train_size=5, validation_size=5, template=template), seed=1)
    assert all(row.prompt[0].content.endswith("\n<think>") for row in task.splits["train"])


TRUTH = {"target": 10, "numbers": [2, 3, 8]}


def tagged(equation):
    return f"<answer> {equation} </answer>"


@pytest.mark.parametrize(
    ("answer", "total"),
    [
        (tagged("(8 - 3) * 2"), 1.0),
        ("so <answer>2*(8-3)</answer>", 1.0),
        ("<think> hm <answer> 1 </answer> no </think>" + tagged("(8-3)*2") + "\nthat is it.", 1.0),
        (tagged("(8 - 3) * 2") + " or " + tagged("8 + 3"), 0.1),
        (tagged("(8 - 3) * 2") + " or <answer> 8", 1.0),
        (tagged("8 + 3 + 2"), 0.1),
        (tagged("8 + 2"), 0.1),
        (tagged("(8 - 3) * 2 + 2 - 2"), 0.1),
        (tagged("8 / (3 - 3)"), 0.1),
        (tagged("10"), 0.1),
        ("(8 - 3) * 2", 0.0),
        ("<answer> (8 - 3) * 2", 0.0),
        ("</answer> (8 - 3) * 2 <answer>", 0.0),
        (tagged("(8 - 3) * 2 = 10"), 0.0),
        (tagged(""), 0.0),
        (tagged("-3 + 8"), 0.0),
        (tagged("2 ** 3"), 0.0),
        (tagged("8 // 3"), 0.0),
        (tagged("8 % 3"), 0.0),
        (tagged("5.0 * 2"), 0.0),
        (tagged("__import__('os').abort()"), 0.0),
        (tagged("\u0668 - 3"), 0.0),
        (tagged("8 \u2212 3"), 0.0),
        (tagged("9**9**9"), 0.0),
        (tagged("(" * 10_000 + "8" + ")" * 10_000), 0.0),
        (tagged("8 + " * 250_000 + "8"), 0.0),
        ("<answer>" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_answers_with_tags(answer, total):
    assert score(answer, TRUTH).total == total


@pytest.mark.parametrize(
    ("answer", "total", "well_formed"),
    [("(8 - 3) * 2", 1.0, 1.0), (" 2*(8-3)\n", 1.0, 1.0), ("8 + 3 + 2", 0.0, 1.0), (tagged("(8 - 3) * 2"), 0.0, 0.0)],
)
def test_bare_answers(answer, total, well_formed):
    found = score(answer, {**TRUTH, "form": "bare"})
    assert (found.total, found.parts["format"]) == (total, well_formed)


def test_after_a_few_shot_prompt_the_first_answer_counts():
    answer = tagged("(8 - 3) * 2") + "\n\nNumbers: 1, 2\nTarget: 3\nAnswer: " + tagged("1 + 2")
    assert score(answer, {**TRUTH, "form": "first"}).total == 1.0
    assert score(answer, {**TRUTH, "form": "first"}).said != score(answer, TRUTH).said  # and votes
    assert score(answer, TRUTH).total == 0.1
    assert tagged_answer("</answer> <answer> 1 </answer>", first=True) == " 1 "


def test_the_value_is_exact():
    # In floating point 0.1 + 0.2 is not 0.3; here 1/3 + 1/3 + 1/3 is 1.
    truth = {"target": 1, "numbers": [1, 3, 1, 3, 1, 3], "form": "bare"}
    assert score("1 / 3 + 1 / 3 + 1 / 3", truth).total == 1.0
    huge = 10**200
    assert score(f"{huge + 1} - {huge}", {"target": 0, "numbers": [huge + 1, huge], "form": "bare"}).total == 0.0
    assert Fraction(huge + 1) != Fraction(huge)
