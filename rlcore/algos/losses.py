"""Losses of policy and critic for each token, KL estimates, and corrections for the distance between the policy that
sampled the responses and the trained policy."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, assert_never

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from rlcore.algos.aggregation import Floats, Ids, Mask, masked, segment_sum, token_counts
from rlcore.config.algo import AlgoConfig, ImportanceConfig, KlEstimator, RejectionConfig

# exp(20) = 4.9e8 is far outside every clip range and far inside fp32: the bound changes no update, only prevents inf
MAX_LOG_RATIO = 20.0
# k3 grows with the ratio itself: one token far from the reference must not outweigh a batch
MAX_K3 = 10.0
# the rounding of a sum of float32 probabilities: a smaller rest is noise
MIN_REST = 1e-6


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss and the flags of each token. Where the mask is False, the loss is 0 and the flags are False. `clipped`:
    True on the clipped branch of the loss. `clipped_lower`: True on the dual-clip branch. `log_ratio`:
    `log pi - log pi_old`, clamped to +-20."""

    loss: Floats
    clipped: Mask
    clipped_lower: Mask
    log_ratio: Floats


PolicyLossFunction = Callable[..., PolicyLoss]
"""A pure function with the arguments of `ppo_clip`. The function reads no values where the mask is False. The gradient
of the loss is with respect to `policy_logprobs` only. Other keyword arguments are options (`algo.policy_loss_options`)
or tensors: `behavior_logprobs` Float[T], `group_ids` Int[N], `entropy` Float[T] without gradient, and `covariance_rank`
Float[T], the `rank_share` of `token_covariance` in the mini-batch."""


