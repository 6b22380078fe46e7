"""An MLflow server that is absent, dies or is slow does not affect training, and every value arrives once."""

import selectors
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rlcore.config import RunConfig
from rlcore.errors import TrackingError
from rlcore.tracking.delivery import read_state, sync_run
from rlcore.tracking.journal import RunJournal
from tests.helpers.mlflow import (
    Server,
    config,
    held_port,
    journal_points,
    main_run,
    points,
    root,
    server,
    values,
    wait_until,
)
from tests.storage.small_disk import fill, small_disk

pytestmark = pytest.mark.slow

__all__ = ["config", "root", "server", "small_disk"]


Begin = Callable[[str], RunJournal]


@pytest.fixture
def run_dir(root: Path, request: pytest.FixtureRequest) -> Path:
    return root / "runs" / request.node.name


@pytest.fixture
def begin(config: RunConfig, run_dir: Path) -> Begin:
    """Return the journal of a trainer that delivers to this address."""

    def begin(uri: str) -> RunJournal:
        elsewhere = RunConfig(paths=config.paths, tracking=config.tracking.model_copy(update={"uri": uri}))
        journal = RunJournal(run_dir, elsewhere, tags={})
        journal.resume_at(0, 0)
        return journal

    return begin


def train(journal: RunJournal, first: int, last: int) -> None:
    for step in range(first, last + 1):
        journal.append_step(step, values(step, 30))


def num_warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum("MLflow rejects the values" in line for line in caplog.messages)


def assert_every_value_once(uri: str, run_dir: Path) -> None:
    client = MlflowClient(uri)
    run = main_run(client, run_dir.name)
    assert run.info.status == "FINISHED"
    for name in values(1, 30):
        assert points(client, run, name) == journal_points(run_dir / "metrics.jsonl", name)


def test_a_restarted_server_has_every_value_once(
    server: Server, begin: Begin, run_dir: Path, caplog: pytest.LogCaptureFixture
):
    journal = begin(server.uri)
    train(journal, 1, 50)
    wait_until(lambda: read_state(run_dir).journal_bytes > 0)
    server.kill()
    train(journal, 51, 100)
    wait_until(lambda: num_warnings(caplog) == 1)
    server.start()
    train(journal, 101, 150)
    assert journal.finish("FINISHED", timeout_s=90.0)
    assert_every_value_once(server.uri, run_dir)
    assert num_warnings(caplog) == 1, "one warning, not one a try"
    assert sum("accepts the values again" in line for line in caplog.messages) == 1


@pytest.mark.lengthy
def test_a_store_on_a_full_disk_gets_every_value_later(
    begin: Begin, run_dir: Path, empty_store: Path, small_disk: Path, caplog: pytest.LogCaptureFixture
):
    shutil.copy(empty_store, small_disk / "mlflow.db")
    uri = f"sqlite:///{small_disk}/mlflow.db"
    journal = begin(uri)
    train(journal, 1, 20)
    wait_until(lambda: read_state(run_dir).journal_bytes > 0)
    ballast = fill(small_disk)
    train(journal, 21, 120)
    wait_until(lambda: num_warnings(caplog) == 1)
    ballast.unlink()
    train(journal, 121, 130)
    assert journal.finish("FINISHED", timeout_s=90.0)
    assert_every_value_once(uri, run_dir)


def test_a_server_that_is_never_there_is_caught_up_later(
    config: RunConfig, begin: Begin, run_dir: Path, caplog: pytest.LogCaptureFixture
):
    with held_port() as unused:
        journal = begin(f"http://127.0.0.1:{unused.getsockname()[1]}")
        train(journal, 1, 100)
        wait_until(lambda: num_warnings(caplog) == 1)
        assert not journal.finish("FINISHED", timeout_s=0.5)
        assert f"millrace sync {run_dir}" in caplog.text
        assert len(journal_points(run_dir / "metrics.jsonl", "test/m0")) == 100
        with pytest.raises(TrackingError, match="cannot be reached"):
            sync_run(run_dir)
    uri = f"sqlite:///{config.paths.root}/mlflow.db"
    sync_run(run_dir, uri)
    assert_every_value_once(uri, run_dir)


ERROR = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class SlowProxy:
    """Forwards bytes to a server, and delays each response by `delay_s`. While `is_broken`, it responds with errors."""

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
    begin: Begin,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """The server is first slower than the client's timeout, so executed requests count as failed."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    proxy.delay_s = 2.0
    journal = begin(f"http://127.0.0.1:{proxy.port}")
    train(journal, 1, 100)
    wait_until(lambda: proxy.num_connections > 2)
    assert num_warnings(caplog) == 1
    proxy.delay_s = 0.3
    wait_until(lambda: read_state(run_dir).journal_bytes > 0)
    connections = proxy.num_connections
    proxy.delay_s = 2.0  # in the middle of the delivery
    train(journal, 101, 120)
    wait_until(lambda: proxy.num_connections > connections + 1)  # a request that has timed out has a new one
    proxy.delay_s = 0.02
    assert journal.finish("FINISHED", timeout_s=90.0)
    assert_every_value_once(server.uri, run_dir)


def test_a_server_that_answered_with_errors_gets_every_value_once(
    server: Server, proxy: SlowProxy, begin: Begin, run_dir: Path
):
    proxy.is_broken = True
    journal = begin(f"http://127.0.0.1:{proxy.port}")
    train(journal, 1, 50)
    wait_until(lambda: proxy.num_errors >= 2)
    proxy.is_broken = False
    wait_until(lambda: read_state(run_dir).journal_bytes > 0)
    proxy.is_broken, errors = True, proxy.num_errors
    train(journal, 51, 100)
    wait_until(lambda: proxy.num_errors > errors)
    proxy.is_broken = False
    assert journal.finish("FINISHED", timeout_s=90.0)
    assert_every_value_once(server.uri, run_dir)


def test_finish_waits_no_longer_than_its_timeout(begin: Begin, run_dir: Path):
    """The server accepts connections and never answers. The delivery process ends afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        journal = begin(f"http://127.0.0.1:{silent.getsockname()[1]}")
        train(journal, 1, 1)
        assert not journal.finish("FAILED", timeout_s=3.0)
    with pytest.raises(TrackingError, match="cannot be reached"):
        sync_run(run_dir)  # not "in use by": no process delivers any more
