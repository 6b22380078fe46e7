"""What a scorer says of an answer. Apart from `rlcore.types`, so that a scoring process loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Score:
    """What a scorer says of one answer: `total` is the reward, `parts` its named components (format, correct, ...).

    `said`: the answer that it found in the text, written so that equal answers are equal texts (`1000` for `1,000`). By
    it answers vote (`maj@k`). None: it found none, or does not say.

    `failure`: why there is no score (the scorer raised, or overran its deadline), set by the scoring pool. Such an
    answer is left out wherever scores count; its `total` is 0 and means nothing.
    """

    total: float
    parts: Mapping[str, float]
    said: str | None = None
    failure: str | None = None


class Scorer(Protocol):
    """Scores one answer text against a ground truth. Pure, deterministic, never raises on any text."""

    def __call__(self, response: str, ground_truth: Mapping[str, object]) -> Score | float:
        """Score one answer. A number is a score without parts."""
        ...
