"""A sweep as a flow: it works on its points in this process, or has workers of the work pool do so."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from shlex import join
from typing import Annotated, Any
from uuid import UUID, uuid4

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
from flows.artifacts import show_artifact
from flows.parameters import NO_STRINGS, Count, Positive, Root, all_overrides, experiment_name, flow_root
from flows.plan.checks import check_run
from flows.progress import LabelledDisplay, display, use_display
from flows.server.watch import end_if_cancelled, end_if_suspended, limit_retries, watch_flow_run
from flows.stages.train import Train
from flows.sweep.drive import POLL_S, SweepWorker, wait_for_others
from flows.sweep.points import Member, load_checked_sweep
from flows.sweep.result import (
    SweepResult,
    describe_sweep,
    end_mlflow_run_on_error,
    finish_mlflow_run,
    start_mlflow_run,
    summary_lines,
    write_result,
)
from flows.sweep.study import sweep_lock
from flows.tasks import (
    CHECKED_SETTINGS,
    call_flow,
    keep_outcome,
    log_and_print,
    log_command,
    log_unused_settings,
    run_as_task,
)
from flows.work.open_run import open_run
from rlcore.config.base import FILE_ENDINGS
from rlcore.config.compose import group_members
from rlcore.config.sweep import Budget, Sweep
from rlcore.errors import MillraceError
from rlcore.tracking.mlflow_store import PARENT_TAG

SpecName = Annotated[str, Field(examples=list(group_members("sweep")))]
DEPLOYMENT = "sweep-child/local"
MAX_CHILDREN = 8
"""Children that wait or run at a time; how many of them run is the work queue's concurrency limit."""
STOP_WAIT_S = 20.0
"""For children on workers to save once the sweep is told to stop; Prefect's worker kills the sweep after 30 s."""


def run_checked(checked: Sweep, spec: str, overrides: list[str], *, on_workers: bool) -> SweepResult:
    """Run a sweep that was checked already; in Prefect it has the parameters that give it."""
    most = checked.spec.budget
    return call_flow(checked, lambda: sweep(spec, overrides, most.runs, most.steps, most.hours, on_workers=on_workers))


def sweep_run_name() -> str:
    """Name of the flow run: `sweep/debug_grid`."""
    return f"{flow_run.flow_name}/{Path(flow_run.parameters['spec']).stem}"


