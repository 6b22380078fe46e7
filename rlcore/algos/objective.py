"""The objectives of policy, critic and supervised training on a micro-batch, their statistics, and the schedules of
the learning rate, the KL coefficient and the entropy bonus."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeVar, assert_never

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlcore.algos.aggregation import Denominator, Floats, Mask, aggregate, masked, masked_sum, segment_sum
from rlcore.algos.loss_call import bind_policy_loss, check_results, loss_problem
from rlcore.algos.losses import kl_estimate, off_policy_mask, top_k_forward_kl, value_loss
from rlcore.config.algo import AlgoConfig, KlConfig, OptimConfig
from rlcore.errors import NonFiniteError
from rlcore.types import PackedBatch, TrainBatch

# typing.Self would read better, but beartype cannot check it on a single method
S = TypeVar("S", bound="Statistics")


@dataclass(frozen=True, slots=True)
class Statistics:
    """Float64 scalars without gradient, summed over micro-batches, mini-batches and ranks before any division."""

    num_tokens: Float[Tensor, ""]

    def per_token(self, sums: Mapping[str, Float[Tensor, ""]]) -> dict[str, float]:
        """Return each entry of `sums` divided by `num_tokens`, or {} if no token has a loss."""
        num_tokens = float(self.num_tokens)
        return {name: float(value) / num_tokens for name, value in sums.items()} if num_tokens else {}

    def __add__(self: S, other: S) -> S:
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def stack(self) -> Float[Tensor, "F"]:
        """Return all fields as one float64 tensor, which a single copy moves to the CPU."""
        return torch.stack([getattr(self, f.name) for f in fields(self)])

    @classmethod
    def unstack(cls: type[S], stacked: Float[Tensor, "F"]) -> S:
        """Rebuild the statistics from the result of `stack`."""
        return cls(*stacked.unbind())


@dataclass(frozen=True, slots=True)
class PolicyStatistics(Statistics):
    """The statistics of a policy update. `pg_loss`, `entropy` and `kl_loss` are shares of the mini-batch's aggregated
    values (see `aggregate`). Other fields are sums over response tokens. `ppo_kl`: old minus new log-probability.
    `ref_kl`: the KL estimate in the loss. `num_clipped`, `num_clipped_lower`: tokens on the clipped and the dual-clip
    branch."""

    pg_loss: Float[Tensor, ""]
    entropy: Float[Tensor, ""]
    kl_loss: Float[Tensor, ""]
    ppo_kl: Float[Tensor, ""]
    ref_kl: Float[Tensor, ""]
    entropy_sum: Float[Tensor, ""]
    num_clipped: Float[Tensor, ""]
    num_clipped_lower: Float[Tensor, ""]
    teacher_kl: Float[Tensor, ""]

    def metrics(self, num_updates: int = 1) -> dict[str, float]:
        """Return the `actor/*` metrics, averaged over `num_updates` mini-batches or over their response tokens.
        Synchronizes with the device."""
        return {
            "actor/pg_loss": float(self.pg_loss) / num_updates,
            "actor/entropy": float(self.entropy) / num_updates,
            "actor/kl_loss": float(self.kl_loss) / num_updates,
            **self.per_token(
                {
                    "actor/ppo_kl": self.ppo_kl,
                    "actor/pg_clipfrac": self.num_clipped,
                    "actor/pg_clipfrac_lower": self.num_clipped_lower,
                }
            ),
        }

    def mean(self, name: Literal["ref_kl", "teacher_kl", "entropy_sum"]) -> float:
        """Return the mean of a field per response token, in nats, or 0 if no token has a loss."""
        return self.per_token({name: getattr(self, name)}).get(name, 0.0)


@dataclass(frozen=True, slots=True)
class SupervisedStatistics(Statistics):
    """Sums over target tokens. `loss`: the negative log-likelihood in nats. `num_correct`: the number of targets that
    are the model's likeliest token."""

    loss: Float[Tensor, ""]
    num_correct: Float[Tensor, ""]

    def means(self) -> dict[str, float]:
        """Return the mean `loss` and the `accuracy` over target tokens, or {} if there are none. Synchronizes with the
        device."""
        return self.per_token({"loss": self.loss, "accuracy": self.num_correct})


