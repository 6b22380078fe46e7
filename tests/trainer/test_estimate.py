"""Advantages, masks and the KL in the reward."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlcore.algos.losses import importance_weights
from rlcore.config.algo import AlgoConfig, ImportanceConfig, KlConfig, RejectionConfig, TeacherConfig
from rlcore.trainer.estimate import Estimate, ForwardResults, ScoreParts, estimate
from rlcore.types import PackedBatch, Score
from tests.models.tiny import answers


def make_batch() -> PackedBatch:
    """Return two prompts with two responses each, of 3, 1, 2 and 2 tokens."""
    packed = answers([(2, (3, 1)), (1, (2, 2))])
    return replace(packed, scores=torch.tensor([1.0, 0.0, 0.5, 2.0]))


def run_estimate(
    packed: PackedBatch, passes: ForwardResults, is_cut: torch.Tensor | None = None, **algo: Any
) -> Estimate:
    return estimate(packed, passes, None, algo=AlgoConfig(**algo), kl_coef=0.5, is_truncated=is_cut)


def test_score_parts_by_weight_order() -> None:
    scores = [Score(1.5, {"b": 2.0, "a": 1.0, "c": 9.0}), Score(0.25, {"a": 3.0})]
    parts = ScoreParts.from_scores(scores, {"a": 0.5, "b": 0.75})
    assert (parts.values.tolist(), parts.weights.tolist()) == ([[1.0, 2.0], [3.0, 0.0]], [0.5, 0.75])
    whole = ScoreParts.from_scores(scores, {})
    assert (whole.values.tolist(), whole.weights.tolist()) == ([[1.5], [0.25]], [1.0])


def test_truncated_responses_are_masked() -> None:
    packed = make_batch()
    is_cut = torch.tensor([True, False, False, True])
    plain = run_estimate(packed, ForwardResults(), advantage="dr_grpo")
    assert plain.masked_share is None
    assert plain.batch.packed.loss_mask is packed.loss_mask
    found = run_estimate(packed, ForwardResults(), is_cut, advantage="dr_grpo", mask_truncated=True)
    assert found.masked_share == pytest.approx(5 / 8)
    kept = packed.loss_mask & ~is_cut[packed.sequence_ids()]
    assert torch.equal(found.batch.packed.loss_mask, kept)
    assert torch.equal(found.batch.advantages, plain.batch.advantages)
    none = replace(packed, loss_mask=torch.zeros_like(packed.loss_mask))
    assert run_estimate(none, ForwardResults(), is_cut, advantage="dr_grpo", mask_truncated=True).masked_share is None


def test_rejected_responses_are_masked() -> None:
    packed = make_batch()
    old = packed.behavior_logprobs.clone()
    old[packed.sequence_ids() == 2] -= 1.0
    rejection = RejectionConfig(level="sequence-mean", cap=2.0)
    found = run_estimate(packed, ForwardResults(old * packed.loss_mask), advantage="dr_grpo", rejection=rejection)
    assert found.masked_share == pytest.approx(2 / 8)
    assert torch.equal(found.batch.packed.loss_mask, packed.loss_mask & (packed.sequence_ids() != 2))
    assert torch.equal(found.response_mask, packed.loss_mask)


def test_importance_weights() -> None:
    packed = make_batch()
    old = (packed.behavior_logprobs + math.log(1.5)) * packed.loss_mask
    importance = ImportanceConfig(mode="truncate")
    found = run_estimate(packed, ForwardResults(old), advantage="dr_grpo", importance=importance)
    rows = (packed.loss_mask, packed.sequence_ids(), packed.num_sequences)
    expected = importance_weights(old, packed.behavior_logprobs, *rows, settings=importance)
    assert torch.equal(found.batch.importance_weights, expected)
    assert set(expected.tolist()) == {0.0, 1.5}
    plain = run_estimate(packed, ForwardResults(old), advantage="dr_grpo").batch.importance_weights
    assert torch.equal(plain, packed.loss_mask.float())


def test_kl_in_reward() -> None:
    packed = make_batch()
    old, ref = packed.loss_mask * -1.0, packed.loss_mask * -1.25
    found = run_estimate(
        packed, ForwardResults(old, ref), advantage="dr_grpo", kl=KlConfig(where="reward", estimator="k1")
    )
    assert found.kl_in_reward == pytest.approx(0.25)
    tokens = torch.tensor([3.0, 1.0, 2.0, 2.0])
    torch.testing.assert_close(found.rewards, packed.scores - 0.5 * 0.25 * tokens)
    assert found.batch.ref_logprobs is None, "the loss does not use it"
    assert found.batch.returns is None
    in_loss = run_estimate(packed, ForwardResults(old, ref), advantage="dr_grpo", kl=KlConfig(where="loss"))
    assert in_loss.batch.ref_logprobs is ref
    assert (in_loss.kl_in_reward, in_loss.rewards.tolist()) == (None, packed.scores.tolist())


def test_values_and_returns_of_gae() -> None:
    packed = make_batch()
    values = torch.arange(packed.num_tokens, dtype=torch.float32) * packed.loss_mask
    found = run_estimate(packed, ForwardResults(values=values), advantage="gae", gamma=1.0, lam=1.0)
    assert found.batch.old_values is values
    assert found.batch.returns is found.returns
    of_answers = [found.returns[packed.loss_mask & (packed.sequence_ids() == i)].tolist() for i in range(4)]
    expected = [[1.0] * 3, [0.0], [0.5] * 2, [2.0] * 2]
    assert of_answers == [pytest.approx(each) for each in expected]
    advantages = found.batch.advantages[packed.loss_mask]
    assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-6), "they are whitened"
    assert float(advantages.std()) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("with_reward", [False, True])
def test_advantage_of_teacher_token_by_token(with_reward: bool) -> None:
    packed = make_batch()
    generator = torch.Generator().manual_seed(3)
    old, teacher = (-torch.rand(packed.num_tokens, generator=generator) for _ in range(2))
    settings = TeacherConfig(path="a/teacher", coef=0.5, with_reward=with_reward)
    by_rewards = run_estimate(packed, ForwardResults(), advantage="dr_grpo")
    found = run_estimate(packed, ForwardResults(old, teacher_logprobs=teacher), advantage="dr_grpo", teacher=settings)
    expected, differences = [], []
    for token in range(packed.num_tokens):
        is_response = bool(packed.loss_mask[token])
        differences += [float(old[token] - teacher[token])] if is_response else []
        reward = float(by_rewards.batch.advantages[token]) if with_reward else 0.0
        expected.append(reward + (0.5 * float(teacher[token] - old[token]) if is_response else 0.0))
    assert found.batch.advantages.tolist() == pytest.approx(expected, rel=1e-6)
    assert found.teacher_kl == pytest.approx(sum(differences) / len(differences), rel=1e-6)
    assert by_rewards.teacher_kl is None
    assert torch.equal(found.rewards, by_rewards.rewards)
    none = replace(packed, loss_mask=torch.zeros_like(packed.loss_mask))
    passes = ForwardResults(old, teacher_logprobs=teacher)
    assert run_estimate(none, passes, advantage="dr_grpo", teacher=settings).teacher_kl is None
