"""A policy loss of one's own is tried before it is trained with."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.algos.loss_call import problem_of, require_policy_loss
from rlcore.algos.losses import PolicyLoss
from rlcore.config.algo import AlgoConfig
from rlcore.config.rules.training import POLICY_LOSSES
from rlcore.errors import ConfigError

HEAD = """
import torch
from dataclasses import replace
from types import SimpleNamespace
from rlcore.algos.losses import PolicyLoss, ppo_clip
def loss(policy_logprobs, old_logprobs, advantages, mask, sequence_ids, num_sequences, *, settings):
    found = ppo_clip(policy_logprobs, old_logprobs, advantages, mask, sequence_ids, num_sequences, settings=settings)
"""


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_ours_pass(name: str) -> None:
    require_policy_loss(AlgoConfig(policy_loss=name))


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("found", None),
        ("replace(found, loss=2 * found.loss)", None),
        ("found.loss", "returns Tensor on two answers of three tokens"),
        ("SimpleNamespace(loss=found.loss)", "returns SimpleNamespace"),
        ("replace(found, loss=found.loss.detach())", "returns a loss without a gradient"),
        ("replace(found, loss=(found.loss - found.loss.detach()).detach() + 0 * found.loss)", "has no gradient"),
        ("replace(found, loss=found.loss / 0)", "is not finite"),
        ("1 / 0", r"raises ZeroDivisionError: division by zero \(.*own_loss.py:8\)"),
    ],
)  # fmt: skip
def test_one_of_ones_own(returned: str, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_loss.py").write_text(f"{HEAD}    return {returned}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_loss", raising=False)
    settings = AlgoConfig(policy_loss="own_loss:loss")
    if told is None:
        require_policy_loss(settings)
        return
    with pytest.raises(ConfigError, match=rf"algo\.policy_loss: .* got own_loss:loss, which .*{told}.*must return"):
        require_policy_loss(settings)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"loss": torch.tensor(1.0)}, r"returns loss of shape \[\] and torch.float32, not of one float a token"),
        ({"clipped": torch.zeros(6)}, r"returns clipped of shape \[6\] and torch.float32, not of one bool a token"),
        ({"log_ratio": None}, "returns NoneType as log_ratio"),
    ],
)
def test_a_field_of_another_shape_or_type(changes: dict[str, Any], told: str) -> None:
    """Tests check every constructor's types; a run does not."""
    found = object.__new__(PolicyLoss)
    fields = {name: torch.zeros(6) for name in ("loss", "log_ratio")}
    masks = {name: torch.zeros(6, dtype=torch.bool) for name in ("clipped", "clipped_lower")}
    for name, value in (fields | masks | changes).items():
        object.__setattr__(found, name, value)
    assert re.search(told, problem_of(found, torch.zeros(6)))
