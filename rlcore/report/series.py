"""One metric over the steps of a run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlcore.evaluation.stats import Array
from rlcore.tracking.journal import StepRecord

Steps = NDArray[np.int64]

SMOOTHING_SHARE = 15
"""A smoothed curve is the mean over 1/15 of the run (3 steps at least): short enough to show when something changed."""


@dataclass(frozen=True)
class Series:
    """Values of one metric, by step, in order of the steps."""

    name: str
    steps: Steps
    values: Array

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def first(self) -> float:
        """Value at its first step."""
        return float(self.values[0])

    @property
    def last(self) -> float:
        """Value at its last step."""
        return float(self.values[-1])

    @property
    def window(self) -> int:
        """Steps over which `smooth` averages."""
        return min(len(self), max(3, len(self) // SMOOTHING_SHARE) | 1)  # odd: as many before a step as after it

    @cached_property
    def smooth(self) -> Array:
        """Centred moving mean; at the ends over what there is."""
        half = self.window // 2
        total = np.concatenate([[0.0], np.cumsum(self.values)])
        low = np.maximum(np.arange(len(self)) - half, 0)
        high = np.minimum(np.arange(len(self)) + half + 1, len(self))
        return np.asarray((total[high] - total[low]) / (high - low))

    def head(self, share: float) -> Array:
        """Values of the first part of the run, one at least."""
        return self.values[: max(1, round(share * len(self)))]

    def tail(self, share: float) -> "Series":
        """The last part of the run, one step at least."""
        count = max(1, round(share * len(self)))
        return Series(self.name, self.steps[-count:], self.values[-count:])

    def mean(self) -> float:
        """Mean over all steps."""
        return float(self.values.mean())

    def thinned(self, most: int) -> "Series":
        """At most so many points, each the mean of a stretch of steps: what a picture can show."""
        if len(self) <= most:
            return self
        edges = np.linspace(0, len(self), most + 1).round().astype(int)
        counts = np.diff(edges)
        return Series(
            self.name,
            (np.add.reduceat(self.steps, edges[:-1]) // counts).astype(np.int64),
            np.add.reduceat(self.values, edges[:-1]) / counts,
        )


def series_of(records: Iterable[StepRecord], name: str) -> Series | None:
    """A metric's values, None where no step has it."""
    found = [(record.step, record.metrics[name]) for record in records if name in record.metrics]
    return make_series(name, found)


def make_series(name: str, points: Sequence[tuple[int, float]]) -> Series | None:
    """A series of (step, value); None of nothing."""
    if not points:
        return None
    ordered = sorted(points)
    return Series(
        name,
        np.array([step for step, _ in ordered], dtype=np.int64),
        np.array([value for _, value in ordered], dtype=np.float64),
    )
