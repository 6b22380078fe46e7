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

    A turn that is no equation (an empty one) ends the episode, so the model itself decides whether a value is the
    target. Its last equation is the answer, which alone is scored. A reply is `> VALUE =`, in the words of a model made
    from nothing.
    """

    def reset(self, row: Mapping[str, Any]) -> None:
        """Begin without an answer."""
        self._row, self._total = row, 0.0

    def step(self, text: str) -> Turn:
        """Compute an equation. The reward is what the turn has changed in the score of the last one."""
        found = evaluate(text)
        if found is None:
            return Turn(done=True)
        answer = score(text, self._row)
        reward, self._total = answer.total - self._total, answer.total
        return Turn(f"> {calculate(text)} =", reward=reward, parts=answer.parts)
