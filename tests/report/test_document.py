"""Short numbers."""

import pytest

from rlcore.report import document


@pytest.mark.parametrize(
    ("value", "text"),
    [(float("nan"), "–"), (float("inf"), "∞"), (-0.00012345, "-1.23e-4"), (0.05, "0.05"), (9999.5, "10,000"),
     (1e20, "100,000,000,000,000,000,000"), (None, "–")],
)  # fmt: skip
def test_compact(value, text):
    assert document.compact(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(59.7, "60 s"), (3_599.8, "60 min"), (86_399.0, "24 h"), (float("nan"), "–")]
)
def test_durations_round_to_next_unit(seconds, text):
    assert document.duration(seconds) == text


def test_unknown_share_is_a_dash():
    assert document.percent(float("nan")) == document.fixed(float("nan")) == "–"