@dataclass(frozen=True, slots=True)
class PreferenceStatistics(SupervisedStatistics):
    """Sums over preference pairs. `num_correct`: the number of pairs in which the chosen response has a higher DPO
    reward than the rejected response. `chosen_logprob`, `rejected_logprob`: the log-probabilities of whole
    responses."""

    num_pairs: Float[Tensor, ""]
    chosen_reward: Float[Tensor, ""]
    rejected_reward: Float[Tensor, ""]
    chosen_logprob: Float[Tensor, ""]
    rejected_logprob: Float[Tensor, ""]

    def means(self) -> dict[str, float]:
        """Return the mean loss, accuracy, reward margin, rewards and log-probabilities of the preference pairs, or {}
        if there is no pair. Synchronizes with the device."""
        found = {f.name: float(getattr(self, f.name)) for f in fields(self)}
        num_pairs = found.pop("num_pairs")
        del found["num_tokens"]
        found["accuracy"] = found.pop("num_correct")
        found["margin"] = found["chosen_reward"] - found["rejected_reward"]
        return {name: value / num_pairs for name, value in found.items()} if num_pairs else {}


@dataclass(frozen=True, slots=True)
class ValueStatistics(Statistics):
    """The statistics of a critic update. `vf_loss`: the micro-batch's share of the mini-batch's loss. `vpred`: the
    critic's values, summed over response tokens."""

    vf_loss: Float[Tensor, ""]
    vpred: Float[Tensor, ""]
    num_clipped: Float[Tensor, ""]

    def metrics(self, num_updates: int = 1) -> dict[str, float]:
        """Return the `critic/*` metrics, averaged over `num_updates` mini-batches or over their response tokens.
        Synchronizes with the device."""
        return {
            "critic/vf_loss": float(self.vf_loss) / num_updates,
            **self.per_token({"critic/vf_clipfrac": self.num_clipped, "critic/vpred_mean": self.vpred}),
        }


def policy_objective(
    policy_logprobs: Floats,
    entropy: Floats,
    batch: TrainBatch,
    *,
    settings: AlgoConfig,
    denominator: Denominator,
    kl_coef: float,
    entropy_added: float = 0.0,
    candidate_logprobs: Float[Tensor, "T k"] | None = None,
) -> tuple[Float[Tensor, ""], PolicyStatistics]:
    """Return a micro-batch's share of the policy loss, which is differentiable, and the statistics of the micro-batch.

        J = agg(w l) + kl_coef agg(kl) [kl.where = loss] - (entropy_coef + entropy_added) agg(H)
            + teacher.coef agg(D) [teacher.top_k]

    `l`: the policy loss of the settings, or 0 where `off_policy_mask` is True. `w`: the importance weights. `H`: the
    entropy, which needs a gradient only if its coefficient is not 0. `D`: the result of `top_k_forward_kl`.
    `candidate_logprobs`: the policy's log-probabilities of the teacher's likeliest tokens, for `D`. If the batch has no
    `old_logprobs`, `policy_logprobs` replace them, without gradient.
    """
    packed, mask = batch.packed, batch.packed.loss_mask
    sequence_ids, num_sequences = packed.sequence_ids(), packed.num_sequences
    old_logprobs = policy_logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs

    def share(values: Floats) -> Float[Tensor, ""]:
        return aggregate(
            values, mask, sequence_ids, mode=settings.aggregation, denominator=denominator, num_sequences=num_sequences
        )

    given = {
        "behavior_logprobs": packed.behavior_logprobs,
        "entropy": entropy.detach(),
        "group_ids": packed.group_ids,
        "covariance_rank": batch.covariance_rank,
    }
    function = check_results(bind_policy_loss(settings, given), "algo.policy_loss", settings.policy_loss, loss_problem)
    policy_loss = function(policy_logprobs, old_logprobs, batch.advantages, mask, sequence_ids, num_sequences)
    token_loss = policy_loss.loss * batch.importance_weights
    if settings.off_policy_mask is not None:
        rows = (packed.behavior_logprobs, batch.advantages, mask, sequence_ids, num_sequences)
        is_left = off_policy_mask(policy_logprobs, *rows, delta=settings.off_policy_mask)
        token_loss = torch.where(is_left, torch.zeros_like(token_loss), token_loss)
    pg_loss = share(token_loss)
    loss = pg_loss
    entropy_share = share(entropy)
    entropy_coef = settings.entropy_coef + entropy_added
    if entropy_coef != 0:
        loss = loss - entropy_coef * entropy_share
    kl = torch.zeros_like(policy_logprobs)
    if settings.kl.where == "loss":
        assert batch.ref_logprobs is not None, "a KL in the loss needs the reference's log-probabilities"
        kl = kl_estimate(policy_logprobs, batch.ref_logprobs, estimator=settings.kl.estimator_in_use)
        loss = loss + kl_coef * share(kl)
    teacher_kl = torch.zeros_like(policy_logprobs)
    if candidate_logprobs is not None:
        assert settings.teacher is not None, "candidates are the tokens of a teacher"
        assert batch.teacher_top_logprobs is not None, "the divergence needs the teacher's log-probabilities"
        teacher_kl = top_k_forward_kl(batch.teacher_top_logprobs, candidate_logprobs)
        loss = loss + settings.teacher.coef * share(teacher_kl)
    statistics = PolicyStatistics(
        pg_loss=pg_loss.detach().double(),
        entropy=entropy_share.detach().double(),
        kl_loss=share(kl.detach()).double(),
        ppo_kl=masked_sum(-policy_loss.log_ratio.detach().double(), mask),
        ref_kl=masked_sum(kl.detach().double(), mask),
        entropy_sum=masked_sum(entropy.detach().double(), mask),
        num_clipped=(policy_loss.clipped & mask).sum().double(),
        num_clipped_lower=(policy_loss.clipped_lower & mask).sum().double(),
        teacher_kl=masked_sum(teacher_kl.detach().double(), mask),
        num_tokens=mask.sum().double(),
    )
    return loss, statistics


