"""Optimizer steps, token selection, and the batch of each rank."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.algos.aggregation import token_covariance
from rlcore.algos.objective import PolicyStatistics, ValueStatistics
from rlcore.batching.balance import Balancer
from rlcore.batching.pack import pack, select_train, token_indices
from rlcore.checkpoint.catalog import LoopState
from rlcore.config import RunConfig
from rlcore.config.algo import AlgoConfig, KlConfig
from rlcore.config.compose import load_config
from rlcore.trainer import PhaseClock, update
from rlcore.types import PackedBatch, Prompt, Rollout, Score, TrainBatch
from rlcore.workers.worker import Worker
from tests.helpers.settings import settings
from tests.models.tiny import answers
from tests.trainer.batches import UPDATE, Ranks, rank_updates

OF_CRITIC = {
    "critic/vf_loss": 3.0, "critic/vf_clipfrac": 0.25, "critic/vpred_mean": 0.5, "critic/grad_norm": 0.25,
    "critic/lr": 1e-4,
}  # fmt: skip
OF_POLICY = {
    "actor/pg_loss": 1.0, "actor/entropy": 2.0, "actor/ppo_kl": 0.5, "actor/pg_clipfrac": 0.75,
    "actor/pg_clipfrac_lower": 0.25, "actor/grad_norm": 0.5, "actor/lr": 1e-3, "actor/kl_coef": 0.125,
}  # fmt: skip


@pytest.mark.parametrize(("settings_of", "more"), [
    (AlgoConfig(), {}),
    (AlgoConfig(kl=KlConfig(where="reward")), {}),
    (AlgoConfig(kl=KlConfig(where="loss")), {"actor/kl_loss": 3.0, "actor/ref_kl": 0.25}),
    (AlgoConfig(aggregation="seq-mean-token-mean"), {"actor/token_entropy": 2.5}),
    (AlgoConfig(entropy_control={"target": 0.3}), {"actor/entropy_coef": 0.01}),
])  # fmt: skip
def test_update_metrics_by_settings(settings_of: AlgoConfig, more: dict[str, float]) -> None:
    assert UPDATE.metrics(settings_of) == {**OF_CRITIC, **OF_POLICY, **more}
    assert update.Update(critic=UPDATE.critic).metrics(settings_of) == OF_CRITIC


@pytest.mark.parametrize(("words", "expected"), [
    ("", False), ("trainer.mini_batch_size=2", True), ("trainer.epochs_per_batch=2", True),
    ("algo.importance.mode=truncate", True), ("algo.rejection.level=sequence-mean", True),
    ("algo.kl.where=reward", True), ("algo.kl.where=loss", False), ("algo.top_entropy=0.9", True),
    ("algo.clip_cov.share=0.1", True), ("algo.policy_loss=kl_cov", True), ("trainer.old_logprobs=recompute", True),
    ("trainer.old_logprobs=behavior trainer.mini_batch_size=2", False),
])  # fmt: skip
def test_needs_old_logprobs(words: str, expected: bool) -> None:
    own = "" if "mini_batch_size" in words else " trainer.mini_batch_size=4"
    assert update.needs_old_logprobs(settings(f"trainer.batch_size=4{own} {words}".strip())) is expected


PPO = ("algo=ppo", "trainer.total_steps=10", "optim.lr=1e-3", "optim.schedule=linear", "critic.optim.lr=1e-2",
       "critic.optim.schedule=linear", "critic.warmup_steps=3", "algo.entropy_coef=0.5", "trainer.batch_size=4",
       "trainer.mini_batch_size=2")  # fmt: skip


FOUR_PROMPTS = [(2, (3, 1)), (1, (2, 2)), (2, (1, 1)), (3, (2, 1))]


def run_update(config: RunConfig, ranks: Ranks, *, step: int = 5) -> tuple[update.Update, update.SharedBatch]:
    """Update on four prompts with two responses each, at half the learning rate."""
    packed = answers(FOUR_PROMPTS)
    places = torch.arange(packed.num_tokens, dtype=torch.float32)
    old = places if update.num_optimizer_steps(config) > 1 else None
    batch = TrainBatch(packed, old, None, None, places, None, packed.loss_mask.float())
    deal = Balancer(num_ranks=2, max_tokens=100, shape=None).assign(packed, config.trainer.mini_batch_size)
    shared = update.SharedBatch.split(config, batch, deal)
    state = LoopState(step, step, 0, 0, 0.125, entropy_added=0.25)
    return update.update_models(config, ranks, shared, state, PhaseClock()), shared


def test_critic_updates_first_with_own_rate() -> None:
    config = load_config(["experiment=debug", *PPO])
    ranks = Ranks([rank_updates(PolicyStatistics, [True, False])] * 2, [rank_updates(ValueStatistics, [True] * 2)] * 2)
    found, shared = run_update(config, ranks)
    (first, of_critic), (second, of_policy) = ranks.asked
    assert (first, second) == (Worker.update_critic, Worker.update_policy)
    assert [(minis, lr) for _, minis, lr in of_critic] == [(shared.mini_batches, 1e-2 * 0.5)] * 2
    assert [more for _, *more in of_policy] == [[shared.mini_batches, 1e-3 * 0.5, 0.125, 0.25]] * 2
    assert all(part is mine for (part, *_), mine in zip([*of_critic, *of_policy], shared.parts * 2, strict=True))
    assert (found.policy.lr, found.critic.lr, found.kl_coef, found.entropy_coef) == (5e-4, 5e-3, 0.125, 0.75)
    assert (found.policy.num_steps, float(found.policy.stats.num_tokens)) == (2, 4.0)
    assert (found.policy.grad_norm, found.policy.largest_grad_norm) == (1.5, 2.0), "of all ranks together"
    assert (found.share_skipped, found.failure) == (0.5, None)
    assert found.logprobs_before is shared.batch.old_logprobs


@pytest.mark.parametrize(("step", "is_trained"), [(2, False), (3, True)])
def test_policy_waits_for_critic_warmup(step: int, is_trained: bool) -> None:
    config = load_config(["experiment=debug", *PPO])
    ranks = Ranks([rank_updates(PolicyStatistics, [True] * 2)] * 2, [rank_updates(ValueStatistics, [True] * 2)] * 2)
    found, shared = run_update(config, ranks, step=step)
    assert [verb for verb, _ in ranks.asked] == [Worker.update_critic, Worker.update_policy][: 1 + is_trained]
    assert (found.policy is not None, found.critic is not None, found.share_skipped) == (is_trained, True, 0.0)
    assert found.logprobs_before is shared.batch.old_logprobs


def test_update_without_steps_or_numbers_has_no_result() -> None:
    config, verbs = load_config(["experiment=debug", *PPO]), [Worker.update_critic, Worker.update_policy]
    good = [rank_updates(ValueStatistics, [True] * 2)] * 2
    half = Ranks([rank_updates(PolicyStatistics, [True], failed=True)] * 2, good)
    of_critic = Ranks([], [rank_updates(ValueStatistics, [True], failed=True)] * 2)
    without = Ranks([rank_updates(PolicyStatistics, [])] * 2, [rank_updates(ValueStatistics, [])] * 2)
    for ranks, failure, skipped, asked in (
        (half, "no number", 0.5, verbs), (of_critic, "no number", 1.0, verbs[:1]), (without, "None", 1.0, verbs),
    ):  # fmt: skip
        found, shared = run_update(config, ranks)
        assert [verb for verb, _ in ranks.asked] == asked
        assert (str(found.failure), found.share_skipped, found.policy, found.critic) == (failure, skipped, None, None)
        assert found.logprobs_before is shared.batch.old_logprobs


def test_single_update_returns_logprobs_before() -> None:
    """Ranks return those of their sequences, which are restored to batch order."""
    config = load_config(["experiment=debug", "trainer.batch_size=4", "trainer.mini_batch_size=4"])
    packed = answers(FOUR_PROMPTS)
    places = torch.arange(packed.num_tokens, dtype=torch.float32)
    mine = Balancer(num_ranks=2, max_tokens=100, shape=None).assign(packed, 4).whole.sequences
    own = [select_tokens(places, packed, sequences) for sequences in mine]
    ranks = Ranks([rank_updates(PolicyStatistics, [True], logprobs=each) for each in own], [])
    found, _ = run_update(config, ranks)
    assert torch.equal(found.logprobs_before, places)
    assert found.critic is None
    behavior = settings("trainer.batch_size=4 trainer.mini_batch_size=2 trainer.old_logprobs=behavior")
    several = Ranks([rank_updates(PolicyStatistics, [True] * 2, logprobs=each) for each in own], [])
    assert run_update(behavior, several)[0].logprobs_before is None, "the second update has other weights"


TWO_HALVES = "trainer.batch_size=4 trainer.mini_batch_size=2 rollout.samples_per_prompt=3"
HALVES = (range(6), range(6, 12))


def make_batch() -> tuple[TrainBatch, Tensor]:
    """Return four prompts with three ragged responses each, and entropies."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 9, size=12).tolist()
    rollouts = [
        Rollout(Prompt(n // 3, (5, 6), "countdown", "{}"), n % 3, np.full(k, 7), np.zeros(k, np.float32), "stop", 0)
        for n, k in enumerate(lengths)
    ]
    packed = pack(rollouts, [Score(0.0, {})] * 12, [n // 3 for n in range(12)])
    old, advantages, entropy = (torch.from_numpy(rng.standard_normal(packed.num_tokens)).float() for _ in range(3))
    weights = packed.loss_mask.float() * 2
    return TrainBatch(packed, old, None, None, advantages, None, weights), entropy


@pytest.mark.parametrize("share", [0.2, 1 / 3, 0.5])
def test_top_entropy_by_mini_batch(share: float) -> None:
    batch, entropy = make_batch()
    found = update.apply_selection(settings(f"{TWO_HALVES} algo.top_entropy={share}"), batch, entropy, num_finished=0)
    for half in HALVES:
        tokens = token_indices(batch.packed.cu_seqlens, half)
        mask = batch.packed.loss_mask[tokens]
        weights, entropies = found.importance_weights[tokens], entropy[tokens]
        kept = weights[mask] != 0
        assert int(kept.sum()) == math.ceil(share * int(mask.sum()))
        assert entropies[mask][kept].min() > entropies[mask][~kept].max()
        assert set(weights.tolist()) == {0.0, 2.0}
    assert torch.equal(found.packed.loss_mask, batch.packed.loss_mask)  # the denominators count all tokens


@pytest.mark.parametrize("words", ["algo.top_entropy=0.3", "algo.policy_loss=kl_cov"])
def test_selection_by_mini_batch(words: str) -> None:
    batch, entropy = make_batch()
    config = settings(f"{TWO_HALVES} {words}")
    whole = update.apply_selection(config, batch, entropy, num_finished=0)
    for half in HALVES:
        tokens = token_indices(batch.packed.cu_seqlens, half)
        alone = update.apply_selection(config, select_train(batch, half), entropy[tokens], num_finished=0)
        mine = select_train(whole, half)
        assert torch.equal(mine.importance_weights, alone.importance_weights)
        assert torch.equal(mine.covariance_rank, alone.covariance_rank)


def test_clip_cov_draws_by_seed_and_step() -> None:
    batch, _ = make_batch()
    words = f"{TWO_HALVES} algo.clip_cov.share=0.1 algo.clip_cov.low=0.05"

    def clip_weights(step: int, seed: int = 1) -> Tensor:
        config = settings(f"{words} seed={seed}")
        return update.apply_selection(config, batch, None, num_finished=step).importance_weights

    assert update.apply_selection(settings(TWO_HALVES), batch, None, num_finished=0) is batch
    assert torch.equal(clip_weights(3), clip_weights(3))
    assert not torch.equal(clip_weights(3), clip_weights(4))
    assert not torch.equal(clip_weights(3), clip_weights(3, seed=2))
    for half in HALVES:
        tokens = token_indices(batch.packed.cu_seqlens, half)
        mask = batch.packed.loss_mask[tokens]
        covariance = token_covariance(batch.old_logprobs[tokens], batch.advantages[tokens], mask)
        out = mask & (clip_weights(3)[tokens] == 0)
        assert int(out.sum()) == math.ceil(0.1 * int(mask.sum()))
        assert covariance[out].min() > 0.05
        assert covariance[out].max() < 5.0


GROUPS = [(3, (2, 5)), (4, (7, 1)), (2, (3, 3)), (5, (4, 6)), (3, (8, 2)), (2, (1, 9))]


def select_tokens(values: Tensor, packed: PackedBatch, sequences: tuple[int, ...]) -> Tensor:
    ends = packed.cu_seqlens.tolist()
    return torch.cat([values[ends[i] : ends[i + 1]] for i in sequences])


def test_shared_batch_parts_and_mini_batches() -> None:
    config = load_config(["experiment=countdown_demo", "trainer.epochs_per_batch=2"])
    packed = answers(GROUPS, unscored=frozenset({2, 3}))
    drawn = torch.from_numpy(np.random.default_rng(1).random((2, packed.num_tokens), dtype=np.float32))
    batch = TrainBatch(packed, drawn[0], None, None, drawn[1], None, packed.loss_mask.float())
    deal = Balancer(num_ranks=2, max_tokens=20, shape=None).assign(packed, 3)
    shared = update.SharedBatch.split(config, batch, deal)
    for sequences, part in zip(deal.whole.sequences, shared.parts, strict=True):
        for name in ("old_logprobs", "advantages", "importance_weights"):
            assert torch.equal(getattr(part, name), select_tokens(getattr(batch, name), packed, sequences))
        assert torch.equal(part.packed.token_ids, select_tokens(packed.token_ids, packed, sequences))
    assert [each.sequences for each in shared.mini_batches] == [range(3), range(3, 6)] * 2
    lengths = [sum(lengths) for _, lengths in GROUPS]
    lengths[1] = 0  # both responses are unscored
    assert [each.denominator.num_tokens for each in shared.mini_batches] == [sum(lengths[:3]), sum(lengths[3:])] * 2
    assert [each.denominator.num_sequences for each in shared.mini_batches] == [4, 6] * 2
    assert {each.denominator.norm_tokens for each in shared.mini_batches} == {config.rollout.max_response_tokens}
    assert [each.num_micro for each in shared.mini_batches] == [each.num_micro for each in deal.mini_batches] * 2
    packed = answers(GROUPS, unscored=frozenset({4, 5, 6, 7}))
    deal = Balancer(num_ranks=1, max_tokens=20, shape=None).assign(packed, 2)
    shared = update.SharedBatch.split(config, replace(batch, packed=packed), deal)
    assert [each.sequences for each in shared.mini_batches] == [range(4), range(8, 12)] * 2, "none without a loss"
