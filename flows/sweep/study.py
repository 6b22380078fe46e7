"""The sweep's points as Optuna's study: which there are, which come next, which are dropped.

The study is a journal in the sweep's folder. Whoever changes it holds the sweep's lock, so several processes can work
on one sweep, and a call that goes on finds what an earlier one has decided.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import optuna
from optuna.pruners import BasePruner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState
from pydantic import JsonValue

from rlcore.config.problems import Problem, settings_error, shown
from rlcore.config.sweep import Point, Pruning, Range, Values
from rlcore.config.sweep_load import Sweep
from rlcore.evaluation.stats import paired_difference

STUDY_FILE = "optuna.log"
STUDY = "sweep"
POINT = "point"
"""Attribute of a trial: the point's number, from 1 on."""
SETTINGS = "settings"
"""Attribute of a trial: what it is, as JSON. A trial without it was being made when its process was killed."""
SEEDS_APART = 100_003
"""Between two seeds of a sweep: each point has a sampler of its own, so an interrupted sweep draws the same points."""

ProblemScores = Callable[[int, Point, int], Mapping[int, float]]
"""Of a point (number, settings) at a step: the score of each held-out problem, by the problem's id."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point and how far it is. `number`: from 1 on, the same in every call.

    `scores`: by step, those that it was compared by. `last_score`: of its last step, where it is finished.
    """

    number: int
    settings: Point
    state: Literal["to do", "finished", "stopped early"]
    scores: Mapping[int, float]
    last_score: float | None


