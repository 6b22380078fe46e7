"""Exact arithmetic on an equation that a model wrote. Nothing is ever evaluated by Python.

The grammar is integers, `+ - * /`, parentheses and ASCII white space: no unary sign, no decimals, no powers, no
`//` or `%`. Time and memory are bounded by the length of the text.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

# Six numbers with every bracket and space stay far below it; it bounds the size of a product too (no powers).
MAX_EXPRESSION_CHARS = 1_000

_ALLOWED = re.compile(r"[0-9+\-*/() \t\r\n]*")
# "07" falls apart into two numbers side by side, which no rule of the grammar allows.
_TOKEN = re.compile(r"0|[1-9][0-9]*|[-+*/()]")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}

Rational = tuple[int, int]  # numerator, denominator; not reduced
_Operation = tuple[Rational, str, Rational, Rational]  # left, operator, right, result


@dataclass(frozen=True, slots=True)
class Expression:
    """A well-formed expression: its numbers as written, its value (None: division by zero), and each operation done."""

    numbers: tuple[int, ...]
    value: Fraction | None
    operations: tuple[_Operation, ...]
    """Left value, operator, right value and result, in the order of the computation."""

    def solution_steps(self) -> str:
        """Every operation with its result, in order.

        >>> evaluate("44 - 14 - (38 - 21)").solution_steps()
        '44 - 14 = 30, 38 - 21 = 17, 30 - 17 = 13'
        """
        return ", ".join(
            f"{_written(left)} {operator} {_written(right)} = {_written(result)}"
            for left, operator, right, result in self.operations
        )


def evaluate(text: str) -> Expression | None:
    """Parse and compute; None where the text is no expression of the grammar.

    >>> evaluate("(8 - 3) / 2").value
    Fraction(5, 2)
    >>> evaluate("1 / (2 - 2)").value is None
    True
    >>> [evaluate(bad) for bad in ("9**9", "-1 + 2", "07 + 1", "1.5 * 2", "(1 + 2", "")]
    [None, None, None, None, None, None]
    """
    if len(text) > MAX_EXPRESSION_CHARS or _ALLOWED.fullmatch(text) is None:
        return None
    numbers: list[int] = []
    values: list[Rational] = []
    done: list[_Operation] = []
    waiting: list[str] = []  # operators and open brackets, innermost last
    wants_operand = True
    for token in _TOKEN.findall(text):
        if token == "(" or token[0].isdigit():
            if not wants_operand:
                return None
            if token == "(":
                waiting.append(token)
                continue
            numbers.append(int(token))
            values.append((numbers[-1], 1))
            wants_operand = False
            continue
        if wants_operand:
            return None
        if token == ")":
            if not _close(values, waiting, done):
                return None
            continue
        while waiting and waiting[-1] != "(" and _PRECEDENCE[waiting[-1]] >= _PRECEDENCE[token]:
            _apply(values, waiting.pop(), done)
        waiting.append(token)
        wants_operand = True
    if wants_operand or "(" in waiting:
        return None
    while waiting:
        _apply(values, waiting.pop(), done)
    numerator, denominator = values[0]
    return Expression(tuple(numbers), Fraction(numerator, denominator) if denominator else None, tuple(done))


def _close(values: list[Rational], waiting: list[str], done: list[_Operation]) -> bool:
    """Compute back to the matching open bracket; False where there is none."""
    while waiting:
        operator = waiting.pop()
        if operator == "(":
            return True
        _apply(values, operator, done)
    return False


def _apply(values: list[Rational], operator: str, done: list[_Operation]) -> None:
    """Replace the last two values by their result. A denominator of 0 marks a division by zero and stays 0."""
    (c, d), (a, b) = values.pop(), values.pop()
    if b == 0 or d == 0:
        values.append((0, 0))
    elif operator == "+":
        values.append((a * d + c * b, b * d))
    elif operator == "-":
        values.append((a * d - c * b, b * d))
    elif operator == "*":
        values.append((a * c, b * d))
    else:
        values.append((a * d, b * c) if c else (0, 0))
    done.append(((a, b), operator, (c, d), values[-1]))


def _written(value: Rational) -> str:
    return str(Fraction(*value)) if value[1] else "undefined"


@dataclass(frozen=True, slots=True)
class Term:
    """A piece of text under construction; `precedence` 3 is a number, 2 a product, 1 a sum."""

    text: str
    precedence: int


def join(left: Term, operator: str, right: Term) -> Term:
    """`left operator right` with no more brackets than exact arithmetic needs.

    >>> join(join(Term("7", 3), "-", Term("2", 3)), "*", Term("3", 3)).text
    '(7 - 2) * 3'
    """
    own = _PRECEDENCE[operator]
    a = f"({left.text})" if left.precedence < own else left.text
    tight = right.precedence < own or (right.precedence == own and operator in "-/")
    b = f"({right.text})" if tight else right.text
    return Term(f"{a} {operator} {b}", own)
