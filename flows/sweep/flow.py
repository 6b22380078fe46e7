"""A sweep as a flow, and how its runs are worked on: in this process, or by workers of the work pool."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from shlex import join
from typing import Annotated, Any
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow
from prefect.runtime import flow_run
from prefect.states import Cancelling
from pydantic import Field

from flows import chain
from flows.parameters import (
    NO_WORDS,
    Count,
    Positive,
    Root,
    RunSettings,
    all_overrides,
    compose_settings,
    experiment_name,
    root_of_the_flow,
)
from flows.plan.checks import check_run
from flows.progress import LabelledDisplay, display, shown_on
from flows.server.watch import end_if_cancelled, end_if_suspended, few_retries, watched
from flows.stages.train import Train
from flows.sweep.check import checked_sweep
from flows.sweep.drive import POLL_S, Drive, Task, Work, pause, sweep_lock
from flows.sweep.record import best_of, sweep_directory
from flows.sweep.result import (
    SweepResult,
    are_alike,
    begin_in_mlflow,
    ended_in_mlflow,
    finish_in_mlflow,
    show_result,
    summary_of,
    write_best,
    write_comparison,
)
from flows.tasks import CHECKED, as_task, kept, run_with, tell, tell_command, tell_idle
from flows.work.open_run import open_run
from rlcore.config.compose import group_members
from rlcore.config.fingerprint import run_id
from rlcore.config.sweep import Budget
from rlcore.config.sweep_load import Sweep
from rlcore.errors import MillraceError, StopRequestedError
from rlcore.tracking.mlflow_store import PARENT_TAG

Spec = Annotated[str, Field(examples=list(group_members("sweep")))]
DEPLOYMENT = "sweep-child/local"
IN_FLIGHT = 8
"""Child flow runs that wait or run at a time; how many of them run is the work queue's concurrency limit."""
STOP_WAIT_S = 20.0
"""For children on workers to save once the sweep is told to stop; Prefect's worker kills the sweep after 30 s."""


def work_here(tasks: Iterator[Task], mlflow_parent: str | None) -> Iterator[tuple[Task, str]]:
    """One after the other in this process, as tasks of the sweep's flow run. Being told to stop is passed on."""
    for task in tasks:
        end_if_cancelled()
        end_if_suspended()
        error = ""
        try:
            with shown_on(LabelledDisplay(display(), task.name)):
                train_run(task.member.settings, task.to_step, task.label, mlflow_parent)
        except StopRequestedError:
            raise
        except Exception as failure:
            error = str(failure) or type(failure).__name__
        yield task, error


def train_run(settings: RunSettings, to_step: int | None, label: str, mlflow_parent: str | None) -> str:
    """Train one run of a sweep to a step, from its last checkpoint; its id. `label`: tells it from the others."""
    check_run(settings)
    config = settings.config
    if mlflow_parent:
        config = config.model_copy(update={"tags": {**config.tags, PARENT_TAG: mlflow_parent}})
    title = f"{experiment_name(settings.experiment)} {label}".rstrip()
    with open_run(config, settings.command("train"), title) as run:
        chain.run_stages(run, as_task, Train.name, to_step)
    tell(f"done: {run.run_id}")
    return run.run_id


