"""Sweeps as Prefect flows. The points are trained in this process or by workers of the work pool."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any
from uuid import UUID, uuid4

from optuna.trial import Trial, TrialState
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow
from prefect.runtime import flow_run
from prefect.states import Cancelling, Completed
from pydantic import Field

from flows import chain
from flows.artifacts import log_and_print, log_command, log_unused_settings, show_artifact
from flows.parameters import NO_STRINGS, Count, Positive, Root, all_overrides, experiment_name, flow_root
from flows.pipeline import CHECKED_SETTINGS, call_flow, keep_outcome, label_flow_run, prefect_tags, run_as_one_task
from flows.progress import LabeledDisplay, display, format_duration, use_display
from flows.server.watch import end_if_cancelled, end_if_suspended, limit_retries, watch_flow_run
from flows.stages.train import Train
from flows.sweep.result import (
    SweepResult,
    describe_sweep,
    end_mlflow_run_on_error,
    finish_mlflow_run,
    start_mlflow_run,
    summary_lines,
    write_record,
    write_result,
)
from flows.sweep.study import (
    ERROR,
    POINT,
    RUNS,
    SETTINGS,
    BudgetTracker,
    Member,
    SweepStudy,
    load_checked_sweep,
    members_of,
    problem_scores_key,
    problem_scores_of,
    sweep_lock,
)
from flows.work.checks import check_run
from flows.work.mlflow_record import MlflowRecord
from flows.work.open_run import open_run
from rlcore.config.base import FILE_ENDINGS, group_members
from rlcore.config.sweep import Budget, Sweep, format_point
from rlcore.errors import MillraceError, StopRequestedError
from rlcore.tracking.mlflow_store import PARENT_TAG

POLL_S = 1.0
TrainFunction = Callable[[Member, int, str], object]  # arguments: a run, a step, and the run's point and seed as text


def wait_for_others() -> None:
    """Sleep for `POLL_S` seconds. Call this function in a loop that waits for other processes to train points.

    Raises FlowCancelledError if the flow run was cancelled, and Pause if it was suspended.
    """
    end_if_cancelled()
    end_if_suspended()
    time.sleep(POLL_S)


class SweepWorker:
    """A worker that trains points. It reports the score of a point at each comparison step, and may prune the point.

    Several processes may share the study and the budget. Each point belongs to one process.
    """

    def __init__(self, sweep: Sweep, train: TrainFunction, call: str) -> None:
        self.study = SweepStudy(sweep)
        self.spending = BudgetTracker(self.study, call)
        self._sweep = sweep
        self._train = train

    def run(self, *, whole: bool = True) -> str:
        """Train points until all have ended or the budget is used up. Return the last point's error, or ''.

        If `whole` is false, stop after one point. If no point is free, wait for other processes. If the process of a
        point was killed before the point ended, the point is continued.
        """
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
        number, settings = trial.user_attrs[POINT], trial.user_attrs[SETTINGS]
        members, problems = members_of(self._sweep, settings)
        metric, rungs = self._sweep.metric_of(members[0].config), self._sweep.rungs(members[0].config)
        study = self.study.optuna
        error = "; ".join(map(str, problems))  # only points of a search: listed points were checked before
        for step in () if error else rungs:
            has_room = all([self._train_to(members, at, step, trial) for at in range(len(members))])
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
                log_and_print(f"point {number} stops at step {step}: {format_point(settings)}")
                break
        if error:
            trial.set_user_attr(ERROR, error)
            study.tell(trial, state=TrialState.FAIL)
        return error

    def _train_to(self, members: list[Member], at: int, step: int, trial: Trial) -> bool:
        """Train run `members[at]` to `step` if it has no score for that step. Return False if the budget is used up."""
        member, number, num_points = members[at], trial.user_attrs[POINT], self._sweep.num_points
        metric, total = self._sweep.metric_of(member.config), member.config.trainer.total_steps
        if member.refresh(metric, step):
            return True
        steps = max(0, step - member.step)
        if not self.spending.reserve(member.run_id, steps):
            return False
        num_runs = len(members)
        run = f"run {(number - 1) * num_runs + at + 1}/{num_points * num_runs}"
        name, member.error = f"point {number}/{num_points} seed {member.seed} ({run})", ""
        others = sum(one.step for one in members if one is not member)
        later_s = self.spending.estimate_s((self.study.num_left() * num_runs - 1) * total - others, steps)
        settings = f"{format_point(trial.user_attrs[SETTINGS])} seed={member.seed}"
        try:
            with use_display(LabeledDisplay(display(), name, later_s)):
                self._train(member, step, settings)
        except StopRequestedError:
            raise
        except Exception as error:
            member.error = str(error) or type(error).__name__
        has_score = member.refresh(metric, step)
        self.spending.refund(max(0, step - member.step))
        if not has_score and not member.error:
            member.error = (
                f"has no {metric} at step {step}, since it was trained before with other validation steps; give "
                "the sweep's runs another name: name=..."
            )
        outcome = member.error.splitlines()[0] if member.error else f"{metric} {member.score:.4g}"
        log_and_print(f"{name} step {member.step}: {outcome}")
        return True

    def _problem_scores(self, members: list[Member], metric: str, step: int) -> dict[str, float]:
        """Return the score of each held-out problem, averaged over the seeds. Without pruning, return {}."""
        if self._sweep.spec.pruning is None:
            return {}
        found = [problem_scores_of(member.config, metric, step) for member in members]
        shared = set.intersection(*(set(one) for one in found))
        return {str(problem): fmean(one[problem] for one in found) for problem in shared}


SpecName = Annotated[str, Field(examples=list(group_members("sweep")))]
DEPLOYMENT = "sweep-child/sweep-point"
MAX_CHILDREN = 8  # largest number of waiting and running children, while the work queue limits the running ones
STOP_WAIT_S = 20.0  # seconds for children to save when the sweep stops, since Prefect's worker kills it after 30 s


def run_checked(checked: Sweep, spec: str, overrides: list[str], *, on_workers: bool) -> SweepResult:
    """Run a sweep whose settings are already checked. Prefect records `spec` and `overrides`."""
    most = checked.spec.budget
    result = call_flow(
        checked, lambda: sweep(spec, overrides, most.runs, most.steps, most.hours, on_workers=on_workers)
    )
    assert isinstance(result, SweepResult)
    return result


def cancel_children(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the child flow runs after the sweep's process has ended. Prefect calls this hook on a cancellation."""
    with get_client(sync_client=True) as client:
        _cancel_children(client, flow_run.id)


