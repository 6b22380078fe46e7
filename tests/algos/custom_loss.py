"""A custom loss: this one function and the line `algo.policy_loss: tests.algos.custom_loss:my_loss`."""

from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from rlcore.algos.advantages import group_advantages
from rlcore.algos.losses import PolicyLoss, token_log_ratio
from rlcore.config.algo import AlgoConfig


def my_loss(
    policy_logprobs: Float[Tensor, "T"],
    old_logprobs: Float[Tensor, "T"],
    advantages: Float[Tensor, "T"],
    mask: Bool[Tensor, "T"],
    sequence_ids: Int[Tensor, "T"],
    num_sequences: int,
    *,
    settings: AlgoConfig,
) -> PolicyLoss:
    """A custom loss with a squared log-ratio instead of a clip: `-r A + (log r)^2 / (2 clip_high)`."""
    log_ratio = token_log_ratio(policy_logprobs, old_logprobs, mask)
    loss = -log_ratio.exp() * torch.where(mask, advantages, 0.0) + log_ratio.square() / (2 * settings.clip_high)
    nothing = torch.zeros_like(mask)
    return PolicyLoss(loss, nothing, nothing, log_ratio)


def careless_loss(*arguments: Any, settings: AlgoConfig) -> PolicyLoss:
    """Return `my_loss` with garbage where the mask is False."""
    kept, mask = my_loss(*arguments, settings=settings), arguments[3]
    garbage = torch.where(mask, 0.0, torch.nan)
    return PolicyLoss(kept.loss + garbage, kept.clipped | ~mask, kept.clipped_lower | ~mask, kept.log_ratio + garbage)


def scaled(
    scores: Float[Tensor, "N"],
    group_ids: Int[Tensor, "N"],
    *,
    lengths: Int[Tensor, "N"],
    factor: Annotated[float, Field(gt=0)] = 2.0,
) -> Float[Tensor, "N"]:
    """A custom advantage: `factor (s - mean) / sqrt(length)`."""
    return factor * group_advantages(scores, group_ids, method="dr_grpo") / lengths.sqrt()


NOT_A_FUNCTION = 3
