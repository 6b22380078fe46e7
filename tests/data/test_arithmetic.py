"""Exact arithmetic against brute force, and texts that are no equations."""

import time
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.arithmetic import MAX_EXPRESSION_CHARS, Term, evaluate, join
from data.countdown import WELL_FORMED_SCORE, score
from rlcore.config import RewardConfig

# A tree is a number or (left, operator, right).
TREES = st.recursive(st.integers(0, 120), lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner), max_leaves=7)
# Texts near the grammar: what a model in training writes, and what one would try to fool a scorer.
PIECES = st.sampled_from(
    [*"0123456789+-*/()=., \n\t", "**", "//", "%", "1e9", "0x1", "\u0662", "\u00d7", "\u2212", "\uff11", "__import__",
     "<answer>", "</answer>", "<answer> ", " </answer>", "<think>", "</think>", "inf", "nan", "(" * 50, "9" * 40, "()"]
)  # fmt: skip
TEXTS = st.one_of(st.text(max_size=200), st.lists(PIECES, max_size=40).map("".join))


def numbers_of(tree):
    return [tree] if isinstance(tree, int) else [*numbers_of(tree[0]), *numbers_of(tree[2])]


def oracle(tree):
    """The value in fractions, None for a division by zero."""
    if isinstance(tree, int):
        return Fraction(tree)
    a, b = oracle(tree[0]), oracle(tree[2])
    if a is None or b is None or (tree[1] == "/" and b == 0):
        return None
    return {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[tree[1]]()


def bracketed(tree):
    return str(tree) if isinstance(tree, int) else f"({bracketed(tree[0])}{tree[1]} {bracketed(tree[2])})"


def shortened(tree):
    if isinstance(tree, int):
        return Term(str(tree), 3)
    return join(shortened(tree[0]), tree[1], shortened(tree[2]))


@settings(max_examples=400, deadline=None)
@given(tree=TREES)
def test_equations_have_the_value_of_brute_force(tree):
    for text in (bracketed(tree), shortened(tree).text):
        found = evaluate(text)
        assert found is not None
        assert found.value == oracle(tree)
        assert sorted(found.numbers) == sorted(numbers_of(tree))


def check_score(text, target, numbers):
    """The score is in its set, its parts agree with it, and Python's own parser finds no other value."""
    for form, allowed in (("bare", {0.0, 1.0}), ("tags", {0.0, WELL_FORMED_SCORE, 1.0}), ("first", {0.0, 0.1, 1.0})):
        answer = text if form != "tags" else f"<answer>{text}</answer>"
        found = score(answer, {"target": target, "numbers": numbers, "form": form})
        assert found.total in allowed
        assert set(found.parts.values()) <= {0.0, 1.0}
        assert (found.total == 1.0) == (found.parts["correct"] == 1.0)


ANYTHING = given(
    text=st.one_of(TEXTS, TREES, TREES.map(bracketed), TREES.map(lambda tree: shortened(tree).text)),
    target=st.integers(-5, 50),
    numbers=st.lists(st.integers(0, 20), min_size=1, max_size=6),
)


@settings(max_examples=1_500, deadline=None)
@ANYTHING
@example(text="9**9**9", target=9, numbers=[9, 9, 9])
@example(text="<answer>" * 1_000 + "</answer>" * 1_000, target=1, numbers=[1])
def test_any_text_scores_as_brute_force_says(text, target, numbers):
    check_anything(text, target, numbers)


@pytest.mark.lengthy
@settings(max_examples=20_000, deadline=None)
@ANYTHING
def test_any_text_scores_as_brute_force_says_for_longer(text, target, numbers):
    check_anything(text, target, numbers)


def check_anything(text, target, numbers):
    """Any text: a score of its set within the deadline. An equation: what brute force says."""
    start = time.process_time()
    if not isinstance(text, str):
        tree, used = text, numbers_of(text)
        value = oracle(tree)
        truth = {"target": target if value is None or value.denominator > 1 else int(value), "numbers": used[::-1]}
        right = value == truth["target"]
        assert score(f"<answer>{bracketed(tree)}</answer>", truth).total == (1.0 if right else WELL_FORMED_SCORE)
        wrong = {**truth, "numbers": [*used, 1]}
        assert score(f"<answer>{bracketed(tree)}</answer>", wrong).total == WELL_FORMED_SCORE
        text = bracketed(tree)
    check_score(text, target, numbers)
    assert time.process_time() - start < RewardConfig().deadline_s


@settings(max_examples=200, deadline=None)
@given(tree=TREES, data=st.data())
def test_the_score_of_an_equation_is_what_brute_force_says(tree, data):
    value, used = oracle(tree), numbers_of(tree)
    target = data.draw(st.sampled_from([7, int(value) if value is not None and value.denominator == 1 else 8]))
    numbers = data.draw(st.permutations(data.draw(st.sampled_from([used, [*used, 1], used[1:] or [3]]))))
    right = value == target and sorted(used) == sorted(numbers)
    found = score(f"<answer> {bracketed(tree)} </answer>", {"target": target, "numbers": list(numbers)})
    assert found.total == (1.0 if right else WELL_FORMED_SCORE)


def test_the_limit_of_length_is_exact():
    exact = "1+" * ((MAX_EXPRESSION_CHARS - 1) // 2) + "1"
    assert evaluate(exact.ljust(MAX_EXPRESSION_CHARS)) is not None
    assert evaluate(exact.ljust(MAX_EXPRESSION_CHARS + 1)) is None


@pytest.mark.parametrize(
    "text", ["1 2", "1 (2)", "(1) 2", "()", "(1 + )", ") 1 (", "1 + + 2", "* 1", "1 )", "( 1", "+"]
)
def test_what_is_no_expression(text):
    assert evaluate(text) is None


def test_operations_are_listed_in_order_with_exact_results() -> None:
    for text, worked in (
        ("2 - 5 * 3", "5 * 3 = 15, 2 - 15 = -13"),
        ("7 / 2 / 3", "7 / 2 = 7/2, 7/2 / 3 = 7/6"),
        ("8 / (3 - 8 / 3)", "8 / 3 = 8/3, 3 - 8/3 = 1/3, 8 / 1/3 = 24"),
        ("1 / (2 - 2) + 0 * 3", "2 - 2 = 0, 1 / 0 = undefined, 0 * 3 = 0, undefined + 0 = undefined"),
        ("4 - 3 - 2 + 1", "4 - 3 = 1, 1 - 2 = -1, -1 + 1 = 0"),
        ("5", ""),
    ):
        found = evaluate(text)
        assert found is not None
        assert found.solution_steps() == worked


def test_brackets_stand_where_exact_arithmetic_needs_them_and_nowhere_else() -> None:
    one, two, three = (Term(number, 3) for number in "123")
    for left, right, texts in (
        (join(one, "+", two), three, ["1 + 2 + 3", "1 + 2 - 3", "(1 + 2) * 3", "(1 + 2) / 3"]),
        (join(one, "*", two), three, ["1 * 2 + 3", "1 * 2 - 3", "1 * 2 * 3", "1 * 2 / 3"]),
        (one, join(two, "-", three), ["1 + 2 - 3", "1 - (2 - 3)", "1 * (2 - 3)", "1 / (2 - 3)"]),
        (one, join(two, "/", three), ["1 + 2 / 3", "1 - 2 / 3", "1 * 2 / 3", "1 / (2 / 3)"]),
    ):
        assert [join(left, sign, right).text for sign in "+-*/"] == texts
        assert [join(left, sign, right).precedence for sign in "+-*/"] == [1, 1, 2, 2]
