"""Exact arithmetic as a tool for the model.

data.environment=rlcore.rollout.tools:Tools episode.tools=[data.calculator:calculate]
"""

from data.arithmetic import evaluate


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
