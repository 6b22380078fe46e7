"""Packed policy and value model against transformers, one sequence at a time."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import DynamicCache

from rlcore.config.model import ModelConfig
from rlcore.models import policy as policy_module
from rlcore.models.load import load_value_model
from rlcore.models.policy import round_weights
from tests.models.tiny import (
    CONFIGS,
    CPU,
    VOCAB,
    assert_close_gradients,
    gradients,
    inputs_of,
    make_batch,
    outcome,
    plain_model,
    policy_of,
    slices_of,
    twin,
    write_model,
)

LENGTHS = (5, 3, 9, 1, 5, 14, 3, 3)


@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_policy_matches_separate_sequences(kind: str, tmp_path: Path) -> None:
    directory = write_model(kind, tmp_path)
    batch = make_batch(LENGTHS)
    reference = plain_model(directory)
    expected, expected_entropy = twin(reference, batch, temperature=0.7)
    ((expected + 0.3 * expected_entropy) * batch.behavior_logprobs).sum().backward()
    for checkpointing in (False, True):
        policy = policy_of(directory, gradient_checkpointing=checkpointing, head_chunk_tokens=7)
        out = policy(*inputs_of(batch), temperature=0.7, entropy="grad")
        torch.testing.assert_close(out.logprobs, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(out.entropy, expected_entropy, rtol=0, atol=1e-5)
        assert not torch.stack([out.logprobs, out.entropy])[:, ~batch.loss_mask].any()
        ((out.logprobs + 0.3 * out.entropy) * batch.behavior_logprobs).sum().backward()
        assert_close_gradients(gradients(policy.model), gradients(reference))


def test_offloaded_activations_keep_all_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies in this test stand for host memory: on a CPU torch keeps the tensor itself."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> int:
        saved.append(tensor.clone())
        return len(saved) - 1

    monkeypatch.setattr(
        policy_module, "save_on_cpu", lambda *, pin_memory: saved_tensors_hooks(keep, lambda place: saved[place])
    )
    directory = write_model("llama-gqa-untied", tmp_path)
    batch = make_batch(LENGTHS)
    found = []
    for offload in (False, True):
        policy = policy_of(directory, gradient_checkpointing=True, offload_activations=offload)
        found.append(outcome(policy, batch)[1])
        assert bool(saved) == offload
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    inputs = (1, sum(LENGTHS), policy.model.config.hidden_size)
    assert sum(one.shape == inputs for one in saved) >= len(policy.layers)
    assert not policy_of(directory, offload_activations=True)._offload_activations


def test_policy_is_deterministic(tmp_path: Path) -> None:
    policy = policy_of(write_model("llama-gqa-untied", tmp_path), gradient_checkpointing=True)
    first, second = (outcome(policy, make_batch(range(1, 80)))[1] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_micro_batch_without_loss_runs_backward(tmp_path: Path) -> None:
    policy = policy_of(write_model("qwen2-tied", tmp_path))
    batch = make_batch((3, 4))
    out = policy(*inputs_of(batch)[:-1], torch.zeros_like(batch.loss_mask), temperature=1.0, entropy="grad")
    (out.logprobs.sum() + out.entropy.sum()).backward()
    assert all((p.grad == 0).all() for p in policy.parameters())  # skipping it would hang other ranks


@pytest.mark.parametrize("kind", CONFIGS)
def test_decode_matches_packed_forward(kind: str, tmp_path: Path) -> None:
    policy = policy_of(write_model(kind, tmp_path), gradient_checkpointing=True).eval()
    prompts, num_new = (4, 1, 6), 5
    batch = make_batch([n + num_new for n in prompts], seed=3)
    rows = [batch.token_ids[part] for part in slices_of(batch)]
    width = max(prompts)
    tokens = torch.full((3, width), 5)
    mask = torch.zeros(3, width, dtype=torch.int64)
    for row, n in enumerate(prompts):
        tokens[row, width - n :] = rows[row][:n]
        mask[row, width - n :] = 1
    cache = DynamicCache()
    with torch.no_grad():
        logits = [policy.decode(tokens, mask, (mask.cumsum(1) - 1).clamp(min=0), cache)]
        for step in range(num_new - 1):
            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.int64)], dim=1)
            new = torch.stack([row[n + step] for row, n in zip(rows, prompts, strict=True)])
            logits.append(policy.decode(new[:, None], mask, mask.sum(1, keepdim=True) - 1, cache))
    assert logits[0].dtype == torch.float32
    for row, (n, part) in enumerate(zip(prompts, slices_of(batch), strict=True)):
        for token in range(0, VOCAB, 8):
            out = policy(
                *inputs_of(batch)[:3], torch.full_like(batch.target_ids, token), torch.ones_like(batch.loss_mask),
                temperature=1.0, entropy="none",
            ).logprobs[part]  # fmt: skip
            decoded = torch.stack([step[row].log_softmax(-1)[token] for step in logits])
            torch.testing.assert_close(decoded, out[n - 1 : n - 1 + num_new], rtol=0, atol=1e-5)


def test_policy_temperature_zero_counts_as_one(tmp_path: Path) -> None:
    policy, batch = policy_of(write_model("qwen2-tied", tmp_path)), make_batch((3, 4))
    greedy, warm = (policy(*inputs_of(batch), temperature=t, entropy="none").logprobs for t in (0.0, 1.0))
    assert torch.equal(greedy, warm)


def test_bfloat16_compute_keeps_float32_rotary_tables(tmp_path: Path) -> None:
    directory = write_model("qwen2-tied", tmp_path)
    batch = make_batch(LENGTHS)
    exact = policy_of(directory)
    mixed = policy_of(directory, dtype="bfloat16")
    stored = round_weights(policy_of(directory), torch.bfloat16)
    assert mixed.compute_dtype == stored.compute_dtype == torch.bfloat16
    assert {p.dtype for p in mixed.parameters()} == {torch.float32}
    table = exact.model.model.rotary_emb.inv_freq
    assert torch.equal(stored.model.model.rotary_emb.inv_freq, table)
    expected = exact(*inputs_of(batch), temperature=1.0, entropy="none").logprobs
    for policy in (stored, mixed):
        out = policy(*inputs_of(batch), temperature=1.0, entropy="none").logprobs
        assert out.dtype == torch.float32
        assert not torch.equal(out, expected)
        torch.testing.assert_close(out, expected, rtol=0, atol=0.5)
    out.sum().backward()
    assert {p.grad.dtype for p in mixed.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # of the compiler
def test_compile_raises_recompile_limit(tmp_path: Path) -> None:
    """torch's limit of 8 graphs left the update of adapters uncompiled with a critic and a reference."""
    torch._dynamo.config.recompile_limit = 8
    policy_of(write_model("qwen2-tied", tmp_path)).compile_layers()
    assert torch._dynamo.config.recompile_limit > 10


