"""Operations on the runs of a root, such as finding runs, comparing them and delivering their metrics."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows.stack.state import set_mlflow_login, stack_tracking_uri
from rlcore.config import PathsConfig, RunConfig, TrackingConfig
from rlcore.config.fingerprint import RUN_FILE
from rlcore.errors import ConfigError, DataError, MillraceError, NotFoundError, RunInUseError, TrackingError
from rlcore.run.layout import RunLayout
from rlcore.storage.documents import files_of, sqlite_file
from rlcore.tracking.attempts import Destination, read_attempts
from rlcore.tracking.connection import explain_error, has_store
from rlcore.tracking.delivery import read_state, sync_run
from rlcore.tracking.lineage import read_origin
from rlcore.tracking.mlflow_store import MlflowStore, compare_url, search_run_ids

if TYPE_CHECKING:
    from rlcore.report.build import ReportFiles

log = logging.getLogger(__name__)

FOLDER = "comparisons"  # folder of comparisons among a run's artifacts in MLflow
MAX_NAMES = 8  # largest number of run ids in a message


def all_runs(root: Path) -> list[Path]:
    """Return the folders of all runs under a root, sorted by name."""
    return sorted(file.parent for file in files_of(root / "runs", f"*/{RUN_FILE}"))


def find_named_runs(names: Sequence[str], root: Path) -> list[Path]:
    """Return the folders of the runs with these paths, ids or id prefixes. Raises NotFoundError if a name fits no
    single run."""
    return [_find_folder(name, root) for name in names]


def _find_folder(name: str, root: Path) -> Path:
    for folder in (Path(name), root / "runs" / name):
        if (folder / RUN_FILE).is_file():
            return folder.resolve()
    known = all_runs(root)
    found = [folder for folder in known if name and folder.name.startswith(name)]
    if len(found) == 1:
        return found[0].resolve()
    name = name or "''"  # perhaps an unset variable of the shell
    meant = found or known
    names = ", ".join(folder.name for folder in meant[:MAX_NAMES]) or "none"
    if len(meant) > MAX_NAMES:
        names += f" and {len(meant) - MAX_NAMES} more (millrace runs lists them)"
    problem = "is a prefix of several run ids" if found else "is neither the folder nor the id of a run"
    raise NotFoundError(
        f"{name}: {problem}; {root / 'runs'} has: {names}. Name one of them, or another root (--root or paths.root)."
    )


def find_run(words: Sequence[str], root: Path | None) -> tuple[RunConfig, RunLayout]:
    """Return the settings and layout of the run that the words name: by a folder, an id, a prefix of an id, or settings
    KEY=VALUE. Raises ConfigError for invalid words or settings, NotFoundError if no run matches, and DataError if the
    run's settings cannot be read.
    """
    named = [word for word in words if "=" not in word or (Path(word) / RUN_FILE).is_file()]
    if named and len(words) > 1:
        raise ConfigError(
            f"RUN: must be one run, by its folder or id, or its settings, each KEY=VALUE; got {' '.join(words)}"
        )
    if named:
        folder = _find_folder(words[0], root or Path(PathsConfig().root))
        config = read_settings(folder)
        layout = RunLayout(Path(config.paths.root).resolve(), folder)  # the folder may be a copy
    else:
        from flows.parameters import all_overrides
        from rlcore.config.compose import load_config  # imports Hydra, which a named run does not need

        config = load_config(all_overrides(words, root=root))
        layout = RunLayout.of(config)
        if not layout.run_dir.is_dir():
            raise NotFoundError(
                f"{layout.run_dir}: there is no such run with these settings. "
                "Give the settings of the run, its id, or its folder."
            )
    return config, layout


def read_settings(folder: Path) -> RunConfig:
    """Return the settings in a run's folder. Raises DataError if they cannot be read."""
    if (origin := read_origin(folder)) is None:
        raise DataError(f"{folder / RUN_FILE}: is not there. Name the folder of a run.")
    return origin.settings


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of runs. `statements` are its conclusions, and `summary` is Markdown. `mlflow_page` and
    `mlflow_table` are addresses in MLflow, or '' if MLflow has fewer than two of the runs.
    """

    runs: tuple[Path, ...]
    html: Path
    json: Path
    mlflow_page: str
    mlflow_table: str
    statements: tuple[str, ...]
    summary: str


def find_runs(names: Sequence[str], search: str, root: Path, tracking: TrackingConfig) -> list[Path]:
    """Return the folders of the named runs and of the runs that a search in MLflow returns. Raises DataError if no run
    is found or if a run is not on this machine. Raises TrackingError if MLflow rejects the search.
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
            raise DataError(
                f"--search {search!r}: finds no run in experiment {tracking.experiment}; check the spelling"
            )
        folders += find_named_runs(found, root)
    return list(dict.fromkeys(folders))


