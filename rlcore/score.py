"""The result of a scorer. This module is separate from `rlcore.types`, so that a scoring process loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

REWARD, HELD_OUT_REWARD = "reward", "val/reward"
"""The metrics that trackers show first. `REWARD` is the mean score of the responses in a training step, and
`HELD_OUT_REWARD` is the mean score of the responses in a validation."""
FULL_SCORE = 1.0
"""The value of the part `correct` for a correct response. If a score has no such part, its total is compared with this
value."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one response. `total` is the reward, and `parts` are its named components (format, correct, ...).

    `said`: the extracted answer in a canonical form (`1000` for `1,000`), which `maj_at_k` compares. `failure`: the
    reason why the response could not be scored. Statistics exclude a score with a failure."""

    total: float
    parts: Mapping[str, float]
    said: str | None = None
    failure: str | None = None

    @property
    def solved(self) -> bool:
        """True if the part `correct` is at least 1, or if there is no such part and the total is at least 1."""
        return self.parts.get("correct", self.total) >= FULL_SCORE - _ROUNDING


def renew_deadline() -> None:
    """Restart the deadline for the current response. This has an effect only in a scoring process."""


class Scorer(Protocol):
    """A pure and deterministic function that scores one response against a ground truth and never raises an error."""

    def __call__(self, response: str, ground_truth: Mapping[str, object]) -> Score | float:
        """Score one response. A plain number is a score without parts."""
        ...
