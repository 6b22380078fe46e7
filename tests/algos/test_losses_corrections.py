"""KL estimates, importance weights and masks against naive twins, and their independence of the split."""

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rlcore.algos.losses import (
    MIN_REST,
    importance_weights,
    kl_estimate,
    off_policy_mask,
    rejection_mask,
    top_k_forward_kl,
)
from rlcore.config.algo import ImportanceConfig, KlConfig, RejectionConfig
from tests.algos import naive
from tests.algos.ragged import (
    GAPPED,
    RAGGED,
    Rows,
    assert_flags,
    assert_tokens,
    floats,
    grad_of,
    leaf,
    partitions,
)

ESTIMATORS = ["k1", "k2", "k3", "low_var_kl"]
DIFFERENCES = [0.0, 1e-4, -1e-4, 0.3, -0.7, 2.0, -2.3, -2.5, 5.0, -5.0, 19.0, 21.0, -21.0, 500.0, -500.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_estimate_equals_naive_twin(estimator: str) -> None:
    ref = torch.linspace(-3, 0, len(DIFFERENCES), dtype=torch.float64)
    policy = leaf(ref + torch.tensor(DIFFERENCES, dtype=torch.float64))
    values = kl_estimate(policy, ref, estimator=estimator)
    twin = [naive.kl(p, r, estimator) for p, r in zip(policy.tolist(), ref.tolist(), strict=True)]
    assert values.tolist() == pytest.approx([value for value, _ in twin], rel=1e-12, abs=1e-12)
    values.sum().backward()
    assert grad_of(policy).tolist() == pytest.approx([slope for _, slope in twin], rel=1e-12, abs=1e-12)


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 11, generator=generator, dtype=torch.float64)
    return leaf(logits[0]), torch.log_softmax(logits[1], 0)


def naive_top_k_kl(teacher: list[float], policy: list[float], k: int) -> float:
    """KL over the teacher's k likeliest of all probabilities, and the rest as one outcome."""
    top = sorted(range(len(teacher)), key=lambda token: -teacher[token])[:k]
    outcomes = [(teacher[token], policy[token]) for token in top]
    outcomes.append((1 - sum(p for p, _ in outcomes), 1 - sum(q for _, q in outcomes)))
    return math.fsum(p * math.log(p / q) for p, q in outcomes)


@pytest.mark.parametrize("k", [1, 4, 10])
def test_top_k_forward_kl_equals_naive_twin(k: int) -> None:
    logits, teacher = distributions()
    top = teacher.topk(k)

    def divergence(logits: torch.Tensor) -> torch.Tensor:
        return top_k_forward_kl(top.values[None], torch.log_softmax(logits, 0)[top.indices][None])[0]

    found = divergence(logits)
    found.backward()
    probabilities = torch.log_softmax(logits, 0).exp().tolist()
    assert found.item() == pytest.approx(naive_top_k_kl(teacher.exp().tolist(), probabilities, k), rel=1e-9)
    full = (teacher.exp() * (teacher - torch.log_softmax(logits, 0))).sum().item()
    assert 0 < found.item() <= full + 1e-12
    for token in range(len(logits)):
        step = torch.zeros_like(logits)
        step[token] = 1e-6
        slope = (divergence(logits + step) - divergence(logits - step)).item() / 2e-6
        assert grad_of(logits)[token].item() == pytest.approx(slope, abs=1e-8)


