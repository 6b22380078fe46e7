"""AdamW by hand, gradient clipping, offloaded moments, and digests of weights."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from rlcore.checkpoint.load import load_shards
from rlcore.config.algo import OFFLOAD_PIECE_BYTES, OptimConfig
from rlcore.models import memory
from rlcore.models.memory import MOMENTS, OffloadedAdamW, build_optimizer, clip_grad_norm, digest
from tests.checkpoint.small import SmallModel, assert_same, save_shards, state_of, train
from tests.models.tiny import CPU, policy_of, write_model


def test_weight_decay_skips_norms_and_biases(tmp_path: Path) -> None:
    policy = policy_of(write_model("qwen2-tied", tmp_path))
    policy.head.weight.requires_grad_(False)
    optimizer = build_optimizer(policy, OptimConfig(weight_decay=0.1), device=CPU)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert len(decay) == len(trained) < len(list(policy.parameters()))
    for name, parameter in trained.items():
        plain = "norm" in name or name.endswith("bias")
        assert decay[id(parameter)] == (0.0 if plain else 0.1), name


def test_step_matches_adamw_by_hand() -> None:
    layer = nn.Linear(1, 1)
    optim = OptimConfig(lr=0.1, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.5)
    start = {name: p.item() for name, p in layer.named_parameters()}
    optimizer = build_optimizer(layer, optim, device=CPU)
    state = {name: (0.0, 0.0) for name in start}
    for step, gradient in enumerate((0.3, -0.7), start=1):
        for name, parameter in layer.named_parameters():
            parameter.grad = torch.full_like(parameter, gradient)
            first, second = state[name]
            first, second = 0.8 * first + 0.2 * gradient, 0.95 * second + 0.05 * gradient**2
            state[name] = (first, second)
            unbiased, root = first / (1 - 0.8**step), math.sqrt(second / (1 - 0.95**step))
            decay = 0.5 if name == "weight" else 0.0
            start[name] = start[name] * (1 - 0.1 * decay) - 0.1 * unbiased / (root + 1e-3)
        optimizer.step()
    for name, parameter in layer.named_parameters():
        assert parameter.item() == pytest.approx(start[name], abs=1e-6)


@pytest.mark.parametrize(("max_norm", "scale"), [(100.0, 1.0), (1.0, 1 / 13)])
def test_clip_grad_norm_scales_to_global_norm(max_norm: float, scale: float) -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
    norm = clip_grad_norm([a, b], max_norm)
    assert norm.item() == pytest.approx(13.0)
    torch.testing.assert_close(a.grad, torch.tensor([3.0, 4.0]) * scale)
    torch.testing.assert_close(b.grad, torch.tensor([12.0]) * scale)
    b.grad = torch.tensor([float("inf")])
    assert not clip_grad_norm([a, b], max_norm).isfinite()


OPTIM = OptimConfig(lr=3e-3, weight_decay=0.1)


def build(*, offloaded: bool, seed: int = 3) -> tuple[SmallModel, torch.optim.AdamW]:
    model = SmallModel(seed)
    return model, build_optimizer(model, OPTIM.model_copy(update={"offload": offloaded}), device=CPU)


def moments_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state[key] for state in optimizer.state.values() for key in MOMENTS]


@pytest.mark.parametrize("limit", [1, 5_000, OFFLOAD_PIECE_BYTES], ids=["one by one", "several", "together"])
def test_offloaded_steps_are_bit_identical(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadedAdamW, "piece_bytes", limit)
    (model, optimizer), (other, plain) = build(offloaded=True), build(offloaded=False)
    assert isinstance(optimizer, OffloadedAdamW)
    assert not isinstance(plain, OffloadedAdamW)
    train(model, optimizer, 3)
    train(other, plain, 3)
    assert_same(state_of(model, optimizer), state_of(other, plain))


def test_offloaded_moments_return_to_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadedAdamW, "piece_bytes", 5_000)
    model, optimizer = build(offloaded=True)
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
    assert max(seen) >= 2, "no piece was stepped on the device"
    assert max(seen) < len(after), "all moments were on the device together"


def test_offloaded_step_keeps_gradients() -> None:
    model, optimizer = build(offloaded=True)
    model(torch.arange(6)[None]).backward()
    head = model.value_head.weight
    before, head.grad = head.detach().clone(), None
    gradients = {name: p.grad for name, p in model.named_parameters()}
    optimizer.step()
    assert {name: p.grad for name, p in model.named_parameters()} == gradients
    assert torch.equal(head, before)
    assert head not in optimizer.state or not optimizer.state[head]


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_checkpoint_is_independent_of_offloading(first: bool, second: bool, tmp_path: Path) -> None:
    model, optimizer = build(offloaded=first)
    train(model, optimizer, 2)
    save_shards(tmp_path / "saved", model=model, optimizer=optimizer)
    fresh, its_optimizer = build(offloaded=second, seed=9)
    used, its_used_optimizer = build(offloaded=second, seed=9)
    train(used, its_used_optimizer, 1)
    for one, own in ((fresh, its_optimizer), (used, its_used_optimizer)):
        load_shards(tmp_path / "saved", model=one, optimizer=own)
    train(model, optimizer, 2)
    for one, own in ((fresh, its_optimizer), (used, its_used_optimizer)):
        train(one, own, 2)
        assert_same(state_of(one, own), state_of(model, optimizer))


def by_hand(tensor: torch.Tensor) -> int:
    """Use Python integers and chunks of the real size."""
    flat = tensor.flatten()
    words = flat.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).tolist()
    factors = memory._digest_factors(tensor.device).tolist()
    total = 0
    for place, (word, value) in enumerate(zip(words, flat.tolist(), strict=True)):
        chunk, inside = divmod(place, memory._CHUNK)
        total += (word if value else 0) * factors[inside] * (2 * chunk + 1)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digest_is_sum_over_elements(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CHUNK", 16)
    memory._digest_factors.cache_clear()
    tensor = torch.randn(7, 9, generator=torch.Generator().manual_seed(1)).to(dtype)
    tensor[0, 0], tensor[1, 1] = 0.0, -0.0
    assert digest(tensor).item() == by_hand(tensor)
    assert digest(tensor.t().contiguous().t()).item() == by_hand(tensor), "independent of the memory layout"
    memory._digest_factors.cache_clear()


def test_digest_changes_with_one_bit_not_zero_sign() -> None:
    tensor = torch.randn(50, 40, generator=torch.Generator().manual_seed(2)).bfloat16()
    right = digest(tensor).item()
    for row, column in ((0, 0), (0, 39), (25, 7), (49, 39)):
        changed = tensor.clone()
        changed.view(torch.int16)[row, column] ^= 1
        assert digest(changed).item() != right
    assert digest(tensor[torch.arange(49, -1, -1)]).item() != right
    zeros = torch.zeros(8)
    assert digest(-zeros).item() == digest(zeros).item() == 0
