"""What a call of a sweep may spend, by each of its three measures."""

import pytest

from flows.sweep.drive import Spending
from rlcore.config.sweep import Budget


@pytest.mark.parametrize(
    ("budget", "begun", "told"),
    [
        (Budget(), [True, True, True, True], ""),
        (Budget(runs=2), [True, True, True, False], "2 runs"),  # the second run is begun twice: at two comparisons
        (Budget(steps=25), [True, True, False, False], "25 steps"),
        (Budget(runs=1, steps=100), [True, False, False, False], "1 runs"),
        (Budget(hours=1e-12), [False, False, False, False], "1e-12 hours"),
        (Budget(hours=1000), [True, True, True, True], ""),
    ],
)
def test_what_is_used_up_first_ends_it(budget: Budget, begun: list[bool], told: str) -> None:
    spending = Spending(budget)
    assert [spending.begin(run, 10) for run in ("one", "two", "two", "three")] == begun
    assert spending.ended_by == told
    assert spending.num_steps == 10 * sum(begun)
