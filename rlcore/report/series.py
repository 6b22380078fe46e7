"""One metric over the steps of a run, and whether it still rises: least squares over its last part."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlcore.evaluation.stats import Array, Interval
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

    def up_to(self, steps: Steps) -> Array:
        """Of a running total, its value after each of these steps; 0 before the first one."""
        at = np.searchsorted(self.steps, steps, side="right") - 1
        return np.where(at >= 0, self.values[np.maximum(at, 0)], 0.0)

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


LAST_PART = 1 / 3
"""Share of the run over which the trend is judged."""

FEWEST_STEPS = 10
"""Fewer steps than this in that part say nothing about a trend."""

_NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True)
class Trend:
    """Change of the fitted line from the first to the last step of the last part, with a 95% interval."""

    change: Interval
    num_steps: int


def trend_of(series: Series) -> Trend | None:
    """Least-squares line over the last part; None if that is too short.

    The interval is that of independent noise around the line: `1.96 s / sqrt(sum (x - mean x)^2)` per step, s the
    residuals' standard deviation. Each step has prompts of its own, so the noise is close to independent.
    """
    part = series.tail(LAST_PART)
    count = len(part)
    if count < FEWEST_STEPS:
        return None
    x = part.steps.astype(float)
    centred = x - x.mean()
    spread = float((centred**2).sum())
    slope = float((centred * part.values).sum()) / spread
    residuals = part.values - part.values.mean() - slope * centred
    error = float(np.sqrt((residuals**2).sum() / (count - 2) / spread))
    length = float(x[-1] - x[0])
    change, half = slope * length, _NORMAL_95 * error * length
    return Trend(Interval(change, change - half, change + half), count)
