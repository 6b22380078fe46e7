"""Exact arithmetic on equations that a model has written, and the tool `calculate` for `episode.tools`.

An expression has integers, `+ - * /`, parentheses and ASCII white space. It has no unary sign, decimal, power, `//` or
`%`.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

MAX_EXPRESSION_CHARS = 1_000  # bounds time and memory
_ALLOWED = re.compile(r"[0-9+\-*/() \t\r\n]*")
_TOKEN = re.compile(r"0|[1-9][0-9]*|[-+*/()]")  # "07" becomes two adjacent numbers, which the grammar refuses
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
Rational = tuple[int, int]  # numerator and denominator, which need not be reduced; 0 below: undefined
_Operation = tuple[Rational, str, Rational, Rational]  # left, operator, right, result


@dataclass(frozen=True, slots=True)
class Expression:
    """A valid expression. `numbers`: its integers in order. `value`: the result, or None after a division by zero."""

    numbers: tuple[int, ...]
    value: Fraction | None
    operations: tuple[_Operation, ...]  # left value, operator, right value and result, in the order of computation

    def solution_steps(self) -> str:
        """Return the expression's operations and their results in the order of computation: `3 + 4 = 7, 7 * 5 = 35`."""

        def text(value: Rational) -> str:
            return str(Fraction(*value)) if value[1] else "undefined"

        return ", ".join(f"{text(a)} {operator} {text(b)} = {text(value)}" for a, operator, b, value in self.operations)


def evaluate(text: str) -> Expression | None:
    """Parse and compute an expression. Return None if the text is not a valid expression."""
    if len(text) > MAX_EXPRESSION_CHARS or _ALLOWED.fullmatch(text) is None:
        return None
    numbers: list[int] = []
    values: list[Rational] = []
    done: list[_Operation] = []
    pending = ["("]  # operators and open brackets, innermost last
    wants_operand = True
    for token in (*_TOKEN.findall(text), ")"):
        if token == "(" or token[0].isdigit():
            if not wants_operand:
                return None
            if token == "(":
                pending.append(token)
                continue
            numbers.append(int(token))
            values.append((numbers[-1], 1))
            wants_operand = False
            continue
        if wants_operand:
            return None
        precedence = _PRECEDENCE.get(token, 0)
        while pending and pending[-1] != "(" and _PRECEDENCE[pending[-1]] >= precedence:
            right, left, operator = values.pop(), values.pop(), pending.pop()
            values.append(apply(left, operator, right))
            done.append((left, operator, right, values[-1]))
        if token != ")":
            pending.append(token)
            wants_operand = True
        elif not pending:
            return None
        else:
            pending.pop()
    if pending:
        return None
    numerator, denominator = values[0]
    return Expression(tuple(numbers), Fraction(numerator, denominator) if denominator else None, tuple(done))


def calculate(expression: str) -> str:
    """Compute an arithmetic expression of whole numbers.

    Args:
        expression: Whole numbers with + - * / and parentheses, such as (3 + 4) * 5.

    >>> calculate("(3 + 4) * 5"), calculate("7 / 2")
    ('35', '7/2')
    """
    found = evaluate(expression)
    if found is None:
        raise ValueError("an expression is whole numbers with + - * / and parentheses")
    return "division by zero" if found.value is None else str(found.value)


def apply(left: tuple[Any, Any], operator: str, right: tuple[Any, Any]) -> tuple[Any, Any]:
    """Apply an operation to two fractions (numerator, denominator) of integers or arrays. The result is not reduced.

    A division by zero gives the denominator 0. Later operations on this fraction also give the denominator 0."""
    (a, b), (c, d) = left, right
    if operator == "+":
        return a * d + c * b, b * d
    if operator == "-":
        return a * d - c * b, b * d
    return (a * c, b * d) if operator == "*" else (a * d, b * c * (d != 0))


@dataclass(frozen=True, slots=True)
class Term:
    """The text of a partial expression. `precedence` is 3 for a number, 2 for a product and 1 for a sum."""

    text: str
    precedence: int


def join(left: Term, operator: str, right: Term) -> Term:
    """Join two terms by an operator. Parentheses are added only if exact arithmetic needs them."""
    precedence = _PRECEDENCE[operator]
    a = f"({left.text})" if left.precedence < precedence else left.text
    needs_brackets = right.precedence < precedence or (right.precedence == precedence and operator in "-/")
    b = f"({right.text})" if needs_brackets else right.text
    return Term(f"{a} {operator} {b}", precedence)
