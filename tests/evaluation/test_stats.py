"""Statistics against brute force, naive twins and simulation."""

import itertools
import math
import random
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.evaluation.stats import (
    Interval,
    bootstrap_intervals,
    majority,
    mean_intervals,
    paired_difference,
    pass_all_at_k,
    pass_at_k,
    wilson_interval,
)

COUNTS = st.integers(1, 8).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))  # n answers, c right, k drawn
)


def interval_of(values, **more):
    return bootstrap_intervals(values.reshape(-1, 1), **more)[0]


@given(st.lists(COUNTS, min_size=1, max_size=3))
def test_pass_at_k_is_share_of_subsets(counts):
    """Draw k of n responses in every way."""
    sets = [list(itertools.combinations([index < c for index in range(n)], k)) for n, c, k in counts]
    for found, test in ((pass_at_k, any), (pass_all_at_k, all)):
        shares = [sum(map(test, drawn)) / len(drawn) for drawn in sets]
        assert found(*zip(*counts, strict=True)) == pytest.approx(shares, abs=1e-12)


def test_pass_at_k_of_large_counts():
    found = pass_at_k([100_000], [1], 50_000)[0]
    assert found == pytest.approx(0.5, abs=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(2, 1, 3), (2, 1, 0), (2, 3, 1), (2, -1, 1)])
def test_pass_at_k_rejects_impossible_counts(n, c, k):
    with pytest.raises(ValueError, match="responses"):
        pass_at_k([n], [c], k)


@pytest.mark.parametrize(("votes", "values", "expected"), [
    (["a", "a", "b"], [1.0, 1.0, 0.0], 1.0),
    (["a", "b", "b"], [1.0, 0.0, 0.0], 0.0),
    (["a", "b", "c"], [1.0, 0.0, 0.0], 1 / 3),
    (["a", "a", "b", "b", "c"], [0.0, 1.0, 0.0, 0.0, 1.0], 1 / 4),
])  # fmt: skip
def test_majority_is_expectation_over_ties(votes, values, expected):
    assert majority(votes, values) == pytest.approx(expected)


def naive_bootstrap(values: list[float], confidence: float, num_resamples: int) -> tuple[float, float]:
    """Draw problems one by one, in plain Python."""
    rng = random.Random(1)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(num_resamples))
    tail = (1 - confidence) / 2
    return means[round(tail * (num_resamples - 1))], means[round((1 - tail) * (num_resamples - 1))]


def test_bootstrap_agrees_with_naive_twin():
    values = np.random.default_rng(3).random(40).round(2)
    low, high = naive_bootstrap(values.tolist(), 0.9, 4_000)
    found = interval_of(values, confidence=0.9, num_resamples=4_000)
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.01)


def test_bootstrap_does_not_depend_on_chunk_size(monkeypatch):
    one = np.random.default_rng(3).random(40)
    values = np.stack([one, 1 - one], axis=1)
    whole = bootstrap_intervals(values)
    assert (whole[0].low, whole[0].high) == pytest.approx((1 - whole[1].high, 1 - whole[1].low)), "same resamples"
    monkeypatch.setattr("rlcore.evaluation.stats._CHUNK_SIZE", 400)
    assert bootstrap_intervals(values) == whole


def coverage(truth: float, samples: list[np.ndarray], confidence: float) -> float:
    """Return the share of simulated validations (columns of each [P, M]) whose interval contains the true value."""
    found = [interval for values in samples for interval in bootstrap_intervals(values, confidence=confidence)]
    return sum(interval.low <= truth <= interval.high for interval in found) / len(found)


def test_bootstrap_coverage():
    """2,400 validations of 120 problems whose chances follow a Beta distribution of mean 0.3, with 4 responses each."""
    rng = np.random.default_rng(11)
    samples = [rng.binomial(4, rng.beta(0.9, 2.1, (120, 60))) / 4 for _ in range(40)]
    assert 0.93 <= coverage(0.3, samples, 0.95) <= 0.97
    assert 0.77 <= coverage(0.3, samples, 0.80) <= 0.83


