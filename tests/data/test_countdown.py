"""Countdown: problems and scorer."""

from collections import Counter
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise, permutations, product
from operator import add, mul, sub, truediv

import numpy as np
import pytest

from data.arithmetic import evaluate
from data.calculator import Countdown
from data.countdown import CALCULATOR, TURN_END, build, score, tagged_answer
from data.countdown_problems import CHUNK, Problem, _equation, _num_problems, draw_chunk, equations_for, generate, solve
from rlcore.config import CountdownData
from rlcore.errors import DataError
from rlcore.models.tokenizer import EOS_TOKEN

DEMO = CountdownData(
    train_size=4_767,
    validation_size=559,
    max_numbers=3,
    number_high=20,
    target_high=40,
    operations=("+", "-"),
    template="bare",
)
LARGE = CountdownData(train_size=1_500, validation_size=200)
UNIFORM = CountdownData(train_size=1_500, validation_size=200, targets="uniform")


def multisets(problems):
    return {tuple(sorted(problem.numbers)) for problem in problems}


def test_the_demo_space_has_exactly_the_problems_that_a_double_loop_finds():
    naive = set()
    for numbers in combinations_with_replacement(range(1, 21), 3):
        for (a, b, c), (s, t) in product(permutations(numbers), product((1, -1), repeat=2)):
            if 1 <= a + s * b + t * c <= 40:
                naive.add((numbers, a + s * b + t * c))
    found = generate(DEMO, seed=1)
    made = [(tuple(sorted(p.numbers)), p.target) for split in found.values() for p in split]
    assert len(made) == len(naive) == 5_326
    assert set(made) == naive


@pytest.mark.parametrize("settings", [DEMO, LARGE, UNIFORM], ids=["enumerated", "drawn", "uniform"])
def test_splits_have_their_size_no_duplicate_and_no_common_multiset(settings):
    found = generate(settings, seed=3)
    assert {split: len(problems) for split, problems in found.items()} == {
        "train": settings.train_size,
        "validation": settings.validation_size,
    }
    assert not multisets(found["train"]) & multisets(found["validation"])
    keys = [(tuple(sorted(p.numbers)), p.target) for problems in found.values() for p in problems]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("settings", [DEMO, LARGE, UNIFORM], ids=["enumerated", "drawn", "uniform"])
def test_solutions_reach_the_target_and_distractors_another(settings):
    ground = [
        (p, {"target": p.target, "numbers": list(p.numbers), "form": "bare"}) for p in generate(settings, 2)["train"]
    ]
    for problem, truth in ground:
        assert score(problem.solution, truth).total == 1.0
        assert settings.target_low <= problem.target <= settings.target_high
        assert all(settings.number_low <= n <= settings.number_high for n in problem.numbers)
        if problem.distractor:
            assert problem.distractor_value != problem.target
            assert score(problem.distractor, {**truth, "target": problem.distractor_value}).total == 1.0
    assert sum(bool(problem.distractor) for problem, _ in ground) > 0.9 * len(ground)


@pytest.mark.parametrize("settings", [LARGE, UNIFORM], ids=["drawn", "uniform"])
def test_every_requested_operation_and_count_of_numbers_occurs(settings):
    found = generate(settings, seed=1)["train"]
    assert Counter(len(p.numbers) for p in found).keys() == {3, 4}
    assert {sign for p in found for sign in p.solution if sign in "+-*/"} == set("+-*/")
    assert {p.difficulty for p in found} == {2, 3}


def test_the_seed_fixes_every_problem():
    assert generate(LARGE, seed=5) == generate(LARGE, seed=5)
    assert generate(LARGE, seed=5) != generate(LARGE, seed=6)
    assert generate(UNIFORM, seed=5) == generate(UNIFORM, seed=5)
    assert generate(UNIFORM, seed=5) != generate(UNIFORM, seed=6)
    assert generate(DEMO, seed=5) == generate(DEMO, seed=5)
    assert generate(DEMO, seed=5) != generate(DEMO, seed=6)