class PairedPruner(BasePruner):
    """Drops a trial that the best one of the same step beats on the same held-out problems, unless few are left.

    It is beaten where the interval of the paired difference (`paired_difference`) excludes 0. Of n trials that have
    begun, the best n / (k + 1) of the k-th comparison go on, beaten or not: a lead early in training, however sure, is
    none at the end. These are never fewer than successive halving (Karnin, Koren and Somekh, ICML 2013) has at that
    step if its first rung is the first comparison. Trials that share no problem are not compared.
    """

    def __init__(self, scores: ProblemScores, confidence: float) -> None:
        self._scores = scores
        self._confidence = confidence

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether the trial is to end at its last step."""
        step = trial.last_step
        if step is None:
            return False
        sign = 1.0 if study.direction == optuna.study.StudyDirection.MAXIMIZE else -1.0
        begun = [one for one in study.get_trials(deepcopy=False) if one.intermediate_values]
        there = [one for one in begun if step in one.intermediate_values]
        there.sort(key=lambda one: (-sign * one.intermediate_values[step], one.number))
        num_safe = math.ceil(len(begun) / (1 + len(trial.intermediate_values)))
        if trial.number in {one.number for one in there[:num_safe]}:
            return False
        ours, theirs = (self._scores(_number(one), _settings(one), step) for one in (trial, there[0]))
        shared = sorted(ours.keys() & theirs.keys())
        if not shared:
            return False
        of_trial, of_best = (sign * np.array([scores[problem] for problem in shared]) for scores in (ours, theirs))
        return paired_difference(of_trial, of_best, confidence=self._confidence).difference.low > 0.0


def pruner_of(pruning: Pruning | None, scores: ProblemScores) -> BasePruner:
    """The pruner that a sweep names.

    Raises:
        ConfigError: Optuna does not take its options.
    """
    if pruning is None:
        return optuna.pruners.NopPruner()
    if pruning.pruner == "paired":
        return PairedPruner(scores, pruning.confidence)
    made = getattr(optuna.pruners, f"{pruning.pruner.title().replace('_', '')}Pruner")
    try:
        pruner: BasePruner = made(**pruning.options)
    except (TypeError, ValueError) as error:
        remedy = f"docs/sweeps.md; Optuna's documentation of {made.__name__} lists them"
        rule = f"are not what Optuna's {made.__name__} takes ({' '.join(str(error).split())})"
        raise settings_error([Problem("pruning.options", rule, shown(pruning.options), remedy)]) from error
    return pruner


class Study:
    """Optuna's study of a sweep."""

    def __init__(self, sweep: Sweep, folder: Path, scores: ProblemScores) -> None:
        self._sweep = sweep
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        folder.mkdir(parents=True, exist_ok=True)
        self._storage = JournalStorage(JournalFileBackend(str(folder / STUDY_FILE)))
        self._study = optuna.create_study(
            storage=self._storage,
            study_name=STUDY,
            load_if_exists=True,
            direction=sweep.spec.objective.direction,
            pruner=pruner_of(sweep.spec.pruning, scores),
        )

    def points(self) -> list[Candidate]:
        """The points so far, in order."""
        return [
            Candidate(
                _number(one),
                _settings(one),
                _STATES[one.state],
                one.intermediate_values,
                one.value if one.state == TrialState.COMPLETE else None,  # a pruned one has its last comparison's
            )
            for one in self._trials()
        ]

    def add_points(self) -> None:
        """Add those that come next: all of a grid, a list or random draws; as many as Optuna chooses at a time."""
        known, search = len(self._trials()), self._sweep.spec.optuna
        if search is None:
            for number, point in enumerate(self._sweep.points[known:], known + 1):
                about = {POINT: number, SETTINGS: json.dumps(dict(point))}
                self._study.add_trial(optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=about))
            return
        for number in range(known + 1, min(search.num_points, known + search.points_at_once) + 1):
            self._study.sampler = optuna.samplers.TPESampler(
                n_startup_trials=search.startup_points, seed=search.seed * SEEDS_APART + number - 1
            )
            trial = self._study.ask()
            settings = {key: _suggested(trial, key, values) for key, values in search.space.items()}
            trial.set_user_attr(POINT, number)
            trial.set_user_attr(SETTINGS, json.dumps(settings))

    def drop(self, scores: Mapping[int, float], step: int) -> frozenset[int]:
        """Of the points with these scores at a step, those that the pruner ends there, now or in an earlier call."""
        of_study = self._storage.get_study_id_from_name(STUDY)
        trials = {_number(one): one for one in self._trials() if _number(one) in scores}
        ids = {
            number: self._storage.get_trial_id_from_study_id_trial_number(of_study, trial.number)
            for number, trial in trials.items()
        }
        for number, trial in trials.items():  # all of them before the first is judged: their order does not matter
            if not trial.state.is_finished() and step not in trial.intermediate_values:
                self._storage.set_trial_intermediate_value(ids[number], step, scores[number])
        dropped = set()
        for number in trials:
            trial = self._storage.get_trial(ids[number])
            is_judged = trial.state.is_finished() or trial.last_step != step  # another process has come further
            if not is_judged and self._study.pruner.prune(self._study, trial):
                self._study.tell(trial.number, state=TrialState.PRUNED)
                dropped.add(number)
            elif trial.state == TrialState.PRUNED:
                dropped.add(number)
        return frozenset(dropped)

    def finish(self, number: int, score: float) -> None:
        """Record a point's score when its run has ended."""
        trial = next(one for one in self._trials() if _number(one) == number)
        self._study.tell(trial.number, score, skip_if_finished=True)

    def _trials(self) -> list[FrozenTrial]:
        known = self._study.get_trials(deepcopy=False)
        return sorted((one for one in known if SETTINGS in one.user_attrs), key=_number)


_STATES: Mapping[TrialState, Literal["to do", "finished", "stopped early"]] = {
    TrialState.RUNNING: "to do",
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "stopped early",
}


def _number(trial: FrozenTrial) -> int:
    return int(trial.user_attrs[POINT])


def _settings(trial: FrozenTrial) -> Point:
    found: dict[str, JsonValue] = json.loads(trial.user_attrs[SETTINGS])
    return found


def _suggested(trial: Trial, key: str, values: Values) -> JsonValue:
    if not isinstance(values, Range):
        # As text, since Optuna takes no lists and mappings as choices.
        chosen: JsonValue = json.loads(trial.suggest_categorical(key, [json.dumps(value) for value in values]))
        return chosen
    if values.is_whole:
        step = 1 if values.step is None else int(values.step)
        return trial.suggest_int(key, int(values.low), int(values.high), step=step, log=values.log)
    drawn = trial.suggest_float(key, values.low, values.high, step=values.step, log=values.log)
    # Four digits: what is run is what is shown.
    return min(max(float(f"{drawn:.4g}"), values.low), values.high)
