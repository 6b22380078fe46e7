"""Losses with bugs, such as the logarithm of a negative advantage."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlcore.algos.losses import PolicyLoss, token_log_ratio
from rlcore.config import AlgoConfig


def log_of_advantage(
    policy_logprobs: Float[Tensor, "T"],
    old_logprobs: Float[Tensor, "T"],
    advantages: Float[Tensor, "T"],
    mask: Bool[Tensor, "T"],
    sequence_ids: Int[Tensor, "T"],
    num_sequences: int,
    *,
    settings: AlgoConfig,
) -> PolicyLoss:
    """Return NaN for negative advantages."""
    nothing = torch.zeros_like(mask)
    log_ratio = token_log_ratio(policy_logprobs, old_logprobs, mask)
    loss = torch.where(mask, log_ratio * torch.log(advantages + 1.0), torch.zeros_like(log_ratio))
    loss = torch.where(advantages < 0, loss + torch.log(advantages), loss)
    return PolicyLoss(loss, nothing, nothing, log_ratio)


def only_at_the_old_policy(
    policy_logprobs: Float[Tensor, "T"],
    old_logprobs: Float[Tensor, "T"],
    advantages: Float[Tensor, "T"],
    mask: Bool[Tensor, "T"],
    sequence_ids: Int[Tensor, "T"],
    num_sequences: int,
    *,
    settings: AlgoConfig,
) -> PolicyLoss:
    """Return NaN once the policy has changed, from the second update of a step on."""
    nothing = torch.zeros_like(mask)
    log_ratio = token_log_ratio(policy_logprobs, old_logprobs, mask)
    loss = log_ratio + torch.where(log_ratio.abs() > 1e-3, torch.nan, 0.0)
    return PolicyLoss(loss, nothing, nothing, log_ratio)
