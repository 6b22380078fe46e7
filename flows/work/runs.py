"""The work over several runs of a root: find them, compare them, prune, deliver and tidy; without Prefect."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows.stack.state import set_mlflow_login, stack_tracking_uri
from flows.work.status import worker_of
from rlcore.checkpoint.catalog import plan_prune
from rlcore.checkpoint.store import CheckpointStore
from rlcore.config import PathsConfig, RunConfig, TrackingConfig
from rlcore.config.fingerprint import RUN_FILE
from rlcore.errors import ConfigError, DataError, MillraceError, RunInUseError, TrackingError
from rlcore.run.layout import RunLayout
from rlcore.storage.documents import files_of, sqlite_file
from rlcore.storage.locks import RunLock
from rlcore.tracking.attempts import Destination, read_attempts
from rlcore.tracking.connection import explain_error, has_store, resolve_uri
from rlcore.tracking.delivery import read_state, sync_run
from rlcore.tracking.lineage import read_origin
from rlcore.tracking.mlflow_store import MlflowStore, compare_url, search_run_ids
from rlcore.tracking.models import find_garbage, remove_garbage

if TYPE_CHECKING:
    from rlcore.report.build import ReportFiles

log = logging.getLogger(__name__)

FOLDER = "comparisons"
"""Folder of comparisons among a run's artifacts in MLflow."""
MAX_NAMES = 8
"""Run ids in a message at most."""


def all_runs(root: Path) -> list[Path]:
    """Folders of all runs under a root, by name."""
    return sorted(file.parent for file in files_of(root / "runs", f"*/{RUN_FILE}"))


def find_named_runs(names: Sequence[str], root: Path) -> list[Path]:
    """The folders of runs named by a path, a run id, or the beginning of one that is no other's.

    Raises:
        DataError: a name that is no run's, or several runs'.
    """
    return [_find_folder(name, root) for name in names]


def _find_folder(name: str, root: Path) -> Path:
    for folder in (Path(name), root / "runs" / name):
        if (folder / RUN_FILE).is_file():
            return folder.resolve()
    known = all_runs(root)
    found = [folder for folder in known if name and folder.name.startswith(name)]
    if len(found) == 1:
        return found[0].resolve()
    name = name or "''"  # an empty name, perhaps of an unset variable, is no beginning
    meant = found or known
    names = ", ".join(folder.name for folder in meant[:MAX_NAMES]) or "none"
    if len(meant) > MAX_NAMES:
        names += f" and {len(meant) - MAX_NAMES} more (millrace runs lists them)"
    problem = "is the beginning of several runs" if found else "is neither the folder nor the id of a run"
    raise DataError(
        f"{name}: {problem}; under {root / 'runs'} there are: {names}. Name one of them, or another root (--root, or "
        "paths.root)."
    )


def find_run(words: Sequence[str], root: Path | None) -> tuple[RunConfig, RunLayout]:
    """Settings and folders of a run: by its folder, its id or the beginning of that under `root`, or by its settings.

    Raises:
        ConfigError: the settings are wrong.
        DataError: there is no such run, or its settings cannot be read.
    """
    named = [word for word in words if "=" not in word or (Path(word) / RUN_FILE).is_file()]
    if named and len(words) > 1:
        raise ConfigError(
            f"RUN: must be one run, by its folder or id, or the settings that it was started with, each KEY=VALUE; got "
            f"{' '.join(words)}"
        )
    if named:
        folder = _find_folder(words[0], root or Path(PathsConfig().root))
        config = read_settings(folder)
        layout = RunLayout(Path(config.paths.root).resolve(), folder)  # the folder may have been moved or copied
    else:
        from flows.parameters import all_overrides
        from rlcore.config.compose import load_config  # Hydra, which a run by its name does not need

        config = load_config(all_overrides(words, root=root))
        layout = RunLayout.of(config)
        if not layout.run_dir.is_dir():
            raise DataError(
                f"{layout.run_dir}: there is no such run: the settings name it, but nothing was started with them. "
                "Give the settings of the run, its id, or its folder."
            )
    return config, layout


