"""Keep a root tidy: prune checkpoints, deliver journals, remove what deleted runs have left in MLflow."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.parameters import Root
from flows.shown.tell import tell, tell_command
from flows.work import upkeep
from flows.work.run_folders import all_runs
from flows.work.stack_store import tracking_in_stack
from flows.work.upkeep import Outcome
from rlcore.config import PathsConfig, TrackingConfig
from rlcore.errors import TrackingError


@task(task_run_name="prune", cache_policy=NO_CACHE)
def prune(folders: list[Path], dry_run: bool) -> list[Outcome]:
    """Delete checkpoints that the retention rules do not keep."""
    return _told("prune", upkeep.prune(folders, dry_run=dry_run))


@task(task_run_name="sync", cache_policy=NO_CACHE)
def sync(folders: list[Path]) -> list[Outcome]:
    """Deliver journals to MLflow."""
    return _told("sync", upkeep.sync(folders, None))


@task(task_run_name="gc", cache_policy=NO_CACHE)
def gc(root: Path, dry_run: bool) -> list[Outcome]:
    """Remove artifacts of runs that were deleted in MLflow."""
    return _told("gc", upkeep.collect_garbage(root, tracking_in_stack(TrackingConfig(), root), dry_run=dry_run))


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