def reached(numbers, operations):
    """Every value of an equation over all the numbers, merged two at a time in every way, as exact fractions."""
    if len(numbers) == 1:
        return set(numbers)
    found = set()
    for i, j in permutations(range(len(numbers)), 2):
        rest = [number for place, number in enumerate(numbers) if place not in (i, j)]
        for sign in operations:
            if sign != "/" or numbers[j]:
                found |= reached(
                    [*rest, {"+": add, "-": sub, "*": mul, "/": truediv}[sign](numbers[i], numbers[j])], operations
                )
    return found


@pytest.mark.parametrize("operations", [("+", "-", "*", "/"), ("*", "-")], ids="".join)
@pytest.mark.parametrize(("n", "rows"), [(2, 60), (3, 40), (4, 6)])
def test_a_target_has_an_equation_exactly_if_a_search_over_fractions_reaches_it(n, rows, operations):
    rng = np.random.default_rng(n)
    numbers, targets = rng.integers(0, 13, size=(rows, n)), rng.integers(-3, 40, size=(rows, 9))
    plan, solved = equations_for(numbers, targets, operations)
    naive = [reached([Fraction(number) for number in row], operations) for row in numbers.tolist()]
    assert solved.tolist() == [[t in found for t in row] for row, found in zip(targets.tolist(), naive, strict=True)]
    assert 0 < solved.mean() < 1
    for row, column in np.argwhere(solved).tolist():
        equation = evaluate(_equation(numbers[row].tolist(), plan[row, column].tolist()))
        assert equation.value == targets[row, column]
        assert sorted(equation.numbers) == sorted(numbers[row].tolist())


def test_uniform_targets_are_reached_by_plus_and_minus_less_often():
    """The shares of docs/data.md, to three standard deviations of 1,500 problems."""
    for settings, share in ((LARGE, 0.67), (UNIFORM, 0.22)):
        problems = generate(settings, seed=1)["train"]
        found = sum((problem.target, 1) in solve(problem.numbers, ("+", "-")) for problem in problems)
        assert found / len(problems) == pytest.approx(share, abs=0.04)


def test_each_problem_of_a_range_is_as_likely_with_uniform_targets():
    """Against all that exist, listed: the share of targets up to a bound, and of problems of three numbers."""
    settings = UNIFORM.model_copy(
        update={"number_high": 25, "target_high": 60, "min_numbers": 3, "max_numbers": 3, "train_size": 3_000,
                "validation_size": 1}
    )  # fmt: skip
    drawn = [p for chunk in range(4) for p in draw_chunk(settings, 1, chunk)]
    every = [
        target
        for numbers in product(range(1, 26), repeat=3)
        if numbers[0] <= numbers[1] <= numbers[2]
        for target, bottom in solve(numbers, settings.operations)
        if bottom == 1 and 1 <= target <= 60
        for _ in set(permutations(numbers))
    ]
    for bound in (10, 20, 40):
        share = sum(target <= bound for target in every) / len(every)
        assert sum(p.target <= bound for p in drawn) / len(drawn) == pytest.approx(share, abs=0.04)


def test_balanced_difficulty_is_exact_in_both_splits():
    drawn = LARGE.model_copy(update={"max_numbers": 6, "balance_difficulty": True, "min_numbers": 2})
    small = DEMO.model_copy(
        update={
            "min_numbers": 2,
            "train_size": 101,
            "validation_size": 20,
            "balance_difficulty": True,
            "template": "base",
            "number_high": 9,
        }
    )
    for settings in (drawn, small):
        for problems, size in zip(
            generate(settings, 1).values(), (settings.train_size, settings.validation_size), strict=True
        ):
            counts = Counter(problem.difficulty for problem in problems)
            assert len(counts) == settings.max_numbers - settings.min_numbers + 1
            assert sum(counts.values()) == size
            assert max(counts.values()) - min(counts.values()) <= 1


