"""Flows over several runs or models: compare them, judge them on suites, and keep a root tidy."""

from collections.abc import Sequence
from pathlib import Path
from shlex import join, quote
from typing import Annotated, Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.states import Completed
from pydantic import Field

from flows.artifacts import harmless, show_comparison, show_evaluation, show_regression
from flows.commands import evaluate as evaluation
from flows.commands import regression as nightly
from flows.commands.settings import SLOWER_BY
from flows.parameters import NO_OVERRIDES, Experiment, Root, compose_settings
from flows.server.watch import watched
from flows.stack.state import tracking_in_stack
from flows.tasks import as_task, flow_run_name, tell, tell_command, tell_idle
from flows.work import runs as several
from flows.work.runs import Comparison, Outcome, all_runs
from rlcore.config import PathsConfig, TrackingConfig
from rlcore.errors import TrackingError


@task(task_run_name="prune", cache_policy=NO_CACHE)
def prune(folders: list[Path], dry_run: bool) -> list[Outcome]:
    """Delete checkpoints that the retention rules do not keep."""
    return _told("prune", several.prune(folders, dry_run=dry_run))


@task(task_run_name="sync", cache_policy=NO_CACHE)
def sync(folders: list[Path]) -> list[Outcome]:
    """Deliver journals to MLflow."""
    return _told("sync", several.sync(folders, None))


@task(task_run_name="gc", cache_policy=NO_CACHE)
def gc(root: Path, dry_run: bool) -> list[Outcome]:
    """Remove artifacts of runs that were deleted in MLflow."""
    return _told("gc", several.collect_garbage(root, tracking_in_stack(TrackingConfig(), root), dry_run=dry_run))


@flow(name="maintain", flow_run_name="maintain")
def maintain(root: Root = None, dry_run: bool = False) -> list[Outcome]:
    """Prune checkpoints, deliver journals, remove artifacts of deleted runs; runs that are going on are left alone.

    Args:
        root: Folder of datasets, models, runs and the MLflow store; none: as in the settings.
        dry_run: Say what would be deleted, and delete nothing.
    """
    at = Path(root or PathsConfig().root).resolve()
    where = quote(str(at))
    tell_command(f"millrace sync --root {where}; millrace gc --root {where}{' --dry-run' if dry_run else ''}")
    folders = all_runs(at)
    outcomes = prune(folders, dry_run)
    if not dry_run:
        outcomes += sync(folders)
    outcomes += gc(at, dry_run)
    failed = [str(outcome) for outcome in outcomes if not outcome.ok]
    if failed:
        raise TrackingError("not all went well:\n" + "\n".join(failed))
    return outcomes


def _told(what: str, outcomes: Sequence[Outcome]) -> list[Outcome]:
    for outcome in outcomes:
        tell(f"{what}: {outcome}")
    return list(outcomes)


NO_RUNS: list[str] = []
"""The default; the flow does not change it."""


@task(task_run_name="compare", cache_policy=NO_CACHE)
def write_comparison(folders: list[Path], root: Path) -> Comparison:
    """Write the comparison, and keep it with the runs in MLflow."""
    made = several.compare(folders, root)
    tell(f"comparison: {made.html}")
    return made


@flow(name="compare", flow_run_name="compare")
def compare(runs: list[str] = NO_RUNS, search: str = "", root: Root = None) -> Comparison:
    """Write the comparison of runs: settings that differ, curves over one another, figures with intervals, costs.

    Args:
        runs: Run ids or folders; the first one is what the others are compared with.
        search: Also the runs that this finds in MLflow, such as tags.task = 'countdown'.
        root: Folder of datasets, models, runs and the MLflow store; none: as in the settings.
    """
    at = Path(root or PathsConfig().root).resolve()
    tell_command(join(["millrace", "compare", *runs, *(["--search", search] if search else []), "--root", str(at)]))
    made = write_comparison(several.find_runs(runs, search, at, tracking_in_stack(TrackingConfig(), at)), at)
    show_comparison(made)
    return made


@flow(name="eval", flow_run_name="eval")
def evaluate(
    models: list[str] = NO_RUNS, suites: list[str] = NO_RUNS, overrides: list[str] = NO_OVERRIDES, root: Root = None
) -> list[str]:
    """Judge models or checkpoints on suites: figures with intervals, each model paired with the first.

    Args:
        models: Model directories, or runs by folder or id, with @last (taken if not given), @best, @start or a step.
        suites: Names in conf/suite, or paths of files where the worker is.
        overrides: Settings for all of them, such as rollout.engine=vllm.
        root: Folder of datasets, models, runs and the MLflow store; none: as in the settings.
    """
    at = None if root is None else Path(root)
    command = evaluation.command_of([*models, *overrides], suites, at)
    tell_command(join(command))
    with watched():
        found = evaluation.evaluate_all(models, suites, overrides, at, command, as_task)
    lines = evaluation.table_lines(found)
    tell("\n".join(lines))
    show_evaluation(found[0].folder.name, lines)
    return [str(one.folder) for one in found]


@flow(name="regression", flow_run_name=flow_run_name)
def regression(
    experiment: Experiment = None,
    overrides: list[str] = NO_OVERRIDES,
    slower_by: Annotated[float, Field(ge=0)] = SLOWER_BY,
    root: Root = None,
) -> State[Any]:
    """Run an experiment anew and judge it against its last good run; the verdict is the name of the run's last state.

    Args:
        experiment: A name in conf/experiment, or a file's path where the worker is; none: the defaults.
        overrides: Settings as on the command line, such as trainer.total_steps=40.
        slower_by: Share by which a step may take longer, such as 0.1, before it is told.
        root: Folder of datasets, models, runs and the MLflow store; none: as in the settings.
    """
    settings = compose_settings(overrides, experiment, root=root)
    name = settings.config.name
    tell_command(join([*settings.command("regression"), f"--slower-by={slower_by}"]))
    tell_idle(settings.idle())
    with watched():
        night, files = nightly.night(settings, as_task, slower_by=slower_by)
    text = nightly.said(name, night)
    tell(text)
    show_regression(name, files.summary, files.html)
    resource = {"prefect.resource.id": f"millrace.regression.{name}", "prefect.resource.name": name}
    harmless(lambda: emit_event(f"millrace.regression.{night.word}", resource=resource, payload={"text": text}))
    return Completed(name=night.word.capitalize(), message=text)
