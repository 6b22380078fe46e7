"""Does a model compute the same packed as it does alone? Asked of every architecture that the tests do not cover.

A hybrid or recurrent layer would carry state from one sequence into the next, a head of its own would scale the
logits, and neither would be noticed by anything but wrong log-probabilities.
"""

from itertools import pairwise

import torch
from torch import Tensor

from rlcore.errors import ModelError
from rlcore.models.library import PreTrainedModel
from rlcore.models.policy import CausalPolicy, decode_mask

TESTED = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose packed forward and gradient the test suite compares with transformers' own."""

_LENGTHS = (5, 3, 6)
# Largest difference of a log-probability that rounding in float32 explains, with room to spare.
_TOLERANCE = 1e-3


def require_faithful(model: PreTrainedModel, path: str) -> None:
    """Compare three short sequences packed with each of them alone. Raises ModelError where they differ."""
    kind = model.config.model_type
    if kind in TESTED:
        return
    try:
        difference = _difference(model)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        raise ModelError(
            f"model.path: {kind!r} cannot run on packed sequences, {path}: {error}. Use one of {_names()}."
        ) from error
    if not difference <= _TOLERANCE:
        raise ModelError(
            f"model.path: {kind!r} must compute the same on packed sequences as on each alone, but log-probabilities "
            f"differ by {difference:.2g} ({path}). Use one of {_names()}."
        )


@torch.no_grad()
def _difference(model: PreTrainedModel) -> float:
    """Largest difference of a log-probability between packed and alone."""
    policy = CausalPolicy(model, attention="sdpa", compute_dtype=torch.float32, head_chunk_tokens=4).eval()
    device, num_tokens = policy.device, sum(_LENGTHS)
    token_ids = (torch.arange(num_tokens, device=device) * 7919 + 13) % model.config.vocab_size
    target_ids = token_ids.roll(-1)
    positions = torch.cat([torch.arange(length, device=device) for length in _LENGTHS])
    bounds = torch.tensor([0, *_LENGTHS]).cumsum(0)
    everywhere = torch.ones(num_tokens, dtype=torch.bool, device=device)
    packed = policy(token_ids, positions, bounds, target_ids, everywhere, temperature=1.0, entropy="none").logprobs
    alone = [_alone(model, token_ids[first:last], target_ids[first:last]) for first, last in pairwise(bounds.tolist())]
    return float((packed - torch.cat(alone)).abs().max())


def _alone(model: PreTrainedModel, token_ids: Tensor, target_ids: Tensor) -> Tensor:
    """Log-probabilities of one sequence by the model's own forward, head included."""
    length = len(token_ids)
    mask = decode_mask(torch.ones(1, length, dtype=torch.bool, device=token_ids.device), length)
    output = model(input_ids=token_ids[None], attention_mask=mask, use_cache=False)
    return output.logits[0].float().log_softmax(-1).gather(1, target_ids[:, None])[:, 0]  # type: ignore[no-any-return]


def _names() -> str:
    return ", ".join(sorted(TESTED))
