"""From scores to advantages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlcore.algos.advantages import (
    SequenceAdvantage,
    bind_advantage,
    broadcast_to_tokens,
    gae,
    group_advantages,
    has_scored_peer,
    reinforce_pp,
    token_rewards,
    whiten,
)
from rlcore.algos.aggregation import masked_sum, segment_sum
from rlcore.algos.loss_call import advantage_problem, check_results
from rlcore.algos.losses import kl_estimate
from rlcore.algos.off_policy import importance_weights, rejection_mask
from rlcore.config import AlgoConfig
from rlcore.types import PackedBatch, Score, TrainBatch


@dataclass(frozen=True, slots=True)
class ForwardResults:
    """Results of the forward passes before an update, Float[T] each; None where the algorithm does not need it."""

    old_logprobs: Float[Tensor, "T"] | None = None
    ref_logprobs: Float[Tensor, "T"] | None = None
    values: Float[Tensor, "T"] | None = None
    entropy: Float[Tensor, "T"] | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """`batch` is what updates use. `rewards` Float[N]: scores less the KL in the reward. `returns` Float[T]: for
    reporting (the advantages, for methods without a critic, as the field has it). `kl_in_reward`: mean per answer
    token, None where there is none. `share_left_out`: answer tokens that `algo.rejection` and
    `algo.mask_truncated` leave out of the update; None where neither is on. `response_mask`: the loss mask with them."""

    batch: TrainBatch
    rewards: Float[Tensor, "N"]
    returns: Float[Tensor, "T"]
    kl_in_reward: float | None
    masked_share: float | None
    response_mask: Bool[Tensor, "T"]


@dataclass(frozen=True, slots=True)
class ScoreParts:
    """The parts of the scores that `reward.weights` names: `values` Float[N, K], `weights` Float[K]."""

    values: Float[Tensor, "N K"]
    weights: Float[Tensor, "K"]

    @classmethod
    def from_scores(cls, scores: Sequence[Score], weights: Mapping[str, float]) -> "ScoreParts":
        """The weighted parts, in their order (0 for an answer without a score, which nothing reads); without weights
        the total alone."""
        if not weights:
            return cls(torch.tensor([[score.total] for score in scores]), torch.ones(1))
        rows = [[score.parts.get(name, 0.0) for name in weights] for score in scores]
        return cls(torch.tensor(rows), torch.tensor(list(weights.values())))


def estimate(
    packed: PackedBatch,
    passes: ForwardResults,
    greedy_scores: Sequence[float] | None,
    *,
    algo: AlgoConfig,
    kl_coef: float,
    parts: ScoreParts | None = None,
    is_truncated: Bool[Tensor, "N"] | None = None,
    turn_rewards: Float[Tensor, "T"] | None = None,
) -> Estimate:
    """Advantages and returns by `algo.advantage`.

    `parts`: for advantages that ask for them; None: the rewards alone. `is_cut`: answers that ended at the limit,
    needed by `algo.mask_truncated`. `turn_rewards`: the shares of the scores that stand where their turns end; None:
    all of a score stands at the last token.

    `greedy_scores`: for each answer the score of the greedy answer to its prompt, needed by remax.
    An answer without a score (`packed.score_mask`) has no part in them: they are those of the batch without it.
    """
    old_logprobs, ref_logprobs, values = passes.old_logprobs, passes.ref_logprobs, passes.values
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
    weights = mask.float()
    if algo.importance.mode != "off":
        assert old_logprobs is not None, "an importance weight is a ratio to the old policy"
        rows = (mask, sequence_ids, packed.num_sequences)
        weights = importance_weights(old_logprobs, packed.behavior_logprobs, *rows, settings=algo.importance)
    kept = _update_mask(packed, old_logprobs, is_truncated, algo)
    share_left_out = None
    if kept is not mask and mask.any():
        share_left_out = 1 - (kept.sum() / mask.sum()).item()
    batch = TrainBatch(
        packed=replace(packed, loss_mask=kept),
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs if algo.kl.where == "loss" else None,
        old_values=values,
        advantages=advantages,
        returns=None if values is None else returns,
        importance_weights=weights,
    )
    return Estimate(batch, rewards, returns, kl_in_reward, share_left_out, mask)


def _update_mask(
    packed: PackedBatch, old_logprobs: Float[Tensor, "T"] | None, is_cut: Bool[Tensor, "N"] | None, algo: AlgoConfig
) -> Bool[Tensor, "T"]:
    """The mask of the update: without what is left out of it after it has counted in its group."""
    kept, sequence_ids = packed.loss_mask, packed.sequence_ids()
    if algo.rejection.level != "off":
        assert old_logprobs is not None, "a rejection measures the distance to the old policy"
        rows = (packed.loss_mask, sequence_ids, packed.num_sequences)
        kept = kept & ~rejection_mask(old_logprobs, packed.behavior_logprobs, *rows, settings=algo.rejection)
    if algo.mask_truncated:
        assert is_cut is not None, "a mask of truncated answers needs to know them"
        kept = kept & ~is_cut[sequence_ids]
    return kept


def _sequence_advantages(
    packed: PackedBatch,
    rewards: Float[Tensor, "N"],
    greedy_scores: Sequence[float] | None,
    parts: ScoreParts,
    algo: AlgoConfig,
) -> Float[Tensor, "N"]:
    """An advantage for each answer; 0 without a score, and where no score is there to compare its own with."""
    greedy = None if greedy_scores is None else torch.tensor(greedy_scores)
    if greedy is not None:
        chosen = packed.score_mask & greedy.isfinite()
    else:
        chosen = has_scored_peer(packed.score_mask, packed.group_ids)
    lengths = packed.loss_lengths()
    advantages = torch.zeros_like(rewards)
    if algo.advantage_function is not None:
        if chosen.any():
            function = bind_advantage(
                algo, lengths=lengths[chosen], parts=parts.values[chosen], part_weights=parts.weights
            )
            function = check_results(function, "algo.advantage", algo.advantage, advantage_problem)
            advantages[chosen] = function(rewards[chosen], packed.group_ids[chosen]).to(advantages.dtype)
        return advantages
    advantages[chosen] = group_advantages(
        rewards[chosen],
        packed.group_ids[chosen],
        method=cast(SequenceAdvantage, algo.advantage),
        lengths=lengths[chosen],
        greedy_scores=None if greedy is None else greedy[chosen],
    )
    return advantages