def compare(folders: Sequence[Path], root: Path) -> Comparison:
    """Write the comparison of two or more runs under `<root>/comparisons`, and upload it to each run in MLflow."""
    from rlcore.report.build import compare_runs

    root = root.resolve()
    files = compare_runs(folders, root=root)
    statements = tuple(f"{found.topic}: {found.statement}" for found in files.findings)
    pages = _upload(folders, files, root)
    return Comparison(tuple(folders), files.html, files.json, *pages, statements, files.summary)


def _upload(folders: Sequence[Path], files: "ReportFiles", root: Path) -> tuple[str, str]:
    """Upload the files to the runs in MLflow. Return two URLs for `Comparison`, which are '' after a logged failure."""
    known = [(folder, run_id) for folder in folders if (run_id := _mlflow_run(folder)) is not None]
    configs = [read_settings(folder) for folder, _ in known]
    if not known or not all(config.tracking.enabled for config in configs):
        return "", ""
    stores = [MlflowStore(config.tracking, root) for config in configs]
    for (folder, _), config, store in zip(known, configs, stores, strict=True):
        if not has_store(store.uri) or (config.tracking.uri is None and folder.resolve().parents[1] != root):
            log.warning("The comparison is not uploaded to MLflow: %s is not in the MLflow store of %s", folder, root)
            return "", ""
    try:
        for store, (_, run_id) in zip(stores, known, strict=True):
            for file in (files.html, files.json):
                store.client.log_artifact(run_id, str(file), f"{FOLDER}/{files.html.parent.name}")
        if len(known) > 1 and len({store.uri for store in stores}) == 1:
            return compare_url(stores[0], [run_id for _, run_id in known]), stores[0].runs_url()
    except Exception as error:
        log.warning("The comparison is not uploaded to MLflow: %s", explain_error(error, stores[0].uri))
    return "", ""


def _mlflow_run(folder: Path) -> str | None:
    try:
        return read_state(folder).mlflow_run_id
    except MillraceError as error:
        log.warning("%s", error)
        return None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an operation on a run."""

    run: str
    text: str
    ok: bool

    def __str__(self) -> str:
        return f"{self.run}: {self.text}"


def sync(folder: Path, uri: str | None) -> Outcome:
    """Deliver the missing part of a run's journal to `uri` (default: the run's MLflow store)."""
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
    status = "is running" if result.status is None else f"is {result.status}"
    news = f"{result.num_bytes:,} bytes of the journal delivered" if result.num_bytes else "nothing was missing"
    return Outcome(folder.name, f"{news}; the run {status} (MLflow run {result.mlflow_run_id})", ok=True)


def _store_of_root(folder: Path, begun_with: Destination) -> str | None:
    """Return the MLflow store of the root that now contains the run's folder, or None if the store has not changed."""
    root = folder.parents[1]
    try:
        if read_settings(folder).tracking.uri is not None:
            return None
    except DataError:  # settings of another version: use the store in `attempts.jsonl`
        return None
    if (stack := stack_tracking_uri(root)) is not None:
        return stack
    store = MlflowStore(TrackingConfig(experiment=begun_with.experiment), root)
    is_file = begun_with.uri.startswith("sqlite:")  # not the address of a server
    if not is_file or sqlite_file(store.uri).resolve() == sqlite_file(begun_with.uri).resolve():
        return None
    try:
        _ = store.experiment_id  # a missing experiment is created with its artifacts under this root
    except Exception as error:
        raise TrackingError(f"{folder}: not delivered: {explain_error(error, store.uri)}") from error
    return store.uri
