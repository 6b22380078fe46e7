"""The whole objective of a micro-batch against a naive twin, its statistics, and their independence of the split."""

import functools
import operator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rlcore.algos.advantages import broadcast_to_tokens, gae, reinforce_pp, token_rewards, whiten
from rlcore.algos.aggregation import Denominator, aggregate, rank_share, token_covariance
from rlcore.algos.losses import importance_weights, off_policy_mask, rejection_mask, top_k_forward_kl
from rlcore.algos.objective import (
    PolicyStatistics,
    ValueStatistics,
    explained_variance,
    policy_objective,
    value_objective,
)
from rlcore.config.algo import (
    POLICY_LOSSES,
    Aggregation,
    AlgoConfig,
    ImportanceConfig,
    KlConfig,
    RejectionConfig,
    TeacherConfig,
)
from tests.algos import naive
from tests.algos.ragged import (
    GAPPED,
    RAGGED,
    Rows,
    assert_tokens,
    denominator,
    floats,
    grad_of,
    leaf,
    partitions,
    spoiled,
    train_batch,
)

NAIVE = {name: getattr(naive, name) for name in POLICY_LOSSES}
NUM_FIELDS = 6


@dataclass(frozen=True)
class Inputs:
    """Everything `policy_objective` reads of each token, mostly under the names of `TrainBatch`."""

    policy: Tensor
    entropy: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    advantages: Tensor
    importance_weights: Tensor
    covariance_rank: Tensor

    @classmethod
    def random(cls, rows: Rows, dtype: torch.dtype = torch.float64) -> "Inputs":
        policy, entropy, old, ref, advantages, weights = (floats(rows, seed, 0.5, dtype) for seed in range(NUM_FIELDS))
        rank = spoiled(rank_share(token_covariance(old, advantages, rows.mask), rows.mask), rows.mask, 1)
        return cls(policy, entropy, old, ref, advantages, weights.exp(), rank)

    def pick(self, index: Tensor) -> "Inputs":
        return Inputs(*(value[index] for value in vars(self).values()))

    def learned(self) -> "Inputs":
        """Return with leaves in place of what a network computes."""
        return replace(self, policy=leaf(self.policy), entropy=leaf(self.entropy))


def call(inputs: Inputs, rows: Rows, settings: AlgoConfig, counts: Denominator, kl_coef: float = 0.3,
         teacher: Tensor | None = None, **more: Any) -> tuple[Tensor, PolicyStatistics]:  # fmt: skip
    given = {name: value for name, value in vars(inputs).items() if name not in ("policy", "entropy")}
    batch = train_batch(rows, teacher_top_logprobs=teacher, **given)
    arguments = {"settings": settings, "denominator": counts, "kl_coef": kl_coef}
    return policy_objective(inputs.policy, inputs.entropy, batch, **arguments, **more)


def algo(**changes: Any) -> AlgoConfig:
    base = {"clip_low": 0.2, "clip_high": 0.28, "entropy_coef": 0.05, "kl": KlConfig(where="loss", estimator="k3")}
    return AlgoConfig(**(base | changes))


