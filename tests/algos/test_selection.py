"""What depends on the whole mini-batch, against naive twins."""

import pytest
import torch
from torch import Tensor

from rlcore.algos.selection import clipped_by_covariance, rank_share, token_covariance
from rlcore.config.algo import ClipCovConfig
from tests.algos import naive
from tests.algos.compare import assert_flags, assert_tokens
from tests.algos.ragged import GAPPED, RAGGED, Rows, floats

BOTH = pytest.mark.parametrize("rows", [RAGGED, GAPPED], ids=["ragged", "gapped"])


def on_answers(values: Tensor, rows: Rows) -> dict[int, float]:
    return {t: values[t].item() for positions in rows.answers() for t in positions}


@BOTH
@pytest.mark.parametrize("share", [0.0001, 0.2, 0.5, 1.0])
def test_the_share_of_the_largest_is_that_of_the_naive_twin(share: float, rows: Rows) -> None:
    for seed in range(5):
        for values in (floats(rows, seed), floats(rows, seed).round()):  # the second has equal ones
            expected = naive.largest(on_answers(values, rows), share)
            found = rank_share(values, rows.mask) < share
            assert_flags(found & rows.mask, dict.fromkeys(expected, True))
            assert not found[~rows.mask].any()


def test_the_share_is_exact_where_it_is_a_whole_number_of_tokens() -> None:
    for num_tokens in (10, 90, 1000):
        mask = torch.ones(num_tokens, dtype=torch.bool)
        ranks = rank_share(torch.arange(num_tokens).double(), mask)
        for tenths in range(1, 10):
            assert int((ranks < tenths / 10).sum()) == num_tokens * tenths // 10


@BOTH
def test_covariance_is_that_of_the_naive_twin(rows: Rows) -> None:
    for seed in range(5):
        old, advantages = floats(rows, seed), floats(rows, seed + 50)
        expected = naive.covariance(old.tolist(), advantages.tolist(), rows.answers())
        assert_tokens(token_covariance(old, advantages, rows.mask), expected)


@BOTH
@pytest.mark.parametrize("share", [0.01, 0.2, 0.9])
def test_what_clip_cov_draws_is_what_the_naive_twin_draws(share: float, rows: Rows) -> None:
    settings = ClipCovConfig(share=share, low=0.1, high=0.9)
    num_tokens, seen = sum(rows.lengths()), set()
    for seed in range(5):
        covariance, draws = floats(rows, seed), floats(rows, seed + 50)
        inside = {t: draws[t].item() for t, value in on_answers(covariance, rows).items() if 0.1 < value < 0.9}
        drawn = [t for place, t in enumerate(naive.largest(inside, 1.0)) if place / num_tokens < share]
        found = clipped_by_covariance(covariance, draws, rows.mask, settings=settings)
        assert_flags(found, dict.fromkeys(drawn, True))
        seen.add(len(drawn))
    assert max(seen) > 0


def test_a_token_at_an_end_of_the_interval_is_not_drawn() -> None:
    settings = ClipCovConfig(share=0.9, low=1.0, high=5.0)
    covariance, mask = torch.tensor([1.0, 2.0, 5.0]), torch.ones(3, dtype=torch.bool)
    found = clipped_by_covariance(covariance, torch.rand(3), mask, settings=settings)
    assert found.tolist() == [False, True, False]


def test_a_share_of_nothing_draws_nothing_and_no_token_is_no_error() -> None:
    values, nothing = floats(RAGGED, 1), torch.zeros_like(RAGGED.mask)
    assert not clipped_by_covariance(values, values, RAGGED.mask, settings=ClipCovConfig(low=-9, high=9)).any()
    assert not token_covariance(values, values, nothing).any()
    assert (rank_share(values, nothing) == 1).all()