class OnWorkers:
    """Executes each task as a run of the deployment `sweep-child/local`."""

    def __init__(self, mlflow_parent: str | None, root: Path) -> None:
        self._parent = mlflow_parent
        self._root = str(root)
        with get_client(sync_client=True) as client:
            try:
                client.read_deployment_by_name(DEPLOYMENT)
            except ObjectNotFound:
                raise MillraceError(
                    f"on_workers: the Prefect server at {client.api_url} has no deployment {DEPLOYMENT}. `millrace up` "
                    "applies the deployments and starts a worker; without on_workers the runs go on in this process."
                ) from None

    def work(self, tasks: Iterator[Task]) -> Iterator[tuple[Task, str]]:
        """Run up to `IN_FLIGHT` tasks at a time."""
        flying: dict[UUID, Task] = {}
        stopping: set[UUID] = set()  # an earlier call of the sweep has told them to stop
        with get_client(sync_client=True) as client:
            while True:
                for task in islice(tasks, IN_FLIGHT - len(flying)):
                    child = self._submit(task)
                    flying[child.id] = task
                    if child.state is not None and child.state.is_cancelling():
                        stopping.add(child.id)
                if not flying:
                    return
                for flow_run_id, error in _ended(client, list(flying)):
                    task = flying.pop(flow_run_id)
                    if error and flow_run_id in stopping:
                        flying[self._submit(task).id] = task
                    else:
                        yield task, error
                if flying:
                    pause()

    def _submit(self, task: Task) -> FlowRun:
        parameters = {
            "experiment": task.member.settings.experiment,
            # A worker may stand elsewhere, and its deployment knows another root.
            "overrides": [text for text in task.member.settings.overrides if not text.startswith("paths.root=")],
            "root": self._root,
            "to_step": task.to_step,
            "label": task.label,
            "mlflow_parent": self._parent,
        }
        # With such a key the server gives back a flow run that is there already: one whose answer was lost, or one that
        # a killed sweep has left to a worker. One that has ended did not bring the run so far: a further one is made.
        run, attempt = run_id(task.member.settings.config), 1
        while True:
            key = f"{self._root} {run} to {task.to_step} attempt {attempt}"
            submitted = run_deployment(DEPLOYMENT, parameters=parameters, timeout=0, idempotency_key=key)
            assert isinstance(submitted, FlowRun)
            if submitted.state is None or not submitted.state.is_final():
                return submitted
            attempt += 1


@contextmanager
def cancelled_with_us() -> Iterator[None]:
    """Where the block fails, cancel the child flow runs: those that run save, and those that wait do not begin."""
    sweep = UUID(str(flow_run.id))
    try:
        yield
    except BaseException:
        # The server may be gone: we end all the same, and soon.
        with suppress(Exception), few_retries(1), get_client(sync_client=True) as client:
            _cancel_children(client, sweep)
            deadline = time.monotonic() + STOP_WAIT_S
            while time.monotonic() < deadline and _alive(client, sweep):
                time.sleep(POLL_S)
        raise


def cancel_children(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """A hook for `on_cancellation`: Prefect's worker calls it once the sweep's process is gone."""
    with get_client(sync_client=True) as client:
        _cancel_children(client, flow_run.id)


def _cancel_children(client: SyncPrefectClient, sweep: UUID) -> None:
    for run in _alive(client, sweep):
        client.set_flow_run_state(run.id, Cancelling(message="The flow run around it was stopped."))


def _alive(client: SyncPrefectClient, sweep: UUID) -> list[FlowRun]:
    """The newest children that have not ended: the server gives 200 at most, and older ones are over."""
    below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[sweep]))
    found = client.read_flow_runs(flow_run_filter=below, sort=FlowRunSort.EXPECTED_START_TIME_DESC)
    return [run for run in found if run.state is None or not run.state.is_final()]


def _ended(client: SyncPrefectClient, flow_run_ids: Sequence[UUID]) -> Iterator[tuple[UUID, str]]:
    """The tasks that have ended, with their errors."""
    for flow_run_id in flow_run_ids:
        try:
            state = client.read_flow_run(flow_run_id).state
        except ObjectNotFound:
            yield flow_run_id, f"flow run {flow_run_id} was deleted in Prefect"
            continue
        if state is not None and state.is_final():
            yield flow_run_id, "" if state.is_completed() else f"{state.name}: {state.message or 'no message'}"


def run_checked(checked: Sweep, spec: str, overrides: list[str], *, on_workers: bool) -> SweepResult:
    """Run a sweep that was checked already; in Prefect it has the parameters that give it."""
    most = checked.spec.budget
    return run_with(checked, lambda: sweep(spec, overrides, most.runs, most.steps, most.hours, on_workers=on_workers))


def sweep_run_name() -> str:
    """Name of the flow run: `sweep/debug_grid`."""
    return f"{flow_run.flow_name}/{Path(flow_run.parameters['spec']).stem}"


@flow(name="sweep", flow_run_name=sweep_run_name, on_cancellation=[cancel_children])
def sweep(
    spec: Spec,
    overrides: list[str] = NO_WORDS,
    max_runs: Count = None,
    max_steps: Count = None,
    max_hours: Positive = None,
    on_workers: bool = False,
    root: Root = None,
) -> SweepResult:
    """Run a sweep: points of settings, several seeds each, compared in the end. What is finished is not done again.

    Args:
        spec: A name in conf/sweep, or the path of a file.
        overrides: Settings that all points share, such as trainer.total_steps=40.
        max_runs: Runs that this call works on at most; none: as the sweep says.
        max_steps: Training steps that this call spends at most; none: as the sweep says.
        max_hours: Hours after which this call begins no further run; none: as the sweep says.
        on_workers: Runs go to the work pool as runs of the deployment sweep-child/local, not one by one in here.
        root: Folder of datasets, models, runs and the MLflow store; none: that of the worker.
    """
    budget = Budget(runs=max_runs, steps=max_steps, hours=max_hours)
    checked: Sweep = CHECKED.get() or checked_sweep(spec, all_overrides(overrides, root=root_of_the_flow(root)), budget)
    return kept(lambda: _sweep(checked, on_workers=on_workers))


