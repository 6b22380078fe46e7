"""The warm start: on the workers' device, in micro-batches of the trainer's token budget."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlcore.errors import ConfigError
from rlcore.models.policy import CausalPolicy
from tests.small_run import prepare

THREE_STEPS = ("warm_start.max_steps=3", "warm_start.stop_at_reward=1")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Device and number of tokens of each forward pass that wants a gradient."""
    seen: list[tuple[str, int]] = []
    forward = CausalPolicy.forward

    def noting(self: CausalPolicy, token_ids: torch.Tensor, *args: Any, **named: Any) -> Any:
        seen.append((token_ids.device.type, len(token_ids)))
        return forward(self, token_ids, *args, **named)

    monkeypatch.setattr(CausalPolicy, "forward", noting)
    return seen


def test_the_gradient_does_not_depend_on_the_cut(tmp_path: Path, passes: list[tuple[str, int]]) -> None:
    whole = prepare(tmp_path / "whole", *THREE_STEPS, "runtime.device=cpu")
    assert len(passes) == 3
    num_tokens = [count for _, count in passes]
    passes.clear()
    cut = prepare(tmp_path / "cut", *THREE_STEPS, "runtime.device=cpu", "trainer.max_tokens_per_micro_batch=128")
    assert max(count for _, count in passes) <= 128
    assert sum(count for _, count in passes) == sum(num_tokens)
    expected, found = (load_file(run.model_directory / "model.safetensors") for run in (whole, cut))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_it_uses_the_device_that_the_workers_will_use(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.device is cuda, but torch sees no GPU here"):
        prepare(tmp_path, *THREE_STEPS, "runtime.device=cuda")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_trains_there(tmp_path: Path, passes: list[tuple[str, int]]) -> None:
    prepare(tmp_path, *THREE_STEPS)
    assert {device for device, _ in passes} == {"cuda"}
