"""How a model did on held-out problems: results as they are kept, and their statistics with intervals. No torch."""

from rlcore.evaluation.result import (
    Answer,
    Comparison,
    ProblemResult,
    ValidationResult,
    compare,
    core_name,
    pass_curve,
    per_problem,
    vote,
)
from rlcore.evaluation.stats import (
    Interval,
    PairedDifference,
    bootstrap_interval,
    bootstrap_intervals,
    majority,
    paired_difference,
    pass_all_at_k,
    pass_at_k,
)

__all__ = [
    "Answer",
    "Comparison",
    "Interval",
    "PairedDifference",
    "ProblemResult",
    "ValidationResult",
    "bootstrap_interval",
    "bootstrap_intervals",
    "compare",
    "core_name",
    "majority",
    "paired_difference",
    "pass_all_at_k",
    "pass_at_k",
    "pass_curve",
    "per_problem",
    "vote",
]
