"""Shards of a model on a GPU: the same bits on the GPU, and on a CPU."""

import pytest
import torch

from rlcore.checkpoint.load import load_shards
from rlcore.checkpoint.save import RankSaver
from tests.checkpoint.small import assert_same, build, save_shards, state_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def on_gpu(seed: int) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    model, _ = build(seed=seed)
    model.cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step. Steps need not be deterministic, because the tests compare states."""
    device = next(model.parameters()).device
    model(torch.arange(24, device=device).reshape(2, 12)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def on_cpu(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in state.items()}


@pytest.mark.parametrize("way", ["directly", "by a copy"])
def test_round_trip_on_the_gpu(tmp_path, way):
    model, optimizer = on_gpu(seed=1)
    step(model, optimizer)
    expected = state_of(model, optimizer)
    if way == "directly":
        save_shards(tmp_path / "policy", model=model, optimizer=optimizer)
    else:
        saver = RankSaver(lambda: {"policy": (model, optimizer)}, num_ranks=1)
        assert saver.copy()[1], "there is memory for the copy"
        parts = saver._copies["policy"].parts
        assert all(part.local.is_pinned() for part in parts if part.name.endswith(".exp_avg"))
        step(model, optimizer)
        saver.write(str(tmp_path))
        assert saver.is_written(wait=True)
    other, other_optimizer = on_gpu(seed=2)
    load_shards(tmp_path / "policy", model=other, optimizer=other_optimizer)
    assert_same(state_of(other, other_optimizer), expected)
    assert all(value.is_cuda for state in other_optimizer.state.values() for value in state.values())
    step(other, other_optimizer)


def test_gpu_to_cpu_and_back(tmp_path):
    model, optimizer = on_gpu(seed=1)
    step(model, optimizer)
    save_shards(tmp_path / "policy", model=model, optimizer=optimizer)
    here, _ = build(seed=2)
    its_optimizer = torch.optim.AdamW(here.parameters(), lr=1.0)
    load_shards(tmp_path / "policy", model=here, optimizer=its_optimizer)
    assert_same(state_of(here, its_optimizer), on_cpu(state_of(model, optimizer)))
    save_shards(tmp_path / "again", model=here, optimizer=its_optimizer)
    back, back_optimizer = on_gpu(seed=3)
    load_shards(tmp_path / "again", model=back, optimizer=back_optimizer)
    assert_same(state_of(back, back_optimizer), state_of(model, optimizer))
