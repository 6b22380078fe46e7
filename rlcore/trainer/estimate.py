"""The estimation of advantages and returns from scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlcore.algos.advantages import (
    SequenceAdvantage,
    broadcast_to_tokens,
    gae,
    group_advantages,
    has_scored_peer,
    reinforce_pp,
    token_rewards,
    whiten,
)
from rlcore.algos.aggregation import masked_sum, segment_sum
from rlcore.algos.loss_call import advantage_problem, bind_advantage, check_results
from rlcore.algos.losses import importance_weights, kl_estimate, rejection_mask
from rlcore.config import AlgoConfig
from rlcore.types import PackedBatch, Score, TrainBatch


@dataclass(frozen=True, slots=True)
class ForwardResults:
    """The results of the forward passes before an update. A result is None if the algorithm does not need it."""

    old_logprobs: Float[Tensor, "T"] | None = None
    ref_logprobs: Float[Tensor, "T"] | None = None
    values: Float[Tensor, "T"] | None = None
    entropy: Float[Tensor, "T"] | None = None
    teacher_logprobs: Float[Tensor, "T"] | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated advantages and returns, with the input of the updates as `batch`. `kl_in_reward` and `teacher_kl`:
    the mean KL divergence per response token from the reference and the teacher, without its coefficient.
    `masked_share`: the share of response tokens that `algo.rejection` and `algo.mask_truncated` exclude from the
    update, or None if both are off."""

    batch: TrainBatch
    rewards: Float[Tensor, "N"]  # the scores minus the KL penalty in the reward
    returns: Float[Tensor, "T"]  # for group methods, the advantages
    kl_in_reward: float | None
    masked_share: float | None
    response_mask: Bool[Tensor, "T"]  # the loss mask before this exclusion
    teacher_kl: float | None = None


@dataclass(frozen=True, slots=True)
class ScoreParts:
    """The K parts of each score that `reward.weights` names, with their weights."""

    values: Float[Tensor, "N K"]
    weights: Float[Tensor, "K"]

    @classmethod
    def from_scores(cls, scores: Sequence[Score], weights: Mapping[str, float]) -> "ScoreParts":
        """Return the parts in the order of `weights`, or the total as the only part. A missing part is 0."""
        if not weights:
            return cls(torch.tensor([[score.total] for score in scores]), torch.ones(1))
        rows = [[score.parts.get(name, 0.0) for name in weights] for score in scores]
        return cls(torch.tensor(rows), torch.tensor(list(weights.values())))


