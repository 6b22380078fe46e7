"""The result of a scorer. Separate from `rlcore.types`, so that a scoring process loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

FULL_SCORE = 1.0
"""Score of a correct response if the scorer names no part `correct`."""
_ROUNDING = 1e-9
"""Largest rounding error of a score that is a sum, such as 0.1 for each of ten turns."""


@dataclass(frozen=True, slots=True)
class Score:
    """Score of one response: `total` is the reward, `parts` its named components (format, correct, ...).

    `said` is the answer that the scorer extracted, in a canonical text (`1000` for `1,000`), which `maj@k` counts.
    None: it found or returned none.

    `failure` is the reason for a missing score: the scorer raised or exceeded its deadline. The scoring pool sets it,
    and no statistic uses such a response.
    """

    total: float
    parts: Mapping[str, float]
    said: str | None = None
    failure: str | None = None

    @property
    def solved(self) -> bool:
        """True for a correct response: by the part `correct` if there is one, else by a full score (1)."""
        return self.parts.get("correct", self.total) >= FULL_SCORE - _ROUNDING


def renew_deadline() -> None:
    """Restart the deadline of the response being scored. A scoring process installs its own function here."""


class Scorer(Protocol):
    """Scores one response against a ground truth. Pure, deterministic, never raises on any text."""

    def __call__(self, response: str, ground_truth: Mapping[str, object]) -> Score | float:
        """Score one response. A plain number is a score without parts."""
        ...
