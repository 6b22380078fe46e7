"""The advantages and returns of a training step, and its optimizer steps. The critic is updated before the policy."""

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar, cast

import numpy as np
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
from rlcore.algos.aggregation import (
    Denominator,
    clipped_by_covariance,
    masked,
    masked_sum,
    rank_share,
    segment_sum,
    token_covariance,
)
from rlcore.algos.loss_call import advantage_problem, bind_advantage, check_results, has_argument
from rlcore.algos.losses import importance_weights, kl_estimate, rejection_mask
from rlcore.algos.objective import PolicyStatistics, Statistics, ValueStatistics, lr_at
from rlcore.batching.balance import Assignment, mini_batches
from rlcore.batching.pack import scatter_tokens, select_train, token_indices
from rlcore.checkpoint.catalog import LoopState
from rlcore.config import AlgoConfig, RunConfig
from rlcore.errors import NonFiniteError
from rlcore.trainer import PhaseClock
from rlcore.types import PackedBatch, Score, TrainBatch
from rlcore.workers.group import WorkerGroup
from rlcore.workers.trained_model import MiniBatch, ModelUpdate, ModelUpdates
from rlcore.workers.worker import Worker

S = TypeVar("S", bound=Statistics)
Parts: TypeAlias = tuple[Float[Tensor, "N K"], Float[Tensor, "K"]]
"""The K parts of each score, as listed in `reward.weights`, and the weights of these parts."""


@dataclass(frozen=True, slots=True)
class ForwardResults:
    """The per-token results of the forward passes before an update. A result is None if the algorithm does not need
    it."""

    old_logprobs: Float[Tensor, "T"] | None = None
    ref_logprobs: Float[Tensor, "T"] | None = None
    values: Float[Tensor, "T"] | None = None
    entropy: Float[Tensor, "T"] | None = None
    teacher_logprobs: Float[Tensor, "T"] | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated advantages and returns. `batch`: the input of the updates. `kl_in_reward`: the mean KL divergence
    from the reference per response token, without its coefficient. `teacher_kl`: the mean KL divergence from the
    teacher per response token. `masked_share`: the share of response tokens that `algo.rejection` and
    `algo.mask_truncated` exclude from the update, or None if both are off."""

    batch: TrainBatch
    rewards: Float[Tensor, "N"]  # the scores minus the KL penalty in the reward
    returns: Float[Tensor, "T"]  # for group methods, the advantages
    kl_in_reward: float | None
    masked_share: float | None
    response_mask: Bool[Tensor, "T"]  # the loss mask before this exclusion
    teacher_kl: float | None = None


def score_parts(scores: Sequence[Score], weights: Mapping[str, float]) -> Parts:
    """Return the parts that `weights` names, and their weights. A missing part is 0. If `weights` is empty, the total
    score is the only part."""
    if not weights:
        return torch.tensor([[score.total] for score in scores]), torch.ones(1)
    rows = [[score.parts.get(name, 0.0) for name in weights] for score in scores]
    return torch.tensor(rows), torch.tensor(list(weights.values()))


def estimate(
    packed: PackedBatch,
    forward: ForwardResults,
    greedy_scores: Sequence[float] | None,
    *,
    algo: AlgoConfig,
    kl_coef: float,
    parts: Parts,
    is_truncated: Bool[Tensor, "N"],
    turn_rewards: Float[Tensor, "T"] | None = None,
) -> Estimate:
    """Compute advantages and returns with the method `algo.advantage`. Responses without a score are excluded.

    A teacher gives each token the advantage `coef (log p_teacher - log p_old)` (Agarwal et al. 2024, arXiv:2306.13649).
    With `algo.teacher.top_k`, the teacher is part of the policy loss instead. `turn_rewards`: each turn's reward, at
    the turn's last token. If None, the whole score is at the response's last token."""
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
    is_truncated: Bool[Tensor, "N"],
    algo: AlgoConfig,
) -> Bool[Tensor, "T"]:
    mask, sequence_ids = packed.loss_mask, packed.sequence_ids()
    if algo.rejection.level != "off":
        assert old_logprobs is not None, "a rejection measures the distance to the old policy"
        rows = (packed.loss_mask, sequence_ids, packed.num_sequences)
        mask = mask & ~rejection_mask(old_logprobs, packed.behavior_logprobs, *rows, settings=algo.rejection)
    if algo.mask_truncated:
        mask = mask & ~is_truncated[sequence_ids]
    return mask


def _sequence_advantages(
    packed: PackedBatch,
    rewards: Float[Tensor, "N"],
    greedy_scores: Sequence[float] | None,
    parts: Parts,
    algo: AlgoConfig,
) -> Float[Tensor, "N"]:
    """Return one advantage per response. It is 0 if the response has no score, or if none of the responses to compare
    it with has a score."""
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
        function = bind_advantage(algo, lengths=lengths, parts=parts[0][chosen], part_weights=parts[1])
        function = check_results(function, "algo.advantage", algo.advantage, advantage_problem)
        advantages[chosen] = function(rewards[chosen], group_ids).to(advantages.dtype)
    return advantages


@dataclass(frozen=True, slots=True)
class OptimizerSteps(Generic[S]):
    """The results of one model's optimizer steps on one batch: summed statistics, gradient norms and learning rate."""

    stats: S  # summed over steps and ranks
    num_steps: int
    grad_norm: float  # the mean over the steps
    largest_grad_norm: float
    lr: float


