"""Importance weights between sampler and trainer."""

import math

import pytest
import torch

from rlcore.algos.off_policy import importance_weights
from rlcore.config.algo import ImportanceConfig
from tests.algos.compare import assert_tokens
from tests.algos.naive import naive_weight
from tests.algos.ragged import GAPPED, RAGGED, Rows, floats, leaf

OF_RAGGED = (RAGGED.mask, RAGGED.sequence_ids, RAGGED.num_sequences)


def of_one(num_tokens: int) -> tuple[torch.Tensor, int]:
    """Ids and number of one sequence."""
    return torch.zeros(num_tokens, dtype=torch.int64), 1


@pytest.mark.parametrize("rows", [RAGGED, GAPPED], ids=["ragged", "gapped"])
@pytest.mark.parametrize("cap", [1.1, 2.0, 50.0])
@pytest.mark.parametrize("mode", ["off", "truncate", "mask"])
def test_weights_are_those_of_the_naive_twin(mode: str, cap: float, rows: Rows) -> None:
    settings = ImportanceConfig(mode=mode, cap=cap)
    for seed in range(5):
        old, behavior = floats(rows, seed), floats(rows, seed + 50)
        weights = importance_weights(old, behavior, rows.mask, rows.sequence_ids, rows.num_sequences, settings=settings)
        expected = {
            t: naive_weight(old[t].item(), behavior[t].item(), mode, cap)
            for positions in rows.answers()
            for t in positions
        }
        assert_tokens(weights, expected)


def test_by_hand() -> None:
    ratio = torch.tensor([0.3, 0.6, 1.0, 1.9, 2.1, 100.0], dtype=torch.float64)
    mask = torch.ones(6, dtype=torch.bool)

    def weights(mode: str) -> list[float]:
        settings = ImportanceConfig(mode=mode, cap=2.0)
        return importance_weights(ratio.log(), torch.zeros(6).double(), mask, *of_one(6), settings=settings).tolist()

    assert weights("truncate") == pytest.approx([0.3, 0.6, 1.0, 1.9, 2.0, 2.0])
    assert weights("mask") == pytest.approx([0.0, 0.6, 1.0, 1.9, 0.0, 0.0])
    assert weights("off") == [1.0] * 6


def test_log_ratio_is_held_within_20() -> None:
    settings = ImportanceConfig(mode="truncate", cap=1e300)
    old, mask = torch.tensor([1000.0, -1000.0], dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    weights = importance_weights(old, torch.zeros(2).double(), mask, *of_one(2), settings=settings)
    assert weights.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


@pytest.mark.parametrize("mode", ["off", "truncate", "mask"])
def test_equal_probabilities_weigh_exactly_one(mode: str) -> None:
    old = floats(RAGGED, 1, dtype=torch.float32)
    settings = ImportanceConfig(mode=mode)
    weights = importance_weights(old, old, *OF_RAGGED, settings=settings)
    assert torch.equal(weights, RAGGED.mask.float())


def test_weights_have_no_gradient() -> None:
    old = leaf(floats(RAGGED, 1))
    weights = importance_weights(old, floats(RAGGED, 2), *OF_RAGGED, settings=ImportanceConfig(mode="truncate"))
    assert not weights.requires_grad


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_a_number_that_is_none_is_not_hidden(mode: str) -> None:
    """A weight of 0 would train on, without a word."""
    old = torch.tensor([0.0, math.nan], dtype=torch.float64)
    mask = torch.ones(2, dtype=torch.bool)
    settings = ImportanceConfig(mode=mode)
    weights = importance_weights(old, torch.zeros(2).double(), mask, *of_one(2), settings=settings)
    assert weights[0] == 1.0
    assert weights[1].isnan()
