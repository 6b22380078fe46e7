"""LoRA adapters and 4-bit layers: initialization, merged weights, products, gradients, and the formats of others."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from flows.work.checks import require_machine
from rlcore.config import LoraConfig, ModelConfig, RunConfig
from rlcore.config.algo import OptimConfig
from rlcore.config.run import PathsConfig
from rlcore.errors import ConfigError, ModelError
from rlcore.models.load import load_policy
from rlcore.models.lora import (
    AdaptedLinear,
    Nf4Linear,
    add_adapters,
    base_digest,
    nf4_linear,
    quantize_weight,
    stochastic_round,
    write_peft,
)
from rlcore.models.memory import build_optimizer
from rlcore.models.parallel import adapter_state, full_state
from rlcore.types import PackedBatch
from tests.helpers.nf4 import nearest_levels
from tests.models.tiny import CPU, inputs_of, make_batch, plain_model, policy_of, twin, write_model

LORA = LoraConfig(rank=4, alpha=10.0)


def load_adapted(directory: Path, lora: LoraConfig = LORA, seed: int = 0, **settings: Any):
    return add_adapters(policy_of(directory, lora=lora, **settings), lora, seed=seed)


def logprobs(policy: Any, batch: PackedBatch) -> Tensor:
    return policy(*inputs_of(batch), temperature=1.0, entropy="none").logprobs


def train_adapters(directory: Path, lora: LoraConfig = LORA, **settings: Any):
    """Return a policy whose adapters have taken three steps."""
    policy = load_adapted(directory, lora, gradient_checkpointing=True, **settings)
    optimizer = build_optimizer(policy, OptimConfig(lr=0.02), device=CPU)
    batch = make_batch((5, 3, 9))
    for _ in range(3):
        optimizer.zero_grad()
        logprobs(policy, batch).sum().backward()
        optimizer.step()
    return policy


def test_adapters_start_at_zero_and_train_alone(tmp_path: Path) -> None:
    directory = write_model("llama-gqa-untied", tmp_path)
    batch = make_batch((5, 3, 9))
    policy = add_adapters(policy_of(directory), LORA, seed=1)
    out = logprobs(policy, batch)
    assert torch.equal(out, logprobs(policy_of(directory), batch))
    out.sum().backward()
    with_gradient = {name for name, p in policy.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, p in policy.named_parameters() if p.requires_grad}
    assert with_gradient
    assert all("lora_" in name for name in with_gradient)
    assert len(with_gradient) == 2 * 2 * len(LORA.target_modules)  # A and B, two layers


def test_seed_determines_adapters(tmp_path: Path) -> None:
    directory = write_model("qwen2-tied", tmp_path)
    torch.manual_seed(3)
    untouched = torch.rand(1)
    torch.manual_seed(3)
    first, again, other = (add_adapters(policy_of(directory), LORA, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), untouched)
    pairs = list(zip(first.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("wrong", ["query", "lm_head"])
def test_unknown_lora_target_raises(wrong: str, tmp_path: Path) -> None:
    policy = policy_of(write_model("qwen2-tied", tmp_path))
    with pytest.raises(ModelError, match=rf"model\.lora\.target_modules: .*got {wrong}\. It has .*q_proj"):
        add_adapters(policy, LoraConfig(target_modules=("q_proj", wrong)), seed=0)


@pytest.mark.parametrize(("rslora", "base"), [(False, "native"), (True, "native"), (False, "nf4")])
def test_lora_gradients_match_merged_twin(tmp_path: Path, rslora: bool, base: str) -> None:
    """Twin: transformers' model, one sequence at a time, with W + s B A instead of W (in 4 bits the nearest levels)."""
    directory = write_model("llama-gqa-untied", tmp_path)
    policy = train_adapters(directory, LORA.model_copy(update={"rslora": rslora, "base": base}))
    batch, plain = make_batch((5, 3, 9), seed=3), plain_model(directory)
    if base == "nf4":
        for module in plain.model.layers.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = nearest_levels(module.weight.detach())
    leaves = {
        name: parameter.detach().clone().requires_grad_() for name, parameter in policy.model.named_parameters()
        if parameter.requires_grad
    }  # fmt: skip
    merged = dict(plain.named_parameters())
    for name in [name for name in leaves if ".lora_A." in name]:
        low, high = leaves[name], leaves[name.replace("lora_A", "lora_B")]
        weight = name.replace(".lora_A.", ".")
        merged[weight] = merged[weight].detach() + 10.0 / (2 if rslora else 4) * (high @ low)

    def by_functional_call(token_ids: Tensor) -> Any:
        return torch.func.functional_call(plain, merged, (token_ids,))

    policy.zero_grad()
    (logprobs(policy, batch) * batch.behavior_logprobs).sum().backward()
    expected, _ = twin(by_functional_call, batch, 1.0)
    (expected * batch.behavior_logprobs).sum().backward()
    torch.testing.assert_close(logprobs(policy, batch), expected, rtol=0, atol=1e-5)
    found = dict(policy.model.named_parameters())
    for name, leaf in leaves.items():
        scale = float(leaf.grad.abs().max())
        torch.testing.assert_close(found[name].grad, leaf.grad, rtol=0, atol=2e-5 * scale, msg=name)


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_computes_the_same(tmp_path: Path, rslora: bool) -> None:
    import peft  # it imports bitsandbytes, which takes seconds

    directory = write_model("qwen2-tied", tmp_path / "base")
    lora = LORA.model_copy(update={"rslora": rslora, "target_modules": ("q_proj", "down_proj")})
    policy, batch = train_adapters(directory, lora), make_batch((5, 3, 9))
    write_peft(dict(adapter_state(policy)), lora, str(directory), tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    expected, _ = twin(model, batch, 1.0)
    found = logprobs(policy, batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    with model.disable_adapter():
        unlike, _ = twin(model, batch, 1.0)
    assert (unlike - found).abs().max() > 0.1


def test_lora_base_and_adapter_types(tmp_path: Path) -> None:
    directory = write_model("qwen2-tied", tmp_path)
    policy = train_adapters(directory, dtype="bfloat16")
    kinds = {(parameter.requires_grad, parameter.dtype) for parameter in policy.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    exact = load_adapted(directory)
    first = [module.lora_A.weight for module in exact.modules() if isinstance(module, AdaptedLinear)]
    again = load_adapted(directory, dtype="bfloat16")
    other = [module.lora_A.weight for module in again.modules() if isinstance(module, AdaptedLinear)]
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))  # independent of the base's type
    for name, tensor in full_state(policy):
        assert tensor.dtype == torch.bfloat16, name


def test_stochastic_round_keeps_small_changes() -> None:
    """Twin: numpy's float32 of the two bfloat16 numbers around a value."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2_000, 3_000, generator=generator).bfloat16().float()  # larger than the noise table
    assert torch.equal(stochastic_round(weight.clone(), torch.bfloat16).float(), weight), "unchanged weights stay equal"
    change = 0.15 * 2**-8 * weight.abs()
    exact = weight + change
    assert (exact.bfloat16().float() == weight).float().mean() > 0.9, "rounding to nearest loses most changes"
    found = stochastic_round(exact.clone(), torch.bfloat16)
    assert torch.equal(stochastic_round(exact.clone(), torch.bfloat16), found)
    low = (exact.numpy().view(np.int32) & ~0xFFFF).view(np.float32)  # towards 0
    step = ((exact.numpy().view(np.int32) & ~0xFFFF) + 0x10000).view(np.float32) - low
    values = found.float().numpy()
    assert ((values == low) | (values == low + step)).all()
    assert ((values - low) / step).mean() == pytest.approx(((exact.numpy() - low) / step).mean(), abs=1e-3)
    assert (found.float() - weight).double().sum() == pytest.approx(change.double().sum().item(), rel=0.02)
    exact = torch.randn(3, 5, generator=generator)
    assert torch.equal(stochastic_round(exact.clone(), torch.float32), exact)


def test_base_digest_depends_on_values_alone(tmp_path: Path) -> None:
    directory = write_model("qwen2-tied", tmp_path / "a")
    digest = load_adapted(directory).base_digest
    assert len(digest) == 16
    assert load_adapted(directory, LoraConfig(rank=2), seed=7).base_digest == digest
    assert load_adapted(directory, dtype="bfloat16").base_digest != digest
    assert load_adapted(write_model("qwen2-tied", tmp_path / "b", seed=1)).base_digest != digest
    in_4_bits = load_adapted(directory, LORA.model_copy(update={"base": "nf4"}))
    assert in_4_bits.base_digest != digest
    before = base_digest(in_4_bits.model)
    in_4_bits.layers[1].mlp.up_proj.base_layer.packed[7] ^= 1
    assert base_digest(in_4_bits.model) != before


def random_layer(rows: int, columns: int, dtype: torch.dtype = torch.float32, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(rows)
    return nn.Linear(columns, rows, bias=bias, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 32), (5, 96), (3, 7)], ids=str)
def test_nf4_picks_nearest_levels(shape: tuple[int, int], dtype: torch.dtype) -> None:
    layer = random_layer(*shape, dtype)
    with torch.no_grad():
        layer.weight[0] = 0
        layer.weight[-1, 2] = -9
    found = Nf4Linear(layer, CPU)
    assert found.dequantized(Tensor.detach).dtype == dtype
    assert torch.equal(found.dequantized(Tensor.detach), nearest_levels(layer.weight.detach()))
    assert (len(found.packed), len(found.scales)) == (32 * len(found.scales), -(-shape[0] * shape[1] // 64))
    assert not found.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_format_is_bitsandbytes(dtype: torch.dtype) -> None:
    """Others use adapters with a base that bitsandbytes quantized."""
    weight = random_layer(96, 160, dtype).weight.detach()
    weight[0, :64] = 0
    packed, scales = quantize_weight(weight)
    codes, largest = torch.ops.bitsandbytes.quantize_4bit(weight, 64, "nf4", torch.uint8)
    assert torch.equal(packed, codes.view(-1))
    assert torch.equal(scales, largest)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("compiled", [False, True])
def test_nf4_product_and_gradient_match_the_rounded_weight(compiled: bool) -> None:
    layer = random_layer(48, 32, bias=True)
    own = Nf4Linear(layer, CPU)

    def product(x: Tensor) -> Tensor:
        return nf4_linear(x, own.packed, own.scales, own.bias, 48)

    with torch.no_grad():
        layer.weight.copy_(nearest_levels(layer.weight))
    x = torch.randn(1, 7, 32, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor.numel()), tensor)[1], lambda t: t):
        # This backend splits a graph as the default one does, without a C compiler.
        output = (torch.compile(product, backend="aot_eager_decomp_partition", fullgraph=True) if compiled else own)(x)
    assert torch.equal(output, layer(x))
    (found,) = torch.autograd.grad(output.square().sum(), x)
    assert torch.equal(found, expected)
    assert kept
    assert max(kept) < 48 * 32  # the weight


def test_nf4_without_package_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check before the start and in a worker."""
    config = RunConfig(model=ModelConfig(path="m", lora=LoraConfig(base="nf4")), paths=PathsConfig(root=str(tmp_path)))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # Python's marker of a missing module
    for refused in (lambda: require_machine(config), lambda: load_policy("m", model=config.model, device=CPU)):
        with pytest.raises(ConfigError, match=r"model\.lora\.base: nf4 needs the package bitsandbytes.*-e '\.\[nf4\]'"):
            refused()
