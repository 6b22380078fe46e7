"""Countdown problems: sizes, splits, targets, and what is refused."""

from collections import Counter
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise, permutations, product
from operator import add, mul, sub, truediv

import numpy as np
import pytest

from data import countdown_problems
from data.arithmetic import evaluate
from data.countdown import score

# `_equation` and `_num_problems`: twins of numeric parts that `generate` uses.
from data.countdown_problems import (
    CHUNK,
    Problem,
    _equation,
    _num_problems,
    draw_chunk,
    equations_for,
    generate,
    require_enough,
    solve,
)
from rlcore.config import CountdownData
from rlcore.errors import DataError
from tests.helpers.countdown import DEMO, LARGE, UNIFORM


def multisets(problems):
    return {tuple(sorted(problem.numbers)) for problem in problems}


def test_the_demo_space_has_the_problems_of_a_naive_search():
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
def test_a_target_is_solved_exactly_if_a_naive_search_reaches_it(n, rows, operations):
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


def test_uniform_targets_draw_each_problem_equally():
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


def test_fewer_rows_than_counts_of_numbers_are_dealt():
    one = {"train_size": 1, "validation_size": 1}
    settings = DEMO.model_copy(update=one | {"balance_difficulty": True, "min_numbers": 2})
    found = generate(settings, 1)
    assert {split: len(problems) for split, problems in found.items()} == {"train": 1, "validation": 1}


def test_a_drawn_space_that_is_used_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(countdown_problems, "CHUNK", 256)
    settings = CountdownData(
        train_size=100_000, validation_size=10, min_numbers=5, max_numbers=5, number_high=4, target_high=2
    )
    with pytest.raises(DataError, match=r"^countdown: 24,576 draws gave 108 of 100,000 for train, 0 of 10 for valid.*"):
        generate(settings, 1)


def test_more_problems_than_exist_are_refused_before_a_draw():
    told = r"5,327 problems asked for, but only 5,326 exist with 3 numbers of 1\.\.20, operations \+ - and"
    for refuses in (generate, require_enough):
        with pytest.raises(DataError, match=told):
            refuses(DEMO.model_copy(update={"train_size": 4_768}), 1)
    large = CountdownData(min_numbers=2, max_numbers=3, number_high=300, train_size=40_000_000, validation_size=8)
    with pytest.raises(DataError, match=r"40,000,008 problems asked for, but only about 22,749,881 exist with 2 or 3"):
        require_enough(large, 7)
    require_enough(large.model_copy(update={"train_size": 400_000}), 7)
    with pytest.raises(DataError, match=r"^data\.number_low must not be above data\.number_high, got 301 and 300$"):
        require_enough(large.model_copy(update={"number_low": 301}), 7)


def test_the_estimate_of_a_large_space_is_near_its_count():
    settings = CountdownData(number_high=25)
    counted = sum(
        bottom == 1 and 1 <= top <= 1_000
        for numbers in combinations_with_replacement(range(1, 26), 3)
        for top, bottom in solve(numbers, settings.operations)
    )
    assert _num_problems(3, settings) == pytest.approx(counted, rel=0.15)
    assert _num_problems(6, settings) == float("inf")


def test_splits_that_share_no_numbers_may_leave_too_few_problems():
    one = DEMO.model_copy(update={"number_low": 2, "number_high": 2, "train_size": 1, "validation_size": 1})
    with pytest.raises(DataError, match=r"^data\.validation_size: 1 asked for, but the splits, which share no"):
        generate(one, 7)


@pytest.mark.parametrize("high", [32_767, 32_768])
def test_numbers_are_bounded_so_that_values_fit_63_bits(high):
    settings = CountdownData(number_high=high, train_size=2, validation_size=1)
    if high == 32_767:
        require_enough(settings, 1)
        return
    with pytest.raises(DataError, match=r"at most 32767 with 4 numbers, got 32768$"):
        require_enough(settings, 1)
