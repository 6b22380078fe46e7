"""Per-token losses of the policy and the critic, and estimates of the KL divergence."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, assert_never

import torch
from pydantic import Field

from rlcore.algos.aggregation import Floats, Ids, Mask, masked, segment_sum, token_counts
from rlcore.algos.named import find_function
from rlcore.config.algo import POLICY_LOSSES, AlgoConfig, KlEstimator

# exp(20) = 4.9e8 is far outside every clip range and far inside fp32: the bound changes no update, only prevents inf
MAX_LOG_RATIO = 20.0
# k3 grows with the ratio itself: one token far from the reference must not outweigh a batch
MAX_K3 = 10.0


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy loss token by token, 0 and False where the mask is False. `clipped`: the clipped branch was taken.
    `clipped_lower`: the dual-clip branch was taken. `log_ratio`: policy - old log-probability of the token, clamped to
    +-20."""

    loss: Floats
    clipped: Mask
    clipped_lower: Mask
    log_ratio: Floats


PolicyLossFunction = Callable[..., PolicyLoss]
"""A pure function of packed tensors with the arguments of `ppo_clip`. It must not read values under a False mask. The
gradient of the loss is with respect to `policy_logprobs` alone.

Other keyword arguments are options (`algo.policy_loss_options`) or one of: `behavior_logprobs`, the engine's
log-probabilities Float[T]; `entropy`, the policy's, Float[T], without gradient; `group_ids`, the prompt of each
sequence Int[N]; `covariance_rank`, the `rank_share` of `token_covariance` in the mini-batch Float[T].
"""


def resolve_policy_loss(name: str) -> PolicyLossFunction:
    """Return the function of a policy loss: a name in `POLICY_LOSSES`, or `module:function`. Raises ConfigError."""
    return find_function("algo.policy_loss", name, POLICY_LOSSES)


def has_argument(name: str, argument: str) -> bool:
    """Return True if the function of a policy loss has an argument of that name."""
    return argument in inspect.signature(resolve_policy_loss(name)).parameters


