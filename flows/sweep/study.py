"""The Optuna study of a sweep. Each point of the sweep (a combination of settings) is a trial of the study.

The study orders and prunes the points, and stores their scores and runs. It is stored as a journal in the sweep's
folder, so that several processes can share it. A failed or interrupted trial is queued again.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState
from pydantic import JsonValue

from flows.parameters import RunSettings
from flows.stack.state import with_stack_tracking
from flows.work.checks import check_before_plan
from flows.work.open_run import committed_step, require_same_inputs
from rlcore.checkpoint.catalog import name_of
from rlcore.config import RunConfig
from rlcore.config.compose import compose
from rlcore.config.fingerprint import run_id
from rlcore.config.problems import Problem
from rlcore.config.sweep import Budget, Point, Range, Sweep, Values, load_sweep
from rlcore.errors import DataError, MillraceError
from rlcore.evaluation.result import ValidationResult, problem_statistics
from rlcore.evaluation.stats import paired_difference
from rlcore.run.layout import RunLayout
from rlcore.storage.locks import FileLock, HeldLock
from rlcore.tracking.journal import read_journal

STUDY_FILE = "optuna.log"
POINT, SETTINGS, RUNS, ERROR = "point", "settings", "runs", "error"
"""The names of a trial's attributes. A trial lacks `settings` if its process was killed before it stored them."""
SEED_STRIDE = 100_003  # distance between the sampler seeds of two search seeds; each point has its own
LOCK_WAIT_S = 600.0  # seconds to wait for another process of the same sweep, which holds the lock for seconds at most


class PairedPruner(BasePruner):
    """A pruner that ends a trial if the best trial beats it on the same held-out problems.

    Whenever a trial has a new score, it is compared with the best trial at the same step. The trial ends if the best
    trial has a better mean score and the interval of the paired difference (see `paired_difference`) excludes 0.

    Let k be the number of the trial's scores, and n the number of trials that have a score. A trial among the best
    n / (k + 1) trials (rounded up) always continues, because early scores are less reliable. A trial also continues if
    it has no problem in common with the best trial.
    """

    def __init__(self, confidence: float) -> None:
        self._confidence = confidence

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Return whether the trial must end at the last step for which it has a score."""
        step = trial.last_step
        if step is None:
            return False
        sign = 1.0 if study.direction == optuna.study.StudyDirection.MAXIMIZE else -1.0
        begun = [one for one in points_of(study).values() if one.intermediate_values]
        there = [one for one in begun if step in one.intermediate_values]
        there.sort(key=lambda one: (-sign * one.intermediate_values[step], one.number))
        num_safe = math.ceil(len(begun) / (1 + len(trial.intermediate_values)))
        if trial.number in {one.number for one in there[:num_safe]}:
            return False
        ours, theirs = (one.user_attrs.get(problem_scores_key(step), {}) for one in (trial, there[0]))
        shared = sorted(ours.keys() & theirs.keys())
        if not shared:
            return False
        of_trial, of_best = (sign * np.array([scores[problem] for problem in shared]) for scores in (ours, theirs))
        return paired_difference(of_trial, of_best, confidence=self._confidence).difference.low > 0.0


def problem_scores_key(step: int) -> str:
    """Return the name of the trial attribute that has the score of each problem at a step."""
    return f"problems at {step}"


def points_of(study: optuna.Study) -> dict[int, FrozenTrial]:
    """Return the newest trial of each point. The keys are the numbers of the points."""
    trials = [one for one in study.get_trials(deepcopy=False) if SETTINGS in one.user_attrs]
    found = {one.user_attrs[POINT]: one for one in trials}
    return dict(sorted(found.items()))


class SweepStudy:
    """The Optuna study of a sweep, and the locks on the points that this process trains."""

    def __init__(self, sweep: Sweep) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.sweep = sweep
        self._claims: dict[int, FileLock] = {}
        (sweep.folder / "claims").mkdir(parents=True, exist_ok=True)
        pruning = sweep.spec.pruning
        with sweep_lock(sweep):
            self.optuna = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(sweep.folder / STUDY_FILE))),
                study_name="points",
                load_if_exists=True,
                direction=sweep.spec.objective.direction,
                pruner=NopPruner() if pruning is None else PairedPruner(pruning.confidence),
            )

    def points(self) -> dict[int, FrozenTrial]:
        """Return the newest trial of each point. The keys are the numbers of the points."""
        return points_of(self.optuna)

    def num_left(self) -> int:
        """Return the number of points that have not ended. It includes points that the search has not drawn yet."""
        ended = [one for one in self.points().values() if one.state.is_finished()]
        return max(0, self.sweep.num_points - len(ended))

    def retry_failed(self) -> None:
        """Queue the failed points again."""
        with sweep_lock(self.sweep):
            for trial in self.points().values():
                if trial.state == TrialState.FAIL:
                    self._requeue(trial)

    def ask(self) -> Trial | None:
        """Reserve the next point for this process. Return None if every point has ended or is reserved."""
        search = self.sweep.spec.optuna
        with sweep_lock(self.sweep):
            self._requeue_lost()
            points = self.points()
            if not any(one.state == TrialState.WAITING for one in points.values()):
                number = len(points) + 1
                if number > self.sweep.num_points:
                    return None
                if search is None:
                    settings = dict(self.sweep.points[number - 1])
                    self.optuna.enqueue_trial({}, {POINT: number, SETTINGS: settings})
                else:
                    seed = search.seed * SEED_STRIDE + number - 1
                    self.optuna.sampler = TPESampler(n_startup_trials=search.startup_points, seed=seed)
            trial = self.optuna.ask()
            self._claims[trial.number] = self._claim(trial.number)
            self._claims[trial.number].try_acquire()
            if search is not None:  # a queued trial returns the values of its first attempt
                settings = {key: _suggest(trial, key, values) for key, values in search.space.items()}
                trial.set_user_attr(POINT, trial.user_attrs.get(POINT, len(points) + 1))
                trial.set_user_attr(SETTINGS, settings)
        return trial

    def release(self, trial: Trial) -> None:
        """End this process's reservation of a point. If the point has not ended, another process may continue it."""
        self._claims.pop(trial.number).release()

    def _claim(self, number: int) -> FileLock:
        return FileLock(self.sweep.folder / "claims" / f"{number}.lock")

    def _requeue_lost(self) -> None:
        for trial in self.optuna.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            claim = self._claim(trial.number)
            if claim.try_acquire():
                self.optuna.tell(trial.number, state=TrialState.FAIL)
                claim.release()
                if SETTINGS in trial.user_attrs:
                    self._requeue(trial)

    def _requeue(self, trial: FrozenTrial) -> None:
        self.optuna.enqueue_trial(trial.params, {name: trial.user_attrs[name] for name in (POINT, SETTINGS)})


