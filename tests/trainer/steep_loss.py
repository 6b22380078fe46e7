"""A loss with an exploding gradient."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlcore.algos.losses import PolicyLoss, ppo_clip
from rlcore.config import AlgoConfig


def steep(
    policy_logprobs: Float[Tensor, "T"],
    old_logprobs: Float[Tensor, "T"],
    advantages: Float[Tensor, "T"],
    mask: Bool[Tensor, "T"],
    sequence_ids: Int[Tensor, "T"],
    num_sequences: int,
    *,
    settings: AlgoConfig,
) -> PolicyLoss:
    """Compute `ppo_clip` with advantages multiplied by a million."""
    return ppo_clip(
        policy_logprobs, old_logprobs, advantages * 1e6, mask, sequence_ids, num_sequences, settings=settings
    )
