"""Countdown: templates, solutions, scorer, and problems with their sizes, splits, targets and refused settings."""

from collections import Counter
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise, permutations, product
from operator import add, mul, sub, truediv

import numpy as np
import pytest

from data import countdown_problems
from data.arithmetic import evaluate
from data.countdown import build, score, tagged_answer
from data.countdown_problems import Problem, _equation, draw_chunk, equations_for, generate, require_enough, solve
from rlcore.config import CountdownData
from rlcore.errors import DataError

DEMO = CountdownData(
    train_size=4_767, validation_size=559, max_numbers=3, number_high=20, target_high=40, operations=("+", "-"),
    template="bare",
)  # fmt: skip
LARGE = CountdownData(train_size=1_500, validation_size=200)
UNIFORM = CountdownData(train_size=1_500, validation_size=200, targets="uniform")
TRUTH = {"target": 10, "numbers": [2, 3, 8]}
OVERFLOW = {"number_high": 32_768}, r"data.number_high must be at most 32767 with 4 numbers, got 32768$"
TOO_MANY = r"5,327 problems asked for, but only 5,326 exist with 3 numbers of 1\.\.20, operations \+ - and"


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


@pytest.mark.parametrize(("response", "total"), [
    (tagged("(8 - 3) * 2"), 1.0), ("so <answer>2*(8-3)</answer>", 1.0),
    ("<think> hm <answer> 1 </answer> no </think>" + tagged("(8-3)*2") + "\nthat is it.", 1.0),
    (tagged("(8 - 3) * 2") + " or <answer> 8", 1.0), (tagged("(8 - 3) * 2") + " or " + tagged("8 + 3"), 0.1),
    *((tagged(text), 0.1) for text in ("8 + 3 + 2", "8 + 2", "(8 - 3) * 2 + 2 - 2", "8 / (3 - 3)", "10")),
    ("(8 - 3) * 2", 0.0), ("<answer> (8 - 3) * 2", 0.0), ("</answer> (8 - 3) * 2 <answer>", 0.0),
    *((tagged(text), 0.0) for text in ("(8 - 3) * 2 = 10", "", "-3 + 8", "2 ** 3", "8 // 3", "8 % 3", "5.0 * 2")),
    *((tagged(text), 0.0) for text in ("__import__('os').abort()", "\u0668 - 3", "8 \u2212 3", "9**9**9")),
    (tagged("(" * 10_000 + "8" + ")" * 10_000), 0.0), (tagged("8 + " * 250_000 + "8"), 0.0),
    ("<answer>" * 100_000, 0.0), ("", 0.0),
])  # fmt: skip
def test_tagged_responses_are_scored(response, total):
    assert score(response, TRUTH).total == total


@pytest.mark.parametrize(("response", "total", "well_formed"), [
    ("(8 - 3) * 2", 1.0, 1.0), (" 2*(8-3)\n", 1.0, 1.0), ("8 + 3 + 2", 0.0, 1.0), (tagged("(8 - 3) * 2"), 0.0, 0.0),
])  # fmt: skip
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
    truth, huge = {"target": 1, "numbers": [1, 3, 1, 3, 1, 3], "form": "bare"}, 10**200
    assert score("1 / 3 + 1 / 3 + 1 / 3", truth).total == 1.0
    assert score(f"{huge + 1} - {huge}", {"target": 0, "numbers": [huge + 1, huge], "form": "bare"}).total == 0.0
    assert solve((3, 3, 8, 8), ("+", "-", "*", "/"))[(24, 1)].text == "8 / (3 - 8 / 3)"
    with pytest.raises(AssertionError, match="does not solve itself"):
        Problem((1, 2, 3), 7, "1 + 2 + 3", "", 0)


def test_demo_has_all_problems_of_a_naive_search():
    naive = set()
    for numbers in combinations_with_replacement(range(1, 21), 3):
        for (a, b, c), (s, t) in product(permutations(numbers), product((1, -1), repeat=2)):
            if 1 <= a + s * b + t * c <= 40:
                naive.add((numbers, a + s * b + t * c))
    made = [(tuple(sorted(p.numbers)), p.target) for split in generate(DEMO, seed=1).values() for p in split]
    assert len(made) == len(naive) == 5_326
    assert set(made) == naive


@pytest.mark.parametrize("settings", [DEMO, LARGE, UNIFORM], ids=["enumerated", "drawn", "uniform"])
def test_problems_are_distinct_and_solved_in_separate_splits(settings):
    splits = generate(settings, seed=3)
    sizes = {split: len(problems) for split, problems in splits.items()}
    assert sizes == {"train": settings.train_size, "validation": settings.validation_size}
    train, validation = ([(*sorted(p.numbers), p.target) for p in splits[split]] for split in ("train", "validation"))
    assert not {numbers[:-1] for numbers in train} & {numbers[:-1] for numbers in validation}
    assert len({*train, *validation}) == len(train) + len(validation)
    for problem in splits["train"]:
        truth = {"target": problem.target, "numbers": list(problem.numbers), "form": "bare"}
        assert score(problem.solution, truth).total == 1.0
        assert settings.target_low <= problem.target <= settings.target_high
        assert all(settings.number_low <= n <= settings.number_high for n in problem.numbers)
        if problem.distractor:
            assert problem.distractor_value != problem.target
            assert score(problem.distractor, {**truth, "target": problem.distractor_value}).total == 1.0
    assert sum(bool(problem.distractor) for problem in splits["train"]) > 0.9 * settings.train_size


