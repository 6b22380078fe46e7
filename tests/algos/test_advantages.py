"""Advantages against their naive twins."""

from typing import get_args

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from rlcore.algos.advantages import (
    SequenceAdvantage,
    broadcast_to_tokens,
    gae,
    gdpo,
    group_advantages,
    groups_with_signal,
    overlong_penalty,
    pass_at_k,
    reinforce_pp,
    token_rewards,
    whiten,
)
from rlcore.config.algo import OverlongConfig
from tests.algos import naive
from tests.algos.ragged import GAPPED, RAGGED, Rows, assert_tokens, floats

GROUP_IDS = [7, 3, 7, 7, 3, -1, 12, 12, 7]
"""Groups of 4, 2, 1 and 2 answers, in no order."""
LENGTHS = [5, 1, 9, 2, 2, 4, 30, 1, 3]


def normal(size: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", get_args(SequenceAdvantage))
def test_group_advantages_equal_naive_twin(method: str, dtype: torch.dtype) -> None:
    for seed in range(5):
        scores, greedy = normal(9, seed, dtype), normal(9, seed + 50, dtype)
        actual = group_advantages(
            scores, torch.tensor(GROUP_IDS), method=method, lengths=torch.tensor(LENGTHS), greedy_scores=greedy
        )
        assert actual.dtype == dtype
        expected = naive.group_advantages(scores.tolist(), GROUP_IDS, method, LENGTHS, greedy.tolist())
        rel = 1e-12 if dtype == torch.float64 else 2e-7
        assert actual.tolist() == pytest.approx(expected, rel=rel, abs=rel)


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo", "opo"])
@pytest.mark.parametrize("size", [2, 3, 5, 6, 8, 9, 13])
@pytest.mark.parametrize("score", [0.1, 0.9])
def test_group_advantages_of_equal_scores_are_zero(score: float, size: int, method: str) -> None:
    scores = torch.full((size,), score, dtype=torch.float32)
    actual = group_advantages(
        scores, torch.zeros(size, dtype=torch.int64), method=method, lengths=torch.arange(1, size + 1)
    )
    assert actual.tolist() == [0.0] * size


@pytest.mark.parametrize(
    ("method", "lack"), [("opo", "lengths"), ("reinforce_pp_baseline", "lengths"), ("remax", "greedy_scores")]
)
def test_group_advantages_name_missing_argument(method: str, lack: str) -> None:
    with pytest.raises(ValueError, match=f"method {method} needs {lack}, got None"):
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), method=method)


def test_broadcast_reaches_response_tokens_only() -> None:
    values = normal(4, 1)
    expected = {t: values[n].item() for n, positions in enumerate(GAPPED.answers()) for t in positions}
    assert_tokens(broadcast_to_tokens(values, GAPPED.mask, GAPPED.sequence_ids), expected)


@pytest.mark.parametrize("rows", [RAGGED, GAPPED], ids=["ragged", "gapped"])
def test_whiten_equals_naive_twin(rows: Rows) -> None:
    values = floats(rows, 3, scale=4.0) + 10
    expected = naive.whiten({t: values[t].item() for positions in rows.answers() for t in positions})
    actual = whiten(values, rows.mask)
    assert_tokens(actual, expected, rel=1e-11)
    assert not whiten(torch.full(values.shape, 0.1), rows.mask).any(), "equal values"


marks = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=6)


@given(marks=marks, seed=st.integers(0, 1000), gamma=st.floats(0, 1), lam=st.floats(0, 1))
@example(GAPPED.marks, 1, 1.0, 0.95)
@example(RAGGED.marks, 1, 0.5, 0.0)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_gae_and_token_rewards_equal_naive_twins(marks: list[list[bool]], seed: int, gamma: float, lam: float) -> None:
    rows = Rows(tuple(tuple(sequence) for sequence in marks))
    scores, values, kl = normal(rows.num_sequences, seed), floats(rows, seed), floats(rows, seed + 1)
    penalized = token_rewards(scores, rows.cu_seqlens, rows.mask, kl, 0.25)
    assert_tokens(penalized, naive.token_rewards(scores.tolist(), rows.answers(), kl.tolist(), 0.25))
    rewards = token_rewards(scores, rows.cu_seqlens, rows.mask, None, 0.25)
    assert_tokens(rewards, naive.token_rewards(scores.tolist(), rows.answers(), None, 0.25))
    advantages, returns = gae(rewards, values, rows.mask, rows.sequence_ids, gamma=gamma, lam=lam)
    expected = naive.gae(rewards.tolist(), values.tolist(), rows.answers(), gamma, lam)
    assert_tokens(advantages, expected[0], rel=1e-11)
    assert_tokens(returns, expected[1], rel=1e-11)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp_is_whitened_reward_to_go(gamma: float) -> None:
    rewards = floats(RAGGED, 1)
    advantages, returns = reinforce_pp(rewards, RAGGED.mask, RAGGED.sequence_ids, gamma=gamma)
    expected = {}
    for positions in RAGGED.answers():
        for i, t in enumerate(positions):
            expected[t] = sum(gamma**k * rewards[u].item() for k, u in enumerate(positions[i:]))
    assert_tokens(returns, expected)
    assert_tokens(advantages, naive.whiten(expected), rel=1e-11)


