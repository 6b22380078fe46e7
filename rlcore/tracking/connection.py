"""The way to MLflow: which store, with which limits on waiting, without telemetry."""

import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.config import TrackingConfig
from rlcore.errors import TrackingError
from rlcore.storage.locks import HeldLock
from rlcore.storage.sqlite import SQLITE, sqlite_address, sqlite_file

if TYPE_CHECKING:
    from mlflow import MlflowClient

LONGEST_MIGRATION_S = 120.0
"""Seconds that the making of a store by another process may take."""

CLIENT_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    # MLflow's own defaults (7 tries, 120 s each) block a caller for minutes when the server is away.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    # We cut long values ourselves, with a mark; a value that slips through is an error, not a silent cut.
    "MLFLOW_TRUNCATE_LONG_VALUES": "false",
    # Colours and spinners have no place in a log.
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Set before mlflow is imported, where the user's environment says nothing else."""


def resolve_uri(config: TrackingConfig, root: Path) -> str:
    """The absolute tracking URI. A relative sqlite path would mean another file in each working directory.

    >>> resolve_uri(TrackingConfig(), Path("/data/artifacts"))
    'sqlite:////data/artifacts/mlflow.db'
    """
    if config.uri is None:
        return sqlite_address(root.absolute() / "mlflow.db")
    if config.uri.startswith(SQLITE):
        return sqlite_address(sqlite_file(config.uri).absolute())
    return config.uri.rstrip("/")


def has_store(uri: str) -> bool:
    """Whether there may be a store: a sqlite file that is there, or any other address. `connect` would make one."""
    return not uri.startswith(SQLITE) or sqlite_file(uri).is_file()


def connect(uri: str) -> "MlflowClient":
    """A client of the store; on sqlite the first one makes the tables (seconds), one process at a time."""
    for name, value in CLIENT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with warnings.catch_warnings():
        # MLflow's own use of what SQLAlchemy and pydantic are about to drop: nothing that a user of ours can act on.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        return _connect(uri)


def _connect(uri: str) -> "MlflowClient":
    from mlflow import MlflowClient

    if not uri.startswith(SQLITE):
        # It tells each try to reach a server that is away; we tell that in a sentence of our own.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        return MlflowClient(uri, uri)
    database = sqlite_file(uri)
    database.parent.mkdir(parents=True, exist_ok=True)
    lock = database.with_name(f"{database.name}.lock")
    with HeldLock(lock, what=f"making {database}", wait_s=LONGEST_MIGRATION_S, error=TrackingError):
        if not database.exists():
            _make_store(database)
        client = MlflowClient(uri, uri)
        client.search_experiments(max_results=1)
        return client


def _make_store(database: Path) -> None:
    """Make the tables in a file beside, and rename it: MLflow's migrations are no transaction, and a store that a kill
    has left in the middle of them is never completed."""
    from mlflow import MlflowClient

    beside = database.with_name(f".tmp-{database.name}")
    for left in (beside, beside.with_name(f"{beside.name}-journal")):
        left.unlink(missing_ok=True)
    address = sqlite_address(beside)
    MlflowClient(address, address).search_experiments(max_results=1)
    beside.replace(database)