def _sweep(checked: Sweep, *, on_workers: bool) -> SweepResult:
    folder = sweep_directory(checked)
    tell(f"sweep {checked.sweep_id} in {folder}")
    tell_idle(checked.idle_settings())
    with watched():
        with sweep_lock(checked):
            parent = begin_in_mlflow(checked)
        with ended_in_mlflow(checked, parent):
            with cancelled_with_us(), work_of(checked, parent, on_workers=on_workers) as work:
                drive = Drive(checked, folder, work, {"mlflow_run_id": parent})
                drive.run()
            with sweep_lock(checked):
                result = conclude(checked, folder, drive, parent)
    for line in summary_of(result):
        tell(line)
    if result.failed and not result.num_finished:
        raise MillraceError(f"sweep {result.sweep_id}: no point was finished. {result.failed[0]}")
    return result


def child_run_name() -> str:
    """`debug optim.lr=0.001 seed=2 to step 4`."""
    given = flow_run.parameters
    words = [experiment_name(given.get("experiment")), *(given.get("label") or "").split()]
    return " ".join([*words, f"to step {given['to_step']}"] if given.get("to_step") else words)


@flow(name="sweep-child", flow_run_name=child_run_name)
def sweep_child(
    experiment: str | None = None,
    overrides: list[str] = NO_WORDS,
    to_step: Count = None,
    label: str = "",
    mlflow_parent: str | None = None,
    root: Root = None,
) -> str:
    """Train one run of a sweep: data, start model, chunks up to a step; what is done is not done again.

    Args:
        experiment: A name in conf/experiment, or a file's path where the worker is; none: the defaults.
        overrides: Settings as on the command line, such as optim.lr=1e-4.
        to_step: Step after which it is compared with others; none: its last.
        label: What tells it from the other runs of the sweep.
        mlflow_parent: MLflow run of the sweep, to nest this one below.
        root: Folder of datasets, models, runs and the MLflow store; none: that of the worker.
    """
    settings = compose_settings(overrides, experiment, root=root_of_the_flow(root))
    tell_command(join(settings.command("train")))
    with watched():
        return train_run(settings, to_step, label, mlflow_parent)


@contextmanager
def work_of(sweep: Sweep, parent: str | None, *, on_workers: bool) -> Iterator[Work]:
    """How the runs of the sweep are executed: here, or on workers."""
    if on_workers:
        yield OnWorkers(parent, sweep_directory(sweep).parent.parent).work
        return
    yield partial(work_here, mlflow_parent=parent)


def conclude(sweep: Sweep, folder: Path, drive: Drive, parent: str | None) -> SweepResult:
    """Write what a sweep leaves, and show it."""
    points = drive.in_order()
    best = best_of(points, sweep.spec.objective.direction)
    states = [point.state for point in points]
    is_alike = are_alike(points)
    result = SweepResult(
        sweep_id=sweep.sweep_id,
        folder=folder,
        num_points=max(len(points), sweep.num_points),
        num_finished=states.count("finished"),
        num_stopped_early=states.count("stopped early"),
        failed=[f"point {one.number}, {one.label}: {one.error}" for one in points if one.state == "failed"],
        num_not_begun=states.count("not begun") + max(0, sweep.num_points - len(points)),
        ended_by=drive.spending.ended_by,
        num_runs=len(drive.spending.runs),
        num_steps=drive.spending.num_steps,
        best_point=None if best is None else best.number,
        best_label="" if best is None else best.label,
        best_score=None if best is None else best.score,
        is_alike=is_alike,
        best_experiment=None if best is None else write_best(folder, sweep, best, is_alike=is_alike),
        comparison=write_comparison(folder, points),
        mlflow_run_id=parent,
    )
    drive.save()
    show_result(sweep, points, result)
    finish_in_mlflow(sweep, parent, points, result)
    return result
