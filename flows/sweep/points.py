"""Checks, plan and start of a sweep, and the runs of its points with the progress that their folders record."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from flows.commands.settings import print_warnings, require_dry_run
from flows.parameters import RunSettings
from flows.plan.checks import check_before_plan
from flows.server.api import command_flow, start_prefect
from flows.stack.state import with_stack_tracking
from flows.work.origin import committed_step, require_same_inputs
from rlcore.checkpoint.catalog import name_of
from rlcore.config import RunConfig
from rlcore.config.compose import compose
from rlcore.config.fingerprint import fingerprint, run_id
from rlcore.config.problems import Problem
from rlcore.config.sweep import Budget, Point, Sweep, format_point, load_sweep
from rlcore.errors import DataError, MillraceError
from rlcore.evaluation.result import ValidationResult, problem_statistics
from rlcore.run.layout import RunLayout
from rlcore.storage.publish import write_text_atomically
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


def start_sweep(
    spec: str | Mapping[str, Any],
    overrides: list[str],
    budget: Budget,
    *,
    dry_run: bool,
    as_json: bool,
    verbose: bool,
    on_workers: bool = False,
) -> None:
    """Run a sweep, or show its plan. The content of a sweep without a file is written below the root before the run.

    The exit code is 1 if a point has failed.
    """
    require_dry_run(as_json=as_json, dry_run=dry_run)
    checked = load_checked_sweep(spec, overrides, budget)
    print_warnings(checked.unused_settings())
    if dry_run:
        _show(checked, as_json=as_json)
        return
    root = Path(checked.base.paths.root)
    if not isinstance(spec, str):
        (root / "multirun").mkdir(parents=True, exist_ok=True)
        file = root / "multirun" / f"{spec['name']}-{fingerprint('multirun', spec)[:8]}.yaml"
        write_text_atomically(file, f"# millrace sweep {file}\n{yaml.safe_dump(spec, sort_keys=False)}")
        spec = str(file)
    api = start_prefect(root, verbose=verbose)
    from flows.sweep.flow import run_checked  # imports Prefect while the server starts

    with command_flow(api, verbose=verbose):
        result = run_checked(checked, spec, overrides, on_workers=on_workers)
    if result.failed:
        sys.exit(1)


def _show(sweep: "Sweep", *, as_json: bool) -> None:
    """Print the runs of a sweep and their progress, as text or as JSON."""
    runs = []
    for number, point in enumerate(sweep.points, 1):
        for member in members_of(sweep, point)[0]:
            total = member.config.trainer.total_steps
            done = member.refresh(sweep.metric_of(member.config), total)
            runs.append({"point": number, "settings": format_point(point), "seed": member.seed, "run_id": member.run_id,
                         "step": member.step, "total_steps": total, "done": done})  # fmt: skip
    rungs = sweep.rungs(sweep.base)
    if as_json:
        plan = {"sweep_id": sweep.sweep_id, "folder": str(sweep.folder), "rungs": list(rungs), "runs": runs}
        print(json.dumps(plan, indent=2))
        return
    print(f"sweep {sweep.sweep_id} in {sweep.folder}")
    drawn = "" if sweep.spec.optuna is None else " drawn by Optuna"
    steps = ", ".join(map(str, rungs))
    print(f"{sweep.num_points} points{drawn}, {len(sweep.spec.seeds)} seed(s) each; compared at step {steps}")
    for run in runs:
        state = "done" if run["done"] else f"step {run['step']} of {run['total_steps']}"
        print(f"  {run['point']:>4}  {run['settings']}  seed={run['seed']}  {run['run_id']}  {state}")
