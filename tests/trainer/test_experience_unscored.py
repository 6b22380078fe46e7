"""Unscored responses do not take part in training."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.batching.pack import pack
from rlcore.config.algo import GROUP_ADVANTAGES, AlgoConfig, KlConfig
from rlcore.errors import UnscoredError
from rlcore.trainer.estimate import Estimate, ForwardResults, estimate
from rlcore.types import Prompt, Rollout, Score
from rlcore.workers.group import LocalGroup
from rlcore.workers.worker import Worker
from tests.helpers.small_run import prepare, train

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
        scores = [
            Score(float(self.totals[index]), {}, failure="failed" if index in UNSCORED else None) for index in chosen
        ]
        packed = pack([self.rollouts[index] for index in chosen], scores, [index // GROUP for index in chosen])
        old, ref, values = (
            torch.from_numpy(np.concatenate([self.per_token[index][which] for index in chosen])).float()
            * packed.loss_mask
            for which in range(3)
        )
        groups = [index // GROUP for index in chosen]
        greedy = [float(np.nan if group == no_greedy else self.greedy[group]) for group in groups]
        passes = ForwardResults(old, ref, values if algo.advantage == "gae" else None)
        return estimate(packed, passes, greedy if algo.advantage == "remax" else None, algo=algo, kl_coef=0.1)


def by_response(found: Estimate, chosen: list[int]) -> dict[int, Tensor]:
    """Return the advantages of each response's tokens."""
    lengths = found.batch.packed.sequence_lengths().tolist()
    return dict(zip(chosen, found.batch.advantages.split(lengths), strict=True))


@pytest.mark.parametrize("method", [*sorted(GROUP_ADVANTAGES), "remax", "gae", "reinforce_pp"])
def test_unscored_responses_do_not_change_advantages(method: str) -> None:
    batch = Batch()
    algo = AlgoConfig(advantage=method, kl=KlConfig(where="reward"), gamma=0.9 if method == "gae" else 1.0)
    everyone = list(range(NUM_ANSWERS))
    scored = [index for index in everyone if index not in UNSCORED]
    # A single scored response of a group has no advantage.
    taught = [index for index in scored if method not in GROUP_ADVANTAGES or index != LONE]
    found, expected = batch.estimated(everyone, algo), batch.estimated(taught, algo)
    with_them, without = by_response(found, everyone), by_response(expected, taught)
    for index in taught:
        torch.testing.assert_close(with_them[index], without[index], rtol=1e-6, atol=1e-7)
    for index in set(everyone) - set(taught):
        assert not with_them[index].any()
    if len(taught) == len(scored):
        assert found.kl_in_reward == pytest.approx(expected.kl_in_reward, rel=1e-6)


def test_unscored_greedy_response_is_no_baseline() -> None:
    batch, algo = Batch(), AlgoConfig(advantage="remax")
    everyone = list(range(NUM_ANSWERS))
    advantages = by_response(batch.estimated(everyone, algo, no_greedy=3), everyone)
    assert not any(advantages[index].any() for index in range(12, 16))
    assert advantages[0].any()


def test_no_advantage_without_scores() -> None:
    batch, none_scored = Batch(), list(range(4, 8))
    for method in ("grpo", "gae", "reinforce_pp", "reinforce_pp_baseline", "opo"):
        found = batch.estimated(none_scored, AlgoConfig(advantage=method, kl=KlConfig(where="reward")))
        assert found.kl_in_reward is None
        assert not found.batch.advantages.any()


NO_WARM_START = "warm_start.enabled=false"
SOMETIMES = "data.scorer=tests.rollout.odd_scorers:fails_on_odd_lengths"
ALWAYS = "data.scorer=tests.rollout.odd_scorers:fails_always"


@pytest.mark.parametrize(
    "overrides",
    [
        ("algo=grpo", "trainer.mini_batch_size=4", "algo.kl.where=loss", "algo.dynamic_sampling.enabled=true"),
        ("algo=remax",),
        ("algo=ppo", "algo.kl.where=reward", "algo.kl.adaptive=true", "reward.num_processes=1"),
    ],
    ids=" ".join,
)
def test_occasional_scorer_failures_keep_steps_finite(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = prepare(tmp_path, NO_WARM_START, SOMETIMES, *overrides)
    with closing(LocalGroup(run.config, str(run.model_directory))) as group:
        steps = train(run, group, 2)
    for step in steps:
        assert 0 < step["reward/unscored_share"] < 1
        assert step["critic/score/min"] == step["critic/score/max"] == 1.0, "unscored responses do not count as 0"
        assert all(np.isfinite(value) for value in step.values())


def test_unscored_step_raises_and_keeps_weights(tmp_path: Path) -> None:
    run = prepare(tmp_path, NO_WARM_START, ALWAYS, "algo.dynamic_sampling.enabled=true")
    with closing(LocalGroup(run.config, str(run.model_directory))) as group:
        before = {name: value.clone() for name, value in group.each(Worker.full_weights)[0].items()}
        with pytest.raises(
            UnscoredError, match=r"^step 1: has no metrics, for \d+ responses have no score; .* always$"
        ):
            train(run, group, 1)
        after = group.each(Worker.full_weights)[0]
    assert all(torch.equal(value, after[name]) for name, value in before.items())