class BudgetTracker:
    """The runs, steps and hours that one call of a sweep has used. They are stored in the study for all processes."""

    def __init__(self, study: SweepStudy, call: str) -> None:
        self.call = call
        self._study = study.optuna
        self._sweep = study.sweep
        self._name = f"spent by {call}"
        if self._name not in self._study.user_attrs:
            budget = self._sweep.spec.budget.model_dump()
            self._write({"budget": budget, "begun": time.time(), "runs": [], "steps": 0, "ended_by": ""})

    def read(self) -> dict[str, Any]:
        """Return the used budget. `runs` has the ids of the started runs, and `steps` is the number of reserved steps.

        `ended_by` is the limit that is used up, such as `10 runs`, or ''.
        """
        found: dict[str, Any] = self._study.user_attrs[self._name]
        return found

    def reserve(self, run_id: str, steps: int) -> bool:
        """Reserve steps of the budget for a run. Return False if the budget does not allow them."""
        with sweep_lock(self._sweep):
            known = self.read()
            new = known | {"runs": sorted({*known["runs"], run_id}), "steps": known["steps"] + steps}
            spent = {"runs": len(new["runs"]), "steps": new["steps"], "hours": (time.time() - known["begun"]) / 3600}
            over = [unit for unit, most in known["budget"].items() if most is not None and spent[unit] > most]
            if over:
                text = f"{str(known['budget'][over[0]]).removesuffix('.0')} {over[0]}"
                new = known | {"ended_by": known["ended_by"] or text}
            self._write(new)
            return not over

    def estimate_s(self, steps: int, unfinished: int = 0) -> float | None:
        """Return the seconds that `steps` steps take at the mean speed so far, or None before the first step.

        `unfinished` is the number of reserved steps that are not trained yet.
        """
        known = self.read()
        done = known["steps"] - unfinished
        return (time.time() - known["begun"]) / done * steps if done > 0 else None

    def refund(self, steps: int) -> None:
        """Release the reserved steps that a run has not done."""
        with sweep_lock(self._sweep):
            known = self.read()
            self._write(known | {"steps": known["steps"] - steps})

    def _write(self, content: Mapping[str, Any]) -> None:
        self._study.set_user_attr(self._name, dict(content))


def sweep_lock(sweep: Sweep) -> HeldLock:
    """Return the lock that a process holds while it reserves a point or writes results."""
    return HeldLock(sweep.folder / "sweep.lock", what=f"sweep {sweep.sweep_id}", wait_s=LOCK_WAIT_S)


def _suggest(trial: Trial, key: str, values: Values) -> JsonValue:
    if not isinstance(values, Range):
        # The choices are JSON texts, since Optuna accepts no lists and mappings.
        chosen: JsonValue = json.loads(trial.suggest_categorical(key, [json.dumps(value) for value in values]))
        return chosen
    if values.is_whole:
        step = 1 if values.step is None else int(values.step)
        return trial.suggest_int(key, int(values.low), int(values.high), step=step, log=values.log)
    drawn = trial.suggest_float(key, values.low, values.high, step=values.step, log=values.log)
    # Four significant digits, which are also shown.
    return min(max(float(f"{drawn:.4g}"), values.low), values.high)


def load_checked_sweep(spec: str | Mapping[str, Any], overrides: list[str], budget: Budget) -> Sweep:
    """Compose a sweep and check the settings of its points.

    The custom functions, models and folders, which all points share, are checked once.
    """
    checked = load_sweep(spec, overrides, budget=budget)
    checked = replace(checked, base=with_stack_tracking(checked.base))
    check_before_plan(checked.base)
    return checked


@dataclass(slots=True)
class Member:
    """The training run of one point with one seed. `step` is the step of its newest checkpoint."""

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
        """Read the newest checkpoint's step and the score at `step` from disk. Return whether this score exists."""
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
    """Return the step of a run's newest checkpoint, or 0 if there is none or an error occurs.

    The error is ignored here, because the start of the run raises it again.
    """
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
    """Return a metric for each held-out problem. The keys are the ids of the problems.

    The result is {} if the responses are not stored.
    """
    file: Path = RunLayout.of(config).validation / f"{name_of(step)}.json"
    try:
        result = ValidationResult.read(file).scored_only
    except DataError:
        return {}
    ids = [problem.prompt_id for problem in result.problems]
    return dict(zip(ids, map(float, problem_statistics(result.problems)[metric]), strict=True))
