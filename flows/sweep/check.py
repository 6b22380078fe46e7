"""Checks of a sweep before its first run."""

from dataclasses import replace

from flows.plan.checks import check_before_plan
from flows.stack.state import in_stack
from rlcore.config.sweep import Budget
from rlcore.config.sweep_load import Sweep, load_sweep


def checked_sweep(spec: str, overrides: list[str], budget: Budget) -> Sweep:
    """Compose and check a sweep: every point's settings, and what all points need.

    Raises:
        ConfigError, DataError: one message with every mistake.
    """
    checked = load_sweep(spec, overrides, budget=budget)
    checked = replace(checked, base=in_stack(checked.base))
    check_before_plan(checked.base)
    if checked.spec.pruning is not None and checked.spec.pruning.pruner != "paired":
        from flows.sweep.study import pruner_of  # Optuna, only where its own pruners are asked for

        pruner_of(checked.spec.pruning, lambda number, point, step: {})
    return checked
