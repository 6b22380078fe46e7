"""The schedules of the learning rate, the entropy bonus and the KL coefficient, step by step."""

import math
from typing import Literal

import pytest

from rlcore.algos.objective import lr_at, next_entropy_bonus, next_kl_coef
from rlcore.config.algo import AlgoConfig, EntropyControlConfig, KlConfig, OptimConfig
from rlcore.errors import NonFiniteError

Schedule = Literal["constant", "linear", "cosine"]


def naive_lr(step: int, schedule: str, lr: float, low: float, warmup: int, total: int) -> float:
    """Return the learning rate of step number `step + 1`, computed separately for each schedule."""
    if step < warmup:
        return lr * (step + 1) / warmup
    if schedule == "constant":
        return lr
    if step >= total:
        return lr * low
    done = (step - warmup) / (total - warmup)
    if schedule == "linear":
        return lr + (lr * low - lr) * done
    return lr * low + (lr - lr * low) * 0.5 * (1 + math.cos(done * math.pi))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("low", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("warmup", "total"), [(0, 10), (3, 10), (10, 10), (15, 10), (0, 1), (1, 1), (7, 200)])
def test_lr_equals_naive_twin(schedule: Schedule, low: float, warmup: int, total: int) -> None:
    optim = OptimConfig(
        lr=3e-4, schedule=schedule, min_lr_ratio=low, warmup_steps=warmup, warmup_ratio=0.5 if warmup else 0
    )
    for step in range(total + 10):
        expected = naive_lr(step, schedule, 3e-4, low, warmup, total)
        assert lr_at(step, optim=optim, total_steps=total) == pytest.approx(expected, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize(
    ("ratio", "total", "warmup"), [(0.0, 100, 0), (0.1, 19, 1), (0.29, 100, 29), (0.57, 300, 171), (0.299, 100, 29)]
)
def test_warmup_ratio_of_whole_steps_is_exact(ratio: float, total: int, warmup: int) -> None:
    by_ratio, by_steps = OptimConfig(warmup_ratio=ratio), OptimConfig(warmup_steps=warmup)
    for step in range(total):
        assert lr_at(step, optim=by_ratio, total_steps=total) == lr_at(step, optim=by_steps, total_steps=total) > 0


def test_entropy_bonus_equals_naive_twin() -> None:
    entropies = [0.1, 0.2, 0.5, 0.3, 0.9, 0.9, 0.9, 0.9, 0.29, 0.31, 0.1]
    settings = AlgoConfig(entropy_coef=0.01, entropy_control=EntropyControlConfig(target=0.3, step=0.004))
    added, weight = 0.0, 0.01
    for entropy in entropies:
        added = next_entropy_bonus(added, entropy, settings=settings)
        if entropy < 0.3:
            weight += 0.004
        elif entropy > 0.3:
            weight = weight - 0.004 if weight > 0.004 else 0.0
        assert settings.entropy_coef + added == pytest.approx(weight, abs=1e-15)
    assert weight == pytest.approx(0.004)
    assert next_entropy_bonus(0.0, 0.1, settings=AlgoConfig(entropy_coef=0.01)) == 0.0  # no target


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
