"""A sweep as a flow: its runs are child flow runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field, JsonValue

from flows.parameters import NO_OVERRIDES, Root, all_overrides
from flows.pipeline import one_heartbeat
from flows.plan.checks import check_before_plan
from flows.server.nested import end_nested
from flows.server.watch import watched
from flows.shown.tell import tell, tell_idle
from flows.sweep import mlflow_parent
from flows.sweep.children import Children, InTurn, OnWorkers, cancelled_with_us
from flows.sweep.drive import Drive, search_of
from flows.sweep.record import PointRecord, best_of, sweep_directory
from flows.sweep.result import SweepResult, show_summary, show_table, summary_of, write_best, write_comparison
from flows.trainer.client import kept_between_runs
from flows.work.stack_store import in_stack
from rlcore.config.sweep import Budget
from rlcore.config.sweep_load import Sweep, load_sweep, sweep_names
from rlcore.errors import MillraceError
from rlcore.storage.locks import HeldLock

LOCK_FILE = "sweep.lock"
Spec = Annotated[str, Field(examples=list(sweep_names()))]
Count = Annotated[int | None, Field(ge=1)]
Hours = Annotated[float | None, Field(gt=0)]


def sweep_run_name() -> str:
    """`sweep/debug_grid`."""
    return f"{flow_run.flow_name}/{Path(flow_run.parameters['spec']).stem}"


@flow(name="sweep", flow_run_name=sweep_run_name, on_cancellation=[end_nested], on_crashed=[end_nested])
def sweep(
    spec: Spec,
    overrides: list[str] = NO_OVERRIDES,
    max_runs: Count = None,
    max_steps: Count = None,
    max_hours: Hours = None,
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
        root: Folder of datasets, models, runs and the MLflow store; none: as in the settings.
    """
    budget = Budget(runs=max_runs, steps=max_steps, hours=max_hours)
    checked = load_sweep(spec, all_overrides(overrides, root=root), budget=budget)
    checked = replace(checked, base=in_stack(checked.base))
    check_before_plan(checked.base)
    folder = sweep_directory(checked)
    tell(f"sweep {checked.sweep_id} in {folder}")
    tell_idle(checked.idle_settings())
    with watched(), HeldLock(folder / LOCK_FILE, what=f"sweep {checked.sweep_id}"), one_heartbeat():
        parent = mlflow_parent.begin(checked)
        with mlflow_parent.ended_with_us(checked, parent):
            with cancelled_with_us(), children_of(checked, parent, on_workers=on_workers) as children:
                more: dict[str, JsonValue] = {"mlflow_run_id": parent}
                drive = Drive(checked, folder, search_of(checked, folder), children, more)
                drive.run()
            points = [drive.points[number] for number in sorted(drive.points)]
            result = conclude(checked, folder, points, drive, parent)
    for line in summary_of(result):
        tell(line)
    if result.failed and not result.num_finished:
        raise MillraceError(f"sweep {result.sweep_id}: no point was finished. {result.failed[0]}")
    return result


@contextmanager
def children_of(sweep: Sweep, parent: str | None, *, on_workers: bool) -> Iterator[Children]:
    """How its runs are worked on."""
    if on_workers:
        yield OnWorkers(parent, sweep_directory(sweep).parent.parent)
        return
    alike = not any(key.partition(".")[0] == "runtime" for point in sweep.points for key in point)
    alike = alike and not any(key.partition(".")[0] == "runtime" for key in sweep.spec.space)
    if alike and sweep.base.runtime.backend == "local":
        with kept_between_runs():
            yield InTurn(parent)
    else:
        yield InTurn(parent)


def conclude(
    sweep: Sweep, folder: Path, points: Sequence[PointRecord], drive: Drive, parent: str | None
) -> SweepResult:
    """Write what a sweep leaves, and show it."""
    best = best_of(points, sweep.spec.objective.direction)
    states = [point.state for point in points]
    num_to_come = len(sweep.points) - len(points)
    result = SweepResult(
        sweep_id=sweep.sweep_id,
        folder=folder,
        num_points=max(len(points), len(sweep.points)),
        num_finished=states.count("finished"),
        num_stopped_early=states.count("stopped early"),
        failed=[f"point {one.number}, {one.label}: {one.error}" for one in points if one.state == "failed"],
        num_not_begun=states.count("not begun") + max(0, num_to_come),
        ended_by=drive.spending.ended_by,
        num_runs=drive.spending.num_runs,
        num_steps=drive.spending.num_steps,
        best_point=None if best is None else best.number,
        best_label="" if best is None else best.label,
        best_score=None if best is None else best.score,
        best_experiment=None if best is None else write_best(folder, sweep, best),
        comparison=write_comparison(folder, points, is_news=drive.spending.num_runs > 0),
        mlflow_run_id=parent,
    )
    drive.save()
    show_table(sweep, points)
    show_summary(sweep, result)
    mlflow_parent.finish(sweep, parent, points, result)
    return result
