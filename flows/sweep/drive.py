"""The work of one process on a sweep: ask for a point, train its runs to each comparison, report, prune or finish."""

import time
from collections.abc import Callable
from statistics import fmean

from optuna.trial import Trial, TrialState

from flows.server.watch import end_if_cancelled, end_if_suspended
from flows.sweep.points import Member, members_of, problem_scores_of
from flows.sweep.result import write_record
from flows.sweep.study import ERROR, POINT, RUNS, SETTINGS, BudgetTracker, SweepStudy, problem_scores_key, sweep_lock
from flows.tasks import log_and_print
from rlcore.config.sweep import Sweep, format_point
from rlcore.errors import StopRequestedError

POLL_S = 1.0
Train = Callable[[Member, int, str, str], object]
"""Trains a run to a step. Takes as texts to show its place in the sweep, and its settings, too."""


def wait_for_others() -> None:
    """Wait between two looks at what others do. Raises where the flow run is cancelled or suspended."""
    end_if_cancelled()
    end_if_suspended()
    time.sleep(POLL_S)


class SweepWorker:
    """Works on a sweep. Several processes may: they share its study, and a point is one process's.

    `call`: name of the call of the sweep, whose budget is shared by its processes.
    """

    def __init__(self, sweep: Sweep, train: Train, call: str) -> None:
        self.study = SweepStudy(sweep)
        self.spending = BudgetTracker(self.study, sweep, call)
        self._sweep = sweep
        self._train = train

    def run(self, *, whole: bool = True) -> str:
        """Work on points until all have ended, or the budget has; unless `whole`, on one. Those of other processes are
        waited for, and continued where such a process is killed. Returns what went wrong with the last one."""
        error = ""
        while not self.spending.read()["ended_by"] and self.study.num_left():
            trial = self.study.ask()
            if trial is None:
                wait_for_others()
                continue
            try:
                error = self._train_point(trial)
            finally:
                self.study.release(trial)
            with sweep_lock(self._sweep):
                write_record(self._sweep, self.study.points())
            if not whole:
                break
        return error

    def _train_point(self, trial: Trial) -> str:
        """Bring a point to its end, or to that of the budget. Returns why it has failed, '' if it has not."""
        number, settings = trial.user_attrs[POINT], trial.user_attrs[SETTINGS]
        members, problems = members_of(self._sweep, settings)
        metric, rungs = self._sweep.metric_of(members[0].config), self._sweep.rungs(members[0].config)
        label, study = format_point(settings), self.study.optuna
        error = "; ".join(map(str, problems))  # of a point of a search; those of a list were checked before
        for step in () if error else rungs:
            has_room = all([self._train_to(member, step, metric, number, label) for member in members])
            trial.set_user_attr(RUNS, [member.to_json() for member in members])
            error = next((member.error for member in members if member.error), "")
            if error or not has_room:
                break
            score = fmean(member.score for member in members if member.score is not None)
            trial.set_user_attr(problem_scores_key(step), self._problem_scores(members, metric, step))
            trial.report(score, step)
            if step == rungs[-1]:
                study.tell(trial, score)
            elif trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED)
                log_and_print(f"point {number} stops at step {step}: {label}")
                break
        if error:
            trial.set_user_attr(ERROR, error)
            study.tell(trial, state=TrialState.FAIL)
        return error

    def _train_to(self, member: Member, step: int, metric: str, number: int, label: str) -> bool:
        """Bring a run to a step, unless it is there, or the budget has no room for it: then False is returned."""
        if member.refresh(metric, step):
            return True
        if not self.spending.reserve(member.run_id, max(0, step - member.step)):
            return False
        name, member.error = f"point {number} seed {member.seed}", ""
        try:
            self._train(member, step, name, f"{label} seed={member.seed}")
        except StopRequestedError:
            raise
        except Exception as error:
            member.error = str(error) or type(error).__name__
        has_score = member.refresh(metric, step)
        self.spending.refund(max(0, step - member.step))
        if not has_score and not member.error:
            member.error = (
                f"has no {metric} at step {step}, since it was trained before with other steps to validate at; give "
                "the sweep's runs another name: name=..."
            )
        said = member.error.splitlines()[0] if member.error else f"{metric} {member.score:.4g}"
        log_and_print(
            f"{name} step {member.step}: {said}; {self.study.num_left()} of {self._sweep.num_points} points left"
        )
        return True

    def _problem_scores(self, members: list[Member], metric: str, step: int) -> dict[str, float]:
        """The mean over seeds of each held-out problem that all runs have answered, where the pruner reads it."""
        pruning = self._sweep.spec.pruning
        if pruning is None or pruning.pruner != "paired":
            return {}
        found = [problem_scores_of(member.config, metric, step) for member in members]
        shared = set.intersection(*(set(one) for one in found))
        return {str(problem): fmean(one[problem] for one in found) for problem in shared}
