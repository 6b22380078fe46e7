"""What a step's updates report, and which passes they need."""

import math
from dataclasses import fields
from typing import Any

import pytest
import torch

from rlcore.algos.objective import PolicyStatistics, Statistics, ValueStatistics
from rlcore.config.algo import AlgoConfig, KlConfig
from rlcore.config.base import Section
from rlcore.trainer.update import Steps, Update, _summed, measured_before, needs_old_logprobs, num_optimizer_steps
from rlcore.types import TrainBatch
from rlcore.workers.trained import ModelUpdate
from tests.config.test_rules import settings
from tests.models.tiny import answers


def sums(kind: type[Statistics], **given: float) -> Any:
    return kind(*(torch.tensor(given.get(field.name, 0.0), dtype=torch.float64) for field in fields(kind)))


POLICY = sums(
    PolicyStatistics, num_tokens=4, pg_loss=3, entropy=6, kl_loss=9, ppo_kl=2, ref_kl=1, entropy_sum=10, num_clipped=3,
    num_clipped_lower=1,
)  # fmt: skip
VALUE = sums(ValueStatistics, num_tokens=4, vf_loss=6, vpred=2, num_clipped=1)
UPDATE = Update(
    Steps(POLICY, num_steps=3, grad_norm=0.5, largest_grad_norm=0.75, lr=1e-3),
    Steps(VALUE, num_steps=2, grad_norm=0.25, largest_grad_norm=0.3, lr=1e-4),
    kl_coef=0.125,
    entropy_coef=0.01,
)
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
    found = _summed(taken, 0.01)
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
    assert measured_before(settings(ONE_UPDATE), batch) is old
    assert measured_before(settings(f"{ONE_UPDATE} trainer.old_logprobs=behavior"), batch) is None
