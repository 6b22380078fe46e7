"""Checks of a sweep's settings, and the runs of its points with the progress that is recorded in their folders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flows.parameters import RunSettings
from flows.stack.state import with_stack_tracking
from flows.work.checks import check_before_plan
from flows.work.open_run import committed_step, require_same_inputs
from rlcore.checkpoint.catalog import name_of
from rlcore.config import RunConfig
from rlcore.config.compose import compose
from rlcore.config.fingerprint import run_id
from rlcore.config.problems import Problem
from rlcore.config.sweep import Budget, Point, Sweep, load_sweep
from rlcore.errors import DataError, MillraceError
from rlcore.evaluation.result import ValidationResult, problem_statistics
from rlcore.run.layout import RunLayout
from rlcore.tracking.journal import read_journal


def load_checked_sweep(spec: str | Mapping[str, Any], overrides: list[str], budget: Budget) -> Sweep:
    """Compose a sweep, and check the settings of every point and their common requirements."""
    checked = load_sweep(spec, overrides, budget=budget)
    checked = replace(checked, base=with_stack_tracking(checked.base))
    check_before_plan(checked.base)
    return checked


@dataclass(slots=True)
class Member:
    """The training run of one point with one seed, its newest checkpoint and its latest score."""

    seed: int
    settings: RunSettings
    step: int = 0
    score: float | None = None
    error: str = ""

    @property
    def config(self) -> RunConfig:
        """The settings of the run."""
        return self.settings.config

    @property
    def run_id(self) -> str:
        """The name of the run's folder."""
        return run_id(self.config)

    def refresh(self, metric: str, step: int) -> bool:
        """Read the step and the score from the run's folder. Return whether the run has a score at `step`."""
        self.step = committed_step_or_zero(self.config)
        self.score = score_at(self.config, metric, step) if self.step >= step else None
        return self.score is not None

    def to_json(self) -> dict[str, Any]:
        """Return the run as it is stored in `sweep.json`."""
        run_dir = str(RunLayout.of(self.config).run_dir)
        return {"seed": self.seed, "run_id": self.run_id, "run_dir": run_dir, "step": self.step, "score": self.score,
                "error": self.error}  # fmt: skip


def members_of(sweep: Sweep, point: Point) -> tuple[list[Member], Sequence[Problem]]:
    """Return the runs of a point, one for each seed, and the errors in the point's settings."""
    overrides = [sweep.overrides_of(point, seed) for seed in sweep.spec.seeds]
    composed = [compose(texts, experiment=sweep.spec.experiment) for texts in overrides]
    members = [
        Member(seed, RunSettings(with_stack_tracking(each.config), tuple(texts), sweep.spec.experiment))
        for seed, texts, each in zip(sweep.spec.seeds, overrides, composed, strict=True)
    ]
    return members, composed[0].problems


def committed_step_or_zero(config: RunConfig) -> int:
    """Return the step of a run's newest checkpoint, or 0 after an error. The start of the run raises this error."""
    try:
        require_same_inputs(config, RunLayout.of(config))
        return committed_step(config)
    except (MillraceError, OSError):
        return 0


def score_at(config: RunConfig, metric: str, step: int) -> float | None:
    """Return a held-out metric at a step, read from the run's journal, or None if the metric is not recorded."""
    try:
        records = read_journal(RunLayout.of(config).journal)
    except (MillraceError, OSError):
        return None
    found = {
        name: value
        for record in records
        if record.step == step
        for name, value in record.metrics.items()
        if name.startswith("val-core/") and name.endswith(f"/{metric}") and not config.validation.is_of_suite(name)
    }
    over_all = f"val-core/all/{metric}"  # for held-out problems of several sources
    value = found[over_all] if over_all in found else next(iter(found.values()), None)
    return None if value is None else float(value)


def problem_scores_of(config: RunConfig, metric: str, step: int) -> dict[int, float]:
    """Return a metric of each held-out problem by the problem's id, or {} if the responses are not stored."""
    file: Path = RunLayout.of(config).validation / f"{name_of(step)}.json"
    try:
        result = ValidationResult.read(file).scored_only
    except DataError:
        return {}
    ids = [problem.prompt_id for problem in result.problems]
    return dict(zip(ids, map(float, problem_statistics(result.problems)[metric]), strict=True))
