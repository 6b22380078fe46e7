"""Exact arithmetic for the model: as a tool that it calls, and as an environment in which every turn is a call.

data.environment=rlcore.rollout.tools:Tools episode.tools=[data.calculator:calculate]
millrace run experiment=countdown_calculator
"""

from collections.abc import Mapping
from typing import Any

from data.arithmetic import evaluate
from data.countdown import score
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
    """Countdown with a calculator: each turn is an equation, the reply its value.

    An empty turn ends the episode, so the model itself decides whether a value is the target. The last equation is the
    answer and alone is scored. The words are those of a model made from nothing: `>` comes before a value, `:` means
    that the turn was no expression.
    """

    def reset(self, row: Mapping[str, Any]) -> None:
        """Begin without an answer."""
        self._row, self._answer, self._total = row, "", 0.0

    def step(self, text: str) -> Turn:
        """Compute the turn. The reward is what it has changed in the score of the answer so far."""
        done = not text.strip()
        self._answer = self._answer if done else text
        found = score(self._answer, self._row)
        reward, self._total = found.total - self._total, found.total
        try:
            reply = f"> {calculate(text)} ="
        except ValueError:
            reply = ": ="
        return Turn(reply, done=done, reward=reward, parts=found.parts)
