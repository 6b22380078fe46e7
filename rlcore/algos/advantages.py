"""Advantages, which measure how much better a response or a token was than expected."""

from typing import Annotated, Literal, assert_never

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from rlcore.algos.aggregation import Floats, Ids, Mask, masked, segment_sum
from rlcore.config.algo import OverlongConfig

Scores = Float[Tensor, "N"]
Counts = Int[Tensor, "N"]
Flags = Bool[Tensor, "N"]

SequenceAdvantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", "remax"]
"""The methods of `group_advantages`, which give one advantage for each response."""

# Keeps a group whose scores differ by rounding alone from dividing by zero; the value that the field uses
STD_EPS = 1e-6
# The same for whitening, under the square root
VARIANCE_EPS = 1e-8


def whiten_weighted(values: Float[Tensor, "K"], weights: Float[Tensor, "K"]) -> Float[Tensor, "K"]:
    """Return `(v - mean) / sqrt(var + 1e-8)` with the weighted mean and
    `var = sum w (v - mean)^2 / max(1, sum w - 1)`."""
    weights = weights.double()
    wide = values.double()
    total = weights.sum()
    centered = wide - (weights * wide).sum() / total.clamp(min=1)
    variance = (weights * centered.square()).sum() / (total - 1).clamp(min=1)
    return (centered * torch.rsqrt(variance + VARIANCE_EPS)).to(values.dtype)


def whiten(values: Floats, mask: Mask) -> Floats:
    """Standardize to mean 0 and variance 1 (ddof = 1) where the mask is True. All other tokens get 0."""
    return masked(whiten_weighted(masked(values, mask), mask.to(values.dtype)), mask)


def group_advantages(
    scores: Scores | Counts,
    group_ids: Counts,
    *,
    method: SequenceAdvantage,
    lengths: Counts | None = None,
    greedy_scores: Scores | None = None,
) -> Scores:
    """Return one advantage for each response.

        grpo                    (s - mean) / (std + 1e-6)         Shao et al. 2024, arXiv:2402.03300
        dr_grpo                 s - mean                          Liu et al. 2025, arXiv:2503.20783
        rloo                    s - mean of the n - 1 others      Ahmadian et al. 2024, arXiv:2402.14740
        reinforce_pp_baseline   s - mean, whitened over tokens    Hu et al. 2025, arXiv:2501.03262
        opo                     s - sum(l s) / sum(l)             Hao et al. 2025, arXiv:2505.23585
        remax                   s - score of greedy response      Li et al. 2023, arXiv:2310.10505

    s is the response's score, including KL and overlong penalties. mean and std (ddof = 1) are over the n responses to
    the same prompt. For a group of one response, mean is set to 0 and std to 1. `lengths` (l): tokens per response.
    `greedy_scores`: the score of the greedy response to the same prompt. Integer scores give float32 advantages."""
    # in float64 the mean of equal fp32 scores is exactly that score, and such a group gets exactly 0
    wide = scores.double()
    centered = wide - group_mean(wide, group_ids, torch.ones_like(wide))
    match method:
        case "grpo":
            advantages = centered / (group_std(wide, group_ids) + STD_EPS)
        case "dr_grpo":
            advantages = centered
        case "rloo":
            # s - (n mean - s) / (n - 1) = (s - mean) n / (n - 1)
            members, sizes = group_members(group_ids)
            size = sizes[members]
            advantages = centered * size / (size - 1).clamp(min=1)
        case "reinforce_pp_baseline":
            advantages = whiten_weighted(centered, _required(lengths, "lengths", method).double())
        case "opo":
            advantages = wide - group_mean(wide, group_ids, _required(lengths, "lengths", method).double())
        case "remax":
            advantages = wide - _required(greedy_scores, "greedy_scores", method).double()
        case _:
            assert_never(method)
    return advantages.to(scores.dtype if scores.is_floating_point() else torch.get_default_dtype())


def gdpo(scores: Scores, group_ids: Counts, *, parts: Float[Tensor, "N K"], part_weights: Float[Tensor, "K"]) -> Scores:
    """Return advantages for scores with K components. Each component is normalized within each group before the
    components are summed, so that no component dominates.

        A_k = (s_k - mean) / (std + 1e-6)              for each component, the same formula that grpo uses
        A   = whiten(sum_k w_k A_k)                    over all responses of the batch

    This is GDPO, Liu et al. 2026, arXiv:2601.05242. `parts` has the components s_k, and `part_weights` has the weights
    w_k. The values of `scores` are not used."""
    columns = [group_advantages(part, group_ids, method="grpo") for part in parts.double().unbind(1)]
    summed = torch.stack(columns, dim=1) @ part_weights.double()
    return whiten_weighted(summed, torch.ones_like(summed)).to(scores.dtype)


