"""Advantages, masks and the KL in the reward."""

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.algos.losses import importance_weights
from rlcore.batching.pack import pack
from rlcore.config.algo import GROUP_ADVANTAGES, AlgoConfig, ImportanceConfig, KlConfig, RejectionConfig, TeacherConfig
from rlcore.errors import UnscoredError
from rlcore.trainer.update import Estimate, ForwardResults, estimate, score_parts
from rlcore.types import PackedBatch, Prompt, Rollout, Score
from rlcore.workers.group import LocalGroup
from rlcore.workers.worker import Worker
from tests.helpers.small_run import SmallRun, prepare, train
from tests.models.tiny import answers


def make_batch() -> PackedBatch:
    """Return two prompts with two responses each, of 3, 1, 2 and 2 tokens."""
    packed = answers([(2, (3, 1)), (1, (2, 2))])
    return replace(packed, scores=torch.tensor([1.0, 0.0, 0.5, 2.0]))


def run_estimate(packed: PackedBatch, *passes: Tensor | None, cut: tuple[int, ...] = (), **algo: Any) -> Estimate:
    """Estimate with advantages `dr_grpo`, unless `algo` names others. `cut`: numbers of truncated responses."""
    parts, is_cut = (packed.scores[:, None], torch.ones(1)), torch.zeros(packed.num_sequences, dtype=torch.bool)
    is_cut[[*cut]] = True
    config, results = AlgoConfig(**{"advantage": "dr_grpo", **algo}), ForwardResults(*passes)
    return estimate(packed, results, None, algo=config, kl_coef=0.5, parts=parts, is_truncated=is_cut)


def without_loss(packed: PackedBatch) -> PackedBatch:
    return replace(packed, loss_mask=torch.zeros_like(packed.loss_mask))


def test_score_parts_by_weight_order() -> None:
    scores = [Score(1.5, {"b": 2.0, "a": 1.0, "c": 9.0}), Score(0.25, {"a": 3.0})]
    by_weights = [[[1.0, 2.0], [3.0, 0.0]], [0.5, 0.75]]
    for weights, parts in (({"a": 0.5, "b": 0.75}, by_weights), ({}, [[[1.5], [0.25]], [1.0]])):
        assert [each.tolist() for each in score_parts(scores, weights)] == parts


def test_truncated_responses_are_masked() -> None:
    packed = make_batch()
    plain = run_estimate(packed)
    assert plain.masked_share is None
    assert plain.batch.packed.loss_mask is packed.loss_mask
    found = run_estimate(packed, cut=(0, 3), mask_truncated=True)
    assert found.masked_share == pytest.approx(5 / 8)
    kept = packed.loss_mask & torch.tensor([False, True, True, False])[packed.sequence_ids()]
    assert torch.equal(found.batch.packed.loss_mask, kept)
    assert torch.equal(found.batch.advantages, plain.batch.advantages)
    assert run_estimate(without_loss(packed), cut=(0, 3), mask_truncated=True).masked_share is None


def test_rejected_responses_are_masked() -> None:
    packed = make_batch()
    old = packed.behavior_logprobs.clone()
    old[packed.sequence_ids() == 2] -= 1.0
    rejection = RejectionConfig(level="sequence-mean", cap=2.0)
    found = run_estimate(packed, old * packed.loss_mask, rejection=rejection)
    assert found.masked_share == pytest.approx(2 / 8)
    assert torch.equal(found.batch.packed.loss_mask, packed.loss_mask & (packed.sequence_ids() != 2))
    assert torch.equal(found.response_mask, packed.loss_mask)


def test_importance_weights() -> None:
    packed = make_batch()
    old = (packed.behavior_logprobs + math.log(1.5)) * packed.loss_mask
    importance = ImportanceConfig(mode="truncate")
    found = run_estimate(packed, old, importance=importance)
    rows = (packed.loss_mask, packed.sequence_ids(), packed.num_sequences)
    expected = importance_weights(old, packed.behavior_logprobs, *rows, settings=importance)
    assert torch.equal(found.batch.importance_weights, expected)
    assert set(expected.tolist()) == {0.0, 1.5}
    assert torch.equal(run_estimate(packed, old).batch.importance_weights, packed.loss_mask.float())


