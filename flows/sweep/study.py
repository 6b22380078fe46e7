"""Points of a sweep as an Optuna study: their order, scores and pruning.

Several processes may share the study, a journal in the sweep's folder. A point is a trial; a failed or interrupted one
is a failed trial, and queued again with the same settings.
"""

import json
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import optuna
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState
from pydantic import JsonValue

from rlcore.config.problems import Problem, format_value, settings_error
from rlcore.config.sweep import OptunaSearch, Pruning, RandomSearch, Range, Sweep, Values
from rlcore.evaluation.stats import paired_difference
from rlcore.storage.locks import FileLock, HeldLock

STUDY_FILE = "optuna.log"
POINT, SETTINGS, RUNS, ERROR = "point", "settings", "runs", "error"
"""Attributes of a trial: number of the point from 1 on, its settings, its runs (`Member.to_json`), its error.

A trial without settings is not a point: its process was killed while creating it.
"""
SEED_STRIDE = 100_003
"""Distance of the seeds of two searches. Each point has a separate sampler, so a resumed sweep draws equal points."""
LOCK_WAIT_S = 600.0  # seconds to wait for another process of the same sweep, which holds the lock for seconds at most


class PairedPruner(BasePruner):
    """Pruner of trials that the best one beats on the same held-out problems, while enough are left.

    A trial is beaten where the interval of the paired difference (`paired_difference`) excludes 0. Of n trials that
    have
    begun, the best n / (k + 1) of the k-th comparison continue in any case, since an early lead may be lost. Trials
    without common problems are not compared.
    """

    def __init__(self, confidence: float) -> None:
        self._confidence = confidence

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Return whether the trial ends at its last step."""
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
    """Return the attribute of a trial for its scores at a step by problem id."""
    return f"problems at {step}"


def make_pruner(pruning: Pruning | None) -> BasePruner:
    """Return the pruner of a sweep. Raises ConfigError if Optuna rejects its options."""
    if pruning is None:
        return optuna.pruners.NopPruner()
    if pruning.pruner == "paired":
        return PairedPruner(pruning.confidence)
    made = getattr(optuna.pruners, f"{pruning.pruner.title().replace('_', '')}Pruner")
    try:
        pruner: BasePruner = made(**pruning.options)
    except (TypeError, ValueError) as error:
        remedy = f"docs/sweeps.md; Optuna's documentation of {made.__name__} lists them"
        rule = f"are not accepted by Optuna's {made.__name__} ({' '.join(str(error).split())})"
        raise settings_error([Problem("pruning.options", rule, format_value(pruning.options), remedy)]) from error
    return pruner


def make_sampler(search: RandomSearch, number: int) -> BaseSampler:
    """Return the sampler of the point with this number."""
    seed = search.seed * SEED_STRIDE + number - 1
    if isinstance(search, OptunaSearch):
        return TPESampler(n_startup_trials=search.startup_points, seed=seed)
    return RandomSampler(seed)


def points_of(study: optuna.Study) -> dict[int, FrozenTrial]:
    """Return the points by number, each with its last trial."""
    trials = [one for one in study.get_trials(deepcopy=False) if SETTINGS in one.user_attrs]
    found = {one.user_attrs[POINT]: one for one in trials}
    return dict(sorted(found.items()))


class SweepStudy:
    """Optuna study of a sweep, with the claims of this process."""

    def __init__(self, sweep: Sweep) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._sweep = sweep
        self._claims: dict[int, FileLock] = {}
        (sweep.folder / "claims").mkdir(parents=True, exist_ok=True)
        with sweep_lock(sweep):
            self.optuna = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(sweep.folder / STUDY_FILE))),
                study_name="points",
                load_if_exists=True,
                direction=sweep.spec.objective.direction,
                pruner=make_pruner(sweep.spec.pruning),
            )

    def points(self) -> dict[int, FrozenTrial]:
        """Return the points, see `points_of`."""
        return points_of(self.optuna)

    def num_left(self) -> int:
        """Return the number of points that have not ended, drawn or not."""
        ended = [one for one in self.points().values() if one.state.is_finished()]
        return max(0, self._sweep.num_points - len(ended))

    def retry_failed(self) -> None:
        """Queue the failed points again."""
        with sweep_lock(self._sweep):
            for trial in self.points().values():
                if trial.state == TrialState.FAIL:
                    self._requeue(trial)

    def ask(self) -> Trial | None:
        """Claim and return the next point; None if none is left or other processes work on the rest."""
        search = self._sweep.spec.search
        with sweep_lock(self._sweep):
            self._requeue_lost()
            points = self.points()
            if not any(one.state == TrialState.WAITING for one in points.values()):
                number = len(points) + 1
                if number > self._sweep.num_points:
                    return None
                if search is None:
                    settings = dict(self._sweep.points[number - 1])
                    self.optuna.enqueue_trial({}, {POINT: number, SETTINGS: settings})
                else:
                    self.optuna.sampler = make_sampler(search, number)
            trial = self.optuna.ask()
            self._claims[trial.number] = self._claim(trial.number)
            self._claims[trial.number].try_acquire()
            if search is not None:  # a queued trial returns its values
                settings = {key: _suggest(trial, key, values) for key, values in search.space.items()}
                trial.set_user_attr(POINT, trial.user_attrs.get(POINT, len(points) + 1))
                trial.set_user_attr(SETTINGS, settings)
        return trial

    def release(self, trial: Trial) -> None:
        """Let other processes continue a point that has not ended."""
        self._claims.pop(trial.number).release()

    def _claim(self, number: int) -> FileLock:
        """Return the lock of the process that works on a trial; the kernel frees it when that is killed."""
        return FileLock(self._sweep.folder / "claims" / f"{number}.lock")

    def _requeue_lost(self) -> None:
        """Queue the points of stopped or killed processes again."""
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
    """Runs, steps and hours of one call of a sweep, stored in the study for all its processes."""

    def __init__(self, study: SweepStudy, sweep: Sweep, call: str) -> None:
        self.call = call
        self._study = study.optuna
        self._sweep = sweep
        self._name = f"spent by {call}"
        if self._name not in self._study.user_attrs:
            budget = sweep.spec.budget.model_dump()
            self._write({"budget": budget, "begun": time.time(), "runs": [], "steps": 0, "ended_by": ""})

    def read(self) -> dict[str, Any]:
        """Return `runs` (ids), `steps` (number) and `ended_by`: the exhausted budget, '' while there is some."""
        found: dict[str, Any] = self._study.user_attrs[self._name]
        return found

    def reserve(self, run_id: str, steps: int) -> bool:
        """Reserve steps of a run, and return whether the budget allows them."""
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

    def refund(self, steps: int) -> None:
        """Return reserved steps that a run has not done."""
        with sweep_lock(self._sweep):
            known = self.read()
            self._write(known | {"steps": known["steps"] - steps})

    def _write(self, content: Mapping[str, Any]) -> None:
        self._study.set_user_attr(self._name, dict(content))


def sweep_lock(sweep: Sweep) -> HeldLock:
    """Return the lock for claiming a point or writing results."""
    return HeldLock(sweep.folder / "sweep.lock", what=f"sweep {sweep.sweep_id}", wait_s=LOCK_WAIT_S)


def _suggest(trial: Trial, key: str, values: Values) -> JsonValue:
    if not isinstance(values, Range):
        # As JSON, since Optuna accepts no lists and mappings as choices.
        chosen: JsonValue = json.loads(trial.suggest_categorical(key, [json.dumps(value) for value in values]))
        return chosen
    if values.is_whole:
        step = 1 if values.step is None else int(values.step)
        return trial.suggest_int(key, int(values.low), int(values.high), step=step, log=values.log)
    drawn = trial.suggest_float(key, values.low, values.high, step=values.step, log=values.log)
    # Four digits, as shown.
    return min(max(float(f"{drawn:.4g}"), values.low), values.high)