@dataclass(frozen=True, slots=True)
class Update:
    """The result of the updates in one training step. `policy` and `critic` are None if no optimizer step was taken.
    `share_skipped`: the share of the policy's optimizer steps that were skipped."""

    policy: OptimizerSteps[PolicyStatistics] | None = None
    critic: OptimizerSteps[ValueStatistics] | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    share_skipped: float = 0.0
    logprobs_before: Float[Tensor, "T"] | None = None  # None if they were not computed
    failure: NonFiniteError | None = None

    def metrics(self, algo: AlgoConfig) -> dict[str, float]:
        """Return the `actor/*` and `critic/*` metrics of the optimizer steps."""
        metrics: dict[str, float] = {}
        if (critic := self.critic) is not None:
            metrics |= critic.stats.metrics(critic.num_steps)
            metrics |= {"critic/grad_norm": critic.grad_norm, "critic/lr": critic.lr}
        if (policy := self.policy) is None:
            return metrics
        metrics |= policy.stats.metrics(policy.num_steps)
        if algo.kl.where == "loss":
            metrics["actor/ref_kl"] = policy.stats.mean("ref_kl")
        else:
            metrics.pop("actor/kl_loss")
        if algo.entropy_control.target is not None:
            metrics["actor/entropy_coef"] = self.entropy_coef
        if algo.teacher is not None and algo.teacher.top_k:
            metrics["actor/teacher_kl"] = policy.stats.mean("teacher_kl")
        if algo.aggregation != "token-mean":
            metrics["actor/token_entropy"] = policy.stats.mean("entropy_sum")
        return metrics | {"actor/grad_norm": policy.grad_norm, "actor/lr": policy.lr, "actor/kl_coef": self.kl_coef}

    def observed_kl(self, algo: AlgoConfig, kl_in_reward: float | None) -> float | None:
        """Return the KL divergence from the reference in nats per token, or None if it was not measured. If
        `algo.kl.where` is not `loss`, the result is `kl_in_reward`."""
        if algo.kl.where == "loss":
            return None if self.policy is None else self.policy.stats.mean("ref_kl")
        return kl_in_reward


