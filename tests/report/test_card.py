"""The base model of a card, with its license. The whole card: tests/flows/work/test_weights.py."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from rlcore.config.model import SMOLLM2
from rlcore.report.card import _base_model
from tests.helpers.hub_server import Repository, serving, use_hub


def test_base_model_is_named_with_the_license_of_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _base_model(None) == (None, "A randomly initialized model", None)
    assert _base_model(SMOLLM2)[1:] == ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")
    folder = tmp_path / "mine"
    folder.mkdir()
    assert _base_model(str(folder)) == (None, "mine", None)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    assert _base_model(str(folder)) == (None, "mine", "mit")
    (folder / "README.md").write_text("No metadata.\n")
    assert _base_model(str(folder)) == (None, "mine", None)
    files = {"README.md": b"---\nlicense: gemma\n---\n"}
    with serving({"me/base": Repository({"a" * 40: files}, {"main": "a" * 40})}) as hub:
        use_hub(monkeypatch, tmp_path, hub.port)
        assert _base_model("me/base") == ("me/base", "me/base", "gemma")
        assert _base_model("me/other") == ("me/other", "me/other", None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert _base_model("me/base") == ("me/base", "me/base", "gemma"), "from the cache"
