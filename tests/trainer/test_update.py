"""What a step's updates report, and which passes they need."""

import math
from typing import Any

import pytest
import torch

from rlcore.algos.objective import PolicyStatistics, ValueStatistics
from rlcore.batching.balance import Balancer
from rlcore.checkpoint.state import LoopState
from rlcore.config import RunConfig
from rlcore.config.algo import AlgoConfig, KlConfig
from rlcore.config.base import Section
from rlcore.config.compose import load_config
from rlcore.trainer.clock import PhaseClock
from rlcore.trainer.update import (
    SharedBatch,
    Update,
    _sum_steps,
    logprobs_before_update,
    needs_old_logprobs,
    num_optimizer_steps,
    update_models,
)
from rlcore.types import TrainBatch
from rlcore.workers.trained_model import ModelUpdate
from rlcore.workers.worker import Worker
from tests.helpers.settings import settings
from tests.models.tiny import answers
from tests.trainer.batches import UPDATE, Ranks, rank_updates, sums

OF_CRITIC = {
    "critic/vf_loss": 3.0, "critic/vf_clipfrac": 0.25, "critic/vpred_mean": 0.5, "critic/grad_norm": 0.25,
    "critic/lr": 1e-4,
}  # fmt: skip
OF_POLICY = {
    "actor/pg_loss": 1.0, "actor/entropy": 2.0, "actor/ppo_kl": 0.5, "actor/pg_clipfrac": 0.75,
    "actor/pg_clipfrac_lower": 0.25, "actor/grad_norm": 0.5, "actor/lr": 1e-3, "actor/kl_coef": 0.125,
}  # fmt: skip


def algo(**given: Any) -> AlgoConfig:
    return AlgoConfig(**given)


def with_target(target: float) -> AlgoConfig:
    control: Section = AlgoConfig().entropy_control.model_copy(update={"target": target})
    return AlgoConfig().model_copy(update={"entropy_control": control})


@pytest.mark.parametrize(
    ("settings_of", "more"),
    [
        (algo(), {}),
        (algo(kl=KlConfig(where="reward")), {}),
        (algo(kl=KlConfig(where="loss")), {"actor/kl_loss": 3.0, "actor/ref_kl": 0.25}),
        (algo(aggregation="seq-mean-token-mean"), {"actor/token_entropy": 2.5}),
        (with_target(0.3), {"actor/entropy_coef": 0.01}),
    ],
)
def test_an_update_tells_what_its_settings_have_in_the_loss(settings_of: AlgoConfig, more: dict[str, float]) -> None:
    assert UPDATE.metrics(settings_of) == {**OF_CRITIC, **OF_POLICY, **more}


def test_a_model_that_took_no_step_tells_nothing() -> None:
    assert Update().metrics(algo(kl=KlConfig(where="loss"))) == {}
    assert Update(critic=UPDATE.critic).metrics(algo()) == OF_CRITIC
    assert Update(policy=UPDATE.policy, kl_coef=0.125).metrics(algo()) == OF_POLICY


def test_the_kl_is_that_of_the_place_where_it_is_measured() -> None:
    in_loss, in_reward = algo(kl=KlConfig(where="loss")), algo(kl=KlConfig(where="reward"))
    assert [UPDATE.observed_kl(in_loss, 0.75), UPDATE.observed_kl(in_reward, 0.75)] == [0.25, 0.75]
    assert Update().observed_kl(in_loss, 0.75) is None
    assert UPDATE.observed_kl(algo(), None) is None


def test_steps_and_ranks_are_added_up_and_the_norm_is_that_of_each_step() -> None:
    """A norm is of all ranks already; each of them reports it."""
    taken = [
        [ModelUpdate(sums(ValueStatistics, num_tokens=count, vpred=1), norm) for count in (1, 2)]
        for norm in (0.5, 1.5, 1.0)
    ]
    found = _sum_steps(taken, 0.01)
    assert (found.num_steps, found.grad_norm, found.largest_grad_norm, found.lr) == (3, 1.0, 1.5, 0.01)
    assert (float(found.stats.num_tokens), float(found.stats.vpred)) == (9.0, 6.0)


