"""From scores to advantages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from rlcore.algos.advantages import (
    SequenceAdvantage,
    bind_advantage,
    comparable,
    gae,
    group_advantages,
    reinforce_pp,
    spread,
    token_rewards,
    whiten,
)
from rlcore.algos.aggregation import masked_sum, segment_sum, token_counts
from rlcore.algos.kl import kl_estimate
from rlcore.algos.losses import importance_weights
from rlcore.config import AlgoConfig
from rlcore.types import PackedBatch, TrainBatch


@dataclass(frozen=True, slots=True)
class Passes:
    """Results of the forward passes before an update, Float[T] each; None where the algorithm does not need it."""

    old_logprobs: Float[Tensor, "T"] | None = None
    ref_logprobs: Float[Tensor, "T"] | None = None
    values: Float[Tensor, "T"] | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """`batch` is what updates use. `rewards` Float[N]: scores less the KL in the reward. `returns` Float[T]: for
    reporting (the advantages, for methods without a critic, as the field has it). `kl_in_reward`: mean per answer
    token, None where there is none."""

    batch: TrainBatch
    rewards: Float[Tensor, "N"]
    returns: Float[Tensor, "T"]
    kl_in_reward: float | None


def estimate(
    packed: PackedBatch,
    passes: Passes,
    greedy_scores: Sequence[float] | None,
    *,
    algo: AlgoConfig,
    kl_coef: float,
) -> Estimate:
    """Advantages and returns by `algo.advantage`.

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
    token_level = token_rewards(packed.scores, packed.cu_seqlens, mask, kl, kl_coef)
    rewards = segment_sum(token_level, sequence_ids, packed.num_sequences)
    if algo.advantage == "gae":
        assert values is not None, "GAE needs a critic's values"
        raw, returns = gae(token_level, values, mask, sequence_ids, gamma=algo.gamma, lam=algo.lam)
        advantages = whiten(raw, mask)
    elif algo.advantage == "reinforce_pp":
        advantages, returns = reinforce_pp(token_level, mask, sequence_ids, gamma=algo.gamma)
    else:
        sequence_level = _sequence_advantages(packed, rewards, greedy_scores, algo)
        advantages = returns = spread(sequence_level, mask, sequence_ids)
    weights = mask.float()
    if algo.importance.mode != "off":
        assert old_logprobs is not None, "an importance weight is a ratio to the old policy"
        weights = importance_weights(old_logprobs, packed.behavior_logprobs, mask, settings=algo.importance)
    batch = TrainBatch(
        packed=packed,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs if algo.kl.where == "loss" else None,
        old_values=values,
        advantages=advantages,
        returns=None if values is None else returns,
        importance_weights=weights,
    )
    return Estimate(batch, rewards, returns, kl_in_reward)


def _sequence_advantages(
    packed: PackedBatch,
    rewards: Float[Tensor, "N"],
    greedy_scores: Sequence[float] | None,
    algo: AlgoConfig,
) -> Float[Tensor, "N"]:
    """An advantage for each answer; 0 without a score, and where no score is there to compare its own with."""
    greedy = None if greedy_scores is None else torch.tensor(greedy_scores)
    if greedy is not None:
        chosen = packed.score_mask & greedy.isfinite()
    else:
        chosen = comparable(packed.score_mask, packed.group_ids)
    lengths = token_counts(packed.loss_mask, packed.sequence_ids(), packed.num_sequences)
    advantages = torch.zeros_like(rewards)
    if algo.advantage_function is not None:
        if chosen.any():
            function = bind_advantage(algo, lengths=lengths[chosen])
            advantages[chosen] = function(rewards[chosen], packed.group_ids[chosen])
        return advantages
    advantages[chosen] = group_advantages(
        rewards[chosen],
        packed.group_ids[chosen],
        method=cast(SequenceAdvantage, algo.advantage),
        lengths=lengths[chosen],
        greedy_scores=None if greedy is None else greedy[chosen],
    )
    return advantages