def value_objective(
    values: Floats, batch: TrainBatch, *, settings: AlgoConfig, denominator: Denominator
) -> tuple[Float[Tensor, ""], ValueStatistics]:
    """Return a micro-batch's share of the critic loss, and the statistics of the micro-batch. The critic loss is the
    mean of `value_loss` over response tokens.
    """
    assert batch.old_values is not None, "the critic's update needs its values before it"
    assert batch.returns is not None, "the critic's update needs returns"
    mask, sequence_ids, num_sequences = batch.packed.loss_mask, batch.packed.sequence_ids(), batch.packed.num_sequences
    token_loss, clipped = value_loss(values, batch.old_values, batch.returns, mask, clip=settings.value_clip)
    loss = aggregate(
        token_loss, mask, sequence_ids, mode="token-mean", denominator=denominator, num_sequences=num_sequences
    )
    statistics = ValueStatistics(
        vf_loss=loss.detach().double(),
        vpred=masked_sum(values.detach().double(), mask),
        num_clipped=clipped.sum().double(),
        num_tokens=mask.sum().double(),
    )
    return loss, statistics


def explained_variance(values: Floats, returns: Floats, mask: Mask) -> Float[Tensor, ""]:
    """Return `1 - Var(R - V) / (Var(R) + 1e-5)` over response tokens, with ddof = 1 (veRL's formula). 1 is perfect, 0
    is no better than a constant."""
    count = mask.sum()

    def variance(x: Floats) -> Float[Tensor, ""]:
        wide = masked(x.double(), mask)
        return masked((wide - wide.sum() / count.clamp(min=1)).square(), mask).sum() / (count - 1).clamp(min=1)

    return (1 - variance(returns - values) / (variance(returns) + 1e-5)).to(values.dtype)


def supervised_objective(
    logprobs: Floats, is_top: Floats, mask: Mask, *, num_tokens: int
) -> tuple[Float[Tensor, ""], SupervisedStatistics]:
    """Return a micro-batch's share of the loss, and the statistics of the micro-batch. The share is `-1 / num_tokens
    sum_t logprob_t` over the tokens t where the mask is True. `num_tokens` is the number of target tokens in the whole
    batch on all ranks.
    """
    nll = -masked_sum(logprobs, mask)
    with torch.no_grad():
        counts = (mask.sum(dtype=torch.float64), nll.double(), masked(is_top, mask).sum(dtype=torch.float64))
    return nll / num_tokens, SupervisedStatistics(*counts)


