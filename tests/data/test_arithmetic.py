"""Exact arithmetic against brute force, and texts that are no equations."""

from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.arithmetic import MAX_EXPRESSION_CHARS, Term, calculate, evaluate, join
from data.countdown import WELL_FORMED_SCORE, score

# A tree is a number or (left, operator, right).
TREES = st.recursive(st.integers(0, 120), lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner), max_leaves=7)
# Texts near the grammar, as a model in training writes them, and attempts to deceive a scorer.
PIECES = st.sampled_from(
    [*"0123456789+-*/()=., \n\t", "**", "//", "%", "1e9", "0x1", "\u0662", "\u00d7", "\u2212", "\uff11", "__import__",
     "<answer>", "</answer>", "<answer> ", " </answer>", "<think>", "</think>", "inf", "nan", "(" * 50, "9" * 40, "()"]
)  # fmt: skip
TEXTS = st.one_of(st.text(max_size=200), st.lists(PIECES, max_size=40).map("".join))


def numbers_of(tree):
    return [tree] if isinstance(tree, int) else [*numbers_of(tree[0]), *numbers_of(tree[2])]


def naive_value(tree):
    if isinstance(tree, int):
        return Fraction(tree)
    a, b = naive_value(tree[0]), naive_value(tree[2])
    if a is None or b is None or (tree[1] == "/" and b == 0):
        return None
    return {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[tree[1]]()


def bracketed(tree):
    return str(tree) if isinstance(tree, int) else f"({bracketed(tree[0])}{tree[1]} {bracketed(tree[2])})"


def joined(tree):
    return Term(str(tree), 3) if isinstance(tree, int) else join(joined(tree[0]), tree[1], joined(tree[2]))


@settings(max_examples=400, deadline=None)
@given(tree=TREES)
def test_equations_have_the_naive_value(tree):
    for text in (bracketed(tree), joined(tree).text):
        expression = evaluate(text)
        assert expression.value == naive_value(tree)
        assert sorted(expression.numbers) == sorted(numbers_of(tree))


@settings(max_examples=1_500, deadline=None)
@given(
    text=st.one_of(TEXTS, TREES, TREES.map(bracketed), TREES.map(lambda tree: joined(tree).text)),
    target=st.integers(-5, 50),
    numbers=st.lists(st.integers(0, 20), min_size=1, max_size=6),
)
@example(text="9**9**9", target=9, numbers=[9, 9, 9])
@example(text="<answer>" * 1_000 + "</answer>" * 1_000, target=1, numbers=[1])
def test_any_text_has_a_bounded_exact_score(text, target, numbers):
    """An equation is compared with its naive value."""
    if not isinstance(text, str):
        value, used, text = naive_value(text), numbers_of(text), bracketed(text)
        truth = {"target": target if value is None or value.denominator > 1 else int(value), "numbers": used[::-1]}
        tagged, right = f"<answer>{text}</answer>", value == truth["target"]
        assert score(tagged, truth).total == (1.0 if right else WELL_FORMED_SCORE)
        assert score(tagged, {**truth, "numbers": [*used, 1]}).total == WELL_FORMED_SCORE
    for form, allowed in (("bare", {0.0, 1.0}), ("tags", {0.0, WELL_FORMED_SCORE, 1.0}), ("first", {0.0, 0.1, 1.0})):
        response = text if form != "tags" else f"<answer>{text}</answer>"
        found = score(response, {"target": target, "numbers": numbers, "form": form})
        assert found.total in allowed
        assert set(found.parts.values()) <= {0.0, 1.0}
        assert (found.total == 1.0) == (found.parts["correct"] == 1.0)


def test_malformed_and_too_long_expressions_are_refused():
    exact = "1+" * ((MAX_EXPRESSION_CHARS - 1) // 2) + "1"
    assert evaluate(exact.ljust(MAX_EXPRESSION_CHARS)) is not None
    assert evaluate(exact.ljust(MAX_EXPRESSION_CHARS + 1)) is None
    texts = ["1 2", "1 (2)", "(1) 2", "()", "(1 + )", ") 1 (", "1 + + 2", "* 1", "1 )", "( 1", "+", "(1 + 2))", ""]
    for text in (*texts, "1) + (2", "-1 + 2", "07 + 1", "1.5 * 2", "9**9"):
        assert evaluate(text) is None, text


@pytest.mark.parametrize(("text", "steps"), [
    ("8 / (3 - 8 / 3)", "8 / 3 = 8/3, 3 - 8/3 = 1/3, 8 / 1/3 = 24"),
    ("1 / (2 - 2) + 0 * 3", "2 - 2 = 0, 1 / 0 = undefined, 0 * 3 = 0, undefined + 0 = undefined"),
    ("1 / (2 / 0)", "2 / 0 = undefined, 1 / undefined = undefined"),
    ("4 - 3 - 2 + 1", "4 - 3 = 1, 1 - 2 = -1, -1 + 1 = 0"), ("5", ""),
])  # fmt: skip
def test_solution_steps_are_in_order_and_exact(text, steps):
    assert evaluate(text).solution_steps() == steps


def test_brackets_are_written_only_where_needed() -> None:
    one, two, three = (Term(number, 3) for number in "123")
    for left, right, texts in (
        (join(one, "+", two), three, ["1 + 2 + 3", "1 + 2 - 3", "(1 + 2) * 3", "(1 + 2) / 3"]),
        (join(one, "*", two), three, ["1 * 2 + 3", "1 * 2 - 3", "1 * 2 * 3", "1 * 2 / 3"]),
        (one, join(two, "-", three), ["1 + 2 - 3", "1 - (2 - 3)", "1 * (2 - 3)", "1 / (2 - 3)"]),
        (one, join(two, "/", three), ["1 + 2 / 3", "1 - 2 / 3", "1 * 2 / 3", "1 / (2 / 3)"]),
    ):
        made = [join(left, sign, right) for sign in "+-*/"]
        assert [(term.text, term.precedence) for term in made] == list(zip(texts, (1, 1, 2, 2), strict=True))


def test_calculate_returns_a_value_or_an_error() -> None:
    assert [calculate(text) for text in ("7 / 2", "4 / 2", "1 / (2 - 2)")] == ["7/2", "2", "division by zero"]
    with pytest.raises(ValueError, match="an expression is whole numbers with "):
        calculate("1.5 * 2")
