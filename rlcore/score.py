"""What a scorer says of an answer. Apart from `rlcore.types`, so that a scoring process loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Score:
    """What a scorer says of one answer: `total` is the reward, `parts` its named components (format, correct, ...)."""

    total: float
    parts: Mapping[str, float]


class Scorer(Protocol):
    """Scores one answer text against a ground truth. Pure, deterministic, never raises on any text."""

    def __call__(self, response: str, ground_truth: Mapping[str, object]) -> Score:
        """Score one answer."""
        ...