@pytest.mark.parametrize("rows", [RAGGED, GAPPED], ids=["ragged", "gapped"])
@pytest.mark.parametrize(("name", "aggregation"), list(product(NAIVE, get_args(Aggregation))))
def test_policy_objective_equals_naive_twin(name: str, aggregation: Aggregation, rows: Rows) -> None:
    inputs, counts = Inputs.random(rows).learned(), denominator(rows)
    settings = algo(policy_loss=name, aggregation=aggregation)
    loss, statistics = call(inputs, rows, settings, counts)
    loss.backward()
    policy, ref = inputs.policy.tolist(), inputs.ref_logprobs.tolist()
    tokens = NAIVE[name](
        policy, inputs.old_logprobs.tolist(), inputs.advantages.tolist(), rows.answers(), 0.2, 0.28, 3.0
    )
    share = naive.token_weights(aggregation, rows.answers(), counts.num_tokens, counts.num_sequences, 8)
    pg_loss = entropy = kl_loss = kl_sum = entropy_sum = 0.0
    gradient = {}
    for t, (token_loss, slope, _, _) in tokens.items():
        kl, kl_slope = naive.kl(policy[t], ref[t], "k3")
        weight = inputs.importance_weights[t].item()
        pg_loss += share[t] * weight * token_loss
        entropy += share[t] * inputs.entropy[t].item()
        kl_loss += share[t] * kl
        kl_sum += kl
        entropy_sum += inputs.entropy[t].item()
        gradient[t] = share[t] * (weight * slope + 0.3 * kl_slope)
    assert loss.item() == pytest.approx(pg_loss + 0.3 * kl_loss - 0.05 * entropy, rel=1e-12)
    assert_tokens(grad_of(inputs.policy), gradient)
    assert_tokens(grad_of(inputs.entropy), {t: -0.05 * share[t] for t in share})
    num_tokens = len(tokens)
    assert statistics.mean("ref_kl") == pytest.approx(kl_sum / num_tokens, rel=1e-12)
    assert statistics.mean("entropy_sum") == pytest.approx(entropy_sum / num_tokens, rel=1e-12)
    log_ratios = [naive.log_ratio(policy[t], inputs.old_logprobs[t].item()) for t in tokens]
    assert statistics.metrics() == pytest.approx(
        {
            "actor/pg_loss": pg_loss,
            "actor/entropy": entropy,
            "actor/kl_loss": kl_loss,
            "actor/ppo_kl": -sum(log_ratios) / num_tokens,
            "actor/pg_clipfrac": sum(token[2] for token in tokens.values()) / num_tokens,
            "actor/pg_clipfrac_lower": sum(token[3] for token in tokens.values()) / num_tokens,
        },
        rel=1e-12,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("name", "aggregation"), list(product(NAIVE, get_args(Aggregation))))
def test_policy_objective_is_independent_of_split(name: str, aggregation: Aggregation, dtype: torch.dtype) -> None:
    rel = 1e-12 if dtype == torch.float64 else 1e-6
    settings, counts = algo(policy_loss=name, aggregation=aggregation), denominator(RAGGED)
    values = Inputs.random(RAGGED, dtype)
    whole = values.learned()
    loss, statistics = call(whole, RAGGED, settings, counts)
    loss.backward()
    for seed in range(4):
        parts, found = values.learned(), []
        shares = []
        for sequences in partitions(RAGGED.num_sequences, seed):
            rows, index = RAGGED.select(sequences)
            micro_loss, micro_statistics = call(parts.pick(index), rows, settings, counts)
            micro_loss.backward()
            shares.append(micro_loss.item())
            found.append(micro_statistics)
        total = functools.reduce(operator.add, found)
        assert sum(shares) == pytest.approx(loss.item(), rel=rel, abs=rel)
        # It depends on the token's own sequence alone; only sigmoid's last digit depends on a place in memory.
        exact = rel if name == "sapo" else 0.0
        torch.testing.assert_close(grad_of(parts.policy), grad_of(whole.policy), rtol=exact, atol=0)
        assert torch.equal(grad_of(parts.entropy), grad_of(whole.entropy))
        assert total.metrics() == pytest.approx(statistics.metrics(), rel=rel, abs=rel)


def test_garbage_of_custom_loss_is_ignored() -> None:
    """A custom loss that does not mask its results."""
    results = []
    for name in ("my_loss", "careless_loss"):
        settings = algo(policy_loss=f"tests.algos.custom_loss:{name}")
        loss, statistics = call(Inputs.random(RAGGED), RAGGED, settings, denominator(RAGGED))
        results.append(torch.cat([loss.detach()[None], statistics.stack()]))
    assert torch.equal(results[0], results[1])


def test_missing_old_logprobs_default_to_policy() -> None:
    inputs, counts = Inputs.random(RAGGED), denominator(RAGGED)
    own, without = inputs.learned(), replace(inputs.learned(), old_logprobs=None)
    own = replace(own, old_logprobs=own.policy.detach().clone())
    losses = [call(each, RAGGED, algo(), counts) for each in (own, without)]
    for loss, _ in losses:
        loss.backward()
    assert torch.equal(losses[0][0], losses[1][0])
    assert torch.equal(grad_of(own.policy), grad_of(without.policy))
    assert losses[1][1].metrics()["actor/ppo_kl"] == 0.0


