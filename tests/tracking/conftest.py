"""MLflow store for each test."""

from pathlib import Path

import pytest

from rlcore.config import RunConfig
from rlcore.tracking.mlflow_store import MlflowStore
from tests.helpers.mlflow import config, offline, root, run_dir

__all__ = ["config", "offline", "root", "run_dir"]


@pytest.fixture
def store(config: RunConfig, root: Path) -> MlflowStore:
    return MlflowStore(config.tracking, root)


@pytest.fixture
def run_id(store: MlflowStore) -> str:
    return store.create_run("run-1", {"millrace.run_id": "run-1", "stage": "train"})