@pytest.mark.parametrize("k", [1, 2, 4, 9])
def test_pass_at_k_is_mean_over_all_sets(k: int) -> None:
    groups = [0] * 8 + [3] * 8 + [1] * 8 + [7] * 3 + [2]
    scores = [1, 0, 0, 0, 0, 0, 0, 0, 1, 0.1, 1, 0, 1, 0.1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1]
    found = pass_at_k(torch.tensor(scores, dtype=torch.float64), torch.tensor(groups), k=k)
    assert found.tolist() == pytest.approx(naive.pass_at_k(scores, groups, k, 0.5), abs=1e-9)
    assert (found[:8].abs().max() > 0) == (k < 8), "with all of them in one set every answer is equal"
    assert found[-4:].tolist() == [0.0] * 4, "equal scores, and a group of one"


@pytest.mark.parametrize("method", get_args(SequenceAdvantage))
def test_integer_scores_give_same_advantages(method: str) -> None:
    scores, ids = torch.tensor([3, 0, 0, 1]), torch.zeros(4, dtype=torch.int64)
    given = {"method": method, "lengths": torch.tensor([1, 2, 3, 4]), "greedy_scores": torch.ones(4)}
    assert torch.equal(group_advantages(scores, ids, **given), group_advantages(scores.float(), ids, **given))
    assert torch.equal(pass_at_k(scores, ids, k=2), pass_at_k(scores.float(), ids, k=2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gdpo_equals_naive_twin(dtype: torch.dtype) -> None:
    groups = torch.tensor([4, 4, 4, 1, 1, 1, 7, 7])
    for seed in range(5):
        parts, weights = normal(24, seed, dtype).view(8, 3), torch.tensor([1.0, 0.5, -2.0], dtype=dtype)
        found = gdpo(torch.zeros(8, dtype=dtype), groups, parts=parts, part_weights=weights)
        expected = naive.gdpo(parts.T.tolist(), weights.tolist(), groups.tolist())
        rel = 1e-12 if dtype == torch.float64 else 1e-6
        assert found.tolist() == pytest.approx(expected, rel=rel, abs=rel)


def naive_penalty(length: int, limit: int, buffer: int, penalty: float) -> float:
    """Compute the overlong penalty by the three cases of the DAPO paper."""
    if length <= limit - buffer:
        return 0.0
    if length <= limit:
        return ((limit - buffer) - length) / buffer * penalty
    return -penalty


@pytest.mark.parametrize(("limit", "buffer", "penalty"), [
    (100, 20, 1.0), (1024, 128, 0.5), (16, 16, 2.0), (8, 1, 1.0), (103, None, 1.0), (3, None, 1.0),
])  # fmt: skip
def test_overlong_penalty_equals_naive_twin(limit: int, buffer: int | None, penalty: float) -> None:
    lengths = torch.arange(0, limit + 5)
    settings = OverlongConfig(enabled=True, buffer_tokens=buffer, penalty=penalty)
    actual = overlong_penalty(lengths, max_response_tokens=limit, settings=settings)
    tokens = {103: 25, 3: 1}[limit] if buffer is None else buffer
    expected = [naive_penalty(length, limit, tokens, penalty) for length in lengths.tolist()]
    assert actual.tolist() == pytest.approx(expected, rel=1e-6)
    assert not overlong_penalty(lengths, max_response_tokens=limit, settings=OverlongConfig()).any()


def naive_informative(scores: list[float], has_score: list[bool], groups: list[int]) -> list[bool]:
    out = []
    for i in range(len(scores)):
        mates = [scores[j] for j in range(len(scores)) if groups[j] == groups[i] and has_score[j]]
        out.append((mates == [scores[i]] and groups.count(groups[i]) == 1) or any(score != mates[0] for score in mates))
    return out


def test_groups_with_signal_equal_naive_twin() -> None:
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
