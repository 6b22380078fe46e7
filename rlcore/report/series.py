"""One metric over the steps of a run: its moving mean, the points that a picture can show, whether it still rises."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from rlcore.evaluation.stats import Interval

if TYPE_CHECKING:
    Series: TypeAlias = pd.Series[float]
else:
    Series = pd.Series  # takes no parameter while it runs
"""Values of one metric, in order of their steps, which are its index."""

SMOOTHING_SHARE = 15
"""A smoothed curve is the mean over 1/15 of the run (3 steps at least): short enough to show when something changed."""

GRID_POINTS = 120
"""Points at which the curves of several seeds are averaged."""

MIN_STEPS = 10
"""Fewer steps than this in its last third say nothing about a trend."""


def series_of(points: Iterable[tuple[int, float]]) -> Series | None:
    """A series of (step, value); None of nothing."""
    found = dict(sorted(points))
    return pd.Series(found, dtype=float) if found else None


def window_of(series: Series) -> int:
    """Steps over which `smooth` averages."""
    return min(len(series), max(3, len(series) // SMOOTHING_SHARE) | 1)  # odd: as many before a step as after it


def smooth(series: Series) -> Series:
    """Centred moving mean; at the ends over what there is."""
    return series.rolling(window_of(series) // 2 * 2 + 1, center=True, min_periods=1).mean()


def _num_steps(series: Series, share: float) -> int:
    return max(1, round(share * len(series)))


def first_tenth(series: Series) -> float:
    """Mean over the first tenth of the run, one step at least."""
    return float(series.iloc[: _num_steps(series, 0.1)].mean())


def last_tenth(series: Series) -> float:
    """Mean over the last tenth of the run, one step at least."""
    return float(series.iloc[-_num_steps(series, 0.1) :].mean())


def last_third(series: Series) -> Series:
    """The last third of the run, one step at least: what counts as its end, and over which the trend is judged."""
    return series.iloc[-_num_steps(series, 1 / 3) :]


def late_mean(series: Series) -> float:
    """Mean over the last third of the run."""
    return float(last_third(series).mean())


def without_first_step(series: Series) -> Series:
    """All but the first step, which warms up; that one alone where there is no other."""
    return series.iloc[min(1, len(series) - 1) :]


def thin(series: Series, most: int) -> Series:
    """At most so many points, each the mean of a stretch of steps: what a picture can show."""
    if len(series) <= most:
        return series
    stretch = np.arange(len(series)) * most // len(series)
    means = series.groupby(stretch).mean()
    return means.set_axis(series.index.to_series().groupby(stretch).mean().astype(int))


def totals_at(totals: Series, steps: "pd.Index[int]") -> Series:
    """Value of a running total after each of these steps; 0 before the first one."""
    return totals.reindex(steps, method="ffill").fillna(0.0)


def trend_of(series: Series) -> Interval | None:
    """Change of the least-squares line over the last third, from its first step to its last, with a 95% interval; None
    if that part is too short.

    The interval is Student's t of independent noise around the line. Each step has prompts of its own, so the noise is
    close to independent.
    """
    part = last_third(series)
    if len(part) < MIN_STEPS:
        return None
    steps = part.index.to_numpy(dtype=float)
    (slope, _), covariance = np.polyfit(steps - steps.mean(), part.to_numpy(), 1, cov=True)
    length = float(steps[-1] - steps[0])
    change = float(slope) * length
    half = float(stdtrit(len(part) - 2, 0.975) * np.sqrt(covariance[0, 0])) * length
    return Interval(change, change - half, change + half)


def series_over(series: Series, totals: Series | None) -> Series:
    """A series over steps, or over tokens or seconds up to each of its steps."""
    return series if totals is None else series.set_axis(totals_at(totals, series.index))


def band_of(curves: Sequence[Series]) -> pd.DataFrame:
    """`mean`, `min` and `max` of curves at points that all of them reach, interpolated."""
    low, high = max(curve.index[0] for curve in curves), min(curve.index[-1] for curve in curves)
    grid = np.linspace(low, max(low, high), GRID_POINTS)
    values = np.array([np.interp(grid, curve.index, curve) for curve in curves])
    return pd.DataFrame({"mean": values.mean(0), "min": values.min(0), "max": values.max(0)}, index=grid)