def test_the_last_mini_batch_may_be_short_and_counts_in_every_epoch() -> None:
    for batch, mini, epochs, steps in ((8, 8, 1, 1), (8, 4, 1, 2), (9, 4, 2, 6), (8, 4, 3, 6)):
        words = f"trainer.batch_size={batch} trainer.mini_batch_size={mini} trainer.epochs_per_batch={epochs}"
        assert num_optimizer_steps(settings(words)) == steps


ONE_UPDATE = "trainer.batch_size=4 trainer.mini_batch_size=4"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", False),
        ("trainer.mini_batch_size=2", True),
        ("trainer.epochs_per_batch=2", True),
        ("algo.importance.mode=truncate", True),
        ("algo.rejection.level=sequence-mean", True),
        ("algo.kl.where=reward", True),
        ("algo.kl.where=loss", False),
        ("trainer.old_logprobs=recompute", True),
        ("trainer.old_logprobs=behavior trainer.mini_batch_size=2", False),
    ],
)
def test_a_pass_of_its_own_is_made_where_something_is_compared_with_the_old_policy(words: str, expected: bool) -> None:
    own = "" if "mini_batch_size" in words else " trainer.mini_batch_size=4"
    assert needs_old_logprobs(settings(f"trainer.batch_size=4{own} {words}".strip())) is expected


def test_what_the_sampler_says_is_not_what_the_trainer_has_measured() -> None:
    packed = answers([(2, (3,))])
    old = torch.full((packed.num_tokens,), math.log(0.5))
    batch = TrainBatch(packed, old, None, None, old, None, old)
    assert logprobs_before_update(settings(ONE_UPDATE), batch) is old
    assert logprobs_before_update(settings(f"{ONE_UPDATE} trainer.old_logprobs=behavior"), batch) is None


PPO = ("algo=ppo", "trainer.total_steps=10", "optim.lr=1e-3", "optim.schedule=linear", "critic.optim.lr=1e-2",
       "critic.optim.schedule=linear", "critic.warmup_steps=3", "algo.entropy_coef=0.5", "trainer.batch_size=4",
       "trainer.mini_batch_size=2")  # fmt: skip


def updated(config: RunConfig, ranks: Ranks, *, step: int = 5) -> tuple[Update, SharedBatch]:
    """The update of four prompts with two answers each, with the learning rate halved."""
    packed = answers([(2, (3, 1)), (1, (2, 2)), (2, (1, 1)), (3, (2, 1))])
    places = torch.arange(packed.num_tokens, dtype=torch.float32)
    old = places if num_optimizer_steps(config) > 1 else None
    batch = TrainBatch(packed, old, None, None, places, None, packed.loss_mask.float())
    deal = Balancer(num_ranks=2, max_tokens=100, shape=None).assign(packed, config.trainer.mini_batch_size)
    shared = SharedBatch.from_deal(config, batch, deal)
    state = LoopState(step, step, 0, 0, 0.125, entropy_added=0.25)
    return update_models(config, ranks, shared, state, PhaseClock()), shared


def test_the_critic_comes_first_and_each_model_has_its_own_rate() -> None:
    config = load_config(["experiment=debug", *PPO])
    ranks = Ranks([rank_updates(PolicyStatistics, [True, False])] * 2, [rank_updates(ValueStatistics, [True] * 2)] * 2)
    found, shared = updated(config, ranks)
    (first, of_critic), (second, of_policy) = ranks.asked
    assert (first, second) == (Worker.update_critic, Worker.update_policy)
    assert [(minis, lr) for _, minis, lr in of_critic] == [(shared.mini_batches, 1e-2 * 0.5)] * 2
    assert [more for _, *more in of_policy] == [[shared.mini_batches, 1e-3 * 0.5, 0.125, 0.25]] * 2
    assert [part is mine for (part, *_), mine in zip([*of_critic, *of_policy], shared.parts * 2, strict=True)] == [
        True
    ] * 4
    assert found.policy is not None
    assert found.critic is not None
    assert (found.policy.lr, found.critic.lr, found.kl_coef, found.entropy_coef) == (5e-4, 5e-3, 0.125, 0.75)
    assert (found.policy.num_steps, found.policy.grad_norm, float(found.policy.stats.num_tokens)) == (2, 1.5, 4.0)
    assert (found.share_skipped, found.failure) == (0.5, None)
    assert found.logprobs_before is shared.batch.old_logprobs


