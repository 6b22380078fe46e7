"""Tiny transformers models in local directories, packed micro-batches to run through them, and naive twins."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from rlcore.batching.pack import pack, shared_prompts
from rlcore.config.model import ModelConfig
from rlcore.models.attention import PackedLayout, packed_attention
from rlcore.models.load import load_policy
from rlcore.models.parallel import gather_parameter
from rlcore.models.policy import CausalPolicy
from rlcore.types import PackedBatch, Prompt, Rollout, Score

Rows = Sequence[Sequence[float]]
CPU = torch.device("cpu")
VOCAB = 41

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # wide, so that attention is far from uniform and errors show
}

CONFIGS = {
    "qwen2-tied": lambda: Qwen2Config(**_SHAPE, num_key_value_heads=4, tie_word_embeddings=True),
    "qwen3-gqa": lambda: Qwen3Config(**_SHAPE, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True),
    "llama-gqa-untied": lambda: LlamaConfig(**_SHAPE, num_key_value_heads=2, tie_word_embeddings=False),
    "mistral-window": lambda: MistralConfig(**_SHAPE, num_key_value_heads=2, sliding_window=4, head_dim=8),
}


def write_model(kind: str, directory: Path, seed: int = 0) -> Path:
    """Save a randomly initialized model with transformers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # biases start at 0 and norms at 1, which would hide a dropped term
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(directory)
    return directory


def plain_model(directory: Path) -> PreTrainedModel:
    """Load the model with transformers alone."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def policy_of(directory: Path, **settings: object) -> CausalPolicy:
    return load_policy(directory, model=ModelConfig(**settings), device=CPU)


def inputs_of(batch: PackedBatch) -> tuple[Tensor, ...]:
    """Return the batch's arguments of `CausalPolicy.forward`."""
    return batch.token_ids, batch.position_ids, batch.cu_seqlens, batch.target_ids, batch.loss_mask


def slices_of(batch: PackedBatch) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(batch.cu_seqlens.tolist())]


def cumulated(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def make_batch(lengths: Sequence[int], seed: int = 0) -> PackedBatch:
    """Return random sequences; about 60% of the tokens have a loss. Tests use `behavior_logprobs` as the weights of a
    loss."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    return PackedBatch(
        token_ids=torch.randint(2, VOCAB, (num_tokens,), generator=generator),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=cumulated(lengths),
        target_ids=torch.randint(2, VOCAB, (num_tokens,), generator=generator),
        loss_mask=torch.rand(num_tokens, generator=generator) < 0.6,
        behavior_logprobs=torch.randn(num_tokens, generator=generator),
        scores=torch.zeros(len(lengths)),
        score_mask=torch.ones(len(lengths), dtype=torch.bool),
        group_ids=torch.arange(len(lengths)),
    )


def answers(groups: Sequence[tuple[int, Sequence[int]]], *, unscored: frozenset[int] = frozenset()) -> PackedBatch:
    """Return random responses to random prompts. `groups`: tokens of each prompt and of each of its responses."""
    drawn = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray:
        return drawn.integers(2, VOCAB, count)

    rollouts, numbers = [], []
    for number, (length, lengths) in enumerate(groups):
        prompt = Prompt(number, tuple(ids(length).tolist()), "countdown", "{}")
        for count in lengths:
            rollouts.append(Rollout(prompt, 0, ids(count), np.zeros(count, dtype=np.float32), "stop", 0))
            numbers.append(number)
    scores = [Score(1.0, {}, failure="failed" if i in unscored else None) for i in range(len(rollouts))]
    return pack(rollouts, scores, numbers)


def twin(model: PreTrainedModel, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies from full logits, one sequence at a time."""
    logprobs, entropies = [], []
    for part in slices_of(batch):
        logits = model(batch.token_ids[part][None]).logits[0] / temperature
        log_probs = logits.log_softmax(-1)
        chosen = log_probs.gather(1, batch.target_ids[part, None])[:, 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        zero = torch.zeros(())
        logprobs.append(torch.where(batch.loss_mask[part], chosen, zero))
        entropies.append(torch.where(batch.loss_mask[part], entropy, zero))
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Compare gradients up to `tolerance` of their largest entry."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        assert scale > 0, name
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=float(tolerance * scale), msg=name)


def outcome(policy: CausalPolicy, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probabilities and gradients of a batch, on the CPU."""
    policy.zero_grad(set_to_none=True)
    shared = shared_prompts(batch) if policy.share_prompts else None
    weights = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    out = policy(*(x.to(policy.device) for x in inputs_of(batch)), shared, temperature=0.8, entropy="grad")
    ((out.logprobs + 0.1 * out.entropy) * weights.to(policy.device)).sum().backward()
    return out.logprobs.detach().cpu(), {
        name: gather_parameter(p.grad).float().cpu() for name, p in policy.model.named_parameters()
    }


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare directions and norms of bfloat16 gradients."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.nn.functional.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0) > 0.995, name
        assert 0.97 < found[name].norm() / gradient.norm() < 1.03, name


def attend(qkv: list[Tensor], layout: PackedLayout, **options: object) -> Tensor:
    """Return Float[T, Hq, D] in batch order."""
    ordered = [x[layout.token_order].transpose(0, 1)[None] for x in qkv]
    out, _ = packed_attention(nn.Identity(), *ordered, None, packed_layout=layout, **options)
    return out[0][layout.computed_index]


def token_logprob_and_entropy(
    hidden: Sequence[float], weight: Rows, target: int, temperature: float
) -> tuple[float, float]:
    """Return log-probability of `target` and entropy of softmax(weight hidden / temperature)."""
    logits = [sum(h * w for h, w in zip(hidden, row, strict=True)) / temperature for row in weight]
    norm = math.fsum(math.exp(z) for z in logits)
    probs = [math.exp(z) / norm for z in logits]
    return math.log(probs[target]), -math.fsum(p * math.log(p) for p in probs)


def causal_attention(query: Rows, key: Rows, value: Rows, scale: float, window: int | None) -> list[list[float]]:
    """Compute one head of one sequence: a weighted mean of the last `window` values."""
    out = []
    for at, q in enumerate(query):
        first = 0 if window is None else max(0, at - window + 1)
        scores = [math.exp(scale * sum(a * b for a, b in zip(q, key[j], strict=True))) for j in range(first, at + 1)]
        total = math.fsum(scores)
        out.append(
            [math.fsum(s / total * value[first + j][d] for j, s in enumerate(scores)) for d in range(len(value[0]))]
        )
    return out