@pytest.mark.parametrize(("settings", "share"), [(LARGE, 0.67), (UNIFORM, 0.22)], ids=["drawn", "uniform"])
def test_all_operations_and_counts_occur_in_documented_shares(settings, share):
    """The shares with plus and minus of docs/data.md, to three standard deviations of 1,500 problems."""
    problems = generate(settings, seed=1)["train"]
    difficulties = [problem.difficulty for problem in problems]
    assert set(difficulties) == {2, 3}
    easy, changes = difficulties.count(2) / len(problems), sum(a != b for a, b in pairwise(difficulties))
    assert changes / len(problems) == pytest.approx(2 * easy * (1 - easy), abs=0.1), "they are in random order"
    assert {sign for p in problems for sign in p.solution if sign in "+-*/"} == set("+-*/")
    reachable = sum((problem.target, 1) in solve(problem.numbers, ("+", "-")) for problem in problems)
    assert reachable / len(problems) == pytest.approx(share, abs=0.04)


def reached(numbers, operations):
    """Return every value of an equation over all the numbers, as exact fractions."""
    if len(numbers) == 1:
        return set(numbers)
    values = set()
    for i, j in permutations(range(len(numbers)), 2):
        rest = [number for place, number in enumerate(numbers) if place not in (i, j)]
        for sign in operations:
            if sign != "/" or numbers[j]:
                value = {"+": add, "-": sub, "*": mul, "/": truediv}[sign](numbers[i], numbers[j])
                values |= reached([*rest, value], operations)
    return values


@pytest.mark.parametrize("operations", [("+", "-", "*", "/"), ("*", "-")], ids="".join)
@pytest.mark.parametrize(("n", "rows"), [(2, 60), (3, 40), (4, 6)])
def test_targets_are_solved_if_a_naive_search_reaches_them(n, rows, operations):
    rng = np.random.default_rng(n)
    numbers, targets = rng.integers(0, 13, size=(rows, n)), rng.integers(-3, 40, size=(rows, 9))
    plan, solved = equations_for(numbers, targets, operations)
    naive = [reached([Fraction(number) for number in row], operations) for row in numbers.tolist()]
    assert solved.tolist() == [[t in values for t in row] for row, values in zip(targets.tolist(), naive, strict=True)]
    assert 0 < solved.mean() < 1
    for row, column in np.argwhere(solved).tolist():
        equation = evaluate(_equation(numbers[row].tolist(), plan[row, column].tolist()))
        assert equation.value == targets[row, column]
        assert sorted(equation.numbers) == sorted(numbers[row].tolist())


def test_uniform_targets_draw_each_problem_equally():
    changes = {"number_high": 25, "target_high": 60, "min_numbers": 3, "max_numbers": 3}
    settings = UNIFORM.model_copy(update=changes | {"train_size": 3_000, "validation_size": 1})
    drawn = [p for chunk in range(4) for p in draw_chunk(settings, 1, chunk)]
    every = []
    for numbers in combinations_with_replacement(range(1, 26), 3):
        whole = [target for target, bottom in solve(numbers, settings.operations) if bottom == 1 and 1 <= target <= 60]
        every += whole * len(set(permutations(numbers)))
    for bound in (10, 20, 40):
        share = sum(target <= bound for target in every) / len(every)
        assert sum(p.target <= bound for p in drawn) / len(drawn) == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize("settings", [
    LARGE.model_copy(update={"max_numbers": 6, "balance_difficulty": True, "min_numbers": 2}),
    DEMO.model_copy(update={"min_numbers": 2, "train_size": 101, "validation_size": 20, "balance_difficulty": True,
                            "template": "base", "number_high": 9}),
    DEMO.model_copy(update={"min_numbers": 2, "train_size": 1, "validation_size": 1, "balance_difficulty": True}),
], ids=["drawn", "enumerated", "fewer rows"])  # fmt: skip
def test_balanced_difficulty_is_exact_in_both_splits(settings):
    for split, problems in generate(settings, 1).items():
        counts = Counter(problem.difficulty for problem in problems)
        assert len(counts) == min(settings.max_numbers - settings.min_numbers + 1, settings.train_size)
        assert sum(counts.values()) == getattr(settings, f"{split}_size")
        assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("function", [generate, require_enough])
def test_numbers_that_overflow_and_more_problems_than_exist_are_refused(function):
    for settings, changes, message in ((LARGE, *OVERFLOW), (DEMO, {"train_size": 4_768}, TOO_MANY)):
        with pytest.raises(DataError, match=message):
            function(settings.model_copy(update=changes), 1)
    require_enough(CountdownData(number_high=32_767, train_size=2, validation_size=1), 1)
    one = {"number_low": 2, "number_high": 2, "train_size": 1, "validation_size": 1}
    with pytest.raises(DataError, match=r"^data\.validation_size: 1 asked for, but the splits, which share no"):
        generate(DEMO.model_copy(update=one), 7)


def test_exhausted_spaces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(countdown_problems, "CHUNK", 256)
    sizes = {"train_size": 100_000, "validation_size": 10}
    settings = CountdownData(min_numbers=5, max_numbers=5, number_high=4, target_high=2, **sizes)
    with pytest.raises(DataError, match=r"^countdown: 24,576 draws gave 108 of 100,000 for train, 0 of 10 for valid.*"):
        generate(settings, 1)
