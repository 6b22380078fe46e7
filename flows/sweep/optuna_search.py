"""Points chosen by Optuna. Its study lies in the sweep's folder, so another call goes on with it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState
from pydantic import JsonValue

from flows.sweep.drive import Candidate
from rlcore.config.sweep import OptunaSearch, Point, Range, Values
from rlcore.config.sweep_load import Sweep

STUDY_FILE = "optuna.log"
STUDY = "sweep"
POINT = "point"
"""Attribute of a trial: the point's number, the same for each trial of it."""
SETTINGS = "settings"
"""Attribute of a trial: what it was, as JSON."""
SEEDS_APART = 100_003
"""A sampler is made for each trial, so that a call that goes on draws what one that was not broken off would have."""


class TpeSearch:
    """TPE, with pruning against the median where the sweep says so."""

    def __init__(self, sweep: Sweep, folder: Path) -> None:
        search = sweep.spec.optuna
        assert search is not None
        self._search: OptunaSearch = search
        self._trials: dict[int, Trial] = {}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        folder.mkdir(parents=True, exist_ok=True)
        pruning = search.pruning
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / STUDY_FILE))),
            study_name=STUDY,
            load_if_exists=True,
            direction=sweep.spec.objective.direction,
            pruner=optuna.pruners.NopPruner()
            if pruning is None
            else optuna.pruners.MedianPruner(n_startup_trials=pruning.startup_points),
        )
        self._enqueue_again()
        self._num_asked = len(self.done())

    def done(self) -> Sequence[Candidate]:
        """Points whose trial has a score, pruned ones too."""
        ended = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        return [Candidate(_number(one), _settings(one), one.state == TrialState.PRUNED) for one in ended]

    def ask(self) -> Sequence[Candidate]:
        """The next points."""
        number = min(self._search.points_at_once, self._search.num_points - self._num_asked)
        return [self._ask() for _ in range(max(0, number))]

    def keep(self, scores: Mapping[int, float], step: int) -> frozenset[int]:
        """Those that are not worse than the median of the others at this step."""
        for number, score in scores.items():
            self._trials[number].report(score, step)
        pruned = {number for number in scores if self._trials[number].should_prune()}
        for number in pruned:
            self._study.tell(self._trials.pop(number), state=TrialState.PRUNED)
        return frozenset(scores) - pruned

    def tell(self, number: int, score: float | None) -> None:
        """The score, or that there is none: then the point is tried again by another call."""
        trial = self._trials.pop(number)
        if score is None:
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._study.tell(trial, score)

    def _ask(self) -> Candidate:
        known = self._study.get_trials(deepcopy=False)
        self._study.sampler = optuna.samplers.TPESampler(
            n_startup_trials=self._search.startup_points, seed=self._search.seed * SEEDS_APART + len(known)
        )
        trial = self._study.ask()
        settings = {key: _suggested(trial, key, values) for key, values in self._search.space.items()}
        number = trial.user_attrs.get(POINT) or 1 + max((_number(one) for one in known), default=0)
        trial.set_user_attr(POINT, number)
        trial.set_user_attr(SETTINGS, json.dumps(settings))
        self._trials[number] = trial
        self._num_asked += 1
        return Candidate(number, settings)

    def _enqueue_again(self) -> None:
        """Points that failed, or whose call was broken off, come first; their runs go on from their checkpoints."""
        trials = self._study.get_trials(deepcopy=False)
        for one in trials:
            if one.state == TrialState.RUNNING:
                self._study.tell(one.number, state=TrialState.FAIL)
        last = {_number(one): one for one in trials if POINT in one.user_attrs}
        for number, one in sorted(last.items()):
            if one.state in (TrialState.FAIL, TrialState.RUNNING):
                self._study.enqueue_trial(one.params, user_attrs={POINT: number})


def _number(trial: FrozenTrial) -> int:
    return int(trial.user_attrs.get(POINT, 0))


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