def read_settings(folder: Path) -> RunConfig:
    """The settings that a run's folder keeps.

    Raises:
        DataError: they cannot be read, or are those of another version.
    """
    if (origin := read_origin(folder)) is None:
        raise DataError(f"{folder / RUN_FILE}: is not there. Name the folder of a run.")
    return origin.settings


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared, where it is written, and MLflow's own page of the same runs; '' where it has fewer than two.
    `statements`: what the comparison concludes. `summary`: its head as Markdown."""

    runs: tuple[Path, ...]
    html: Path
    json: Path
    mlflow_page: str
    statements: tuple[str, ...]
    summary: str


def find_runs(names: Sequence[str], search: str, root: Path, tracking: TrackingConfig) -> list[Path]:
    """The folders of the named runs, and of those that a search in MLflow finds.

    Raises:
        DataError: a name is no run's; a run that the search finds is not on this machine.
        TrackingError: MLflow does not take the search.
    """
    folders = find_named_runs(names, root)
    if search:
        store = MlflowStore(tracking, root)
        if not has_store(store.uri):
            raise DataError(
                f"--search {search!r}: there is no MLflow store ({store.uri}) to search; name another --root"
            )
        found = search_run_ids(store, search)
        if not found:
            raise DataError(f"--search {search!r}: finds no run in experiment {tracking.experiment}; look for typos")
        folders += find_named_runs(found, root)
    return list(dict.fromkeys(folders))


def compare(folders: Sequence[Path], root: Path) -> Comparison:
    """Write the comparison of runs, under `<root>/comparisons`, and keep it with each of them in the root's MLflow.

    Raises:
        DataError: fewer than two runs, or a folder that cannot be read.
    """
    from rlcore.report.build import compare_runs

    root = root.resolve()
    files = compare_runs(folders, root=root)
    statements = tuple(f"{found.topic}: {found.statement}" for found in files.findings)
    page = _upload(folders, files, root)
    return Comparison(tuple(folders), files.html, files.json, page, statements, files.summary)


def _upload(folders: Sequence[Path], files: "ReportFiles", root: Path) -> str:
    """Upload the files to the runs that MLflow has; the URL of its page of them. A failure is a line in the log."""
    known = [(folder, run_id) for folder in folders if (run_id := _mlflow_run(folder)) is not None]
    configs = [read_settings(folder) for folder, _ in known]
    if not known or not all(config.tracking.enabled for config in configs):
        return ""
    stores = [MlflowStore(config.tracking, root) for config in configs]
    for (folder, _), config, store in zip(known, configs, stores, strict=True):
        if not has_store(store.uri) or (config.tracking.uri is None and folder.resolve().parents[1] != root):
            log.warning("MLflow does not keep the comparison: %s is not in the MLflow store of %s", folder, root)
            return ""
    try:
        for store, (_, run_id) in zip(stores, known, strict=True):
            for file in (files.html, files.json):
                store.client.log_artifact(run_id, str(file), f"{FOLDER}/{files.html.parent.name}")
        if len(known) > 1 and len({store.uri for store in stores}) == 1:
            return compare_url(stores[0], [run_id for _, run_id in known])
    except Exception as error:
        log.warning("MLflow did not take the comparison: %s", explain_error(error, stores[0].uri))
    return ""


def _mlflow_run(folder: Path) -> str | None:
    try:
        return read_state(folder).mlflow_run_id
    except MillraceError as error:
        log.warning("%s", error)
        return None


BYTES_PER_MB = 1e6


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one run, as a sentence. `ok`: it went well, or there was nothing to do."""

    run: str
    text: str
    ok: bool

    def __str__(self) -> str:
        return f"{self.run}: {self.text}"


