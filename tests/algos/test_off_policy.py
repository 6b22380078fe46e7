"""Importance weights and masks against naive twins, and their independence of the split."""

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rlcore.algos.off_policy import importance_weights, off_policy_mask, rejection_mask
from rlcore.config.algo import ImportanceConfig, RejectionConfig
from tests.algos import naive
from tests.algos.compare import assert_flags, assert_tokens
from tests.algos.ragged import GAPPED, RAGGED, Rows, floats, leaf, partitions

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


def test_nan_is_not_rejected() -> None:
    old, mask = torch.tensor([0.0, math.nan]).double(), torch.ones(2, dtype=torch.bool)
    rows = (mask, torch.zeros(2, dtype=torch.int64), 1)
    for level in LEVELS:
        settings = RejectionConfig(level=level)
        assert not rejection_mask(old, torch.zeros(2).double(), *rows, settings=settings).any()


def of_one(num_tokens: int) -> tuple[torch.Tensor, int]:
    """Ids and number of one sequence."""
    return torch.zeros(num_tokens, dtype=torch.int64), 1


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
    old, mask = torch.tensor([1000.0, -1000.0], dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    weights = importance_weights(old, torch.zeros(2).double(), mask, *of_one(2), settings=settings)
    assert weights.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_importance_weight_of_nan_is_nan(mode: str) -> None:
    """A weight of 0 would hide the error."""
    old = torch.tensor([0.0, math.nan], dtype=torch.float64)
    mask = torch.ones(2, dtype=torch.bool)
    settings = ImportanceConfig(mode=mode)
    weights = importance_weights(old, torch.zeros(2).double(), mask, *of_one(2), settings=settings)
    assert weights[0] == 1.0
    assert weights[1].isnan()
