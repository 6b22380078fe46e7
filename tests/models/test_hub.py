"""An unreachable hub is contacted once, and an unavailable model raises early."""

import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from rlcore.config.model import ModelConfig
from rlcore.errors import ModelError
from rlcore.models.hub import is_hub_reachable, require_reachable
from rlcore.models.load import load_policy
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
def reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Reach:
    return partial(use_hub, monkeypatch, tmp_path)


def test_is_hub_reachable(reach: Reach) -> None:
    with socket.socket() as taken:  # a bound port without a listener, so that no other process takes it
        taken.bind(("127.0.0.1", 0))
        reach(taken.getsockname()[1])
        assert not is_hub_reachable()
    is_hub_reachable.cache_clear()
    with serving({}) as hub:
        reach(hub.port)
        assert is_hub_reachable()
        assert is_hub_reachable()
    assert len(hub.asked) == 1, "the result is cached"


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
