"""Corrections for the distance between the policy that sampled the responses and the trained policy."""

import math
from typing import assert_never

import torch

from rlcore.algos.aggregation import Floats, Ids, Mask, masked, segment_sum, token_counts
from rlcore.algos.losses import MAX_LOG_RATIO, kl_estimate, token_log_ratio
from rlcore.config.algo import ImportanceConfig, RejectionConfig


def importance_weights(
    old_logprobs: Floats, behavior_logprobs: Floats, mask: Mask, sequence_ids: Ids, num_sequences: int,
    *, settings: ImportanceConfig,
) -> Floats:  # fmt: skip
    """Return the weight of each response token in the policy loss, without gradient, and 0 where the mask is False.

        off        1
        truncate   min(r, cap)                           truncated importance sampling, Ionides 2008; Yao et al. 2025
        mask       r where 1 / cap <= r <= cap, else 0   IcePop, Ling Team 2025, arXiv:2510.18855

    `r = exp(d_t)` with `d_t = clamp(log pi_old - log pi_behavior, -20, 20)`. At the level `sequence`, all tokens of
    sequence n have `r = exp(clamp(sum_{t in n} d_t, -20, 20))`."""
    log_ratio = token_log_ratio(old_logprobs, behavior_logprobs, mask).detach()
    if settings.level == "sequence":
        summed = segment_sum(log_ratio, sequence_ids, num_sequences)
        log_ratio = summed.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[sequence_ids]
    ratio = log_ratio.exp()
    match settings.mode:
        case "off":
            weights = torch.ones_like(ratio)
        case "truncate":
            weights = ratio.clamp(max=settings.cap)
        case "mask":
            outside = (ratio < 1 / settings.cap) | (ratio > settings.cap)  # not its negation: a NaN stays one
            weights = torch.where(outside, torch.zeros_like(ratio), ratio)
        case _:
            assert_never(settings.mode)
    return torch.where(mask, weights, torch.zeros_like(weights))


def rejection_mask(
    old_logprobs: Floats, behavior_logprobs: Floats, mask: Mask, sequence_ids: Ids, num_sequences: int,
    *, settings: RejectionConfig,
) -> Mask:  # fmt: skip
    """Return True for response tokens that are too far from the policy that sampled them.

        token                      |k_t| > bound
        sequence-sum, -mean        |sum or mean of k over its response| > bound
        sequence-max               max |k_t| over its response > bound

    `k_t` is the estimate of KL(behavior || old) (`kl_estimate`). `bound` is log(cap) for k1, otherwise cap. A NaN is
    not rejected, so that it is reported. Sources: veRL's rollout correction, Liu et al. 2025, "When Speed Kills
    Stability"."""
    distance = masked(kl_estimate(behavior_logprobs, old_logprobs, estimator=settings.estimator), mask).detach()
    match settings.level:
        case "off":
            return torch.zeros_like(mask)
        case "token":
            measured = distance
        case "sequence-sum" | "sequence-mean":
            measured = segment_sum(distance, sequence_ids, num_sequences)
            if settings.level == "sequence-mean":
                measured = measured / token_counts(mask, sequence_ids, num_sequences).clamp(min=1)
            measured = measured[sequence_ids]
        case "sequence-max":
            highest = torch.zeros(num_sequences, dtype=distance.dtype, device=distance.device)
            measured = highest.scatter_reduce(0, sequence_ids, distance.abs(), reduce="amax")[sequence_ids]
        case _:
            assert_never(settings.level)
    bound = math.log(settings.cap) if settings.estimator == "k1" else settings.cap
    return mask & (measured.abs() > bound)


def off_policy_mask(
    policy_logprobs: Floats, behavior_logprobs: Floats, advantages: Floats, mask: Mask, sequence_ids: Ids,
    num_sequences: int, *, delta: float,
) -> Mask:  # fmt: skip
    """Return True for each token with a negative advantage in a response that has become too unlikely under the policy.

        A_t < 0 and (1 / |n|) sum_{t in n} (log pi_behavior(t) - log pi(t)) > delta

    This is the off-policy sequence mask of DeepSeek-V3.2, 2025, arXiv:2512.02556."""
    drift = token_log_ratio(behavior_logprobs, policy_logprobs.detach(), mask)
    counts = token_counts(mask, sequence_ids, num_sequences).clamp(min=1)
    mean = segment_sum(drift, sequence_ids, num_sequences) / counts
    return (mean > delta)[sequence_ids] & (masked(advantages, mask) < 0)