@pytest.mark.parametrize(("step", "is_trained"), [(2, False), (3, True)])
def test_the_policy_is_left_alone_until_the_critic_is_warm(step: int, is_trained: bool) -> None:
    config = load_config(["experiment=debug", *PPO])
    ranks = Ranks([rank_updates(PolicyStatistics, [True] * 2)] * 2, [rank_updates(ValueStatistics, [True] * 2)] * 2)
    found, shared = updated(config, ranks, step=step)
    assert [verb for verb, _ in ranks.asked] == [Worker.update_critic, Worker.update_policy][: 1 + is_trained]
    assert (found.policy is not None, found.critic is not None, found.share_skipped) == (is_trained, True, 0.0)
    assert found.logprobs_before is shared.batch.old_logprobs


def test_what_follows_a_step_that_is_not_finite_is_left_out() -> None:
    config = load_config(["experiment=debug", *PPO])
    good = [rank_updates(ValueStatistics, [True] * 2)] * 2
    half = Ranks([rank_updates(PolicyStatistics, [True], failed=True)] * 2, good)
    found, shared = updated(config, half)
    assert (str(found.failure), found.share_skipped, found.policy, found.critic) == ("no number", 0.5, None, None)
    assert found.logprobs_before is shared.batch.old_logprobs
    of_critic = Ranks([], [rank_updates(ValueStatistics, [True], failed=True)] * 2)
    found, shared = updated(config, of_critic)
    assert [verb for verb, _ in of_critic.asked] == [Worker.update_critic]
    assert (str(found.failure), found.share_skipped, found.policy, found.critic) == ("no number", 1.0, None, None)
    assert found.logprobs_before is shared.batch.old_logprobs


def test_without_a_step_nothing_of_the_policy_is_told() -> None:
    config = load_config(["experiment=debug", *PPO])
    ranks = Ranks([rank_updates(PolicyStatistics, [])] * 2, [rank_updates(ValueStatistics, [])] * 2)
    found, shared = updated(config, ranks)
    assert (found.policy, found.critic, found.share_skipped, found.failure) == (None, None, 1.0, None)
    assert found.logprobs_before is shared.batch.old_logprobs


def test_the_only_update_of_a_step_gives_the_log_probabilities_before_it() -> None:
    """Each rank those of its own sequences, which are put in the order of the batch."""
    config = load_config(["experiment=debug", "trainer.batch_size=4", "trainer.mini_batch_size=4"])
    packed = answers([(2, (3, 1)), (1, (2, 2)), (2, (1, 1)), (3, (2, 1))])
    places = torch.arange(packed.num_tokens, dtype=torch.float32)
    mine = Balancer(num_ranks=2, max_tokens=100, shape=None).assign(packed, 4).whole.sequences
    ends = packed.cu_seqlens.tolist()
    own = [torch.cat([places[ends[i] : ends[i + 1]] for i in sequences]) for sequences in mine]
    ranks = Ranks([rank_updates(PolicyStatistics, [True], logprobs=each) for each in own], [])
    found, _ = updated(config, ranks)
    assert found.logprobs_before is not None
    assert torch.equal(found.logprobs_before, places)
    assert found.critic is None
    behavior = load_config(
        ["experiment=debug", "trainer.batch_size=4", "trainer.mini_batch_size=2", "trainer.old_logprobs=behavior"]
    )
    several = Ranks([rank_updates(PolicyStatistics, [True] * 2, logprobs=each) for each in own], [])
    assert updated(behavior, several)[0].logprobs_before is None, "those of the second are of other weights"
    dropping = load_config(
        [
            "experiment=debug",
            "trainer.batch_size=4",
            "trainer.mini_batch_size=4",
            "model.lora.rank=4",
            "model.lora.dropout=0.1",
        ]
    )
    assert updated(dropping, ranks)[0].logprobs_before is None, "those of a pass with dropout are noisy"