def test_paired_interval_coverage():
    rng = np.random.default_rng(12)
    samples = []
    for _ in range(40):
        chances = rng.beta(0.9, 2.1, (120, 60)) * 0.9
        samples.append(rng.binomial(4, chances + 0.1) / 4 - rng.binomial(4, chances) / 4)
    assert 0.93 <= coverage(0.1, samples, 0.95) <= 0.97
    one = samples[0][:, 0]
    assert paired_difference(np.zeros(120), one).difference == interval_of(one)


def naive_wilson(num_right: int, num_problems: int, z: float) -> tuple[float, float]:
    """Return the lowest and the highest chance that the score test accepts, by bisection from the share."""

    def is_kept(chance: float) -> bool:
        return abs(num_right / num_problems - chance) <= z * (chance * (1 - chance) / num_problems) ** 0.5

    ends = []
    for end in (0.0, 1.0):
        kept, rejected = num_right / num_problems, end
        for _ in range(60):
            middle = (kept + rejected) / 2
            kept, rejected = (middle, rejected) if is_kept(middle) else (kept, middle)
        ends.append(kept)
    return ends[0], ends[1]


@pytest.mark.parametrize(("confidence", "z"), [(0.95, 1.959964), (0.8, 1.281552)])
@pytest.mark.parametrize(("num_right", "num_problems"), [(0, 64), (1, 64), (3, 7), (32, 64), (64, 64), (1, 1)])
def test_wilson_agrees_with_naive_twin(num_right, num_problems, confidence, z):
    found = wilson_interval(num_right, num_problems, confidence=confidence)
    assert (found.low, found.high) == pytest.approx(naive_wilson(num_right, num_problems, z), abs=1e-6)
    assert found.value == num_right / num_problems


def exact_coverage(chance: float, num_problems: int, intervals: Sequence[Interval]) -> float:
    """Return the probability that the interval contains `chance`. `intervals`: by number of correct responses."""
    return sum(
        math.comb(num_problems, right) * chance**right * (1 - chance) ** (num_problems - right)
        for right, interval in enumerate(intervals)
        if interval.low <= chance <= interval.high
    )


@pytest.mark.parametrize("chance", [0.01, 0.05, 0.5, 0.95])
def test_share_interval_coverage(chance):
    outcomes = [np.repeat([1.0, 0.0], [right, 64 - right]).reshape(-1, 1) for right in range(65)]
    assert 0.92 <= exact_coverage(chance, 64, [mean_intervals(values)[0] for values in outcomes]) <= 0.99
    if chance == 0.01:
        assert exact_coverage(chance, 64, [bootstrap_intervals(values)[0] for values in outcomes]) < 0.5


def test_mean_intervals_choose_method():
    rng = np.random.default_rng(8)
    table = np.stack([rng.random(50) < 0.1, rng.binomial(4, 0.3, 50) / 4, np.zeros(50)], axis=1)
    first, second, third = mean_intervals(table, confidence=0.9)
    assert first == wilson_interval(int(table[:, 0].sum()), 50, confidence=0.9)
    assert second == bootstrap_intervals(table, confidence=0.9)[1]
    assert (third.low, third.high > 0.04) == (0.0, True)
    one = np.zeros(100)
    one[3] = 1.0
    assert not paired_difference(np.zeros(100), one).difference.excludes_zero, "one win of 100 is no difference"


def test_paired_difference_is_narrower():
    rng = np.random.default_rng(5)
    before = rng.beta(0.5, 0.5, 200)  # problems differ a lot, the gain hardly does
    after = before + rng.normal(0.02, 0.01, 200)
    after[:3] = before[:3]
    found = paired_difference(before, after)
    assert found.wins == sum(b > a for a, b in zip(before, after, strict=True))
    assert found.wins + found.losses == 197
    assert found.difference.value == pytest.approx(after.mean() - before.mean())
    assert found.difference.excludes_zero
    alone = interval_of(before)
    assert found.difference.high - found.difference.low < 0.1 * (alone.high - alone.low)


@pytest.mark.parametrize("values", [np.empty((0, 1)), np.ones(3), np.array([[np.nan]])])
def test_bootstrap_rejects_values_without_mean(values):
    with pytest.raises(ValueError, match=r"values must"):
        bootstrap_intervals(values)


def test_paired_difference_rejects_other_shapes():
    with pytest.raises(ValueError, match="same problems"):
        paired_difference([1.0], [1.0, 2.0])
