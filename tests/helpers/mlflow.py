"""A real MLflow store for each test, a real MLflow server on a free port, and functions that read from them."""

import os
import shutil
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from rlcore.config import PathsConfig, RunConfig, TrackingConfig
from rlcore.tracking.delivery import Delivery, delivery_lock
from rlcore.tracking.journal import read_journal
from tests.helpers.forked import fork_module

SERVER_START_S = 200.0


class Server:
    def __init__(self, database: Path) -> None:
        self._database = database
        self._log = database.with_suffix(".log")
        self._process: BaseProcess | None = None
        self._held = held_port()
        self.port = int(self._held.getsockname()[1])

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = fork_module(
            "tests.helpers.mlflow_server",
            [str(self._database), str(self.port)],
            output=self._log,
            environment=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )
        until = time.monotonic() + SERVER_START_S
        while not self._answers():
            if self._process.exitcode is not None or time.monotonic() > until:
                raise RuntimeError(f"mlflow server did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1.0) as answer:
                return answer.read() == b"OK"
        except OSError:
            return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def close(self) -> None:
        self.kill()
        self._held.close()


def held_port() -> socket.socket:
    """Return a bound socket that does not listen. Only a server of the test can get its port."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


@pytest.fixture
def root(artifacts_root: Path, empty_store: Path) -> Path:
    shutil.copy(empty_store, artifacts_root / "mlflow.db")
    return artifacts_root


@pytest.fixture
def config(root: Path) -> RunConfig:
    return RunConfig(paths=PathsConfig(root=str(root)), tracking=TrackingConfig(ship_every_s=0.2))


@pytest.fixture
def offline(config: RunConfig) -> RunConfig:
    return RunConfig(paths=config.paths, tracking=config.tracking.model_copy(update={"enabled": False}))


@pytest.fixture
def run_dir(root: Path) -> Path:
    return root / "runs" / "run-1"


@contextmanager
def running_server(folder: Path, empty_store: Path) -> Iterator[Server]:
    database = folder / "mlflow.db"
    shutil.copy(empty_store, database)
    server = Server(database)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("server"), empty_store) as server:
        yield server


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "what was waited for did not happen"
        time.sleep(0.05)


@contextmanager
def delivery_of(run_dir: Path) -> Iterator[Delivery]:
    with delivery_lock(run_dir):
        yield Delivery(run_dir)


def client_of(root: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{root}/mlflow.db")


def all_runs(client: MlflowClient, experiment: str = "millrace") -> list[Run]:
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else list(client.search_runs([found.experiment_id], order_by=["start_time ASC"]))


def main_runs(client: MlflowClient, run_id: str = "run-1") -> list[Run]:
    return [run for run in all_runs(client) if run.data.tags.get("millrace.run_id") == run_id]


def main_run(client: MlflowClient, run_id: str = "run-1") -> Run:
    (run,) = main_runs(client, run_id)
    return run


def points(client: MlflowClient, run: Run, name: str) -> list[tuple[int, float]]:
    """Return each stored (step, value) of a metric by step, duplicates included."""
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name))


def values_by_step(client: MlflowClient, run: Run, name: str) -> list[tuple[int, float]]:
    history = sorted(client.get_metric_history(run.info.run_id, name), key=lambda metric: metric.timestamp)
    return sorted({metric.step: metric.value for metric in history}.items())


def journal_points(path: Path, name: str) -> list[tuple[int, float]]:
    return [(record.step, record.metrics[name]) for record in read_journal(path) if name in record.metrics]


def values(step: int, num_metrics: int = 5) -> Mapping[str, float]:
    """Return numbers that only float64 restores exactly."""
    return {f"test/m{i}": step + (i + 1) / 7 for i in range(num_metrics)}