def token_log_ratio(policy_logprobs: Floats, old_logprobs: Floats, mask: Mask) -> Floats:
    """Return `clamp(log pi - log pi_old, -20, 20)` at response tokens, and 0 elsewhere."""
    return masked(policy_logprobs - old_logprobs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(log_ratio: Floats, advantages: Floats, *, settings: AlgoConfig) -> tuple[Floats, Mask, Mask]:
    """Return (loss, clipped, clipped_lower), each [T], of the clipped surrogate loss with `r = exp(log_ratio)`.

        l = max(-A r, -A clamp(r, 1 - clip_low, 1 + clip_high))
        l = min(l, -A dual_clip)      only where A < 0 and dual_clip is set

    PPO (Schulman et al. 2017, arXiv:1707.06347) has clip_low = clip_high. DAPO's clip-higher (Yu et al. 2025,
    arXiv:2503.14476) has a larger clip_high. The second line is dual clip (Ye et al. 2020, arXiv:1912.09729)."""
    ratio = log_ratio.exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss = torch.maximum(free, bounded)
    clipped = bounded > free
    if settings.dual_clip is None:
        return loss, clipped, torch.zeros_like(clipped)
    ceiling = -advantages * settings.dual_clip
    clipped_lower = (advantages < 0) & (loss > ceiling)
    return torch.where(clipped_lower, ceiling, loss), clipped, clipped_lower


def _sequence_mean(log_ratio: Floats, mask: Mask, sequence_ids: Ids, num_sequences: int) -> Floats:
    """Return for each token the mean log-ratio of its sequence. The gradient reaches only the token's own log-ratio."""
    counts = token_counts(mask, sequence_ids, num_sequences).clamp(min=1)
    sequence_log_ratio = (segment_sum(log_ratio.detach(), sequence_ids, num_sequences) / counts)[sequence_ids]
    # the added difference is exactly 0 in value and carries the token's gradient
    return masked(sequence_log_ratio, mask) + (log_ratio - log_ratio.detach())


def ppo_clip(
    policy_logprobs: Floats, old_logprobs: Floats, advantages: Floats, mask: Mask, sequence_ids: Ids,
    num_sequences: int, *, settings: AlgoConfig,
) -> PolicyLoss:  # fmt: skip
    """Return the clipped surrogate loss of each token's ratio `r_t = pi(t) / pi_old(t)`, see `clipped_surrogate`."""
    log_ratio = token_log_ratio(policy_logprobs, old_logprobs, mask)
    loss, clipped, clipped_lower = clipped_surrogate(log_ratio, masked(advantages, mask), settings=settings)
    return PolicyLoss(loss, clipped, clipped_lower, log_ratio)


def gspo(
    policy_logprobs: Floats, old_logprobs: Floats, advantages: Floats, mask: Mask, sequence_ids: Ids,
    num_sequences: int, *, settings: AlgoConfig,
) -> PolicyLoss:  # fmt: skip
    """Return the clipped surrogate loss of each sequence's ratio, with a gradient for each token (GSPO-token).

        log s_n = (1 / |n|) sum_{t in n} (log pi(t) - log pi_old(t))
        log r_t = sg(log s_n) + log pi(t) - sg(log pi(t))            sg: no gradient

    Source: Zheng et al. 2025, arXiv:2507.18071. GSPO needs a small clip range (3e-4, 4e-4) and the aggregation
    seq-mean-token-mean."""
    log_ratio = token_log_ratio(policy_logprobs, old_logprobs, mask)
    token_form = _sequence_mean(log_ratio, mask, sequence_ids, num_sequences)
    loss, clipped, clipped_lower = clipped_surrogate(token_form, masked(advantages, mask), settings=settings)
    return PolicyLoss(loss, clipped, clipped_lower, log_ratio)


def cispo(
    policy_logprobs: Floats, old_logprobs: Floats, advantages: Floats, mask: Mask, sequence_ids: Ids,
    num_sequences: int, *, settings: AlgoConfig,
) -> PolicyLoss:  # fmt: skip
    """Return the REINFORCE loss weighted by a clipped ratio without gradient. Clipped tokens also keep their gradient.

        l_t = -sg(clamp(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi(t)            sg: no gradient

    This is CISPO, MiniMax 2025, arXiv:2506.13585, equations 4 and 5. `clipped`: True where the clamp changes the ratio.
    """
    log_ratio = token_log_ratio(policy_logprobs, old_logprobs, mask)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss = -weight * masked(advantages, mask) * masked(policy_logprobs, mask)
    return PolicyLoss(loss, weight != ratio, torch.zeros_like(mask), log_ratio)


def sapo(
    policy_logprobs: Floats, old_logprobs: Floats, advantages: Floats, mask: Mask, sequence_ids: Ids,
    num_sequences: int, *, settings: AlgoConfig, tau_pos: Annotated[float, Field(gt=0)] = 1.0,
    tau_neg: Annotated[float, Field(gt=0)] = 1.05,
) -> PolicyLoss:  # fmt: skip
    """Return a loss with a soft gate instead of a clip (SAPO, Gao et al. 2025, arXiv:2511.20347).

    l_t = -A_t (4 / tau) sigmoid(tau (r_t - 1))        tau: tau_pos where A_t > 0, otherwise tau_neg
    """
    log_ratio = token_log_ratio(policy_logprobs, old_logprobs, mask)
    advantages = masked(advantages, mask)
    tau = tau_neg + (tau_pos - tau_neg) * (advantages > 0).to(log_ratio.dtype)
    loss = -advantages * (4 / tau) * torch.sigmoid(tau * (log_ratio.exp() - 1))
    return PolicyLoss(loss, torch.zeros_like(mask), torch.zeros_like(mask), log_ratio)


def gmpo(
    policy_logprobs: Floats, old_logprobs: Floats, advantages: Floats, mask: Mask, sequence_ids: Ids,
    num_sequences: int, *, settings: AlgoConfig, log_clip: Annotated[float, Field(gt=0)] = 0.4,
) -> PolicyLoss:  # fmt: skip
    """Return the loss of the geometric mean of a sequence's clipped ratios, with a gradient for each token.

        c_t     = sign(A_t) min(sign(A_t) log r_t, log_clip)
        log g_n = (1 / |n|) sum_{t in n} c_t
        l_t     = -A_t exp(sg(log g_n) + c_t - sg(c_t))            sg: no gradient

    This is GMPO, Zhao et al. 2025, arXiv:2507.20673, if `algo.aggregation` is seq-mean-token-mean."""
    log_ratio = token_log_ratio(policy_logprobs, old_logprobs, mask)
    advantages = masked(advantages, mask)
    sign = advantages.sign()
    signed = sign * log_ratio
    bounded = sign * signed.clamp(max=log_clip)
    loss = -advantages * _sequence_mean(bounded, mask, sequence_ids, num_sequences).exp()
    return PolicyLoss(loss, signed > log_clip, torch.zeros_like(mask), log_ratio)


def gpg(
    policy_logprobs: Floats, old_logprobs: Floats, advantages: Floats, mask: Mask, sequence_ids: Ids,
    num_sequences: int, *, settings: AlgoConfig,
) -> PolicyLoss:  # fmt: skip
    """Return the policy gradient loss without a ratio, `l_t = -A_t log pi(t)` (GPG, Chu et al. 2025, arXiv:2504.02546).
    The paper's factor for groups with equal scores is left out."""
    log_ratio = token_log_ratio(policy_logprobs, old_logprobs, mask).detach()
    logprobs = masked(policy_logprobs, mask)
    return PolicyLoss(-masked(advantages, mask) * logprobs, torch.zeros_like(mask), torch.zeros_like(mask), log_ratio)


def dppo(
    policy_logprobs: Floats, old_logprobs: Floats, advantages: Floats, mask: Mask, sequence_ids: Ids,
    num_sequences: int, *, settings: AlgoConfig, delta: Annotated[float, Field(gt=0, lt=1)] = 0.1,
) -> PolicyLoss:  # fmt: skip
    """Return a loss that bounds the change of a token's probability, not its ratio. A rare token's ratio may be large.

        l_t = 0                   where |pi(t) - pi_old(t)| > delta and A_t (r_t - 1) > 0
        l_t = -A_t r_t            elsewhere

    This is DPPO with the binary total variation, Qi et al. 2026, arXiv:2602.04879. `clipped` is True for
    tokens of the first case.
    """
    log_ratio = token_log_ratio(policy_logprobs, old_logprobs, mask)
    advantages = masked(advantages, mask)
    now, before = masked(policy_logprobs, mask).exp().detach(), masked(old_logprobs, mask).exp()
    clipped = mask & ((now - before).abs() > delta) & (advantages * log_ratio.detach() > 0)
    loss = torch.where(clipped, torch.zeros_like(log_ratio), -advantages * log_ratio.exp())
    return PolicyLoss(loss, clipped, torch.zeros_like(mask), log_ratio)


def kl_cov(
    policy_logprobs: Floats, old_logprobs: Floats, advantages: Floats, mask: Mask, sequence_ids: Ids,
    num_sequences: int, *, settings: AlgoConfig, covariance_rank: Floats,
    share: Annotated[float, Field(gt=0, lt=1)] = 0.0002, coef: Annotated[float, Field(gt=0)] = 1.0,
) -> PolicyLoss:  # fmt: skip
    """Return the unclipped loss plus a penalty on the tokens with the highest `token_covariance`.

        l_t = -A_t r_t + coef |log r_t|      for the `share` of the mini-batch's tokens with the largest covariance
        l_t = -A_t r_t                       elsewhere

    This is KL-Cov, Cui et al. 2025, arXiv:2505.22617, as in the paper's code. `clipped` is True
    for the penalized tokens."""
    log_ratio = token_log_ratio(policy_logprobs, old_logprobs, mask)
    penalized = mask & (covariance_rank < share)
    loss = -masked(advantages, mask) * log_ratio.exp() + coef * masked(log_ratio.abs(), penalized)
    return PolicyLoss(loss, penalized, torch.zeros_like(mask), log_ratio)


def value_loss(values: Floats, old_values: Floats, returns: Floats, mask: Mask, *, clip: float) -> tuple[Floats, Mask]:
    """Return (loss, clipped), each [T], of the critic's clipped squared error. `clipped`: True where v' has the larger
    error.

        v' = clamp(v, v_old - clip, v_old + clip)
        l  = max((v - R)^2, (v' - R)^2) / 2

    This is the loss in PPO's companion code (Schulman et al. 2017, arXiv:1707.06347)."""
    values, old_values, returns = masked(values, mask), masked(old_values, mask), masked(returns, mask)
    # not v_old + clamp(v - v_old): that differs from v in the last digit, and unclipped tokens would count as clipped
    near = values.clamp(old_values - clip, old_values + clip)
    free_error = (values - returns).square()
    near_error = (near - returns).square()
    return 0.5 * torch.maximum(free_error, near_error), near_error > free_error


def top_k_forward_kl(teacher_logprobs: Float[Tensor, "T k"], policy_logprobs: Float[Tensor, "T k"]) -> Floats:
    """Return KL(teacher || policy) at each token over k + 1 outcomes: the teacher's k likeliest tokens, and all others
    together.

        sum_i p_i (log p_i - log q_i) + p_rest (log p_rest - log q_rest)

    The result is at most the divergence over the whole vocabulary (log-sum inequality)."""
    teacher = teacher_logprobs.exp()
    teacher_rest, policy_rest = (
        (1 - probabilities.sum(dim=1)).clamp(min=MIN_REST) for probabilities in (teacher, policy_logprobs.exp())
    )
    of_top = (teacher * (teacher_logprobs - policy_logprobs)).sum(dim=1)
    return of_top + teacher_rest * (teacher_rest.log() - policy_rest.log())


def kl_estimate(policy_logprobs: Floats, ref_logprobs: Floats, *, estimator: KlEstimator) -> Floats:
    """Return an estimate of KL(pi || pi_ref) at each sampled token. The estimate is differentiable in pi.

        d                clamp(log pi - log pi_ref, -20, 20)
        k1               d
        k2               d^2 / 2
        k3, low_var_kl   min(exp(-d) - 1 + d, 10)

    Source: Schulman 2020, "Approximating KL Divergence". The values of k1 and k3 are unbiased. In the reward, only k1
    gives the gradient of KL(pi || pi_ref). In the loss, k2 gives this gradient, and k3 gives the gradient of
    KL(pi_ref || pi). The expected gradient of k1 in the loss is 0 (Liu et al. 2025, arXiv:2510.01555). The gradient is
    0 where d is NaN or clamped."""
    difference = (policy_logprobs - ref_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference.square()
        case "k3" | "low_var_kl":
            # expm1 keeps the digits of a small d; k3 >= 0, so only the upper bound can act
            return (torch.expm1(-difference) + difference).clamp(-MAX_K3, MAX_K3)
        case _:
            assert_never(estimator)


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
    """Return True for response tokens on which the old policy differs too much from the policy that sampled them.

        token                      |k_t| > bound
        sequence-sum, -mean        |sum or mean of k over its response| > bound
        sequence-max               max |k_t| over its response > bound

    `k_t` is the estimate of KL(behavior || old) (`kl_estimate`). `bound` is log(cap) for k1, otherwise cap. A token
    with a NaN is not rejected, so that the NaN is reported. Sources: veRL's rollout correction, Liu et al. 2025, "When
    Speed Kills Stability"."""
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
