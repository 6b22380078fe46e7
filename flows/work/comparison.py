"""The work of a comparison, without Prefect: find the runs, write the report, keep it with the runs in MLflow."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows.work.run_folders import named_runs
from rlcore.config import RunConfig, TrackingConfig
from rlcore.errors import DataError, MillraceError
from rlcore.tracking import MlflowStore, explain
from rlcore.tracking.connection import has_store
from rlcore.tracking.delivery import read_state
from rlcore.tracking.mlflow_store import compare_url, search_run_ids

if TYPE_CHECKING:
    from rlcore.report import ReportFiles

log = logging.getLogger(__name__)

FOLDER = "comparisons"
"""Of a run's artifacts in MLflow."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared, where it is written, and MLflow's own page of the same runs; '' where it knows fewer than two.
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
    folders = named_runs(names, root)
    if search:
        store = MlflowStore(tracking, root)
        if not has_store(store.uri):
            raise DataError(
                f"--search {search!r}: there is no MLflow store ({store.uri}) to search; name another --root"
            )
        found = search_run_ids(store, search)
        if not found:
            raise DataError(f"--search {search!r}: finds no run in experiment {tracking.experiment}; look for typos")
        folders += named_runs(found, root)
    return list(dict.fromkeys(folders))


def compare(folders: Sequence[Path], root: Path) -> Comparison:
    """Write the comparison of runs, under `<root>/comparisons`, and keep it with each of them in MLflow.

    Raises:
        DataError: fewer than two runs, or a folder that cannot be read.
    """
    from rlcore.report import compare_runs

    files = compare_runs(folders)
    told = json.loads(files.json.read_text())
    statements = tuple(f"{found['topic']}: {found['statement']}" for found in told["findings"])
    page = _keep(folders, files, root)
    return Comparison(tuple(folders), files.html, files.json, page, statements, files.summary)


def _keep(folders: Sequence[Path], files: "ReportFiles", root: Path) -> str:
    """Upload the files to the runs that MLflow knows; MLflow's page of them. A failure is a line in the log."""
    known = [(folder, run_id) for folder in folders if (run_id := _mlflow_run(folder)) is not None]
    configs = [RunConfig.model_validate_json((folder / "settings.json").read_bytes()) for folder, _ in known]
    if not known or not all(config.tracking.enabled for config in configs):
        return ""
    stores = [MlflowStore(config.tracking, root) for config in configs]
    try:
        for store, (_, run_id) in zip(stores, known, strict=True):
            for file in (files.html, files.json):
                store.log_artifact(run_id, file, f"{FOLDER}/{files.html.parent.name}")
        if len(known) > 1 and len({store.uri for store in stores}) == 1:
            return compare_url(stores[0], [run_id for _, run_id in known])
    except Exception as error:
        log.warning("MLflow did not take the comparison: %s", explain(error, stores[0].uri))
    return ""


def _mlflow_run(folder: Path) -> str | None:
    try:
        return read_state(folder).mlflow_run_id
    except MillraceError as error:
        log.warning("%s", error)
        return None