def token_log_ratio(policy_logprobs: Floats, old_logprobs: Floats, mask: Mask) -> Floats:
    """Return `clamp(log pi - log pi_old, -20, 20)` at response tokens, 0 elsewhere."""
    return masked(policy_logprobs - old_logprobs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(log_ratio: Floats, advantages: Floats, *, settings: AlgoConfig) -> tuple[Floats, Mask, Mask]:
    """Return the clipped surrogate loss of any importance ratio: (loss, clipped, clipped_lower), each [T].

    With `r = exp(log_ratio)`:

        l = max(-A r, -A clamp(r, 1 - clip_low, 1 + clip_high))
        l = min(l, -A dual_clip)      only where A < 0 and dual_clip is set

    PPO (Schulman et al. 2017, arXiv:1707.06347) is clip_low = clip_high. Clip-higher is DAPO (Yu et al. 2025,
    arXiv:2503.14476). The second line is dual clip (Ye et al. 2020, arXiv:1912.09729).
    """
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
    """Return at each response token the mean over its sequence, with the gradient of the token's own value."""
    counts = token_counts(mask, sequence_ids, num_sequences).clamp(min=1)
    sequence_log_ratio = (segment_sum(log_ratio.detach(), sequence_ids, num_sequences) / counts)[sequence_ids]
    # the added difference is exactly 0 in value and carries the token's gradient
    return masked(sequence_log_ratio, mask) + (log_ratio - log_ratio.detach())


def ppo_clip(
    policy_logprobs: Floats, old_logprobs: Floats, advantages: Floats, mask: Mask, sequence_ids: Ids,
    num_sequences: int, *, settings: AlgoConfig,
) -> PolicyLoss:  # fmt: skip
    """Return the clipped surrogate of each token's ratio `r_t = pi(t) / pi_old(t)`; see `clipped_surrogate`. DAPO's
    clip-higher has clip_high > clip_low. At pi = pi_old the gradient is REINFORCE's, `-A_t grad log pi(t)`."""
    log_ratio = token_log_ratio(policy_logprobs, old_logprobs, mask)
    loss, clipped, clipped_lower = clipped_surrogate(log_ratio, masked(advantages, mask), settings=settings)
    return PolicyLoss(loss, clipped, clipped_lower, log_ratio)


def gspo(
    policy_logprobs: Floats, old_logprobs: Floats, advantages: Floats, mask: Mask, sequence_ids: Ids,
    num_sequences: int, *, settings: AlgoConfig,
) -> PolicyLoss:  # fmt: skip
    """Return the clipped surrogate of the sequence's ratio, with each token's own gradient (GSPO-token).

        log s_n = (1 / |n|) sum_{t in n} (log pi(t) - log pi_old(t))
        log r_t = sg(log s_n) + log pi(t) - sg(log pi(t))            sg: no gradient

    Zheng et al. 2025, arXiv:2507.18071. For sequences of one token it is `ppo_clip`. It needs a small clip range (3e-4,
    4e-4) and the aggregation seq-mean-token-mean.
    """
    log_ratio = token_log_ratio(policy_logprobs, old_logprobs, mask)
    token_form = _sequence_mean(log_ratio, mask, sequence_ids, num_sequences)
    loss, clipped, clipped_lower = clipped_surrogate(token_form, masked(advantages, mask), settings=settings)
    return PolicyLoss(loss, clipped, clipped_lower, log_ratio)


def cispo(
    policy_logprobs: Floats, old_logprobs: Floats, advantages: Floats, mask: Mask, sequence_ids: Ids,
    num_sequences: int, *, settings: AlgoConfig,
) -> PolicyLoss:  # fmt: skip
    """Return REINFORCE weighted by a clipped ratio without gradient: every token keeps its gradient, clipped or not.

        l_t = -sg(clamp(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi(t)

    CISPO, MiniMax 2025, arXiv:2506.13585, equations 4 and 5. `clipped` is where the clamp changes the ratio.
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
    """Return a loss with a soft gate instead of a clip: the gradient falls with the ratio's distance from 1.

        l_t = -A_t (4 / tau) sigmoid(tau (r_t - 1))        tau: tau_pos where A_t > 0, else tau_neg

    SAPO, Gao et al. 2025, arXiv:2511.20347. At r = 1 its gradient is REINFORCE's.
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
    """Return the geometric mean of a sequence's clipped ratios, with each token's own gradient.

        c_t     = sign(A_t) min(sign(A_t) log r_t, log_clip)
        log g_n = (1 / |n|) sum_{t in n} c_t
        l_t     = -A_t exp(sg(log g_n) + c_t - sg(c_t))            sg: no gradient

    GMPO, Zhao et al. 2025, arXiv:2507.20673, with the aggregation seq-mean-token-mean.
    """
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
    """Return the plain policy gradient without a ratio: `l_t = -A_t log pi(t)`. GPG, Chu et al. 2025, arXiv:2504.02546,
    without its factor for groups of equal scores."""
    log_ratio = token_log_ratio(policy_logprobs, old_logprobs, mask).detach()
    logprobs = masked(policy_logprobs, mask)
    return PolicyLoss(-masked(advantages, mask) * logprobs, torch.zeros_like(mask), torch.zeros_like(mask), log_ratio)


def dppo(
    policy_logprobs: Floats, old_logprobs: Floats, advantages: Floats, mask: Mask, sequence_ids: Ids,
    num_sequences: int, *, settings: AlgoConfig, delta: Annotated[float, Field(gt=0, lt=1)] = 0.1,
) -> PolicyLoss:  # fmt: skip
    """Return a loss with a trust region in probability instead of its ratio: rare tokens may change by large factors.

        l_t = 0                   where |pi(t) - pi_old(t)| > delta and a step would lead further away
        l_t = -A_t r_t            elsewhere

    Further away: A_t > 0 and r_t > 1, or A_t < 0 and r_t < 1. DPPO with the binary total variation, Qi et al. 2026,
    arXiv:2602.04879. `clipped` is where the loss is 0 for that reason.
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
    """Return the loss without a clip, with a penalty on the tokens of the highest covariance.

        l_t = -A_t r_t + coef |log r_t|      for the share of the mini-batch's tokens with the largest covariance
        l_t = -A_t r_t                       elsewhere

    KL-Cov, Cui et al. 2025, arXiv:2505.22617, with its code's estimate of the divergence. See `token_covariance`.
    `clipped` is where the penalty is.
    """
    log_ratio = token_log_ratio(policy_logprobs, old_logprobs, mask)
    penalized = mask & (covariance_rank < share)
    loss = -masked(advantages, mask) * log_ratio.exp() + coef * masked(log_ratio.abs(), penalized)
    return PolicyLoss(loss, penalized, torch.zeros_like(mask), log_ratio)


def value_loss(values: Floats, old_values: Floats, returns: Floats, mask: Mask, *, clip: float) -> tuple[Floats, Mask]:
    """Return the critic's clipped squared error: (loss, clipped), each [T].

        v' = clamp(v, v_old - clip, v_old + clip)
        l  = max((v - R)^2, (v' - R)^2) / 2

    PPO's companion code (Schulman et al. 2017, arXiv:1707.06347). `clipped` is where the second error is larger.
    """
    values, old_values, returns = masked(values, mask), masked(old_values, mask), masked(returns, mask)
    # not v_old + clamp(v - v_old): that differs from v in the last digit, and unclipped tokens would count as clipped
    near = values.clamp(old_values - clip, old_values + clip)
    free_error = (values - returns).square()
    near_error = (near - returns).square()
    return 0.5 * torch.maximum(free_error, near_error), near_error > free_error


def kl_estimate(policy_logprobs: Floats, ref_logprobs: Floats, *, estimator: KlEstimator) -> Floats:
    """Estimate KL(pi || pi_ref) at each sampled token, differentiable in the policy.

    With `d = clamp(log pi - log pi_ref, -20, 20)`:

        k1               d
        k2               d^2 / 2
        k3, low_var_kl   min(exp(-d) - 1 + d, 10)

    Schulman 2020, "Approximating KL Divergence". k1 and k3 are unbiased in value. In the reward only k1 has the
    divergence's gradient: near the reference that of k2 and k3 vanishes. In the loss k2 has the divergence's gradient,
    k3 that of KL(pi_ref || pi), k1 none in expectation (Liu et al. 2025, arXiv:2510.01555). The caller masks. The bound
    on d also keeps the gradient of NaN or infinity at 0.
    """
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
