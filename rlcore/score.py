"""The result of a scorer. Apart from `rlcore.types`, so that a scoring process loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

FULL_SCORE = 1.0
"""Score of a right answer where the scorer names no part `correct`."""
_ROUNDING = 1e-9
"""A score added up in floating point, 0.1 for each of ten turns, is that much off at most."""


@dataclass(frozen=True, slots=True)
class Score:
    """Score of one answer: `total` is the reward, `parts` its named components (format, correct, ...).

    `said`: the answer found in the text, the same text for equal answers (`1000` for `1,000`): the vote of `maj@k`.
    None: none was found, or the scorer returns none.

    `failure`: why there is no score (the scorer raised, or overran its deadline), set by the scoring pool. Such an
    answer is left out wherever scores count; its `total` is 0 and means nothing.
    """

    total: float
    parts: Mapping[str, float]
    said: str | None = None
    failure: str | None = None

    @property
    def solved(self) -> bool:
        """Whether the answer is right: by the part `correct` if there is one, else by a full score (1)."""
        return self.parts.get("correct", self.total) >= FULL_SCORE - _ROUNDING


def renew_deadline() -> None:
    """Give the answer that is being scored its whole deadline anew. A scoring process puts its own function here."""


class Scorer(Protocol):
    """Scores one answer text against a ground truth. Pure, deterministic, never raises on any text."""

    def __call__(self, response: str, ground_truth: Mapping[str, object]) -> Score | float:
        """Score one answer. A number is a score without parts."""
        ...
