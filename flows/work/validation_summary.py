"""The figures of a validation, and how people read them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flows.progress import HEADLINE_METRIC, skipped_suffix

CI_SUFFIXES = ("/ci_low", "/ci_high")


@dataclass(frozen=True, slots=True)
class ValidationSummary:
    """One validation: its figures, and the file that holds every answer."""

    name: str
    step: int
    file: Path
    cached: bool
    summary: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.headline()}{skipped_suffix(self.cached)}"

    def headline(self) -> str:
        """The validation's main figures with their intervals."""
        shown = [name for name in self.summary if HEADLINE_METRIC.search(name) and f"{name}/ci_low" in self.summary]
        several = len({_source_of(name) for name in shown}) > 1
        labels = {name: f"{_source_of(name)} " if several else "" for name in shown}
        parts = (f"{labels[name]}{name.rpartition('/')[2]} {with_interval(self.summary, name)}" for name in shown)
        return f"{self.name} (step {self.step}): {', '.join(parts)}"


def with_interval(summary: Mapping[str, float], figure: str) -> str:
    """A figure of a validation with its confidence interval, if it has one; '' where the validation has no such figure.

    >>> with_interval({"a": 0.5, "a/ci_low": 0.41, "a/ci_high": 0.59}, "a")
    '0.500 [0.410, 0.590]'
    """
    if figure not in summary:
        return ""
    low, high = (summary.get(f"{figure}{end}") for end in CI_SUFFIXES)
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{summary[figure]:.3f}{interval}"


def _source_of(name: str) -> str:
    """The data source in a held-out metric's name.

    >>> _source_of("val-core/openai/gsm8k/reward/mean@4")
    'openai/gsm8k'
    """
    return name.partition("/")[2].rpartition("/reward/")[0]
