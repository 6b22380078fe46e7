"""An unreachable hub is contacted once, and an unavailable model raises early."""

import socket
from collections.abc import Callable, Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from threading import Thread

import pytest
import torch

from rlcore.config.model import ModelConfig
from rlcore.errors import ModelError
from rlcore.models.hub import is_hub_reachable, require_reachable
from rlcore.models.load import load_policy
from rlcore.runtime.cluster import unreachable
from tests.helpers.hub_server import Repository, serving, use_hub
from tests.models.tiny import CPU, write_model

COMMIT = "a" * 40
Reach = Callable[[int], None]


@pytest.fixture(autouse=True)
def clear_cache() -> Iterator[None]:
    is_hub_reachable.cache_clear()
    yield
    is_hub_reachable.cache_clear()


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A bound port without a listener, so that no other process takes it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Reach:
    return partial(use_hub, monkeypatch, tmp_path)


def test_is_hub_reachable(reach: Reach, closed_port: int) -> None:
    reach(closed_port)
    assert not is_hub_reachable()
    is_hub_reachable.cache_clear()
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        thread = Thread(target=server.handle_request)  # one response
        thread.start()
        reach(server.server_port)
        assert is_hub_reachable()
        thread.join()
        assert is_hub_reachable()  # cached: no process would respond


def test_missing_model_raises(tmp_path: Path) -> None:
    require_reachable("model.path", str(tmp_path))
    with pytest.raises(ModelError, match=r"^critic\.path: no/model is not a directory here.*hf download no/mod"):
        require_reachable("critic.path", "no/model")  # tests are offline


def test_unavailable_hub_model_raises(reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {COMMIT: {"config.json": b"{}"}}
    models = {
        "somebody/open": Repository(files, {"main": COMMIT}),
        "somebody/gated": Repository(files, {"main": COMMIT}, token="secret"),
        "somebody/empty": Repository({COMMIT: {}}, {"main": COMMIT}),
    }
    with serving(models) as hub:
        reach(hub.port)
        require_reachable("model.path", "somebody/open")
        for name, words in (
            (
                "somebody/gated",
                rf"the model is gated\. Request access on {hub.endpoint}/somebody/gated, then log in",
            ),
            ("somebody/empty", r"the hub has no such model \(.*EntryNotFoundError\)"),
            ("no/model", r"the hub has no such model \(RepositoryNotFoundError\)\. Check the name"),
        ):
            with pytest.raises(ModelError, match=rf"^model\.path: {name} is not a directory here.*{words}"):
                require_reachable("model.path", name)
        monkeypatch.setenv("HF_TOKEN", "secret")
        require_reachable("model.path", "somebody/gated")


def test_hub_model_is_fetched_once(reach: Reach, tmp_path: Path) -> None:
    written = write_model("qwen2-tied", tmp_path / "written")
    files = {file.name: file.read_bytes() for file in written.iterdir()}

    def weights(path: str | Path) -> dict[str, torch.Tensor]:
        return load_policy(path, model=ModelConfig(), device=CPU).state_dict()

    with serving({"somebody/tiny": Repository({COMMIT: files}, {"main": COMMIT})}) as hub:
        reach(hub.port)
        require_reachable("model.path", "somebody/tiny")
        fetched = weights("somebody/tiny")
        num_asked = len(hub.asked)
    is_hub_reachable.cache_clear()
    require_reachable("model.path", "somebody/tiny")
    again = weights("somebody/tiny")
    assert num_asked > 0
    for name, wanted in weights(written).items():
        assert torch.equal(fetched[name], wanted), name
        assert torch.equal(again[name], wanted), name


def test_closed_port_is_not_a_ray_cluster(closed_port: int) -> None:
    for address in (f"127.0.0.1:{closed_port}", f"ray://127.0.0.1:{closed_port}"):
        assert f"got {address}, where nothing answers" in (unreachable(address) or "")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert unreachable(f"127.0.0.1:{listening.getsockname()[1]}") is None
