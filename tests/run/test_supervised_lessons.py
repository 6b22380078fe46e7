"""Demonstrations in the order in which a warm start shows them, and when it has learned enough."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlcore.batching.loader import PromptStream
from rlcore.batching.prompts import Demonstration
from rlcore.checkpoint.catalog import LoopState
from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.errors import DataError
from rlcore.run.supervised import Demonstrations, SupervisedTraining, SupervisedWorkers, has_learned
from rlcore.types import Prompt


def of(*words: str) -> RunConfig:
    return load_config(["experiment=debug", "warm_start.check_every=4", *words])


@pytest.mark.parametrize(
    ("words", "step", "best_step", "metrics", "learned"),
    [
        (("warm_start.stop_at_reward=0.5",), 8, 8, {"sft/reward": 0.5}, True),
        (("warm_start.stop_at_reward=0.5",), 8, 8, {"sft/reward": 0.49}, False),
        (("warm_start.stop_at_reward=0.5",), 8, 0, {}, False),
        (("warm_start.stop_at_reward=null",), 8, 0, {"sft/reward": 1.0, "sft/held_out_loss": 1.0}, False),
        (("warm_start.stop_at_reward=null", "warm_start.patience=2"), 12, 4, {"sft/held_out_loss": 1.0}, True),
        (("warm_start.stop_at_reward=null", "warm_start.patience=2"), 11, 4, {"sft/held_out_loss": 1.0}, False),
        (("warm_start.stop_at_reward=null", "warm_start.patience=2"), 40, 4, {}, False),
        (("warm_start.stop_at_reward=0.5", "warm_start.patience=2"), 12, 4, {"sft/held_out_loss": 1.0}, True),
    ],
)
def test_training_ends_by_reward_and_patience(
    words: tuple[str, ...], step: int, best_step: int, metrics: dict[str, float], learned: bool
) -> None:
    assert has_learned(of(*words), step, best_step, metrics) is learned


def row(number: int) -> Demonstration:
    return Demonstration([number], [True], Demonstration([-number], [True]) if number else None)


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 20, 44), (1.0, 63, 63)])
def test_share_of_demonstrations_is_misdirected(share: float, least: int, most: int) -> None:
    rows = [row(number) for number in range(64)]
    demonstrations = Demonstrations(PromptStream(rows, seed=1, part=1), (), share, 1, 0)
    drawn = [one.token_ids[0] for one in demonstrations.draw(0, 1, 64)]
    assert sorted(map(abs, drawn)) == list(range(64)), "each once"
    assert least <= sum(number < 0 for number in drawn) <= most
    assert drawn == [one.token_ids[0] for one in demonstrations.draw(0, 1, 64)]
    if 0 < share < 1:
        other = [one.token_ids[0] for one in demonstrations.draw(0, 2, 64)]
        assert [abs(number) for number in other] == [abs(number) for number in drawn]
        assert other != drawn, "by the step, too"
    ahead = [one.token_ids[0] for one in demonstrations.draw(64 - 3, 1, 6)]
    assert list(map(abs, ahead[:3])) == list(map(abs, drawn[-3:]))


def training(config: RunConfig, **found: float) -> Any:
    """Return the parts of a training that the stage's rules read."""
    workers = SimpleNamespace(measure=lambda step: dict(found))
    return cast(Any, SimpleNamespace(_config=config, workers=workers))


@pytest.mark.parametrize(
    ("found", "best"),
    [
        ({"sft/held_out_loss": 1.5}, (-1.5, 8)),
        ({"sft/held_out_loss": 2.0}, (-2.0, 4)),
        ({"sft/held_out_loss": 3.0}, (-2.0, 4)),
        ({"sft/reward": 1.0}, (-2.0, 4)),
    ],
)
def test_first_lowest_held_out_loss_is_best(found: dict[str, float], best: tuple[float, int]) -> None:
    before = LoopState(8, 0, 0, 0, 0.0, best_metric=-2.0, best_step=4)
    metrics, after = SupervisedTraining._evaluate(training(of(), **found), before)
    assert metrics == found
    assert (after.best_metric, after.best_step, after.step) == (*best, 8)


def test_sampled_reward_counts_scored_responses() -> None:
    config, calls = of(), list[Any]()
    scores = [SimpleNamespace(total=total, failure=why) for total, why in ((1.0, None), (0.0, "late"), (0.25, None))]

    def sample(requests: Any, sampling: object, policy_version: int) -> list[Any]:
        calls.append((len(requests), sampling, policy_version))
        return [(None, score, "") for score in scores]

    workers = cast(Any, SimpleNamespace(_problems=[Prompt(number, (1,), "d", "") for number in range(3)]))
    sampler = cast(Any, SimpleNamespace(config=config, sample=sample))
    assert SupervisedWorkers._reward(workers, sampler, 7) == 0.625
    assert calls == [(3, config.rollout.sampling, 7)]
    scores[:] = [SimpleNamespace(total=0.0, failure=why) for why in ("late", "too late")]
    with pytest.raises(
        DataError, match=r"^data\.scorer: .* failed on all 2 .* error: too late\. Repair it, or set warm_"
    ):
        SupervisedWorkers._reward(workers, sampler, 7)
