"""The soft overlong penalty, and which groups dynamic sampling keeps."""

import pytest
import torch

from rlcore.algos.advantages import groups_with_signal, overlong_penalty
from rlcore.config.algo import OverlongConfig


def naive_penalty(length: int, limit: int, buffer: int, penalty: float) -> float:
    """DAPO's three cases as the paper writes them."""
    if length <= limit - buffer:
        return 0.0
    if length <= limit:
        return ((limit - buffer) - length) / buffer * penalty
    return -penalty


@pytest.mark.parametrize(("limit", "buffer", "penalty"), [(100, 20, 1.0), (1024, 128, 0.5), (16, 16, 2.0), (8, 1, 1.0)])
def test_overlong_penalty_is_that_of_the_naive_twin(limit: int, buffer: int, penalty: float) -> None:
    lengths = torch.arange(0, limit + 5)
    settings = OverlongConfig(enabled=True, buffer_tokens=buffer, penalty=penalty)
    actual = overlong_penalty(lengths, max_response_tokens=limit, settings=settings)
    expected = [naive_penalty(length, limit, buffer, penalty) for length in lengths.tolist()]
    assert actual.tolist() == pytest.approx(expected, rel=1e-6)


def test_overlong_penalty_is_zero_where_it_is_off() -> None:
    lengths = torch.tensor([1, 99, 1000])
    assert overlong_penalty(lengths, max_response_tokens=100, settings=OverlongConfig()).tolist() == [0.0, 0.0, 0.0]


def naive_informative(scores: list[float], has_score: list[bool], groups: list[int]) -> list[bool]:
    out = []
    for i in range(len(scores)):
        mates = [scores[j] for j in range(len(scores)) if groups[j] == groups[i] and has_score[j]]
        out.append((mates == [scores[i]] and groups.count(groups[i]) == 1) or any(score != mates[0] for score in mates))
    return out


def test_informative_groups_are_those_of_the_naive_twin() -> None:
    generator = torch.Generator().manual_seed(1)
    seen = set()
    for _ in range(20):
        scores = torch.randint(0, 2, (12,), generator=generator).float() / 10
        groups = torch.randint(-2, 4, (12,), generator=generator)
        has_score = torch.rand(12, generator=generator) < 0.8
        garbage = torch.where(has_score, scores, torch.nan)
        actual = groups_with_signal(garbage, has_score, groups).tolist()
        assert actual == naive_informative(scores.tolist(), has_score.tolist(), groups.tolist())
        seen.update(actual)
    assert seen == {True, False}


def test_informative_groups_by_hand() -> None:
    scores = torch.tensor([0.1, 1.0, 0.1, 0.1, -5.0, -5.0, 0.0])
    groups = torch.tensor([9, 9, 2, 2, 4, 4, 3])
    everyone = torch.ones(7, dtype=torch.bool)
    assert groups_with_signal(scores, everyone, groups).tolist() == [True, True, False, False, False, False, True]
    without_the_second = torch.tensor([True, False, True, True, True, True, False])
    assert not groups_with_signal(scores, without_the_second, groups).any()
