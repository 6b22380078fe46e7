"""Curves."""

import numpy as np
import pytest

from rlcore.report.series import series_of, smooth, thin, window_of


def test_smoothing_is_a_centred_mean():
    values = np.random.default_rng(0).random(100)
    series = series_of(enumerate(values))
    assert window_of(series) == 7  # 100 // 15 = 6, and the step itself
    naive = [values[max(0, i - 3) : i + 4].mean() for i in range(100)]
    assert smooth(series).tolist() == pytest.approx(naive)
    assert smooth(series_of([(1, 2.0), (2, 4.0)])).tolist() == [3.0, 3.0]


def test_thinning_keeps_the_mean():
    values = np.random.default_rng(0).random(1_000)
    points = thin(series_of(enumerate(values)), 100)
    assert points.index.tolist() == [10 * place + 4 for place in range(100)]
    assert points.tolist() == pytest.approx(values.reshape(100, 10).mean(axis=1))
    assert len(thin(series_of(enumerate(values[:950])), 400)) == 400


def test_series_are_in_order_of_steps():
    series = series_of([(2, 5.0), (1, 3.0)])
    assert (series.tolist(), series.index.tolist()) == ([3.0, 5.0], [1, 2])
    assert series_of([]) is None