def prune(folder: Path, *, dry_run: bool) -> Outcome:
    """Delete the checkpoints that a run's own retention rule does not keep; one that is going on is left alone."""
    try:
        config = read_settings(folder)
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
        if worker_of(folder) is not None:
            return Outcome(folder.name, "is going on, and prunes by itself", ok=True)
        with RunLock(folder, is_named=False):  # its file says what has worked on the run last
            deleted = CheckpointStore(checkpoints, config.checkpoint, config).prune()
    except RunInUseError:
        return Outcome(folder.name, "is going on, and prunes by itself", ok=True)
    except (MillraceError, OSError, ValueError) as error:
        return Outcome(folder.name, f"not pruned: {error}", ok=False)
    return Outcome(folder.name, f"deleted {len(deleted)} checkpoints", ok=True)


def sync(folder: Path, uri: str | None) -> Outcome:
    """Deliver to MLflow what it has not got of a run's journal. Doing it again changes nothing.

    `uri`: another store than that of the run's settings; where neither names one, it is the stack's or the root's file.
    """
    try:
        if not (attempts := read_attempts(folder)):
            return Outcome(folder.name, "has not begun", ok=True)
        begun_with = attempts[-1][0].destination
        uri = uri or _store_of_root(folder, begun_with)
        set_mlflow_login(uri or begun_with.uri, folder.parents[1])
        result = sync_run(folder, uri)
    except RunInUseError:
        return Outcome(folder.name, "is being delivered by another process", ok=True)
    except (MillraceError, OSError) as error:
        return Outcome(folder.name, str(error), ok=False)
    status = "goes on" if result.status is None else f"is {result.status}"
    news = f"{result.num_bytes:,} bytes of the journal delivered" if result.num_bytes else "nothing was missing"
    return Outcome(folder.name, f"{news}; the run {status} (MLflow run {result.mlflow_run_id})", ok=True)


def _store_of_root(folder: Path, begun_with: Destination) -> str | None:
    """The stack's store, or the file under the root, for a run whose settings name none; None: the one that it was
    begun with. A run that was moved or copied to another root goes to that root's store.

    Raises:
        TrackingError: the file under another root than the run was begun in is no store.
    """
    root = folder.parents[1]
    try:
        named = read_settings(folder).tracking.uri
    except DataError:  # settings of another version: `attempts.jsonl` says where it goes
        return None
    if named is not None:
        return None
    if (stack := stack_tracking_uri(root)) is not None:
        return stack
    store = MlflowStore(TrackingConfig(experiment=begun_with.experiment), root)
    is_file = begun_with.uri.startswith("sqlite:")  # else a server's, which no folder holds
    if not is_file or sqlite_file(store.uri).resolve() == sqlite_file(begun_with.uri).resolve():
        return None
    try:
        _ = store.experiment_id  # made here where it is missing: its artifacts lie under this root
    except Exception as error:
        raise TrackingError(f"{folder}: not delivered: {explain_error(error, store.uri)}") from error
    return store.uri


def collect_garbage(root: Path, tracking: TrackingConfig, *, dry_run: bool) -> list[Outcome]:
    """Remove the artifacts of runs that were deleted in MLflow; their records in MLflow, and `runs/`, stay.

    Raises:
        TrackingError: the store cannot be read.
    """
    uri = set_mlflow_login(resolve_uri(tracking, root), root)
    if not has_store(uri):
        return [Outcome(str(root), f"there is no MLflow store ({uri})", ok=True)]
    try:
        found = find_garbage(uri)
    except Exception as error:
        raise TrackingError(f"garbage cannot be looked for: {explain_error(error, uri)}") from error
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
            outcomes.append(Outcome(name, f"{size} not removed: {explain_error(error, uri)}", ok=False))
            continue
        outcomes.append(Outcome(name, f"{size} {'would be removed' if dry_run else 'removed'}", ok=True))
    return outcomes