@pytest.mark.parametrize("where", ["off", "reward"])
def test_kl_outside_loss_needs_no_reference(where: str) -> None:
    counts = denominator(RAGGED)
    inputs = replace(Inputs.random(RAGGED), ref_logprobs=None).learned()
    loss, statistics = call(inputs, RAGGED, algo(kl=KlConfig(where=where)), counts)
    without, _ = call(Inputs.random(RAGGED).learned(), RAGGED, algo(), counts, kl_coef=0.0)
    assert loss.item() == pytest.approx(without.item(), rel=1e-12)
    assert statistics.kl_loss.item() == 0.0


def test_entropy_without_bonus_has_no_gradient() -> None:
    inputs = Inputs.random(RAGGED).learned()
    loss, statistics = call(inputs, RAGGED, algo(entropy_coef=0.0), denominator(RAGGED))
    loss.backward()
    assert inputs.entropy.grad is None
    expected = inputs.entropy[RAGGED.mask].mean().item()
    assert statistics.metrics()["actor/entropy"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rows", [RAGGED, GAPPED], ids=["ragged", "gapped"])
def test_off_policy_response_stays_in_denominators(rows: Rows) -> None:
    inputs, counts = replace(Inputs.random(rows).learned(), ref_logprobs=None), denominator(rows)
    assert inputs.old_logprobs is not None
    loss, _ = call(inputs, rows, algo(kl=KlConfig(), entropy_coef=0.0, off_policy_mask=0.1), counts)
    loss.backward()
    policy, old, advantages = inputs.policy.tolist(), inputs.old_logprobs.tolist(), inputs.advantages.tolist()
    tokens = naive.ppo_clip(policy, old, advantages, rows.answers(), 0.2, 0.28, 3.0)
    value, gradient, num_left = 0.0, {}, 0
    for positions in rows.answers():
        drift = naive.mean([-naive.log_ratio(policy[t], old[t]) for t in positions]) if positions else 0.0
        for t in positions:
            counted = (
                0.0 if advantages[t] < 0 and drift > 0.1 else inputs.importance_weights[t].item() / counts.num_tokens
            )
            num_left += counted == 0.0
            value += counted * tokens[t][0]
            gradient[t] = counted * tokens[t][1]
    assert 0 < num_left < len(gradient)
    assert loss.item() == pytest.approx(value, rel=1e-12)
    assert_tokens(grad_of(inputs.policy), gradient)


def test_added_entropy_weight_counts() -> None:
    plain, moved = Inputs.random(RAGGED).learned(), Inputs.random(RAGGED).learned()
    by_settings, _ = call(plain, RAGGED, algo(entropy_coef=0.05), denominator(RAGGED))
    by_controller, _ = call(moved, RAGGED, algo(entropy_coef=0.01), denominator(RAGGED), entropy_added=0.04)
    assert by_controller.item() == pytest.approx(by_settings.item(), rel=1e-12)
    by_settings.backward()
    by_controller.backward()
    torch.testing.assert_close(grad_of(moved.entropy), grad_of(plain.entropy), rtol=1e-12, atol=0)


def test_statistics_have_no_gradient_and_survive_an_all_reduce() -> None:
    _, statistics = call(Inputs.random(RAGGED).learned(), RAGGED, algo(), denominator(RAGGED))
    stacked = statistics.stack()
    assert not stacked.requires_grad
    assert stacked.dtype == torch.float64
    assert PolicyStatistics.unstack(stacked).metrics() == statistics.metrics()
    two_ranks = PolicyStatistics.unstack(stacked + stacked)
    assert two_ranks.metrics(num_updates=2) == pytest.approx(statistics.metrics(), rel=1e-12)


@pytest.mark.parametrize("rows", [RAGGED, GAPPED], ids=["ragged", "gapped"])
def test_value_objective_equals_naive_twin(rows: Rows) -> None:
    values, old, returns = leaf(floats(rows, 1)), floats(rows, 2), floats(rows, 3)
    counts = denominator(rows)
    # the policy's aggregation does not reach the critic
    settings = AlgoConfig(value_clip=0.5, aggregation="seq-mean-token-sum")
    batch = train_batch(rows, torch.zeros_like(old), old_values=old, returns=returns)
    loss, statistics = value_objective(values, batch, settings=settings, denominator=counts)
    loss.backward()
    twin = {
        t: naive.value_loss(values[t].item(), old[t].item(), returns[t].item(), 0.5)
        for positions in rows.answers()
        for t in positions
    }
    assert loss.item() == pytest.approx(naive.mean([token[0] for token in twin.values()]), rel=1e-12)
    assert_tokens(grad_of(values), {t: token[1] / len(twin) for t, token in twin.items()})
    assert statistics.metrics() == pytest.approx(
        {
            "critic/vf_loss": loss.item(),
            "critic/vf_clipfrac": naive.mean([float(token[2]) for token in twin.values()]),
            "critic/vpred_mean": naive.mean([values[t].item() for t in twin]),
        },
        rel=1e-12,
    )


def test_value_objective_is_independent_of_split() -> None:
    data = [floats(RAGGED, seed) for seed in (1, 2, 3)]
    counts, settings = denominator(RAGGED), AlgoConfig()

    def of_split(split: list[list[int]]) -> tuple[Tensor, dict[str, float]]:
        learned, found = leaf(data[0]), []
        for rows, index in map(RAGGED.select, split):
            values, old, returns = (tensor[index] for tensor in (learned, *data[1:]))
            batch = train_batch(rows, torch.zeros_like(old), old_values=old, returns=returns)
            loss, statistics = value_objective(values, batch, settings=settings, denominator=counts)
            loss.backward()
            found.append(statistics)
        total: ValueStatistics = functools.reduce(operator.add, found)
        return grad_of(learned), total.metrics()

    gradient, metrics = of_split([[*range(RAGGED.num_sequences)]])
    for seed in range(8):
        found = of_split(partitions(RAGGED.num_sequences, seed))
        torch.testing.assert_close(found[0], gradient, rtol=1e-12, atol=0)
        assert found[1] == pytest.approx(metrics, rel=1e-12)


def naive_explained_variance(values: list[float], returns: list[float]) -> float:
    def variance(numbers: list[float]) -> float:
        return sum((x - naive.mean(numbers)) ** 2 for x in numbers) / (len(numbers) - 1)

    errors = [r - v for v, r in zip(values, returns, strict=True)]
    return 1 - variance(errors) / (variance(returns) + 1e-5)


@pytest.mark.parametrize("rows", [RAGGED, GAPPED], ids=["ragged", "gapped"])
def test_explained_variance(rows: Rows) -> None:
    values, returns = floats(rows, 1), floats(rows, 2) + 3
    expected = naive_explained_variance(values[rows.mask].tolist(), returns[rows.mask].tolist())
    assert explained_variance(values, returns, rows.mask).item() == pytest.approx(expected, rel=1e-12)
    assert explained_variance(returns - 7, returns, rows.mask).item() == pytest.approx(1.0, rel=1e-12)
    constant = torch.where(rows.mask, 5.0, float("nan")).double()
    assert explained_variance(constant, returns, rows.mask).item() == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 1.0), (2, 1 - 0.5 / (2.0 + 1e-5))])
