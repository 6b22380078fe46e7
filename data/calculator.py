"""Exact arithmetic for the model: as a tool that it calls, and as an environment in which every turn is a call.

data.environment=rlcore.rollout.tools:Tools episode.tools=[data.calculator:calculate]
millrace run experiment=countdown_calculator
"""

from collections.abc import Mapping
from typing import Any

from data.arithmetic import evaluate
from data.countdown import COMPUTED, score
from rlcore.rollout.environment import Turn


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


class Countdown:
    """Countdown with a calculator: each turn is an equation, the reply its value (`> VALUE =`, or `: =` where it is no
    equation), in the words of a model made from nothing. The episode ends with the right one.
    """

    def reset(self, row: Mapping[str, Any]) -> None:
        """Keep the problem."""
        self._row = row

    def step(self, text: str) -> Turn:
        """Compute an equation, and score it."""
        found = score(text, self._row)
        reply = COMPUTED.format(value=calculate(text)) if evaluate(text) else ": ="
        return Turn(reply, done=found.parts["correct"] == 1.0, reward=found.parts["correct"], parts=found.parts)