def test_kl_in_reward() -> None:
    packed = make_batch()
    old, ref = packed.loss_mask * -1.0, packed.loss_mask * -1.25
    found = run_estimate(packed, old, ref, kl=KlConfig(where="reward", estimator="k1"))
    assert found.kl_in_reward == pytest.approx(0.25)
    tokens = torch.tensor([3.0, 1.0, 2.0, 2.0])
    torch.testing.assert_close(found.rewards, packed.scores - 0.5 * 0.25 * tokens)
    assert (found.batch.ref_logprobs, found.batch.returns) == (None, None), "the loss does not use them"
    in_loss = run_estimate(packed, old, ref, kl=KlConfig(where="loss"))
    assert in_loss.batch.ref_logprobs is ref
    assert (in_loss.kl_in_reward, in_loss.rewards.tolist()) == (None, packed.scores.tolist())


def test_values_and_returns_of_gae() -> None:
    packed = make_batch()
    values = torch.arange(packed.num_tokens, dtype=torch.float32) * packed.loss_mask
    found = run_estimate(packed, None, None, values, advantage="gae", gamma=1.0, lam=1.0)
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
    by_rewards, passes = run_estimate(packed), (old, None, None, None, teacher)
    found = run_estimate(packed, *passes, teacher=settings)
    expected, differences = [], []
    for token, is_response in enumerate(packed.loss_mask.tolist()):
        distance = float(old[token] - teacher[token])
        differences += [distance] if is_response else []
        reward = float(by_rewards.batch.advantages[token]) if with_reward else 0.0
        expected.append(reward - 0.5 * distance * is_response)
    assert found.batch.advantages.tolist() == pytest.approx(expected, rel=1e-6)
    assert found.teacher_kl == pytest.approx(sum(differences) / len(differences), rel=1e-6)
    assert by_rewards.teacher_kl is None
    assert torch.equal(found.rewards, by_rewards.rewards)
    assert run_estimate(without_loss(packed), *passes, teacher=settings).teacher_kl is None


GROUP = 4
UNSCORED = {1, *range(4, 8), 8, 9, 11, 17, 18}
"""One response of group 0, all of group 1, all but one of group 2, none of group 3, two of group 4."""
LONE = 10
NUM_ANSWERS = 5 * GROUP


class Batch:
    """Ragged responses with all inputs of an estimate; any subset can be packed."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.rollouts = []
        for index in range(NUM_ANSWERS):
            prompt = Prompt(index // GROUP, (5,) * int(rng.integers(1, 4)), "countdown", "{}")
            answer = rng.integers(3, 60, size=rng.integers(1, 7))
            self.rollouts.append(Rollout(prompt, index % GROUP, answer, np.zeros(len(answer), np.float32), "stop", 0))
        self.totals = rng.random(NUM_ANSWERS)
        self.per_token = [rng.standard_normal((3, len(self._ids(index)))) for index in range(NUM_ANSWERS)]
        self.greedy = rng.random(NUM_ANSWERS // GROUP)

    def _ids(self, index: int) -> tuple[int, ...]:
        return (*self.rollouts[index].prompt.token_ids, *self.rollouts[index].response_ids.tolist())

    def estimated(self, chosen: list[int], algo: AlgoConfig, no_greedy: int | None = None) -> Estimate:
        """Estimate some of the responses. `no_greedy`: the group whose greedy response has no score."""
        failures = ["failed" if index in UNSCORED else None for index in chosen]
        scores = [
            Score(float(self.totals[index]), {}, failure=why) for index, why in zip(chosen, failures, strict=True)
        ]
        groups = [index // GROUP for index in chosen]
        packed = pack([self.rollouts[index] for index in chosen], scores, groups)
        drawn = torch.from_numpy(np.concatenate([self.per_token[index] for index in chosen], axis=1)).float()
        old, ref, values = drawn * packed.loss_mask
        greedy = [float(np.nan if group == no_greedy else self.greedy[group]) for group in groups]
        return estimate(
            packed, ForwardResults(old, ref, values if algo.advantage == "gae" else None),
            greedy if algo.advantage == "remax" else None, algo=algo, kl_coef=0.1, parts=score_parts(scores, {}),
            is_truncated=torch.zeros(len(chosen), dtype=torch.bool),
        )  # fmt: skip


def by_response(found: Estimate, chosen: list[int]) -> dict[int, Tensor]:
    """Return the advantages of each response's tokens."""
    lengths = found.batch.packed.sequence_lengths().tolist()
    return dict(zip(chosen, found.batch.advantages.split(lengths), strict=True))


