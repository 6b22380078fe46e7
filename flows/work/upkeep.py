"""The work of keeping a root tidy, without Prefect: prune checkpoints, deliver journals, remove deleted runs' files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.work.open_run import FLOW_LOCK
from flows.work.stack_store import log_in, stack_store
from rlcore.checkpoint.catalog import plan_prune
from rlcore.checkpoint.store import CheckpointStore
from rlcore.config import RunConfig, TrackingConfig
from rlcore.errors import MillraceError, RunInUseError, TrackingError
from rlcore.run.layout import RunLayout
from rlcore.storage.locks import HeldLock
from rlcore.tracking import explain, sync_run
from rlcore.tracking.attempts import has_begun
from rlcore.tracking.connection import has_store, resolve_uri
from rlcore.tracking.models import find_garbage, remove_garbage

BYTES_PER_MB = 1e6


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one run, as a sentence. `ok`: it went well, or there was nothing to do."""

    run: str
    text: str
    ok: bool

    def __str__(self) -> str:
        """The line that people read."""
        return f"{self.run}: {self.text}"


def prune(folders: Sequence[Path], *, dry_run: bool) -> list[Outcome]:
    """Delete the checkpoints that each run's own retention rule does not keep; a run that is going on is left alone."""
    return [_pruned(folder, dry_run) for folder in folders]


def _pruned(folder: Path, dry_run: bool) -> Outcome:
    try:
        config = RunConfig.model_validate_json((folder / "settings.json").read_bytes())
        checkpoints = RunLayout(folder.parents[1], folder).checkpoints
        if not checkpoints.is_dir():
            return Outcome(folder.name, "no checkpoints", ok=True)
        if dry_run:
            plan = plan_prune(checkpoints, config.checkpoint)
            return Outcome(
                folder.name,
                f"would delete {len(plan.deleted)} of {len(plan.deleted) + len(plan.kept)} checkpoints, "
                f"{plan.freed_bytes / BYTES_PER_MB:.1f} MB",
                ok=True,
            )
        with HeldLock(folder / FLOW_LOCK, what=f"run {folder.name}"):
            deleted = CheckpointStore(checkpoints, config.checkpoint, config).prune()
    except RunInUseError:
        return Outcome(folder.name, "is going on, and prunes by itself", ok=True)
    except (MillraceError, OSError, ValueError) as error:
        return Outcome(folder.name, f"not pruned: {error}", ok=False)
    return Outcome(folder.name, f"deleted {len(deleted)} checkpoints", ok=True)


def sync(folders: Sequence[Path], uri: str | None) -> list[Outcome]:
    """Deliver to MLflow what it has not got of each run's journal. Doing it again changes nothing.

    `uri`: another store than that of the run's settings; where neither names one, it is the stack's.
    """
    return [_synced(folder, uri) for folder in folders]


def _synced(folder: Path, uri: str | None) -> Outcome:
    if not has_begun(folder):
        return Outcome(folder.name, "has not begun", ok=True)
    try:
        result = sync_run(folder, log_in(uri, folder.parents[1]) if uri else _store_in_stack(folder))
    except TrackingError as error:
        if "in use by" in str(error):
            return Outcome(folder.name, "is being delivered by another process", ok=True)
        return Outcome(folder.name, str(error), ok=False)
    status = "goes on" if result.status is None else f"is {result.status}"
    news = f"{result.num_bytes:,} bytes of the journal delivered" if result.num_bytes else "nothing was missing"
    return Outcome(folder.name, f"{news}; the run {status} (MLflow run {result.mlflow_run_id})", ok=True)


def _store_in_stack(folder: Path) -> str | None:
    """The stack's store for a run whose settings name none; None: the one that it was begun with."""
    try:
        named = RunConfig.model_validate_json((folder / "settings.json").read_bytes()).tracking.uri
    except (OSError, ValueError):  # settings of another version: `attempts.jsonl` says where it goes
        return None
    if named is None:
        return stack_store(folder.parents[1])
    log_in(named, folder.parents[1])
    return None


def collect_garbage(root: Path, tracking: TrackingConfig, *, dry_run: bool) -> list[Outcome]:
    """Remove the artifacts of runs that were deleted in MLflow; what MLflow knows of them, and `runs/`, stays.

    Raises:
        TrackingError: the store cannot be read.
    """
    uri = resolve_uri(tracking, root)
    if not has_store(uri):
        return [Outcome(str(root), f"there is no MLflow store ({uri})", ok=True)]
    try:
        found = find_garbage(uri)
    except Exception as error:
        raise TrackingError(f"garbage cannot be looked for: {explain(error, uri)}") from error
    outcomes = []
    for one in found:
        name = f"{one.run_name or one.run_id}{f' model {one.model_id}' if one.model_id else ''}"
        size = f"{one.num_files} files, {one.num_bytes / BYTES_PER_MB:.1f} MB"
        if one.kept:
            outcomes.append(Outcome(name, f"{size} stay: {one.kept}", ok=True))
            continue
        try:
            if not dry_run:
                remove_garbage(uri, one)
        except Exception as error:
            outcomes.append(Outcome(name, f"{size} not removed: {explain(error, uri)}", ok=False))
            continue
        outcomes.append(Outcome(name, f"{size} {'would be removed' if dry_run else 'removed'}", ok=True))
    return outcomes