def test_top_k_forward_kl_of_equal_policies_is_0() -> None:
    _, teacher = distributions()
    top = teacher.topk(4).values.float()[None]
    assert top_k_forward_kl(top, top).tolist() == [0.0]
    certain = torch.tensor([[0.0, -200.0]])  # no rest: its logarithm must stay finite
    assert top_k_forward_kl(certain, certain).tolist() == [0.0]
    assert top_k_forward_kl(certain, torch.tensor([[-200.0, -200.0]])).item() == pytest.approx(
        200 + MIN_REST * math.log(MIN_REST), rel=1e-4
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_of_estimator_are_exact_expectations(estimator: str) -> None:
    """The table in docs/algorithms.md, over a small vocabulary near the reference."""
    logits, direction = distributions()
    ref = torch.log_softmax(logits.detach(), 0)
    near = leaf(ref + 0.05 * direction)
    policy = torch.log_softmax(near, 0)
    weights, found = policy.exp().detach(), kl_estimate(policy, ref, estimator=estimator)
    divergence = (policy.exp() * (policy - ref)).sum()
    if estimator != "k2":
        assert (weights * found).sum().item() == pytest.approx(divergence.item(), rel=1e-9)
    losses = (divergence, (ref.exp() * (ref - policy)).sum(), (weights * found).sum())
    exact, turned, in_loss = (torch.autograd.grad(loss, near, retain_graph=True)[0] for loss in losses)
    wanted = {"k1": torch.zeros_like(exact), "k2": exact}.get(estimator, turned)
    torch.testing.assert_close(in_loss, wanted, rtol=1e-10, atol=1e-12)
    (in_reward,) = torch.autograd.grad((weights * found.detach() * policy).sum(), near)
    if estimator == "k1":
        torch.testing.assert_close(in_reward, exact, rtol=1e-10, atol=1e-12)
    assert abs((in_reward @ exact / exact.square().sum()).item() - (estimator == "k1")) < 0.05


@pytest.mark.parametrize(("where", "used"), [("reward", "k1"), ("loss", "low_var_kl"), ("off", "low_var_kl")])
def test_default_estimator_depends_on_place(where: str, used: str) -> None:
    assert KlConfig(where=where).estimator_in_use == used
    assert KlConfig(where=where, estimator="k2").estimator_in_use == "k2"


def test_k3_in_float32_keeps_small_digits() -> None:
    """exp(-d) - 1 + d in float32 is 0 or 6e-8 at d = 1e-4, where d^2 / 2 = 5e-9."""
    small = kl_estimate(torch.tensor([1e-4]), torch.tensor([0.0]), estimator="k3")
    assert small.item() == pytest.approx(5e-9, rel=1e-3)


LEVELS = get_args(RejectionConfig.model_fields["level"].annotation)
CAPS = {"k1": (1.05, 1.5, 4.0), "k2": (0.01, 0.3), "k3": (0.01, 0.3)}


def of(rows: Rows) -> tuple[Tensor, Tensor, int]:
    return rows.mask, rows.sequence_ids, rows.num_sequences


def naive_rejected(old: list[float], behavior: list[float], rows: Rows, settings: RejectionConfig) -> dict[int, bool]:
    bound = math.log(settings.cap) if settings.estimator == "k1" else settings.cap
    out: dict[int, bool] = {}
    for positions in rows.answers():
        each = {t: naive.kl(behavior[t], old[t], settings.estimator)[0] for t in positions}
        for t in positions:
            whole = {
                "off": 0.0,
                "token": each[t],
                "sequence-sum": sum(each.values()),
                "sequence-mean": sum(each.values()) / len(each),
                "sequence-max": max(abs(k) for k in each.values()),
            }[settings.level]
            out[t] = abs(whole) > bound
    return out


@pytest.mark.parametrize("rows", [RAGGED, GAPPED], ids=["ragged", "gapped"])
@pytest.mark.parametrize("estimator", CAPS)
@pytest.mark.parametrize("level", LEVELS)
def test_rejection_mask_equals_naive_twin(level: str, estimator: str, rows: Rows) -> None:
    seen = set()
    for cap in CAPS[estimator]:
        settings = RejectionConfig(level=level, estimator=estimator, cap=cap)
        for seed in range(5):
            old, behavior = floats(rows, seed, 0.5), floats(rows, seed + 50, 0.5)
            expected = naive_rejected(old.tolist(), behavior.tolist(), rows, settings)
            assert_flags(rejection_mask(old, behavior, *of(rows), settings=settings), expected)
            seen.update(expected.values())
    assert seen == ({False} if level == "off" else {False, True})


@pytest.mark.parametrize("rows", [RAGGED, GAPPED], ids=["ragged", "gapped"])
def test_off_policy_mask_equals_naive_twin(rows: Rows) -> None:
    seen = set()
    for seed in range(5):
        policy, behavior, advantages = floats(rows, seed), floats(rows, seed + 50), floats(rows, seed + 100)
        expected = {}
        for positions in rows.answers():
            drift = [-naive.log_ratio(policy[t].item(), behavior[t].item()) for t in positions]
            expected |= {t: advantages[t].item() < 0 and naive.mean(drift) > 0.1 for t in positions}
        assert_flags(off_policy_mask(policy, behavior, advantages, *of(rows), delta=0.1), expected)
        seen.update(expected.values())
    assert seen == {False, True}


def verdicts(values: list[Tensor], rows: Rows) -> list[Tensor]:
    settings: list[Any] = [RejectionConfig(level=level, cap=1.5) for level in LEVELS]
    whole = ImportanceConfig(mode="truncate", level="sequence")
    return [
        *(rejection_mask(*values[:2], *of(rows), settings=each) for each in settings),
        importance_weights(*values[:2], *of(rows), settings=whole),
        off_policy_mask(*values, *of(rows), delta=0.1),
    ]


def test_corrections_are_independent_of_split() -> None:
    """Each response lies whole in one micro-batch, in each split."""
    values = [floats(RAGGED, seed, 0.5) for seed in range(3)]
    whole = verdicts(values, RAGGED)
    for seed in range(8):
        for sequences in partitions(RAGGED.num_sequences, seed):
            rows, index = RAGGED.select(sequences)
            for part, expected in zip(verdicts([each[index] for each in values], rows), whole, strict=True):
                torch.testing.assert_close(part, expected[index], rtol=1e-12, atol=0)


def of_one(num_tokens: int) -> tuple[Tensor, Tensor, int]:
    """Return the mask, ids and number of one sequence."""
    return of(Rows(((True,) * num_tokens,)))


def test_nan_is_not_rejected() -> None:
    old = torch.tensor([0.0, math.nan]).double()
    for level in LEVELS:
        settings = RejectionConfig(level=level)
        assert not rejection_mask(old, torch.zeros(2).double(), *of_one(2), settings=settings).any()


@pytest.mark.parametrize("rows", [RAGGED, GAPPED], ids=["ragged", "gapped"])
@pytest.mark.parametrize("cap", [1.1, 3.0, 50.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["off", "truncate", "mask"])
def test_importance_weights_equal_naive_twin(mode: str, level: str, cap: float, rows: Rows) -> None:
    """The weight of a sequence is that of the product of its ratios."""
    settings = ImportanceConfig(mode=mode, cap=cap, level=level)
    for seed in range(5):
        old, behavior = leaf(floats(rows, seed)), floats(rows, seed + 50)
        expected = {}
        for positions in rows.answers():
            each = {t: naive.log_ratio(old[t].item(), behavior[t].item()) for t in positions}
            logarithms = each if level == "token" else dict.fromkeys(positions, sum(each.values()))
            expected |= {t: naive.naive_weight(value, 0.0, mode, cap) for t, value in logarithms.items()}
        weights = importance_weights(old, behavior, *of(rows), settings=settings)
        assert_tokens(weights, expected)
        assert not weights.requires_grad


def test_importance_log_ratio_is_clamped() -> None:
    settings = ImportanceConfig(mode="truncate", cap=1e300)
    old = torch.tensor([1000.0, -1000.0], dtype=torch.float64)
    weights = importance_weights(old, torch.zeros(2).double(), *of_one(2), settings=settings)
    assert weights.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


def test_ratios_equal_to_the_bounds_are_kept() -> None:
    old = torch.tensor([math.log(2), -math.log(2), 1.0, -1.0], dtype=torch.float64)
    cap = old[0].exp().item()
    settings = ImportanceConfig(mode="mask", cap=cap)
    weights = importance_weights(old, torch.zeros(4).double(), *of_one(4), settings=settings)
    assert weights.tolist() == [cap, 1 / cap, 0.0, 0.0]


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_importance_weight_of_nan_is_nan(mode: str) -> None:
    """A weight of 0 would hide the error."""
    old = torch.tensor([0.0, math.nan], dtype=torch.float64)
    settings = ImportanceConfig(mode=mode)
    weights = importance_weights(old, torch.zeros(2).double(), *of_one(2), settings=settings)
    assert weights[0] == 1.0
    assert weights[1].isnan()
