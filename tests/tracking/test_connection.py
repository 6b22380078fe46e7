"""Addresses, tables, names and errors of MLflow stores.

python -m tests.tracking.test_connection ADDRESS [killed]     # makes MLflow's tables, and is killed while it does
"""

import logging
import os
import re
import shutil
import signal
import sqlite3
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name
from sqlalchemy import Engine, event

from rlcore.config import PathsConfig, RunConfig, TrackingConfig
from rlcore.errors import TrackingError
from rlcore.tracking.connection import CLIENT_ENVIRONMENT, connect, explain_error, has_store, mlflow_name, resolve_uri
from rlcore.tracking.mlflow_store import MlflowStore
from tests.helpers.forked import fork_module, run_module


def test_uris_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_uri(TrackingConfig(), Path("artifacts")) == f"sqlite:///{tmp_path}/artifacts/mlflow.db"
    assert resolve_uri(TrackingConfig(uri="sqlite:///my.db"), tmp_path) == f"sqlite:///{tmp_path}/my.db"
    assert resolve_uri(TrackingConfig(uri="http://127.0.0.1:5000/"), tmp_path) == "http://127.0.0.1:5000"


def test_sqlite_store_must_exist(tmp_path: Path):
    assert not has_store(f"sqlite:///{tmp_path}/mlflow.db")
    assert not has_store(f"sqlite:///{tmp_path}"), "a folder is not a store"
    assert has_store("http://127.0.0.1:1")


def test_user_environment_overrides_defaults(root: Path, monkeypatch: pytest.MonkeyPatch):
    for name in CLIENT_ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    connect(f"sqlite:///{root}/mlflow.db")
    values = {name: os.environ.get(name) for name in CLIENT_ENVIRONMENT}
    assert values == CLIENT_ENVIRONMENT | {"MLFLOW_HTTP_REQUEST_TIMEOUT": "7"}


def test_connect_sends_no_request_to_server(monkeypatch: pytest.MonkeyPatch):
    tries = logging.getLogger("urllib3.connectionpool")
    monkeypatch.setattr(tries, "level", logging.NOTSET)
    assert connect("http://127.0.0.1:1").tracking_uri == "http://127.0.0.1:1"
    assert tries.level == logging.ERROR


def test_two_processes_create_one_store_after_a_kill(tmp_path: Path):
    address, said = f"sqlite:///{tmp_path}/new/mlflow.db", tmp_path / "said"
    assert run_module(__name__, [address, "killed"], output=said, timeout_s=120.0) == -9
    processes = [fork_module(__name__, [address], output=said) for _ in range(2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0], said.read_text()
    config = RunConfig(paths=PathsConfig(root=str(tmp_path / "new")))
    assert MlflowStore(config.tracking, tmp_path / "new").experiment_id
    shutil.rmtree(tmp_path / "new")


def test_folder_in_place_of_store_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").mkdir()
    with pytest.raises(TrackingError, match=r"^tracking.uri: must be a file of sqlite or a new one; got .*mlflow\.db"):
        connect(f"sqlite:///{tmp_path / 'mlflow.db'}")


def test_store_of_other_version_is_reported(root: Path):
    with sqlite3.connect(root / "mlflow.db") as database:
        database.execute("update alembic_version set version_num = 'ffffffffffff'")
    database.close()
    store = MlflowStore(TrackingConfig(), root)
    with pytest.raises(Exception, match="schema") as caught:
        assert store.experiment_id
    assert "the store has another MLflow version" in explain_error(caught.value, store.uri)
    assert "if newer, use its MLflow version" in explain_error(caught.value, store.uri)


def test_file_without_database_is_reported(artifacts_root: Path):
    (artifacts_root / "mlflow.db").write_text("no database, long enough to be read as one" * 50)
    store = MlflowStore(TrackingConfig(), artifacts_root)
    with pytest.raises(Exception, match="not a database") as caught:
        assert store.experiment_id
    assert "not a database" in explain_error(caught.value, store.uri)


BEHIND = "mysql://me:SECRET@host/db"


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (ValueError("two\n  lines at http://you:SECRET@b"), "ValueError: two lines at http://you:***@b"),
        (ValueError("x" * 301), f"ValueError: {'x' * 300}"),
        (
            ValueError("Can't locate revision" + "x" * 180),
            f"the store has another MLflow version (Can't locate revision{'x' * 179}). If the store is older, back it "
            "up and run `mlflow db upgrade mysql://me:***@host/db`; if newer, use its MLflow version, or set another "
            "tracking.uri",
        ),
        (
            ValueError("must be in the 'active' state" + "x" * 180),
            f"the run or its experiment was deleted there (must be in the 'active' state{'x' * 171}). Restore "
            "it (`mlflow runs restore`, `mlflow experiments restore`), or set another tracking.experiment",
        ),
        (OSError("database is locked"), "the database is locked by another process for longer than 20 s"),
        (OSError("Max retries exceeded"), "the server cannot be reached or does not answer (OSError)"),
        (ConnectionError("Connection refused"), "the server cannot be reached or does not answer (ConnectionError)"),
        (TimeoutError("read timed out"), "the server cannot be reached or does not answer (TimeoutError)"),
        (
            ValueError("failed with error code 401"),
            "the server requires a login, which is missing or wrong. Set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD; that of `millrace up` is in stack-secret in its workspace",
        ),
    ],
)
def test_errors_have_remedy_and_no_password(error: Exception, problem: str):
    assert explain_error(error, BEHIND) == f"tracking.uri mysql://me:***@host/db: {problem}"
    assert explain_error(TrackingError("a: reported\nalready"), BEHIND) == "a: reported\nalready"


@pytest.mark.parametrize(
    "name", ["pass^4", "50%", "größe", "a\n", "", "a" * 251, "a@" * 80, "/a", "a/", "a//b", "a/../b", "..", "."]
)
def test_invalid_names_are_rejected(name: str):
    with pytest.raises(
        TrackingError, match=rf"metric name {re.escape(repr(name[:80]))}: MLflow accepts 1 to 250 letters"
    ):
        mlflow_name(name)


@settings(deadline=None, max_examples=50)
@given(st.text(alphabet="ab1_-. :/@%\n", max_size=12) | st.text(max_size=6))
def test_accepted_names_pass_mlflow_check(name: str):
    try:
        mapped = mlflow_name(name)
    except TrackingError:
        return
    _validate_metric_name(mapped)


def kill(connection: object, cursor: object, statement: str, *rest: object) -> None:
    if "CREATE TABLE entity_associations" in statement:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[2:]:
        event.listen(Engine, "after_cursor_execute", kill)
    connect(sys.argv[1])