def test_explained_variance_of_one_token(num_tokens: int, expected: float) -> None:
    """One number has no variance, and two have that of one degree of freedom."""
    values, returns = torch.tensor([3.0, 4.0]).double(), torch.tensor([5.0, 7.0]).double()
    mask = torch.arange(2) < num_tokens
    assert explained_variance(values, returns, mask).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_divergence_from_teacher_is_added_to_loss(aggregation: Aggregation) -> None:
    """The loss grows by `coef` times the aggregated divergence, for any split into micro-batches."""
    inputs, counts = Inputs.random(RAGGED), denominator(RAGGED)
    settings = algo(aggregation=aggregation, teacher=TeacherConfig(path="a/b", top_k=3, coef=0.7))
    generator = torch.Generator().manual_seed(4)
    teacher, policy = (
        torch.log_softmax(torch.randn(len(RAGGED.mask), 5, generator=generator, dtype=torch.float64), 1)[:, :3]
        for _ in range(2)
    )

    def with_teacher(rows: Rows, index: Tensor) -> tuple[Tensor, PolicyStatistics]:
        more = {"teacher": teacher[index], "candidate_logprobs": policy[index]}
        return call(inputs.pick(index), rows, settings, counts, **more)

    plain, _ = call(inputs, RAGGED, settings, counts)
    whole, statistics = with_teacher(RAGGED, torch.arange(len(RAGGED.mask)))
    divergence = top_k_forward_kl(teacher, policy)
    added = aggregate(
        divergence,
        RAGGED.mask,
        RAGGED.sequence_ids,
        mode=aggregation,
        denominator=counts,
        num_sequences=RAGGED.num_sequences,
    )
    assert (whole - plain).item() == pytest.approx(0.7 * added.item(), rel=1e-9)
    assert statistics.mean("teacher_kl") == pytest.approx(divergence[RAGGED.mask].mean().item(), rel=1e-9)
    shares = [with_teacher(*RAGGED.select(sequences))[0].item() for sequences in partitions(RAGGED.num_sequences, 3)]
    assert sum(shares) == pytest.approx(whole.item(), rel=1e-9)


