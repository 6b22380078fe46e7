"""What a held-out score cost: the step, tokens and seconds at which it was first reached."""

import math
from dataclasses import dataclass

import numpy as np

from rlcore.report.record import RunRecord
from rlcore.report.series import Series

LEVEL_STEP = 0.1
"""Costs are told for every tenth of a point between the first validation and the best."""

ROUNDING = 1e-9
"""A mean of scores may lie so far beside the tenth that it is."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The first validation at or above a level. `tokens` and `seconds` are None where they were not measured."""

    level: float
    step: int
    tokens: float | None
    seconds: float | None


def levels_of(*records: RunRecord) -> tuple[float, ...]:
    """Multiples of 0.1 above the lowest first validation, up to the highest one of all runs."""
    curves = [found for record in records if (found := record.held_out(record.reward_statistic))]
    if not curves:
        return ()
    first = min(curve[0][1].value for curve in curves)
    best = max(interval.value for curve in curves for _, interval in curve)
    low, high = (math.floor(value / LEVEL_STEP + ROUNDING) for value in (first, best))
    return tuple(round(tenth * LEVEL_STEP, 10) for tenth in range(low + 1, high + 1))


def cost_of(record: RunRecord, level: float) -> Cost | None:
    """What this run paid for a level of the held-out reward; None if it never reached it."""
    for step, interval in record.held_out(record.reward_statistic):
        if interval.value >= level - ROUNDING:
            return Cost(level, step, total_at(record.tokens, step), total_at(record.seconds, step))
    return None


def total_at(totals: Series | None, step: int) -> float | None:
    """A running total after a step; 0 before the first one."""
    if totals is None:
        return None
    index = int(np.searchsorted(totals.steps, step, side="right")) - 1
    return float(totals.values[index]) if index >= 0 else 0.0