@flow(name="sweep", on_cancellation=[cancel_children])
def sweep(
    spec: SpecName,
    overrides: list[str] = NO_STRINGS,
    max_runs: Count = None,
    max_steps: Count = None,
    max_hours: Positive = None,
    on_workers: bool = False,
    root: Root = None,
) -> State[None]:
    """Train points (combinations of settings) with several seeds, and compare the points. Finished runs are skipped.

    Args:
        spec: A name in conf/sweep, or the path of a file.
        overrides: Settings of all points, such as trainer.total_steps=40.
        max_runs: The largest number of runs of this call. The default is the sweep's limit.
        max_steps: The largest number of training steps of this call. The default is the sweep's limit.
        max_hours: The time in hours after which this call begins no more runs. The default is the sweep's limit.
        on_workers: Send the points to the work pool as runs of the deployment sweep-child/sweep-point.
        root: The folder of datasets, models, runs and the MLflow store. The default is the worker's workspace.
    """
    budget = Budget(runs=max_runs, steps=max_steps, hours=max_hours)
    given = all_overrides(overrides, root=flow_root(root))
    checked: Sweep = CHECKED_SETTINGS.get() or load_checked_sweep(spec, given, budget)
    label_flow_run(checked.sweep_id, checked.spec.name, "sweep")
    result = keep_outcome(lambda: _sweep(checked, spec, given, on_workers=on_workers))
    return Completed(message="\n".join(summary_lines(result)))


def _sweep(checked: Sweep, spec: str, overrides: list[str], *, on_workers: bool) -> SweepResult:
    log_and_print(f"sweep {checked.sweep_id} in {checked.folder}")
    log_unused_settings(checked.unused_settings())
    with watch_flow_run():
        with sweep_lock(checked):
            parent = start_mlflow_run(checked)
        with end_mlflow_run_on_error(checked, parent):
            drive = SweepWorker(checked, partial(train_member, parent), call=str(uuid4()))
            drive.study.retry_failed()
            if on_workers:
                work_on_workers(drive, checked, {  # a worker may have another working directory
                    "spec": str(Path(spec).absolute()) if spec.endswith(FILE_ENDINGS) else spec,
                    "call": drive.spending.call,
                    "root": str(checked.folder.parent.parent),
                    "overrides": [text for text in overrides if not text.startswith("paths.root=")],
                    "mlflow_parent": parent,
                })  # fmt: skip
            else:
                drive.run()
            with sweep_lock(checked):
                result = write_result(checked, drive.study.points(), drive.spending.read())
                about = describe_sweep(checked, result)
                show_artifact(checked.sweep_id, "sweep", f"{checked.sweep_id}: its points and outcome", lambda: about)
                finish_mlflow_run(checked, parent, result, about)
    for line in summary_lines(result):
        log_and_print(line)
    if result.failed and result.best is None:
        raise MillraceError(f"sweep {checked.sweep_id}: no point was finished. {result.failed[0]}")
    return result


