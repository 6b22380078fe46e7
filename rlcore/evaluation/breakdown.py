"""Figures by number of answers and by difficulty, and the comparison of two validations on the same problems."""

from dataclasses import dataclass, replace

import numpy as np

from rlcore.errors import DataError
from rlcore.evaluation.result import ValidationResult, per_problem
from rlcore.evaluation.stats import Interval, PairedDifference, paired_difference, pass_at_k


@dataclass(frozen=True, slots=True)
class DifficultyRow:
    """Held-out problems of one difficulty. `greedy` is None where no greedy answers were taken."""

    difficulty: int
    num_problems: int
    reward: Interval
    pass_at_k: Interval
    greedy: Interval | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One statistic of two validations on the problems that both have; differences are `second - first`."""

    statistic: str
    num_problems: int
    first: Interval
    second: Interval
    paired: PairedDifference


def pass_curve(result: ValidationResult) -> dict[int, Interval]:
    """pass@k for k = 1, 2, 4, ... and all samples, each with its interval."""
    result = result.with_figures
    num_samples = result.num_samples
    if not num_samples:
        return {}
    ks = sorted({*(2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples), num_samples})
    right = [problem.num_solved for problem in result.problems]
    answers = [len(problem.scored) for problem in result.problems]
    found = result.intervals_of({str(k): pass_at_k(answers, right, np.minimum(k, answers)) for k in ks})
    return {int(k): interval for k, interval in found.items()}


def by_difficulty(result: ValidationResult) -> tuple[DifficultyRow, ...]:
    """Reward, pass@k and greedy score at each difficulty, easiest first."""
    result = result.with_figures
    values, k = per_problem(result.problems), result.num_samples
    if not values:
        return ()
    difficulties = np.array([problem.difficulty for problem in result.problems])
    rows = []
    for difficulty in sorted(set(difficulties.tolist())):
        chosen = difficulties == difficulty
        names = (f"reward/mean@{k}", f"reward/pass@{k}", "reward/greedy")
        found = result.intervals_of({name: values[name][chosen] for name in names if name in values})
        sampled = found.get(f"reward/mean@{k}") or found["reward/greedy"]
        solved = found.get(f"reward/pass@{k}") or found["reward/greedy"]
        rows.append(DifficultyRow(difficulty, int(chosen.sum()), sampled, solved, found.get("reward/greedy")))
    return tuple(rows)


def compare(first: ValidationResult, second: ValidationResult) -> tuple[Comparison, ...]:
    """Every statistic that both validations have, paired over the problems that both have.

    Raises:
        DataError: they share no problem, or a problem of the same id asks for something else.
    """
    first, second = _common(first, second)
    first_values, second_values = per_problem(first.problems), per_problem(second.problems)
    confidence, num_resamples = second.settings.confidence, second.settings.num_resamples
    found = []
    for name in (name for name in first_values if name in second_values):
        values = first_values[name], second_values[name]
        paired = paired_difference(*values, confidence=confidence, num_resamples=num_resamples)
        found.append(Comparison(name, len(first.problems), first.intervals[name], second.intervals[name], paired))
    return tuple(found)


def _common(first: ValidationResult, second: ValidationResult) -> tuple[ValidationResult, ValidationResult]:
    """Both results over the problems that both have, in the same order."""
    first, second = first.with_figures, second.with_figures
    known = {problem.prompt_id: problem for problem in second.problems}
    pairs = [(problem, known[problem.prompt_id]) for problem in first.problems if problem.prompt_id in known]
    if not pairs:
        raise DataError(f"validations {first.name} and {second.name}: share no problem, so nothing can be paired")
    for one, other in pairs:
        if one.ground_truth_json != other.ground_truth_json or first.data_source != second.data_source:
            raise DataError(
                f"validations {first.name} and {second.name}: problem {one.prompt_id} is not the same in both; "
                "compare validations of the same dataset"
            )
    return (
        replace(first, problems=tuple(one for one, _ in pairs)),
        replace(second, problems=tuple(other for _, other in pairs)),
    )
