"""Naive twins: Python floats and double loops, written from the papers' equations, with gradients by hand.

Nothing here imports rlcore.algos. A loss comes with its derivative by the policy's log-probability (or the value).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

Flat = Sequence[float]
Positions = Sequence[Sequence[int]]  # for each sequence the flat positions of its answer tokens


def clamp(x: float, low: float, high: float) -> float:
    return low if x < low else high if x > high else x


def log_ratio(policy: float, old: float) -> float:
    return clamp(policy - old, -20.0, 20.0)


def inside(policy: float, old: float) -> float:
    """Return the derivative of the clamped log-ratio, which is 0 beyond a bound."""
    return 1.0 if abs(policy - old) <= 20.0 else 0.0


Token = tuple[float, float, bool, bool]


def surrogate(log_r: float, advantage: float, low: float, high: float, dual: float | None) -> Token:
    ratio = math.exp(log_r)
    slope = -advantage * ratio
    if ratio < 1 - low and advantage < 0:
        loss, slope, clipped = -advantage * (1 - low), 0.0, True
    elif ratio > 1 + high and advantage > 0:
        loss, slope, clipped = -advantage * (1 + high), 0.0, True
    else:
        loss, clipped = -advantage * ratio, False
    if dual is not None and advantage < 0 and ratio > dual:
        return -advantage * dual, 0.0, clipped, True
    return loss, slope, clipped, False


def by_token(token: Callable[..., Token]) -> Callable[..., dict[int, Token]]:
    """Return the twin of a loss whose tokens are independent of each other."""

    def twin(
        policy: Flat, old: Flat, advantages: Flat, answers: Positions, low: float, high: float, dual: float | None,
        **options: float,
    ) -> dict[int, Token]:  # fmt: skip
        clips = {"low": low, "high": high, "dual": dual}
        every = (t for positions in answers for t in positions)
        return {t: token(policy[t], old[t], advantages[t], **clips, **options) for t in every}

    return twin


@by_token
def ppo_clip(policy: float, old: float, advantage: float, low: float, high: float, dual: float | None) -> Token:
    loss, slope, *flags = surrogate(log_ratio(policy, old), advantage, low, high, dual)
    return loss, slope * inside(policy, old), *flags


@by_token
def cispo(policy: float, old: float, advantage: float, low: float, high: float, dual: float | None) -> Token:
    ratio = math.exp(log_ratio(policy, old))
    weight = clamp(ratio, 1 - low, 1 + high)
    return -weight * advantage * policy, -weight * advantage, weight != ratio, False


@by_token
def sapo(policy: float, old: float, advantage: float, tau_pos: float = 1.0, tau_neg: float = 1.05, **_: Any) -> Token:
    tau = tau_pos if advantage > 0 else tau_neg
    log_r = log_ratio(policy, old)
    z = tau * (math.exp(log_r) - 1)
    gate = 1 / (1 + math.exp(-z))
    away = math.exp(-z) / (1 + math.exp(-z)) if z < 700 else 0.0
    slope = -advantage * 4 * gate * away * math.exp(log_r)
    return -advantage * 4 / tau * gate, slope * inside(policy, old), False, False


@by_token
def gpg(policy: float, old: float, advantage: float, **_: Any) -> Token:
    return -advantage * policy, -advantage, False, False


@by_token
def dppo(policy: float, old: float, advantage: float, delta: float = 0.1, **_: Any) -> Token:
    ratio = math.exp(log_ratio(policy, old))
    away = (ratio > 1 and advantage > 0) or (ratio < 1 and advantage < 0)
    if away and abs(math.exp(policy) - math.exp(old)) > delta:
        return 0.0, 0.0, True, False
    return -advantage * ratio, -advantage * ratio * inside(policy, old), False, False


def gspo(
    policy: Flat, old: Flat, advantages: Flat, answers: Positions, low: float, high: float, dual: float | None
) -> dict[int, Token]:
    tokens = {}
    for positions in answers:
        total = 0.0
        for t in positions:
            total += log_ratio(policy[t], old[t])
        for t in positions:
            loss, slope, *flags = surrogate(total / len(positions), advantages[t], low, high, dual)
            tokens[t] = (loss, slope * inside(policy[t], old[t]), *flags)
    return tokens


def gmpo(
    policy: Flat, old: Flat, advantages: Flat, answers: Positions, low: float, high: float, dual: float | None,
    log_clip: float = 0.4,
) -> dict[int, Token]:  # fmt: skip
    tokens = {}
    for positions in answers:
        total, is_clipped = 0.0, {}
        for t in positions:
            log_r = log_ratio(policy[t], old[t])
            is_clipped[t] = log_r > log_clip if advantages[t] > 0 else log_r < -log_clip and advantages[t] < 0
            if advantages[t] != 0:
                total += math.copysign(log_clip, advantages[t]) if is_clipped[t] else log_r
        for t in positions:
            loss = -advantages[t] * math.exp(total / len(positions))
            slope = 0.0 if is_clipped[t] else loss
            tokens[t] = (loss, slope * inside(policy[t], old[t]), is_clipped[t], False)
    return tokens


def covariance(old: Flat, advantages: Flat, answers: Positions) -> dict[int, float]:
    tokens = [t for positions in answers for t in positions]
    logprob, advantage = mean([old[t] for t in tokens]), mean([advantages[t] for t in tokens])
    return {t: (old[t] - logprob) * (advantages[t] - advantage) for t in tokens}


def largest(values: dict[int, float], share: float) -> list[int]:
    """Return the tokens with the largest values: the given share of all tokens, and at least one token."""
    ordered = sorted(values, key=lambda t: -values[t])
    return [t for place, t in enumerate(ordered) if place / len(ordered) < share]


def kl_cov(
    policy: Flat, old: Flat, advantages: Flat, answers: Positions, low: float, high: float, dual: float | None,
    share: float = 0.0002, coef: float = 1.0,
) -> dict[int, Token]:  # fmt: skip
    penalized = largest(covariance(old, advantages, answers), share)
    tokens = {}
    for t in (t for positions in answers for t in positions):
        log_r = log_ratio(policy[t], old[t])
        loss = slope = -advantages[t] * math.exp(log_r)
        if t in penalized:
            loss += coef * abs(log_r)
            slope += coef * ((log_r > 0) - (log_r < 0))
        tokens[t] = (loss, slope * inside(policy[t], old[t]), t in penalized, False)
    return tokens


def value_loss(value: float, old: float, target: float, clip: float) -> tuple[float, float, bool]:
    near = clamp(value, old - clip, old + clip)
    if (near - target) ** 2 > (value - target) ** 2:
        return 0.5 * (near - target) ** 2, 0.0, True
    return 0.5 * (value - target) ** 2, value - target, False


def kl(policy: float, ref: float, estimator: str) -> tuple[float, float]:
    d, slope = log_ratio(policy, ref), inside(policy, ref)
    if estimator == "k1":
        return d, slope
    if estimator == "k2":
        return d * d / 2, d * slope
    k3 = math.exp(-d) - 1 + d
    return (k3, (1 - math.exp(-d)) * slope) if k3 <= 10.0 else (10.0, 0.0)


def token_weights(mode: str, answers: Positions, num_tokens: int, num_sequences: int, norm: int) -> dict[int, float]:
    """Return how much each token counts in the mini-batch loss."""
    weights = {}
    for positions in answers:
        for t in positions:
            if mode == "token-mean":
                weights[t] = 1 / num_tokens
            elif mode == "seq-mean-token-sum":
                weights[t] = 1 / num_sequences
            elif mode == "seq-mean-token-mean":
                weights[t] = 1 / len(positions) / num_sequences
            elif mode == "seq-mean-token-sum-norm":
                weights[t] = 1 / norm / num_sequences
            else:
                raise AssertionError(mode)
    return weights


def mean(values: Flat) -> float:
    return sum(values) / len(values)


def std(values: Flat) -> float:
    center = mean(values)
    return math.sqrt(sum((v - center) ** 2 for v in values) / (len(values) - 1))


def group_advantages(
    scores: Flat, groups: Sequence[int], method: str, lengths: Sequence[int], greedy: Flat
) -> list[float]:
    out = []
    for i, score in enumerate(scores):
        mates = [j for j in range(len(scores)) if groups[j] == groups[i]]
        alone = len(mates) == 1
        center = 0.0 if alone else mean([scores[j] for j in mates])
        if method == "grpo":
            out.append((score - center) / ((1.0 if alone else std([scores[j] for j in mates])) + 1e-6))
        elif method in ("dr_grpo", "reinforce_pp_baseline"):
            out.append(score - center)
        elif method == "rloo":
            out.append(score if alone else score - mean([scores[j] for j in mates if j != i]))
        elif method == "opo":
            weighted = sum(lengths[j] * scores[j] for j in mates) / sum(lengths[j] for j in mates)
            out.append(score if alone else score - weighted)
        elif method == "remax":
            out.append(score - greedy[i])
        else:
            raise AssertionError(method)
    if method != "reinforce_pp_baseline":
        return out
    # whitened over tokens, each with its answer's value
    tokens = [value for value, length in zip(out, lengths, strict=True) for _ in range(length)]
    center, spread = mean(tokens), sum((v - mean(tokens)) ** 2 for v in tokens) / (len(tokens) - 1)
    return [(value - center) / math.sqrt(spread + 1e-8) for value in out]


def pass_at_k(scores: Flat, groups: Sequence[int], k: int, threshold: float) -> list[float]:
    """Every set of k answers is one draw with reward 1 if one of them is right; an answer gets the mean standardized
    reward of the sets that it is in."""
    advantages = []
    for i, group in enumerate(groups):
        mates = [j for j, other in enumerate(groups) if other == group]
        draws = list(itertools.combinations(mates, min(k, len(mates))))
        rewards = [float(any(scores[j] >= threshold for j in draw)) for draw in draws]
        p = mean(rewards)
        deviation = math.sqrt(mean([(reward - p) ** 2 for reward in rewards]))
        mine = [reward for reward, draw in zip(rewards, draws, strict=True) if i in draw]
        advantages.append((mean(mine) - p) / deviation if deviation > 0 else 0.0)
    return advantages


def gdpo(parts: Sequence[Flat], weights: Flat, groups: Sequence[int]) -> list[float]:
    """`parts[k]`: the scores of part k."""
    ones = [1] * len(groups)
    each = [group_advantages(part, groups, "grpo", ones, part) for part in parts]
    summed = [sum(w * column[i] for w, column in zip(weights, each, strict=True)) for i in range(len(groups))]
    return list(whiten(dict(enumerate(summed))).values())


def whiten(values: dict[int, float]) -> dict[int, float]:
    numbers = list(values.values())
    center = mean(numbers)
    variance = sum((v - center) ** 2 for v in numbers) / (len(numbers) - 1)
    return {t: (v - center) / math.sqrt(variance + 1e-8) for t, v in values.items()}


def gae(
    rewards: Flat, values: Flat, answers: Positions, gamma: float, lam: float
) -> tuple[dict[int, float], dict[int, float]]:
    advantages, returns = {}, {}
    for positions in answers:
        next_value, next_advantage = 0.0, 0.0
        for t in reversed(positions):
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[t]
            advantages[t] = next_advantage
            returns[t] = next_advantage + values[t]
    return advantages, returns


def token_rewards(scores: Flat, answers: Positions, kls: Flat | None, coef: float) -> dict[int, float]:
    rewards = {}
    for n, positions in enumerate(answers):
        for t in positions:
            rewards[t] = (scores[n] if t == positions[-1] else 0.0) - (0.0 if kls is None else coef * kls[t])
    return rewards


def naive_weight(old: float, behavior: float, mode: str, cap: float) -> float:
    ratio = math.exp(max(-20.0, min(20.0, old - behavior)))
    if mode == "off":
        return 1.0
    if mode == "truncate":
        return min(ratio, cap)
    return ratio if 1 / cap <= ratio <= cap else 0.0