def train_member(mlflow_parent: str | None, member: Member, to_step: int, label: str) -> None:
    """Train one run of a sweep from its last checkpoint to a step, as one task of the current flow run."""
    end_if_cancelled()
    end_if_suspended()
    settings = member.settings
    check_run(settings)
    config = settings.config
    if mlflow_parent:
        config = config.model_copy(update={"tags": {**config.tags, PARENT_TAG: mlflow_parent}})
    command, title = settings.command("train"), f"{experiment_name(settings.experiment)} {label}"
    log_command(command)
    stages, what = chain.stages_until(config, Train.name, to_step), f"train {title} to step {to_step}"
    with open_run(config, command, title) as run, MlflowRecord(run, prefect_tags()) as record:
        run_as_one_task(stages, run, what, record)


@flow(name="sweep-child")
def sweep_child(
    spec: SpecName, call: str, overrides: list[str] = NO_STRINGS, mlflow_parent: str | None = None, root: Root = None
) -> None:
    """Train one point of a sweep on behalf of the sweep's flow run.

    Args:
        spec: The name or file of the sweep. The worker must be able to read the file.
        call: The id of the `millrace sweep` command or of the flow run whose budget the point uses.
        overrides: The settings that the sweep sets for all points.
        mlflow_parent: The MLflow run of the sweep, which is the parent of the point's runs.
        root: The folder of datasets, models, runs and the MLflow store. The default is the worker's workspace.
    """
    checked = load_checked_sweep(spec, all_overrides(overrides, root=flow_root(root)), Budget())
    label_flow_run(f"point of {checked.sweep_id}", checked.spec.name, "sweep")
    with watch_flow_run():
        if error := SweepWorker(checked, partial(train_member, mlflow_parent), call).run(whole=False):
            raise MillraceError(error)


def work_on_workers(drive: SweepWorker, sweep: Sweep, parameters: dict[str, Any]) -> None:
    """Start child flow runs that train the points, until all points have ended or the budget is used up.

    A child flow run that fails or crashes is replaced by another one.

    Raises MillraceError if the deployment is missing, or if too many child flow runs are lost.
    """
    max_children = MAX_CHILDREN if sweep.spec.optuna is None else sweep.spec.optuna.points_at_once
    with cancel_children_on_error() as us, get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(DEPLOYMENT)
        except ObjectNotFound:
            raise MillraceError(
                f"on_workers: the Prefect server at {client.api_url} has no deployment {DEPLOYMENT}. `millrace up` "
                "applies the deployments and starts a worker; without on_workers this process trains the runs."
            ) from None
        num_lost_before = sum(_is_lost(child) for child in _children(client, us))
        last_reported = -1
        while True:
            num_left = 0 if drive.spending.read()["ended_by"] else drive.study.num_left()
            if num_left != last_reported:
                last_reported = num_left
                seconds = drive.spending.estimate_s(num_left * len(sweep.spec.seeds) * sweep.base.trainer.total_steps)
                about = "" if seconds is None else f", about {format_duration(seconds)}"
                log_and_print(f"{num_left} of {sweep.num_points} points left{about}")
            children = _children(client, us)
            num_alive = sum(_is_alive(child) for child in children)
            lost = [child for child in children if _is_lost(child)]
            if len(lost) - num_lost_before > sweep.num_points - num_left + max_children:
                raise MillraceError(f"{DEPLOYMENT}: its runs end without working on a point: {lost[0].state!r}")
            if not num_alive and not num_left:
                return
            for _ in range(min(max_children, num_left) - num_alive):
                run_deployment(DEPLOYMENT, parameters=parameters, timeout=0)
            wait_for_others()


@contextmanager
def cancel_children_on_error() -> Iterator[UUID]:
    """Yield the id of the current flow run. If the `with` block fails, cancel the child flow runs and let them save."""
    us = UUID(str(flow_run.id))
    try:
        yield us
    except BaseException:
        with suppress(Exception), limit_retries(1), get_client(sync_client=True) as client:
            _cancel_children(client, us)
            deadline = time.monotonic() + STOP_WAIT_S
            while time.monotonic() < deadline and any(map(_is_alive, _children(client, us))):
                time.sleep(POLL_S)
        raise


def _cancel_children(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    for child in filter(_is_alive, _children(client, flow_run_id)):
        client.set_flow_run_state(child.id, Cancelling(message="The parent flow run was stopped."))


def _children(client: SyncPrefectClient, flow_run_id: UUID) -> list[FlowRun]:
    """Return the newest child flow runs, at most 200. Any older child flow run has ended."""
    below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run_id]))
    return client.read_flow_runs(flow_run_filter=below, sort=FlowRunSort.EXPECTED_START_TIME_DESC)


def _is_alive(child: FlowRun) -> bool:
    return child.state is None or not child.state.is_final()


def _is_lost(child: FlowRun) -> bool:
    return child.state is not None and child.state.is_final() and not child.state.is_completed()
