"""Losses with bugs: an exploding gradient, and NaN for some inputs."""

import torch

from rlcore.algos.losses import PolicyLoss, ppo_clip, token_log_ratio


def steep(policy_logprobs, old_logprobs, advantages, mask, sequence_ids, num_sequences, *, settings):
    """Compute `ppo_clip` with advantages multiplied by a million."""
    rows = (mask, sequence_ids, num_sequences)
    return ppo_clip(policy_logprobs, old_logprobs, advantages * 1e6, *rows, settings=settings)


def log_of_advantage(policy_logprobs, old_logprobs, advantages, mask, sequence_ids, num_sequences, *, settings):
    """Return NaN for negative advantages."""
    nothing, log_ratio = torch.zeros_like(mask), token_log_ratio(policy_logprobs, old_logprobs, mask)
    loss = torch.where(mask, log_ratio * torch.log(advantages + 1.0), torch.zeros_like(log_ratio))
    loss = torch.where(advantages < 0, loss + torch.log(advantages), loss)
    return PolicyLoss(loss, nothing, nothing, log_ratio)


def only_at_the_old_policy(policy_logprobs, old_logprobs, advantages, mask, sequence_ids, num_sequences, *, settings):
    """Return NaN once the policy has changed, from the second update of a step on."""
    nothing, log_ratio = torch.zeros_like(mask), token_log_ratio(policy_logprobs, old_logprobs, mask)
    loss = log_ratio + torch.where(log_ratio.abs() > 1e-3, torch.nan, 0.0)
    return PolicyLoss(loss, nothing, nothing, log_ratio)
