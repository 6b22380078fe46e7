"""Runs in memory with planted curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlcore.config import RunConfig
from rlcore.evaluation.result import ValidationResult
from rlcore.report.record import RunRecord
from rlcore.tracking.journal import StepRecord


def record_of(
    curves: Mapping[str, Sequence[float]],
    *,
    validations: Mapping[str, ValidationResult] | None = None,
    config: RunConfig | None = None,
    nonfinite: Mapping[int, tuple[str, ...]] | None = None,
) -> RunRecord:
    """Step 1 is the first value of each curve."""
    length = max((len(values) for values in curves.values()), default=0)
    steps = tuple(
        StepRecord(
            step,
            1_000.0 + step,
            {name: float(values[step - 1]) for name, values in curves.items() if step <= len(values)},
            (nonfinite or {}).get(step, ()),
        )
        for step in range(1, length + 1)
    )
    return RunRecord(Path("planted"), config or RunConfig(), steps, (), validations or {}, None, (), ())