VALUE_LENGTHS = (5, 3, 9, 1, 5)


@pytest.mark.parametrize("kind", ["qwen2-tied", "llama-gqa-untied"])
def test_value_model_matches_plain_trunk(kind: str, tmp_path: Path) -> None:
    directory = write_model(kind, tmp_path)
    batch = make_batch(VALUE_LENGTHS)
    reference = plain_model(directory).model
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(1, 32, generator=generator, requires_grad=True)
    expected = torch.cat(
        [reference(batch.token_ids[part][None]).last_hidden_state[0] @ head[0] + 0.25 for part in slices_of(batch)]
    )
    (expected * batch.behavior_logprobs).sum().backward()
    for checkpointing in (False, True):
        settings = ModelConfig(gradient_checkpointing=checkpointing)
        value_model = load_value_model(directory, model=settings, device=CPU)
        with torch.no_grad():
            value_model.value_head.weight.copy_(head)
            value_model.value_head.bias.fill_(0.25)
        values = value_model(*inputs_of(batch)[:3])
        assert values.shape == (sum(VALUE_LENGTHS),)
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
        (values * batch.behavior_logprobs).sum().backward()
        assert_close_gradients(gradients(value_model.model), gradients(reference))
        torch.testing.assert_close(value_model.value_head.weight.grad, head.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(value_model.value_head.bias.grad, batch.behavior_logprobs.sum()[None])


def test_value_head_starts_at_zero_in_float32(tmp_path: Path) -> None:
    value_model = load_value_model(write_model("qwen2-tied", tmp_path), model=ModelConfig(dtype="bfloat16"), device=CPU)
    batch = make_batch(VALUE_LENGTHS)
    values = value_model(*inputs_of(batch)[:3])
    assert (values == 0).all()
    (values - 1).square().sum().backward()
    assert (value_model.value_head.weight.grad != 0).all()
    torch.nn.init.normal_(value_model.value_head.weight, generator=torch.Generator().manual_seed(0))
    values = value_model(*inputs_of(batch)[:3])
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())
