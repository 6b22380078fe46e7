"""KL estimators and the controller of the coefficient."""

import math

import pytest
import torch

from rlcore.algos.losses import MIN_REST, kl_estimate, top_k_forward_kl
from rlcore.algos.schedules import next_kl_coef
from rlcore.config.algo import KlConfig
from rlcore.errors import NonFiniteError
from tests.algos import naive
from tests.algos.compare import assert_floats
from tests.algos.ragged import grad_of, leaf

ESTIMATORS = ["k1", "k2", "k3", "low_var_kl"]
DIFFERENCES = [0.0, 1e-4, -1e-4, 0.3, -0.7, 2.0, -2.3, -2.5, 5.0, -5.0, 19.0, 21.0, -21.0, 500.0, -500.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_estimate_equals_naive_twin(estimator: str) -> None:
    ref = torch.linspace(-3, 0, len(DIFFERENCES), dtype=torch.float64)
    policy = leaf(ref + torch.tensor(DIFFERENCES, dtype=torch.float64))
    values = kl_estimate(policy, ref, estimator=estimator)
    twin = [naive.kl(p, r, estimator) for p, r in zip(policy.tolist(), ref.tolist(), strict=True)]
    assert_floats(values, [value for value, _ in twin])
    values.sum().backward()
    assert_floats(grad_of(policy), [slope for _, slope in twin])


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


@pytest.mark.parametrize(
    ("observed", "factor"), [(0.1, 1.0), (0.11, 1.05), (0.3, 1.1), (50.0, 1.1), (0.09, 0.95), (0.0, 0.9), (-1.0, 0.9)]
)
def test_adaptive_coefficient(observed: float, factor: float) -> None:
    settings = KlConfig(where="reward", adaptive=True, target=0.1, horizon=10_000)
    assert next_kl_coef(0.2, observed, 5_000, settings=settings) == pytest.approx(0.2 * factor, rel=1e-12)
    fixed, short = settings.model_copy(update={"adaptive": False}), settings.model_copy(update={"horizon": 10})
    assert next_kl_coef(0.2, observed, 5_000, settings=fixed) == 0.2
    assert next_kl_coef(0.2, 0.0, 1_000, settings=short) == 0.0


@pytest.mark.parametrize("observed", [math.nan, math.inf])
def test_adaptive_coefficient_rejects_non_finite_kl(observed: float) -> None:
    with pytest.raises(NonFiniteError, match=r"algo\.kl: the observed KL is"):
        next_kl_coef(0.2, observed, 10, settings=KlConfig(where="reward", adaptive=True))
