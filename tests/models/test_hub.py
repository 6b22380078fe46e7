"""A hub that is away is asked once, not once a file; a model that is nowhere is told before anything is made."""

import socket
from collections.abc import Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from rlcore.errors import ModelError
from rlcore.models.hub import hub_answers, require_reachable
from rlcore.runtime.address import unreachable


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    hub_answers.cache_clear()
    yield
    hub_answers.cache_clear()


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Bound and not listened at, so that nobody else takes it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_the_hub_answers_or_does_not(monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed_port}")
    assert not hub_answers()
    hub_answers.cache_clear()
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        thread = Thread(target=server.handle_request)  # one answer
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hub_answers()
        thread.join()
        assert hub_answers()  # not asked again: nobody would answer


def test_a_model_that_is_nowhere(tmp_path: Path) -> None:
    require_reachable("model.path", str(tmp_path))
    with pytest.raises(ModelError, match=r"^critic\.path: nobody/nothing is no directory here.*hf download nobody/no"):
        require_reachable("critic.path", "nobody/nothing")  # the tests are told to stay offline


def test_a_closed_port_is_no_ray_cluster(closed_port: int) -> None:
    for address in (f"127.0.0.1:{closed_port}", f"ray://127.0.0.1:{closed_port}"):
        assert f"got {address}, where nothing answers" in (unreachable(address) or "")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert unreachable(f"127.0.0.1:{listening.getsockname()[1]}") is None
