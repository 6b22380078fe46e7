"""MLflow behind HTTP that is away, dies, or is slow: training does not notice and every value arrives once."""

import logging
import selectors
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rlcore.config import RunConfig
from rlcore.errors import TrackingError
from rlcore.tracking.delivery import read_state, sync_run
from rlcore.tracking.journal import RunJournal
from tests.storage.small_disk import fill, small_disk
from tests.tracking.conftest import Server, held_port, wait_until
from tests.tracking.reading import journal_points, main_run, points, values

pytestmark = pytest.mark.slow

__all__ = ["small_disk"]


def config_for(config: RunConfig, uri: str, **more: object) -> RunConfig:
    update = {"uri": uri, **more}
    return RunConfig(paths=config.paths, tracking=config.tracking.model_copy(update=update))


def num_warnings(caplog: pytest.LogCaptureFixture) -> int:
    """How often MLflow has begun to fail."""
    return sum("does not take the values" in line for line in caplog.messages)


@pytest.fixture
def run_dir(root: Path, request: pytest.FixtureRequest) -> Path:
    """A run of its own for each test on the one server."""
    return root / "runs" / request.node.name


def test_a_server_that_dies_and_comes_back_has_every_value_once(
    server: Server, config: RunConfig, run_dir: Path, caplog: pytest.LogCaptureFixture
):
    tracker = RunJournal(run_dir, config_for(config, server.uri), tags={})
    tracker.resume_at(0, 0)

    def train(first: int, last: int) -> None:
        for step in range(first, last + 1):
            tracker.append_step(step, values(step, 30))

    train(1, 50)
    wait_until(lambda: read_state(run_dir).journal_bytes > 0)
    server.kill()
    train(51, 100)
    wait_until(lambda: num_warnings(caplog) == 1)
    server.start()
    train(101, 150)
    assert tracker.finish("FINISHED", timeout_s=90.0)
    client = MlflowClient(server.uri)
    run = main_run(client, run_dir.name)
    assert run.info.status == "FINISHED"
    for name in values(1, 30):
        assert points(client, run, name) == journal_points(run_dir / "metrics.jsonl", name)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("rlcore.tracking")]
    assert len([line for line in said if "does not take the values" in line]) == 1, "one warning, not one a try"
    assert len([line for line in said if "takes the values again" in line]) == 1


@pytest.mark.lengthy
def test_a_store_on_a_full_disk_has_every_value_once_when_there_is_room(
    config: RunConfig, run_dir: Path, empty_store: Path, small_disk: Path, caplog: pytest.LogCaptureFixture
):
    """MLflow's database has a file system of its own here: the journal's is another test's."""
    shutil.copy(empty_store, small_disk / "mlflow.db")
    uri = f"sqlite:///{small_disk}/mlflow.db"
    tracker = RunJournal(run_dir, config_for(config, uri), tags={})
    tracker.resume_at(0, 0)

    def train(first: int, last: int) -> None:
        for step in range(first, last + 1):
            tracker.append_step(step, values(step, 30))

    train(1, 20)
    wait_until(lambda: read_state(run_dir).journal_bytes > 0)
    ballast = fill(small_disk)
    train(21, 120)
    wait_until(lambda: num_warnings(caplog) == 1)
    ballast.unlink()
    train(121, 130)
    assert tracker.finish("FINISHED", timeout_s=90.0)
    client = MlflowClient(uri)
    run = main_run(client, run_dir.name)
    assert run.info.status == "FINISHED"
    for name in values(1, 30):
        assert points(client, run, name) == journal_points(run_dir / "metrics.jsonl", name)