def pass_at_k(
    scores: Scores | Counts, group_ids: Counts, *, k: Annotated[int, Field(ge=1)] = 4, threshold: float = 0.5
) -> Scores:
    """Return advantages for a reward that a set of k responses gets as a whole. The reward is 1 if at least one
    response of the set is correct, otherwise 0. A correct response has a score of at least `threshold`.

        p = 1 - C(n - c, k) / C(n, k)              sigma = sqrt(p (1 - p))
        A = (1 - p) / sigma                        for a correct response: every set that contains it passes
        A = (q - p) / sigma                        for a wrong response, q = 1 - C(n - c - 1, k - 1) / C(n - 1, k - 1)

    c of the n responses to a prompt are correct. A is the mean advantage of all sets of k responses that contain the
    response. A is 0 if p is 0 or 1. If n < k, n replaces k. Source: the analytical form of Chen et al. 2025,
    arXiv:2508.10751."""
    right = scores >= threshold
    members, sizes = group_members(group_ids)
    num_right = torch.zeros_like(sizes).index_add(0, members, right.long())
    n, c = sizes.double(), num_right.double()
    chosen = torch.minimum(n, torch.full_like(n, k))
    passes = 1 - _share_without_correct(n, n - c, chosen)
    with_wrong = 1 - _share_without_correct(n - 1, n - c - 1, chosen - 1)
    is_open = (c > 0) & (n - c >= chosen)  # by counts: p itself is rounded
    sigma = (passes * (1 - passes)).sqrt()
    value = torch.where(right, (1 - passes)[members], (with_wrong - passes)[members])
    advantages = torch.where(is_open[members], value / sigma[members], torch.zeros_like(value))
    return advantages.to(scores.dtype if scores.is_floating_point() else torch.get_default_dtype())


def _share_without_correct(
    total: Float[Tensor, "P"], wrong: Float[Tensor, "P"], chosen: Float[Tensor, "P"]
) -> Float[Tensor, "P"]:
    """Return `C(wrong, chosen) / C(total, chosen)`, the chance that `chosen` responses of a group are all wrong."""
    logarithm = (
        torch.lgamma(wrong + 1) - torch.lgamma(wrong - chosen + 1)
        - torch.lgamma(total + 1) + torch.lgamma(total - chosen + 1)
    )  # fmt: skip
    return torch.where(wrong >= chosen, logarithm.exp(), torch.zeros_like(logarithm))


def _required(value: Tensor | None, name: str, method: str) -> Tensor:
    if value is None:
        raise ValueError(f"group_advantages: method {method} needs {name}, got None; pass a tensor of shape [N]")
    return value


def broadcast_to_tokens(values: Scores, mask: Mask, sequence_ids: Ids) -> Floats:
    """Copy the value of each sequence to its response tokens. All other tokens get 0."""
    return masked(values[sequence_ids], mask)


def token_rewards(
    scores: Scores, cu_seqlens: Int[Tensor, "N+1"], mask: Mask, kl: Floats | None, kl_coef: float
) -> Floats:
    """Return the reward of each response token, and 0 where the mask is False.

        r_t = [t is the last response token of n] s_n - kl_coef kl_t

    A sequence without response tokens gets no score. Source of the KL: Ziegler et al. 2019, arXiv:1909.08593."""
    counts = mask.cumsum(0)
    # up_to[n]: response tokens before sequence n. last[n]: position of the last response token up to its end.
    up_to = pad(counts, (1, 0))[cu_seqlens]
    last = torch.searchsorted(counts, up_to[1:])
    of_last = torch.where(up_to[1:] > up_to[:-1], scores, torch.zeros_like(scores))
    rewards = torch.zeros_like(mask, dtype=scores.dtype).index_add(0, last, of_last)
    if kl is None:
        return rewards
    return rewards - kl_coef * masked(kl, mask)


def gae(
    rewards: Floats, values: Floats, mask: Mask, sequence_ids: Ids, *, gamma: float, lam: float
) -> tuple[Floats, Floats]:
    """Return (advantages, returns) of generalized advantage estimation over the response tokens of each sequence.

        delta_t = r_t + gamma V_{t'} - V_t
        A_t     = delta_t + gamma lam A_{t'}
        R_t     = A_t + V_t

    t' is the next response token of the same sequence, so tokens of a tool's output are skipped. V and A are 0 after
    the last response token. Nothing is whitened. Source: Schulman et al. 2016, arXiv:1506.02438. The results are
    computed in float64 and rounded once."""
    wide_values = masked(values.double(), mask)
    follows = pad(sequence_ids[:-1] == sequence_ids[1:], (0, 1)).double()  # 1 before a token of the same sequence
    # value of the nearest response token at or after t
    nearest_value = backward_recurrence(follows * (1 - mask.double()), wide_values)
    next_value = follows * pad(nearest_value[1:], (0, 1))
    delta = masked(rewards.double() + gamma * next_value - wide_values, mask)
    # decay gamma lam at a response token, 1 at a skipped token, 0 where the sequence ends
    decay = torch.where(mask, gamma * lam * follows, follows)
    advantages = masked(backward_recurrence(decay, delta), mask)
    return advantages.to(values.dtype), (advantages + wide_values).to(values.dtype)