def num_optimizer_steps(config: RunConfig) -> int:
    """Return the number of optimizer steps of the policy for a batch in which every group has a score."""
    trainer = config.trainer
    return trainer.epochs_per_batch * -(-trainer.batch_size // trainer.mini_batch_size)


def needs_old_logprobs(config: RunConfig) -> bool:
    """Return whether the trainer's log-probabilities are computed in a separate forward pass before the update."""
    if config.trainer.old_logprobs != "auto":
        return config.trainer.old_logprobs == "recompute"
    algo = config.algo
    gives_advantage = algo.teacher is not None and not algo.teacher.top_k
    is_compared = algo.importance.mode != "off" or algo.rejection.level != "off" or gives_advantage
    return num_optimizer_steps(config) > 1 or is_compared or algo.kl.where == "reward" or _needs_selection(algo)


def _needs_selection(algo: AlgoConfig) -> bool:
    """Return whether the weight of a token in the loss depends on the other tokens of its mini-batch."""
    return algo.top_entropy < 1 or algo.clip_cov.share > 0 or has_argument(algo.policy_loss, "covariance_rank")


def apply_selection(
    config: RunConfig, batch: TrainBatch, entropy: Float[Tensor, "T"] | None, *, num_finished: int
) -> TrainBatch:
    """Return the batch with weight 0 for the tokens that `algo.top_entropy` and `algo.clip_cov` leave out, and with
    `covariance_rank`. Tokens are compared within their mini-batch. `entropy`: required for `algo.top_entropy`.
    `num_finished`: the number of finished steps, which seeds the random choice of `algo.clip_cov`. If no setting needs
    this selection, the batch is returned unchanged."""
    algo, packed = config.algo, batch.packed
    if not _needs_selection(algo):
        return batch
    assert batch.old_logprobs is not None, "covariances need the old log-probabilities"
    weights, ranks = batch.importance_weights.clone(), torch.ones(packed.num_tokens, dtype=torch.float64)
    seed = int(np.random.SeedSequence((config.seed, num_finished)).generate_state(1)[0])
    draws = torch.rand(packed.num_tokens, generator=torch.Generator().manual_seed(seed))
    for sequences in mini_batches(packed.group_ids, config.trainer.mini_batch_size):
        tokens = token_indices(packed.cu_seqlens, sequences)
        mask = packed.loss_mask[tokens]
        covariance = token_covariance(batch.old_logprobs[tokens], batch.advantages[tokens], mask)
        ranks[tokens] = rank_share(covariance, mask)
        is_out = clipped_by_covariance(covariance, draws[tokens], mask, settings=algo.clip_cov)
        if algo.top_entropy < 1:
            assert entropy is not None, "algo.top_entropy needs the pass of old log-probabilities"
            is_out = is_out | (rank_share(entropy[tokens], mask) >= algo.top_entropy)
        weights[tokens] = masked(weights[tokens], ~is_out)
    return replace(batch, importance_weights=weights, covariance_rank=ranks)


@dataclass(frozen=True, slots=True)
class SharedBatch:
    """A batch that is split over the ranks."""

    batch: TrainBatch
    assignment: Assignment
    parts: Sequence[Any]
    """The `TrainBatch` of each rank, or a handle to the `TrainBatch` if it has been sent to the rank."""
    mini_batches: Sequence[MiniBatch]
    """The mini-batches of all epochs. Mini-batches without a loss token are left out."""

    @classmethod
    def split(cls, config: RunConfig, batch: TrainBatch, assignment: Assignment) -> "SharedBatch":
        """Split a batch over the ranks and into mini-batches, as `assignment` prescribes."""
        lengths = batch.packed.loss_lengths()
        mini_batches: list[MiniBatch] = []
        start = 0
        for shares in assignment.mini_batches:
            # The counts cover the mini-batch on all ranks. A response without a loss token does not count.
            tokens = lengths[list(itertools.chain.from_iterable(shares.sequences))]
            of_rank = range(start, start + len(shares.sequences[0]))  # equally many on each rank
            start = of_rank.stop
            if tokens.any():
                limit = config.rollout.max_response_tokens
                denominator = Denominator(int(tokens.sum()), int((tokens > 0).sum()), limit)
                mini_batches.append(MiniBatch(of_rank, shares.num_micro, denominator))
        parts = [select_train(batch, mine) for mine in assignment.whole.sequences]
        return cls(batch, assignment, parts, mini_batches * config.trainer.epochs_per_batch)

    @property
    def sequences(self) -> Sequence[Sequence[int]]:
        """The sequences of each rank, as indices in the batch."""
        return self.assignment.whole.sequences


def update_models(
    config: RunConfig,
    group: WorkerGroup,
    shared: SharedBatch,
    state: LoopState,
    clock: PhaseClock,
    *,
    is_skipped: bool = False,
) -> Update:
    """Run all optimizer steps on a batch, but stop at the first non-finite step. Run none if `is_skipped` is true."""
    total_steps, added = config.trainer.total_steps, state.entropy_added
    num_steps = num_optimizer_steps(config)
    before = None if config.trainer.old_logprobs == "behavior" else shared.batch.old_logprobs
    skipped = Update(share_skipped=1.0, logprobs_before=before)
    if is_skipped:
        return skipped
    critic: OptimizerSteps[ValueStatistics] | None = None
    if config.critic is not None:
        lr = lr_at(state.step, optim=config.critic.optim, total_steps=total_steps)
        with clock.phase("update_critic"):
            critic_steps, failure = _optimizer_steps(group, Worker.update_critic, shared, lr)
        if failure is not None:
            return replace(skipped, failure=failure)
        critic = _sum_steps(critic_steps, lr) if critic_steps else None
        if state.step < config.critic.warmup_steps:
            return Update(critic=critic, logprobs_before=before)
    lr = lr_at(state.step, optim=config.optim, total_steps=total_steps)
    with clock.phase("update_actor"):
        policy_steps, failure = _optimizer_steps(group, Worker.update_policy, shared, lr, state.kl_coef, added)
    share_skipped = 1.0 - sum(by_rank[0].applied for by_rank in policy_steps) / num_steps
    if failure is not None:
        return replace(skipped, share_skipped=share_skipped, failure=failure)
    if not policy_steps:
        return replace(skipped, critic=critic)
    if num_steps == 1 and before is None:
        # With several updates, only the forward pass of the first one uses the initial weights.
        logprobs = [update.logprobs for update in policy_steps[0] if update.logprobs is not None]
        before = scatter_tokens(logprobs, shared.batch.packed.cu_seqlens, shared.sequences)
    return Update(
        policy=_sum_steps(policy_steps, lr),
        critic=critic,
        kl_coef=state.kl_coef,
        entropy_coef=config.algo.entropy_coef + added,
        share_skipped=share_skipped,
        logprobs_before=before,
    )


def _sum_steps(steps: Sequence[Sequence[ModelUpdate[S]]], lr: float) -> OptimizerSteps[S]:
    stats = functools.reduce(operator.add, (update.stats for by_rank in steps for update in by_rank))
    norms = [by_rank[0].grad_norm for by_rank in steps]
    return OptimizerSteps(stats, len(steps), sum(norms) / len(norms), max(norms), lr)


def _optimizer_steps(
    group: WorkerGroup, verb: Callable[..., ModelUpdates[S]], shared: SharedBatch, *more: float
) -> tuple[list[tuple[ModelUpdate[S], ...]], NonFiniteError | None]:
    """Return the results of each optimizer step on all ranks. Also return the error of a non-finite step, or None."""
    by_rank = group.begin(verb, [(part, shared.mini_batches, *more) for part in shared.parts]).result()
    return list(zip(*(each.steps for each in by_rank), strict=True)), by_rank[0].failure