def preference_objective(
    logprobs: Floats, batch: PackedBatch, *, beta: float, num_pairs: int
) -> tuple[Float[Tensor, ""], PreferenceStatistics]:
    """Return a micro-batch's share of the DPO loss (Rafailov et al. 2023, arXiv:2305.18290), and the statistics of the
    micro-batch.

        -1 / num_pairs sum_n log sigmoid(r_n(chosen) - r_n(rejected)),   r = beta sum_t (logprob_t - reference_t)

    `batch`: pairs packed by `pack_demonstrations`, with `reference_t` in `behavior_logprobs`. `num_pairs`: the number
    of pairs in the whole batch on all ranks. Pairs without targets do not count.
    """
    mask, responses = batch.loss_mask, (batch.position_ids == 0).cumsum(0) - 1

    def by_pair(values: Floats) -> Float[Tensor, "N 2"]:
        return segment_sum(masked(values, mask), responses, 2 * batch.num_sequences).view(-1, 2)

    rewards = beta * by_pair(logprobs - batch.behavior_logprobs)
    margins = rewards[:, 0] - rewards[:, 1]
    is_pair = by_pair(mask.to(logprobs.dtype))[:, 0] > 0
    losses = masked(-logsigmoid(margins), is_pair)
    with torch.no_grad():
        per_pair = torch.cat([rewards, by_pair(logprobs)], dim=1).sum(dim=0, dtype=torch.float64)
        counts = ((margins > 0) & is_pair).sum().double()
        statistics = PreferenceStatistics(
            mask.sum().double(), losses.sum(dtype=torch.float64), counts, is_pair.sum().double(), *per_pair
        )
    return losses.sum(dtype=torch.float64).to(losses.dtype) / num_pairs, statistics


# The controller moves by at most this share over one horizon (Ziegler et al. 2019)
MAX_RELATIVE_ERROR = 0.2


def lr_at(step: int, *, optim: OptimConfig, total_steps: int) -> float:
    """Return the learning rate of the training step that follows `step` finished steps (0, 1, ...).

        step < W   lr (step + 1) / W
        constant   lr
        linear     lr (m + (1 - m) (1 - x))
        cosine     lr (m + (1 - m) (1 + cos(pi x)) / 2)       m = min_lr_ratio

    W is the number of warm-up steps. It is `warmup_steps`, or `warmup_ratio` times S if `warmup_steps` is 0. S is
    `total_steps`. `x = (step - W) / (S - W)` is clamped to [0, 1]. Source of cosine: Loshchilov and Hutter 2017,
    arXiv:1608.03983, without restarts.
    """
    # 0.29 of 100 steps is 28.999999999999996 as a product
    warmup = optim.warmup_steps or int(optim.warmup_ratio * total_steps + 1e-9)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    progress = (step - warmup) / (total_steps - warmup) if step < total_steps else 1.0
    match optim.schedule:
        case "constant":
            share = 1.0
        case "linear":
            share = 1.0 - progress
        case "cosine":
            share = (1.0 + math.cos(math.pi * progress)) / 2
        case _:
            assert_never(optim.schedule)
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * share)


def next_entropy_bonus(added: float, observed_entropy: float, *, settings: AlgoConfig) -> float:
    """Return the new value of `added`, the addend to `algo.entropy_coef`, after a step with the mean entropy
    `observed_entropy` in nats per token. The coefficient `c = entropy_coef + added` becomes:

        c + step            where the entropy is below the target
        max(0, c - step)    where the entropy is above the target

    Source: the controller of Skywork-OR1 (He et al. 2025, arXiv:2505.22312), which however uses c = 0 above the target.
    """
    control = settings.entropy_control
    if control.target is None or observed_entropy == control.target:
        return added
    if observed_entropy < control.target:
        return added + control.step
    return max(-settings.entropy_coef, added - control.step)


def next_kl_coef(coef: float, observed_kl: float, num_sequences: int, *, settings: KlConfig) -> float:
    """Return the KL coefficient after a step of `num_sequences` responses with a mean KL of `observed_kl` nats per
    token.

        fixed      coef
        adaptive   coef (1 + clip(observed_kl / target - 1, -0.2, 0.2) num_sequences / horizon), not below 0

    Source: Ziegler et al. 2019, arXiv:1909.08593. Raises NonFiniteError if the KL of an adaptive coefficient is not
    finite."""
    if not settings.adaptive:
        return coef
    if not math.isfinite(observed_kl):
        raise NonFiniteError(f"algo.kl: the observed KL is {observed_kl}; the coefficient cannot follow it")
    error = max(-MAX_RELATIVE_ERROR, min(MAX_RELATIVE_ERROR, observed_kl / settings.target - 1))
    return max(0.0, coef * (1 + error * num_sequences / settings.horizon))