def test_statistics_without_tokens_are_empty() -> None:
    nothing = PolicyStatistics.unstack(torch.zeros(10, dtype=torch.float64))
    assert (nothing.mean("ref_kl"), nothing.mean("entropy_sum"), nothing.mean("teacher_kl")) == (0.0, 0.0, 0.0)


def flat() -> Tensor:
    return torch.empty(T, device="meta")


T, N = RAGGED.mask.numel(), RAGGED.num_sequences
MASK, IDS, COUNTS = RAGGED.mask.to("meta"), RAGGED.sequence_ids.to("meta"), denominator(RAGGED)
GIVEN = ("old_logprobs", "ref_logprobs", "old_values", "returns", "importance_weights", "covariance_rank")
BATCH = train_batch(RAGGED, flat(), **{name: flat() for name in GIVEN})
ON_META = {field.name: getattr(BATCH.packed, field.name).to("meta") for field in fields(BATCH.packed)}
BATCH = replace(BATCH, packed=replace(BATCH.packed, **ON_META))


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_objective_does_not_synchronize(name: str, aggregation: Aggregation) -> None:
    settings = AlgoConfig(policy_loss=name, aggregation=aggregation, entropy_coef=0.1, kl=KlConfig(where="loss"))
    policy = flat().requires_grad_()
    loss, _ = policy_objective(policy, flat(), BATCH, settings=settings, denominator=COUNTS, kl_coef=0.1)
    loss.backward()
    assert policy.grad is not None


def test_value_objective_does_not_synchronize() -> None:
    loss, _ = value_objective(flat(), BATCH, settings=AlgoConfig(), denominator=COUNTS)
    assert loss.shape == ()


def test_token_functions_do_not_synchronize() -> None:
    rewards = token_rewards(
        torch.empty(N, device="meta"), torch.empty(N + 1, dtype=torch.int64, device="meta"), MASK, flat(), 0.1
    )
    advantages, _ = gae(rewards, flat(), MASK, IDS, gamma=1.0, lam=0.95)
    for result in (
        whiten(advantages, MASK),
        reinforce_pp(rewards, MASK, IDS, gamma=1.0)[0],
        broadcast_to_tokens(torch.empty(N, device="meta"), MASK, IDS),
        importance_weights(flat(), flat(), MASK, IDS, N, settings=ImportanceConfig(mode="mask", level="sequence")),
        *(
            rejection_mask(flat(), flat(), MASK, IDS, N, settings=RejectionConfig(level=level))
            for level in get_args(RejectionConfig.model_fields["level"].annotation)
        ),
        off_policy_mask(flat(), flat(), flat(), MASK, IDS, N, delta=0.1),
    ):
        assert result.shape == (T,)
    assert explained_variance(flat(), flat(), MASK).shape == ()