def estimate(
    packed: PackedBatch,
    forward: ForwardResults,
    greedy_scores: Sequence[float] | None,
    *,
    algo: AlgoConfig,
    kl_coef: float,
    parts: ScoreParts | None = None,
    is_truncated: Bool[Tensor, "N"] | None = None,
    turn_rewards: Float[Tensor, "T"] | None = None,
) -> Estimate:
    """Compute advantages and returns with the method `algo.advantage`. Responses without a score are excluded.

    A teacher gives each token the advantage `coef (log p_teacher - log p_old)` (Agarwal et al. 2024, arXiv:2306.13649),
    or none with `algo.teacher.top_k`. `turn_rewards`: if None, the whole score is at the last token."""
    old_logprobs, ref_logprobs, values = forward.old_logprobs, forward.ref_logprobs, forward.values
    mask, sequence_ids = packed.loss_mask, packed.sequence_ids()
    kl: Tensor | None = None
    kl_in_reward: float | None = None
    if algo.kl.where == "reward":
        assert old_logprobs is not None, "a KL in the reward needs the old log-probabilities"
        assert ref_logprobs is not None, "a KL in the reward needs the reference's log-probabilities"
        kl = kl_estimate(old_logprobs, ref_logprobs, estimator=algo.kl.estimator_in_use)
        if mask.any():
            kl_in_reward = (masked_sum(kl, mask) / mask.sum()).item()
    early = torch.zeros_like(packed.behavior_logprobs) if turn_rewards is None else turn_rewards
    late = packed.scores - segment_sum(early, sequence_ids, packed.num_sequences)
    token_level = early + token_rewards(late, packed.cu_seqlens, mask, kl, kl_coef)
    rewards = segment_sum(token_level, sequence_ids, packed.num_sequences)
    if algo.advantage == "gae":
        assert values is not None, "GAE needs a critic's values"
        raw, returns = gae(token_level, values, mask, sequence_ids, gamma=algo.gamma, lam=algo.lam)
        advantages = whiten(raw, mask)
    elif algo.advantage == "reinforce_pp":
        advantages, returns = reinforce_pp(token_level, mask, sequence_ids, gamma=algo.gamma)
    else:
        parts = parts or ScoreParts(rewards[:, None], torch.ones(1))
        sequence_level = _sequence_advantages(packed, rewards, greedy_scores, parts, algo)
        advantages = returns = broadcast_to_tokens(sequence_level, mask, sequence_ids)
    teacher_kl = None
    if algo.teacher is not None:
        if not algo.teacher.with_reward:
            advantages = torch.zeros_like(advantages)
        if not algo.teacher.top_k:
            assert old_logprobs is not None, "a teacher is compared with the old policy"
            assert forward.teacher_logprobs is not None, "distillation needs the teacher's log-probabilities"
            closer = torch.where(mask, forward.teacher_logprobs - old_logprobs, 0.0)
            advantages = advantages + algo.teacher.coef * closer
            teacher_kl = (-masked_sum(closer, mask) / mask.sum()).item() if mask.any() else None
    weights = mask.float()
    if algo.importance.mode != "off":
        assert old_logprobs is not None, "an importance weight is a ratio to the old policy"
        rows = (mask, sequence_ids, packed.num_sequences)
        weights = importance_weights(old_logprobs, packed.behavior_logprobs, *rows, settings=algo.importance)
    update_mask = _update_mask(packed, old_logprobs, is_truncated, algo)
    masked_share = None
    if update_mask is not mask and mask.any():
        masked_share = 1 - (update_mask.sum() / mask.sum()).item()
    batch = TrainBatch(
        packed=replace(packed, loss_mask=update_mask),
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs if algo.kl.where == "loss" else None,
        old_values=values,
        advantages=advantages,
        returns=None if values is None else returns,
        importance_weights=weights,
    )
    return Estimate(batch, rewards, returns, kl_in_reward, masked_share, mask, teacher_kl)


def _update_mask(
    packed: PackedBatch,
    old_logprobs: Float[Tensor, "T"] | None,
    is_truncated: Bool[Tensor, "N"] | None,
    algo: AlgoConfig,
) -> Bool[Tensor, "T"]:
    mask, sequence_ids = packed.loss_mask, packed.sequence_ids()
    if algo.rejection.level != "off":
        assert old_logprobs is not None, "a rejection measures the distance to the old policy"
        rows = (packed.loss_mask, sequence_ids, packed.num_sequences)
        mask = mask & ~rejection_mask(old_logprobs, packed.behavior_logprobs, *rows, settings=algo.rejection)
    if algo.mask_truncated:
        assert is_truncated is not None, "algo.mask_truncated needs is_truncated"
        mask = mask & ~is_truncated[sequence_ids]
    return mask


def _sequence_advantages(
    packed: PackedBatch,
    rewards: Float[Tensor, "N"],
    greedy_scores: Sequence[float] | None,
    parts: ScoreParts,
    algo: AlgoConfig,
) -> Float[Tensor, "N"]:
    """Return one advantage per response. It is 0 if the response has no score or no scored response to compare with."""
    greedy = None if greedy_scores is None else torch.tensor(greedy_scores)
    if greedy is not None:
        chosen = packed.score_mask & greedy.isfinite()
    else:
        chosen = has_scored_peer(packed.score_mask, packed.group_ids)
    lengths, group_ids = packed.loss_lengths()[chosen], packed.group_ids[chosen]
    advantages = torch.zeros_like(rewards)
    if algo.advantage_function is None:
        advantages[chosen] = group_advantages(
            rewards[chosen],
            group_ids,
            method=cast(SequenceAdvantage, algo.advantage),
            lengths=lengths,
            greedy_scores=None if greedy is None else greedy[chosen],
        )
    elif chosen.any():
        function = bind_advantage(algo, lengths=lengths, parts=parts.values[chosen], part_weights=parts.weights)
        function = check_results(function, "algo.advantage", algo.advantage, advantage_problem)
        advantages[chosen] = function(rewards[chosen], group_ids).to(advantages.dtype)
    return advantages
