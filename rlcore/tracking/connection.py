"""The connection to an MLflow store, metric names in MLflow, explanations of MLflow's errors, and the application of
MLflow's server."""

import logging
import os
import posixpath
import re
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rlcore.config import TrackingConfig
from rlcore.config.problems import mask_secrets
from rlcore.errors import TrackingError
from rlcore.storage.documents import SQLITE, sqlite_address, sqlite_file
from rlcore.storage.locks import HeldLock

Value = TypeVar("Value")
log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from starlette.types import ASGIApp

MIGRATION_TIMEOUT_S = 120.0  # seconds to wait for another process that creates a store
CLIENT_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    # MLflow's own defaults (7 tries, 120 s each) block a caller for minutes when the server is away.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    # Millrace truncates long values itself, with a mark.
    "MLFLOW_TRUNCATE_LONG_VALUES": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}
"""Defaults of environment variables, set before mlflow is imported."""


def resolve_uri(config: TrackingConfig, root: Path) -> str:
    """Return the MLflow tracking URI: `tracking.uri`, or by default a sqlite file in `root`. A relative sqlite path is
    resolved against the working directory."""
    if config.uri is None:
        return sqlite_address(root.absolute() / "mlflow.db")
    if config.uri.startswith(SQLITE):
        return sqlite_address(sqlite_file(config.uri).absolute())
    return config.uri.rstrip("/")


def has_store(uri: str) -> bool:
    """Return False if the store is a sqlite file that does not exist, otherwise True. A server is not checked."""
    return not uri.startswith(SQLITE) or sqlite_file(uri).is_file()


def connect(uri: str) -> "MlflowClient":
    """Return a client of the store. The tables of a sqlite store are first created or migrated under a lock."""
    for name, value in CLIENT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with warnings.catch_warnings():
        # MLflow uses deprecated functions of SQLAlchemy and pydantic; users cannot change that.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        from mlflow import MlflowClient

        if not uri.startswith(SQLITE):
            # urllib3 logs each failed connection, and `explain_error` reports the failure once.
            logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
            return MlflowClient(uri, uri)
        database = sqlite_file(uri)
        database.parent.mkdir(parents=True, exist_ok=True)
        lock = database.with_name(f"{database.name}.lock")
        with HeldLock(lock, what=f"making {database}", wait_s=MIGRATION_TIMEOUT_S, error=TrackingError):
            if not database.exists():
                _create_store(database)
            elif not database.is_file():
                raise TrackingError(
                    f"tracking.uri: must be a file of sqlite or a new one; got {database}. Move it away"
                )
            return _create_tables(uri)


def _create_store(database: Path) -> None:
    """Create the store in a temporary file, then rename the file, so that a kill leaves no incomplete store."""
    temporary = database.with_name(f".tmp-{database.name}")
    for left in (temporary, temporary.with_name(f"{temporary.name}-journal")):
        left.unlink(missing_ok=True)
    _create_tables(sqlite_address(temporary))
    temporary.replace(database)


def _create_tables(address: str) -> "MlflowClient":
    from mlflow import MlflowClient

    client = MlflowClient(address, address)
    client.search_experiments(max_results=1)
    return client


_EXPLANATIONS = {
    r"out-of-date database schema|Can't locate revision": "the store has another MLflow version ({text:.200}). If the "
    "store is older, back it up and run `mlflow db upgrade {uri}`; if newer, use its MLflow version, or set another "
    "tracking.uri",
    "must be in the 'active' state": "the run or its experiment was deleted there ({text:.200}). Restore it (`mlflow "
    "runs restore`, `mlflow experiments restore`), or set another tracking.experiment",
    "database is locked": "the database is locked by another process for longer than 20 s",
    "Max retries exceeded|Connection refused|Connection aborted|timed out": "the server cannot be reached or does not "
    "answer ({kind})",
    "error code 401": "the server requires a login, which is missing or wrong. Set MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD; that of `millrace up` is in stack-secret in its workspace",
    "": "{kind}: {text:.300}",
}
"""A mapping from regular expressions to explanations of MLflow's errors. The explanation of the first expression that
matches the error's text is used."""


def explain_error(error: BaseException, uri: str) -> str:
    """Explain an error of MLflow in one line, with the remedy."""
    if isinstance(error, TrackingError):
        return str(error)
    text, uri = mask_secrets(" ".join(str(error).split())), mask_secrets(uri)
    explanation = next(explanation for pattern, explanation in _EXPLANATIONS.items() if re.search(pattern, text))
    return f"tracking.uri {uri}: {explanation.format(text=text, uri=uri, kind=type(error).__name__)}"


MAX_NAME_CHARACTERS = 250  # MLflow's limit for names of metrics, parameters and tags
_ALLOWED = re.compile(r"[A-Za-z0-9_\-. :/]+")


def mlflow_name(name: str) -> str:
    """Return the name under which MLflow stores a metric or parameter: `_at_` replaces `@`.

    >>> mlflow_name("reward/recall@8/mean")
    'reward/recall_at_8/mean'

    Raises TrackingError if MLflow does not accept the name."""
    mapped = name.replace("@", "_at_")
    is_path = posixpath.normpath(mapped) == mapped and not mapped.startswith(("/", "..")) and mapped != "."
    if not (len(mapped) <= MAX_NAME_CHARACTERS and _ALLOWED.fullmatch(mapped) and is_path):
        raise TrackingError(
            f"metric name {name[:80]!r}: MLflow accepts 1 to {MAX_NAME_CHARACTERS} letters a-z, digits and "
            "`_ - . : / space` (`@` becomes `_at_`), and no empty part, `.` or `..` between `/`. Rename the metric."
        )
    return mapped


def accepted_values(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the values whose names MLflow accepts, by their MLflow names. One invalid name would make MLflow reject a
    whole request."""
    return {taken: value for name, value in values.items() if (taken := _is_accepted(name)) is not None}


@lru_cache(maxsize=4096)  # logs an invalid name once
def _is_accepted(name: str) -> str | None:
    try:
        return mlflow_name(name)
    except TrackingError as error:
        log.warning("omitted in MLflow: %s", error)
        return None


def mlflow_app() -> "ASGIApp":
    """Return the application of `mlflow server`, which is configured by the environment of this process."""
    from mlflow.server.fastapi_app import app

    application: ASGIApp = app
    return application
