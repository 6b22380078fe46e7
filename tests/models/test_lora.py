"""LoRA adapters: the same function at the start, the merged weights after."""

from pathlib import Path

import pytest
import torch

from rlcore.config.algo import OptimConfig
from rlcore.config.model import LoraConfig
from rlcore.errors import ModelError
from rlcore.models.lora import add_adapters
from rlcore.models.optim import build_optimizer
from rlcore.models.parallel import full_state
from tests.models.tiny import CPU, make_batch, policy_of, write_model

LORA = LoraConfig(rank=4, alpha=10.0)


def trained(directory: Path, seed: int = 0):
    """A policy whose adapters have taken three steps."""
    policy = add_adapters(policy_of(directory, gradient_checkpointing=True), LORA, seed=seed)
    optimizer = build_optimizer(policy, OptimConfig(lr=0.02), device=CPU)
    batch = make_batch((5, 3, 9))
    for _ in range(3):
        optimizer.zero_grad()
        policy(*batch.inputs, temperature=1.0, entropy="none").logprobs.sum().backward()
        optimizer.step()
    return policy


def test_adapters_start_as_nothing_and_train_alone(tmp_path: Path) -> None:
    directory = write_model("llama-gqa-untied", tmp_path)
    batch = make_batch((5, 3, 9))
    plain = policy_of(directory)
    policy = add_adapters(policy_of(directory), LORA, seed=1)
    expected = plain(*batch.inputs, temperature=1.0, entropy="none").logprobs
    out = policy(*batch.inputs, temperature=1.0, entropy="none").logprobs
    assert torch.equal(out, expected)
    out.sum().backward()
    with_gradient = {name for name, p in policy.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, p in policy.named_parameters() if p.requires_grad}
    assert with_gradient
    assert all("lora_" in name for name in with_gradient)
    assert len(with_gradient) == 2 * 2 * len(LORA.target_modules)  # A and B, two layers


def test_full_state_is_the_merged_model_under_plain_names(tmp_path: Path) -> None:
    directory = write_model("llama-gqa-untied", tmp_path)
    policy = trained(directory)
    merged = policy_of(directory)
    own = dict(merged.model.named_parameters())
    state = dict(full_state(policy))
    assert state.keys() == own.keys()
    batch = make_batch((5, 3, 9))
    before = merged(*batch.inputs, temperature=1.0, entropy="none").logprobs
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)
    expected = policy(*batch.inputs, temperature=1.0, entropy="none").logprobs
    torch.testing.assert_close(
        merged(*batch.inputs, temperature=1.0, entropy="none").logprobs, expected, rtol=0, atol=1e-5
    )
    assert (before - expected).abs().max() > 0.1


def test_the_seed_alone_decides_the_adapters(tmp_path: Path) -> None:
    directory = write_model("qwen2-tied", tmp_path)
    torch.manual_seed(3)
    untouched = torch.rand(1)
    torch.manual_seed(3)
    first, again, other = (add_adapters(policy_of(directory), LORA, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), untouched)
    pairs = list(zip(first.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_an_unknown_target_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    policy = policy_of(write_model("qwen2-tied", tmp_path))
    wrong = LoraConfig(target_modules=("q_proj", "query"))
    with pytest.raises(ModelError, match=r"model\.lora\.target_modules: .*got query\. It has .*q_proj"):
        add_adapters(policy, wrong, seed=0)


def test_the_head_gets_no_adapter_since_its_product_would_leave_it_out(tmp_path: Path) -> None:
    policy = policy_of(write_model("qwen2-tied", tmp_path))
    with pytest.raises(ModelError, match=r"linear layers of the decoder, got lm_head"):
        add_adapters(policy, LoraConfig(target_modules=("q_proj", "lm_head")), seed=0)