def test_a_server_that_is_never_there_costs_nothing_and_is_caught_up_later(
    config: RunConfig, run_dir: Path, caplog: pytest.LogCaptureFixture
):
    with held_port() as nobody:
        away = config_for(config, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        tracker = RunJournal(run_dir, away, tags={})
        tracker.resume_at(0, 0)
        for step in range(1, 101):
            tracker.append_step(step, values(step))
        wait_until(lambda: num_warnings(caplog) == 1)
        assert not tracker.finish("FINISHED", timeout_s=0.5)
        assert f"millrace sync {run_dir}" in caplog.text
        assert len(journal_points(run_dir / "metrics.jsonl", "test/m0")) == 100
        with pytest.raises(TrackingError, match="cannot be reached"):
            sync_run(run_dir)
    root = Path(config.paths.root)
    sync_run(run_dir, f"sqlite:///{root}/mlflow.db")
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    assert main_run(client, run_dir.name).info.status == "FINISHED"
    assert points(client, main_run(client, run_dir.name), "test/m0") == journal_points(
        run_dir / "metrics.jsonl", "test/m0"
    )


ERROR = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class SlowProxy:
    """Passes bytes on to a server, every answer late by `delay_s`. While `is_broken` it answers with errors itself."""

    def __init__(self, target_port: int) -> None:
        self.delay_s = 0.0
        self.is_broken = False
        self.num_connections = self.num_errors = 0
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        self._listener.settimeout(0.1)
        while not self._closed.is_set():
            try:
                asking, _ = self._listener.accept()
            except TimeoutError:
                continue
            self.num_connections += 1
            thread = threading.Thread(target=self._serve, args=(asking,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, asking: socket.socket) -> None:
        with (
            asking,
            socket.create_connection(("127.0.0.1", self._target_port)) as answering,
            selectors.DefaultSelector() as selector,
        ):
            selector.register(asking, selectors.EVENT_READ, answering)
            selector.register(answering, selectors.EVENT_READ, asking)
            while not self._closed.is_set():
                for key, _ in selector.select(timeout=0.1):
                    source: socket.socket = key.fileobj  # type: ignore[assignment]
                    try:
                        data = source.recv(65536)
                        if source is asking and self.is_broken:
                            asking.sendall(ERROR)
                            self.num_errors += 1
                            return
                        if source is answering:
                            self._closed.wait(self.delay_s)
                        if not data:
                            return
                        key.data.sendall(data)
                    except OSError:
                        return

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[SlowProxy]:
    proxy = SlowProxy(server.port)
    yield proxy
    proxy.close()


def test_a_slow_server_holds_up_nothing_and_doubles_nothing(
    server: Server,
    proxy: SlowProxy,
    config: RunConfig,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """Slower than the client's patience at first: the server has done what the client believes to have failed."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    proxy.delay_s = 2.0
    tracker = RunJournal(run_dir, config_for(config, f"http://127.0.0.1:{proxy.port}"), tags={})
    tracker.resume_at(0, 0)
    for step in range(1, 101):
        tracker.append_step(step, values(step, 30))
    wait_until(lambda: proxy.num_connections > 2)
    assert num_warnings(caplog) == 1
    proxy.delay_s = 0.3
    wait_until(lambda: read_state(run_dir).journal_bytes > 0)
    connections = proxy.num_connections
    proxy.delay_s = 2.0  # in the middle of the delivery
    for step in range(101, 121):
        tracker.append_step(step, values(step, 30))
    wait_until(lambda: proxy.num_connections > connections + 1)  # a request that has timed out has a new one
    proxy.delay_s = 0.02
    assert tracker.finish("FINISHED", timeout_s=90.0)
    client = MlflowClient(server.uri)
    run = main_run(client, run_dir.name)
    assert run.info.status == "FINISHED"
    for name in values(1, 30):
        assert points(client, run, name) == journal_points(run_dir / "metrics.jsonl", name)


def test_a_server_that_answers_with_errors_gets_every_value_once_when_it_has_stopped_to(
    server: Server, proxy: SlowProxy, config: RunConfig, run_dir: Path
):
    proxy.is_broken = True
    tracker = RunJournal(run_dir, config_for(config, f"http://127.0.0.1:{proxy.port}"), tags={})
    tracker.resume_at(0, 0)

    def train(first: int, last: int) -> None:
        for step in range(first, last + 1):
            tracker.append_step(step, values(step, 30))

    train(1, 50)
    wait_until(lambda: proxy.num_errors >= 2)
    proxy.is_broken = False
    wait_until(lambda: read_state(run_dir).journal_bytes > 0)
    proxy.is_broken = True
    errors = proxy.num_errors
    train(51, 100)
    wait_until(lambda: proxy.num_errors > errors)
    proxy.is_broken = False
    assert tracker.finish("FINISHED", timeout_s=90.0)
    client = MlflowClient(server.uri)
    run = main_run(client, run_dir.name)
    assert run.info.status == "FINISHED"
    for name in values(1, 30):
        assert points(client, run, name) == journal_points(run_dir / "metrics.jsonl", name)


def test_finish_waits_no_longer_than_told(config: RunConfig, run_dir: Path, caplog: pytest.LogCaptureFixture):
    """A server that accepts and never answers; the process beside the trainer is gone afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracker = RunJournal(run_dir, config_for(config, f"http://127.0.0.1:{silent.getsockname()[1]}"), tags={})
        tracker.resume_at(0, 0)
        tracker.append_step(1, values(1))
        assert not tracker.finish("FAILED", timeout_s=3.0)
    with caplog.at_level(logging.WARNING), pytest.raises(TrackingError, match="cannot be reached"):
        sync_run(run_dir)  # not "in use by": nobody delivers any more