def reinforce_pp(rewards: Floats, mask: Mask, sequence_ids: Ids, *, gamma: float) -> tuple[Floats, Floats]:
    """Return (advantages, returns) of REINFORCE++ (Hu et al. 2025, arXiv:2501.03262), which is `gae` with lam = 1 and V
    = 0.

        R_t = r_t + gamma R_{t'},   A = whiten(R) over all response tokens
    """
    returns, _ = gae(rewards, torch.zeros_like(rewards), mask, sequence_ids, gamma=gamma, lam=1.0)
    return whiten(returns, mask), returns


def group_members(group_ids: Counts) -> tuple[Counts, Int[Tensor, "P"]]:
    """Return the group index of each response, and the size of each group. The ids may be any integers. The call
    synchronizes with the device.

    >>> members, sizes = group_members(torch.tensor([7, 3, 7]))
    >>> members.tolist(), sizes.tolist()
    ([1, 0, 1], [1, 2])
    """
    _, members, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return members, sizes


def has_scored_peer(score_mask: Flags, group_ids: Counts) -> Flags:
    """Return True for each scored response that is alone in its group or whose group has another scored response.

    >>> has_scored_peer(torch.tensor([True, False, True, True, True]), torch.tensor([0, 0, 1, 1, 2])).tolist()
    [False, False, True, True, True]
    """
    members, sizes = group_members(group_ids)
    num_scored = torch.zeros_like(sizes).index_add(0, members, score_mask.long())
    return score_mask & ((num_scored > 1) | (sizes == 1))[members]


def group_mean(scores: Scores, group_ids: Counts, weights: Scores) -> Scores:
    """Return the weighted mean `sum w s / sum w` of each response's group. A group of one response gets 0."""
    members, sizes = group_members(group_ids)
    sums = segment_sum(weights * scores, members, sizes.numel())
    totals = segment_sum(weights, members, sizes.numel())
    return torch.where(sizes > 1, sums / totals, torch.zeros_like(sums))[members]


def group_std(scores: Scores, group_ids: Counts) -> Scores:
    """Return the standard deviation (ddof = 1) of each response's group. A group of one response gets 1."""
    members, sizes = group_members(group_ids)
    deviations = scores - group_mean(scores, group_ids, torch.ones_like(scores))
    squares = segment_sum(deviations.square(), members, sizes.numel())
    std = (squares / (sizes - 1).clamp(min=1)).sqrt()
    return torch.where(sizes > 1, std, torch.ones_like(std))[members]


def backward_recurrence(decay: Floats, addend: Floats) -> Floats:
    """Compute `x_t = addend_t + decay_t x_{t+1}` backward from `x_T = 0`, where a decay of 0 ends a sequence. This is a
    parallel prefix sum in log2(T) passes (Hillis and Steele 1986, Blelloch 1990).

    >>> backward_recurrence(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1.0, 1.0, 4.0])).tolist()
    [2.5, 3.0, 4.0]
    """
    distance = 1
    while distance < addend.numel():
        addend = addend + decay * pad(addend[distance:], (0, distance))
        decay = decay * pad(decay[distance:], (0, distance))
        distance *= 2
    return addend


def score_range(scores: Scores, score_mask: Flags, group_ids: Counts) -> tuple[Float[Tensor, "P"], Float[Tensor, "P"]]:
    """Return the highest and the lowest score of each group. A group without scores gets -inf and inf."""
    members, sizes = group_members(group_ids)
    members, scores = members[score_mask], scores[score_mask]
    highest = torch.full_like(sizes, -torch.inf, dtype=scores.dtype).scatter_reduce(0, members, scores, reduce="amax")
    lowest = torch.full_like(sizes, torch.inf, dtype=scores.dtype).scatter_reduce(0, members, scores, reduce="amin")
    return highest, lowest


def groups_with_signal(scores: Scores, score_mask: Flags, group_ids: Counts) -> Flags:
    """Return True for each response of a group with at least two different scores, and for a scored response that is
    alone in its group. This is the filter of DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476)."""
    members, sizes = group_members(group_ids)
    highest, lowest = score_range(scores, score_mask, group_ids)
    return ((highest > lowest) | ((sizes == 1) & (highest == lowest)))[members]


def overlong_penalty(lengths: Counts, *, max_response_tokens: int, settings: OverlongConfig) -> Scores:
    """Return `-penalty clamp((length - (L - B)) / B, 0, 1)` for each response, or 0 if `enabled` is false. L is the
    token limit, and B the buffer size. This is DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476)."""
    buffer = settings.buffer_tokens or max(1, max_response_tokens // 4)
    excess = (lengths - (max_response_tokens - buffer)).float() / buffer
    share = excess.clamp(0.0, 1.0)
    return -settings.penalty * share if settings.enabled else 0.0 * share