def test_problems_are_not_ordered_by_difficulty():
    found = [problem.difficulty for problem in generate(LARGE, seed=1)["train"]]
    assert 0.3 < sum(a != b for a, b in pairwise(found)) / len(found) < 0.7


def test_a_problem_that_does_not_solve_itself_is_caught():
    with pytest.raises(AssertionError, match="does not solve itself"):
        Problem((1, 2, 3), 7, "1 + 2 + 3", "", 0).proved()


def test_a_chunk_does_not_depend_on_other_chunks():
    assert draw_chunk(LARGE, 1, 7) == draw_chunk(LARGE, 1, 7)
    assert 0 < len(draw_chunk(LARGE, 1, 7)) < CHUNK
    assert draw_chunk(LARGE, 1, 7) != draw_chunk(LARGE, 1, 9)


def test_asking_for_more_than_exist_says_how_many_there_are():
    with pytest.raises(DataError, match=r"5,327 problems asked for, but only 5,326 exist"):
        generate(DEMO.model_copy(update={"train_size": 4_768}), seed=1)


def test_a_drawn_space_that_runs_dry_is_refused():
    settings = CountdownData(
        train_size=100_000, validation_size=10, min_numbers=5, max_numbers=5, number_high=5, target_high=9
    )
    with pytest.raises(DataError, match="less than one in a hundred is still new"):
        generate(settings, seed=1)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"min_numbers": 5}, r"data.min_numbers must not be above data.max_numbers, got 5 and 4"),
        ({"number_low": 200}, r"data.number_low must not be above"),
        ({"target_low": 2_000}, r"data.target_low must not be above"),
        ({"number_high": 10**6}, r"data.number_high must be at most \d+ with 4 numbers"),
        ({"operations": ()}, r"data.operations must name at least one"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(change, rule):
    with pytest.raises(DataError, match=rule):
        generate(LARGE.model_copy(update=change), seed=1)


def test_the_solver_finds_what_needs_a_fraction_on_the_way():
    assert solve((3, 3, 8, 8), ("+", "-", "*", "/"))[(24, 1)].text == "8 / (3 - 8 / 3)"


@pytest.mark.parametrize("template", ["bare", "base", "qwen-instruct", "chat", "few-shot"])
def test_every_template_names_numbers_and_target_and_its_solution_scores_one(template):
    settings = CountdownData(train_size=20, validation_size=5, template=template)
    task = build(settings, seed=1)
    assert task.prompt_form == ("chat" if template == "chat" else "text")
    for row in task.splits["train"]:
        [message] = row.prompt
        assert message.role == "user"
        assert all(str(n) in message.content for n in [*row.ground_truth["numbers"], row.ground_truth["target"]])
        assert score(row.solution, row.ground_truth).total == 1.0
        assert not row.distractor or score(row.distractor, row.ground_truth).parts == {"correct": 0.0, "format": 1.0}


def test_a_search_tries_wrong_equations_step_by_step_and_ends_at_the_right_one():
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


def test_with_a_calculator_a_bare_solution_shows_the_turns_of_an_episode():
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


def test_fewer_rows_than_counts_of_numbers_are_dealt():
    one = {"train_size": 1, "validation_size": 1}
    settings = DEMO.model_copy(update=one | {"balance_difficulty": True, "min_numbers": 2})
    found = generate(settings, 1)
    assert {split: len(problems) for split, problems in found.items()} == {"train": 1, "validation": 1}


def test_an_estimate_of_the_problems_of_a_large_space_is_near_their_count():
    settings = CountdownData(number_high=25)
    counted = sum(
        bottom == 1 and 1 <= top <= 1_000
        for numbers in combinations_with_replacement(range(1, 26), 3)
        for top, bottom in solve(numbers, settings.operations)
    )
    assert _num_problems(3, settings) == pytest.approx(counted, rel=0.15)
    assert _num_problems(6, settings) == float("inf")
