"""MLflow store for each test."""

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rlcore.config import RunConfig
from rlcore.tracking.journal import RunJournal
from rlcore.tracking.mlflow_store import MlflowStore
from tests.helpers.mlflow import client_of, config, offline, root, run_dir

__all__ = ["config", "offline", "root", "run_dir"]


@pytest.fixture
def store(config: RunConfig, root: Path) -> MlflowStore:
    return MlflowStore(config.tracking, root)


@pytest.fixture
def client(root: Path) -> MlflowClient:
    return client_of(root)


@pytest.fixture
def other(tmp_path: Path, empty_store: Path) -> Path:
    """Return the folder of a second store."""
    (tmp_path / "other").mkdir()
    shutil.copy(empty_store, tmp_path / "other" / "mlflow.db")
    return tmp_path / "other"


@pytest.fixture
def run_id(store: MlflowStore) -> str:
    return store.create_run("run-1", {"millrace.run_id": "run-1", "stage": "train"})


@pytest.fixture
def tracker(offline: RunConfig, run_dir: Path) -> RunJournal:
    """Return a journal with one step, which begins an attempt."""
    tracker = RunJournal(run_dir, offline, tags={"stage": "train"})
    tracker.append_step(1, {"a": 1.0})
    return tracker