@pytest.mark.parametrize("method", [*sorted(GROUP_ADVANTAGES), "remax", "gae", "reinforce_pp"])
def test_unscored_responses_do_not_change_advantages(method: str) -> None:
    batch, everyone = Batch(), list(range(NUM_ANSWERS))
    algo = AlgoConfig(advantage=method, kl=KlConfig(where="reward"), gamma=0.9 if method == "gae" else 1.0)
    scored = [index for index in everyone if index not in UNSCORED]
    # A single scored response of a group has no advantage.
    taught = [index for index in scored if method not in GROUP_ADVANTAGES or index != LONE]
    found, expected = batch.estimated(everyone, algo), batch.estimated(taught, algo)
    with_them, without = by_response(found, everyone), by_response(expected, taught)
    for index in taught:
        torch.testing.assert_close(with_them[index], without[index], rtol=1e-6, atol=1e-7)
    assert not any(with_them[index].any() for index in set(everyone) - set(taught))
    if len(taught) == len(scored):
        assert found.kl_in_reward == pytest.approx(expected.kl_in_reward, rel=1e-6)


def test_unscored_greedy_response_is_no_baseline() -> None:
    everyone = list(range(NUM_ANSWERS))
    advantages = by_response(Batch().estimated(everyone, AlgoConfig(advantage="remax"), no_greedy=3), everyone)
    assert not any(advantages[index].any() for index in range(12, 16))
    assert advantages[0].any()


def test_no_advantage_without_scores() -> None:
    batch, none_scored = Batch(), list(range(4, 8))
    for method in ("grpo", "gae", "reinforce_pp", "reinforce_pp_baseline", "opo"):
        found = batch.estimated(none_scored, AlgoConfig(advantage=method, kl=KlConfig(where="reward")))
        assert found.kl_in_reward is None
        assert not found.batch.advantages.any()


def with_scorer(root: Path, scorer: str, *overrides: str) -> SmallRun:
    return prepare(root, "warm_start.enabled=false", f"data.scorer=tests.rollout.odd_scorers:{scorer}", *overrides)


@pytest.mark.parametrize("overrides", [
    ("algo=grpo", "trainer.mini_batch_size=4", "algo.kl.where=loss", "algo.dynamic_sampling.enabled=true"),
    ("algo=remax",),
    ("algo=ppo", "algo.kl.where=reward", "algo.kl.adaptive=true", "reward.num_processes=1"),
], ids=" ".join)  # fmt: skip
def test_occasional_scorer_failures_keep_steps_finite(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = with_scorer(tmp_path, "fails_on_odd_lengths", *overrides)
    with closing(LocalGroup(run.config, str(run.model_directory))) as group:
        steps = train(run, group, 2)
    for step in steps:
        assert 0 < step["reward/unscored_share"] < 1
        assert step["critic/score/min"] == step["critic/score/max"] == 1.0, "unscored responses do not count as 0"
        assert all(np.isfinite(value) for value in step.values())


def test_unscored_step_raises_and_keeps_weights(tmp_path: Path) -> None:
    run = with_scorer(tmp_path, "fails_always", "algo.dynamic_sampling.enabled=true")
    with closing(LocalGroup(run.config, str(run.model_directory))) as group:
        before = {name: value.clone() for name, value in group.each(Worker.full_weights)[0].items()}
        rule = r"^step 1: has no metrics, for \d+ responses have no score; .* always$"
        with pytest.raises(UnscoredError, match=rule):
            train(run, group, 1)
        after = group.each(Worker.full_weights)[0]
    assert all(torch.equal(value, after[name]) for name, value in before.items())
