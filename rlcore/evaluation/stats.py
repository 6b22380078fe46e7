"""Statistics of repeated responses to the same problems, with confidence intervals.

P: the number of problems. M: the number of statistics. n: the number of responses to a problem. c: the number of
correct ones among them. Metrics are means over problems."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

# The maximum number of counts (8 bytes each) of resamples in memory, whatever the number of problems.
_CHUNK_SIZE = 4_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and the lower and upper end of its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """True if the whole interval is above or below 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The mean difference `b - a` of two systems' scores on the same problems. `wins`: the number of problems where
    `b` scores higher. `losses`: the number of problems where `b` scores lower."""

    difference: Interval
    wins: int
    losses: int


def pass_at_k(num_responses: ArrayLike, num_correct: ArrayLike, k: ArrayLike) -> Array:
    """Return an unbiased estimate of the probability that at least one of k responses is correct:
    `1 - C(n-c, k) / C(n, k)` (Chen et al. 2021, arXiv:2107.03374). n is `num_responses` and c is `num_correct`, both
    of shape [P]. k, from 1 to n, is one number or has the shape [P].

    >>> pass_at_k([4, 4], [2, 1], 2).round(4).tolist()
    [0.8333, 0.5]
    """
    return 1.0 - pass_all_at_k(num_responses, np.subtract(num_responses, num_correct), k)


def pass_all_at_k(num_responses: ArrayLike, num_correct: ArrayLike, k: ArrayLike) -> Array:
    """Return an unbiased estimate of the probability that k responses are all correct, `C(c, k) / C(n, k)`. Shapes are
    as in `pass_at_k`. The estimate is also known as pass^k (Yao et al. 2024, arXiv:2406.12045).

    >>> pass_all_at_k([4, 4], [2, 4], 2).round(4).tolist()
    [0.1667, 1.0]
    """
    total, correct = np.asarray(num_responses, dtype=float), np.asarray(num_correct, dtype=float)
    drawn = np.broadcast_to(np.asarray(k, dtype=float), total.shape)
    if (drawn < 1).any() or (total < drawn).any():
        raise ValueError(f"k must be 1 to the number of responses, got {k!r} with {total.min():.0f} responses")
    if (correct < 0).any() or (correct > total).any():
        raise ValueError("the number of correct responses must be 0 to the number of responses")
    # a product of k ratios, which cannot overflow
    before = np.arange(drawn.max(initial=0))  # responses drawn before the response of this factor
    left = np.maximum(total[:, None] - before, 1.0)
    factors = np.where(before < drawn[:, None], np.clip(correct[:, None] - before, 0.0, None) / left, 1.0)
    return np.asarray(factors.prod(axis=1))


def majority(votes: Sequence[Hashable], values: Sequence[float]) -> float:
    """Return the mean value of the responses with the most frequent answer. On a tie, return the mean over the tied
    answers. `votes`: the answer of each response, at least one. `values`: the score of each response, or 1 for right
    and 0 for wrong.

    >>> majority(["7", "8", "7"], [1.0, 0.0, 1.0])
    1.0
    >>> majority(["7", "8"], [1.0, 0.0])
    0.5
    """
    groups: dict[Hashable, list[float]] = {}
    for vote, value in zip(votes, values, strict=True):
        groups.setdefault(vote, []).append(value)
    most = max(map(len, groups.values()))
    means = [sum(group) / len(group) for group in groups.values() if len(group) == most]
    return sum(means) / len(means)


def mean_intervals(values: ArrayLike, *, confidence: float = 0.95, num_resamples: int = 1_000) -> list[Interval]:
    """Return the mean over problems and a confidence interval for each of M statistics. `values`: [P, M]. If a
    statistic has only the values 0 and 1, its interval is Wilson's, because the bootstrap is too narrow for rare
    successes. Other intervals are those of `bootstrap_intervals`.
    """
    table = _table(values)
    found = bootstrap_intervals(table, confidence=confidence, num_resamples=num_resamples)
    return [
        wilson_interval(int(column.sum()), len(column), confidence=confidence)
        if ((column == 0) | (column == 1)).all()
        else interval
        for column, interval in zip(table.T, found, strict=True)
    ]


def wilson_interval(num_correct: int, num_problems: int, *, confidence: float = 0.95) -> Interval:
    """Return the share `num_correct / num_problems` and its score interval (Wilson 1927).

    >>> round(wilson_interval(0, 30).high, 3)
    0.114
    """
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    share, weight = num_correct / num_problems, z * z / num_problems
    center = (share + weight / 2.0) / (1.0 + weight)
    half = z * sqrt(share * (1.0 - share) / num_problems + weight / (4.0 * num_problems)) / (1.0 + weight)
    return Interval(share, min(share, max(0.0, center - half)), max(share, min(1.0, center + half)))


def bootstrap_intervals(values: ArrayLike, *, confidence: float = 0.95, num_resamples: int = 1_000) -> list[Interval]:
    """Return the mean over problems and a percentile-bootstrap interval (Efron 1979) for each of M statistics.
    `values`: [P, M]. Problems are resampled, not responses, because the responses to one problem are dependent."""
    table = _table(values)
    means = _resampled_means(table, num_resamples)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail], axis=0)
    return [Interval(*figures) for figures in np.column_stack([table.mean(axis=0), low, high]).tolist()]


def _table(values: ArrayLike) -> Array:
    table = np.asarray(values, dtype=float)
    if table.ndim != 2 or table.shape[0] == 0:
        raise ValueError(f"values must be [P, M] with at least one problem, got the shape {table.shape}")
    if not np.isfinite(table).all():
        raise ValueError("values must be finite")
    return table


def _resampled_means(table: Array, num_resamples: int) -> Array:
    num_problems, rng = table.shape[0], np.random.default_rng(0)
    at_a_time = max(1, _CHUNK_SIZE // num_problems)
    parts = []
    for start in range(0, num_resamples, at_a_time):
        size = min(at_a_time, num_resamples - start)
        drawn = rng.integers(num_problems, size=(size, num_problems))
        drawn += num_problems * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=size * num_problems).reshape(size, num_problems)
        parts.append(counts @ table / num_problems)
    return np.concatenate(parts)


def paired_difference(
    a: ArrayLike, b: ArrayLike, *, confidence: float = 0.95, num_resamples: int = 1_000
) -> PairedDifference:
    """Return the mean of `b - a` over the same problems, its bootstrap interval, and the numbers of wins and losses of
    `b`. `a` and `b` have the shape [P]. Pairing removes the effect of the problems' difficulty on the interval."""
    first, second = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if first.shape != second.shape:
        raise ValueError(f"a and b must be values of the same problems, got {first.shape} and {second.shape}")
    gain = second - first
    (interval,) = bootstrap_intervals(gain.reshape(-1, 1), confidence=confidence, num_resamples=num_resamples)
    return PairedDifference(interval, wins=int((gain > 0).sum()), losses=int((gain < 0).sum()))