def cancel_children(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """A hook for `on_cancellation`: Prefect's worker calls it once the sweep's process is gone."""
    with get_client(sync_client=True) as client:
        _cancel_children(client, flow_run.id)


@flow(name="sweep", flow_run_name=sweep_run_name, on_cancellation=[cancel_children])
def sweep(
    spec: SpecName,
    overrides: list[str] = NO_STRINGS,
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
        on_workers: Points go to the work pool as runs of the deployment sweep-child/local, not one by one in here.
        root: Folder of datasets, models, runs and the MLflow store; none: that of the worker.
    """
    budget = Budget(runs=max_runs, steps=max_steps, hours=max_hours)
    given = all_overrides(overrides, root=flow_root(root))
    checked: Sweep = CHECKED_SETTINGS.get() or load_checked_sweep(spec, given, budget)
    return keep_outcome(lambda: _sweep(checked, spec, given, on_workers=on_workers))


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
                result = write_result(checked, drive.study.points(), drive.spending.read(), parent)
                about = describe_sweep(checked, result)
                show_artifact(checked.sweep_id, "sweep", f"{checked.sweep_id}: its points and outcome", lambda: about)
                finish_mlflow_run(checked, result, about)
    for line in summary_lines(result):
        log_and_print(line)
    if result.failed and result.best is None:
        raise MillraceError(f"sweep {result.sweep_id}: no point was finished. {result.failed[0]}")
    return result


def train_member(mlflow_parent: str | None, member: Member, to_step: int, name: str, label: str) -> None:
    """Train one run of a sweep to a step, from its last checkpoint, as tasks of the flow run that we are in."""
    end_if_cancelled()
    end_if_suspended()
    settings = member.settings
    check_run(settings)
    config = settings.config
    if mlflow_parent:
        config = config.model_copy(update={"tags": {**config.tags, PARENT_TAG: mlflow_parent}})
    command, title = settings.command("train"), f"{experiment_name(settings.experiment)} {label}"
    log_command(join(command))
    with use_display(LabelledDisplay(display(), name)), open_run(config, command, title) as run:
        chain.run_stages(run, run_as_task, Train.name, to_step)


# ---------------------------------------------------------------------- on workers


@flow(name="sweep-child", flow_run_name=sweep_run_name)
def sweep_child(
    spec: SpecName, call: str, overrides: list[str] = NO_STRINGS, mlflow_parent: str | None = None, root: Root = None
) -> None:
    """Bring one point of a sweep to its end, on behalf of the sweep's flow run.

    Args:
        spec: As the sweep's; a file must be one that the worker can read.
        call: Name of the call of the sweep, whose budget this is spent from.
        overrides: As the sweep's.
        mlflow_parent: MLflow run of the sweep, to nest the runs below.
        root: Folder of datasets, models, runs and the MLflow store; none: that of the worker.
    """
    checked = load_checked_sweep(spec, all_overrides(overrides, root=flow_root(root)), Budget())
    with watch_flow_run():
        if error := SweepWorker(checked, partial(train_member, mlflow_parent), call).run(whole=False):
            raise MillraceError(error)


def work_on_workers(drive: SweepWorker, sweep: Sweep, parameters: dict[str, Any]) -> None:
    """Have children work on the points until all have ended, or the budget has. One that is lost is replaced.

    Raises:
        MillraceError: there is no such deployment, or its runs end without working on a point.
    """
    at_once = MAX_CHILDREN if sweep.spec.optuna is None else sweep.spec.optuna.points_at_once
    with cancel_children_on_error() as us, get_client(sync_client=True) as client:
        _require_deployment(client)
        num_lost_before = sum(_is_lost(child) for child in _children(client, us))
        while True:
            num_left = 0 if drive.spending.read()["ended_by"] else drive.study.num_left()
            children = _children(client, us)
            num_alive = sum(_is_alive(child) for child in children)
            lost = [child for child in children if _is_lost(child)]
            if len(lost) - num_lost_before > sweep.num_points - num_left + at_once:
                raise MillraceError(f"{DEPLOYMENT}: its runs end without working on a point: {lost[0].state!r}")
            if not num_alive and not num_left:
                return
            for _ in range(min(at_once, num_left) - num_alive):
                run_deployment(DEPLOYMENT, parameters=parameters, timeout=0)
            wait_for_others()


def _require_deployment(client: SyncPrefectClient) -> None:
    try:
        client.read_deployment_by_name(DEPLOYMENT)
    except ObjectNotFound:
        raise MillraceError(
            f"on_workers: the Prefect server at {client.api_url} has no deployment {DEPLOYMENT}. `millrace up` "
            "applies the deployments and starts a worker; without on_workers the runs go on in this process."
        ) from None


@contextmanager
def cancel_children_on_error() -> Iterator[UUID]:
    """Gives the id of our flow run. Where the block fails, its children are cancelled: those that run save, and those
    that wait do not begin."""
    us = UUID(str(flow_run.id))
    try:
        yield us
    except BaseException:
        # The server may be gone: we end all the same, and soon.
        with suppress(Exception), limit_retries(1), get_client(sync_client=True) as client:
            _cancel_children(client, us)
            deadline = time.monotonic() + STOP_WAIT_S
            while time.monotonic() < deadline and any(map(_is_alive, _children(client, us))):
                time.sleep(POLL_S)
        raise


def _cancel_children(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    for child in filter(_is_alive, _children(client, flow_run_id)):
        client.set_flow_run_state(child.id, Cancelling(message="The flow run around it was stopped."))


def _children(client: SyncPrefectClient, flow_run_id: UUID) -> list[FlowRun]:
    """The newest children: the server gives 200 at most, and older ones have ended."""
    below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run_id]))
    return client.read_flow_runs(flow_run_filter=below, sort=FlowRunSort.EXPECTED_START_TIME_DESC)


def _is_alive(child: FlowRun) -> bool:
    return child.state is None or not child.state.is_final()


def _is_lost(child: FlowRun) -> bool:
    return child.state is not None and child.state.is_final() and not child.state.is_completed()
