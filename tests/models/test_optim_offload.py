"""Moments on the host: the numbers of the optimizer that keeps them beside its weights."""

from pathlib import Path

import pytest
import torch
from torch import nn

from rlcore.checkpoint.shards import load_shards
from rlcore.config.algo import OFFLOAD_PIECE_BYTES, OptimConfig
from rlcore.models.optim import MOMENTS, OffloadedAdamW, build_optimizer, split_by_moments
from tests.checkpoint.small import SmallModel, assert_same, save_shards, state_of, train
from tests.models.tiny import CPU

OPTIM = OptimConfig(lr=3e-3, weight_decay=0.1)


def built(*, offloaded: bool, seed: int = 3) -> tuple[SmallModel, torch.optim.AdamW]:
    model = SmallModel(seed)
    return model, build_optimizer(model, OPTIM.model_copy(update={"offload": offloaded}), device=CPU)


def moments_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state[key] for state in optimizer.state.values() for key in MOMENTS]


@pytest.mark.parametrize("limit", [1, 5_000, OFFLOAD_PIECE_BYTES], ids=["one by one", "several", "all at once"])
def test_steps_are_equal_to_the_last_bit(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadedAdamW, "piece_bytes", limit)
    (model, optimizer), (other, plain) = built(offloaded=True), built(offloaded=False)
    assert isinstance(optimizer, OffloadedAdamW)
    assert not isinstance(plain, OffloadedAdamW)
    train(model, optimizer, 3)
    train(other, plain, 3)
    assert_same(state_of(model, optimizer), state_of(other, plain))


def test_moments_are_stepped_elsewhere_and_come_home_to_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadedAdamW, "piece_bytes", 5_000)
    model, optimizer = built(offloaded=True)
    train(model, optimizer, 1)
    home = [(moment.data_ptr(), moment.clone()) for moment in moments_of(optimizer)]
    seen: list[int] = []

    def look(stepped: torch.optim.Optimizer, *rest: object) -> None:
        own = {address for address, _ in home}
        seen.append(sum(moment.data_ptr() not in own for moment in moments_of(stepped)))

    optimizer.register_step_pre_hook(look)
    train(model, optimizer, 1)
    after = moments_of(optimizer)
    assert [moment.data_ptr() for moment in after] == [address for address, _ in home]
    assert not any(torch.equal(moment, before) for moment, (_, before) in zip(after, home, strict=True))
    assert max(seen) >= 2, "no piece was ever stepped away from home"
    assert max(seen) < len(after), "all moments were away together"


def test_gradients_stay_and_a_parameter_without_one_is_passed_over() -> None:
    model, optimizer = built(offloaded=True)
    model(torch.arange(6)[None]).backward()
    head = model.value_head.weight
    before, head.grad = head.detach().clone(), None
    gradients = {name: p.grad for name, p in model.named_parameters()}
    optimizer.step()
    assert {name: p.grad for name, p in model.named_parameters()} == gradients
    assert torch.equal(head, before)
    assert head not in optimizer.state or not optimizer.state[head]


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_a_checkpoint_does_not_know_where_the_moments_were(first: bool, second: bool, tmp_path: Path) -> None:
    model, optimizer = built(offloaded=first)
    train(model, optimizer, 2)
    save_shards(tmp_path / "saved", model=model, optimizer=optimizer)
    fresh, its_optimizer = built(offloaded=second, seed=9)
    used, its_used_optimizer = built(offloaded=second, seed=9)
    train(used, its_used_optimizer, 1)
    for one, own in ((fresh, its_optimizer), (used, its_used_optimizer)):
        load_shards(tmp_path / "saved", model=one, optimizer=own)
    train(model, optimizer, 2)
    for one, own in ((fresh, its_optimizer), (used, its_used_optimizer)):
        train(one, own, 2)
        assert_same(state_of(one, own), state_of(model, optimizer))


def test_the_plan_counts_the_piece_that_the_optimizer_takes() -> None:
    assert OffloadedAdamW.piece_bytes == OFFLOAD_PIECE_BYTES
    one = nn.Parameter(torch.zeros(10))
    assert [len(piece) for piece in split_by_moments([one] * 5, 160)] == [2, 2, 1]
