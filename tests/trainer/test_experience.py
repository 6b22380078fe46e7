"""From prompts to a step's answers, by an answerer whose scores and lengths are written down."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rlcore.batching.loader import PassCounts, RowSampler
from rlcore.checkpoint.state import LoopState
from rlcore.config import PassRatesConfig, RunConfig
from rlcore.config.compose import load_config
from rlcore.errors import UnscoredError
from rlcore.rollout.engine import TRAINING_STREAM, SamplingRequest, response_seed
from rlcore.trainer.clock import PhaseClock
from rlcore.trainer.experience import (
    ExperienceCollector,
    all_unscored_error,
    count_solved,
)
from rlcore.trainer.generate import split_requests
from tests.trainer.batches import PROMPTS, InOrder, Written

START = LoopState(4, 4, 0, 0, 0.0)


def config_of(*overrides: str) -> RunConfig:
    return load_config(
        ["experiment=debug", "trainer.batch_size=3", "trainer.mini_batch_size=3", "rollout.samples_per_prompt=2",
         "warm_start.enabled=false", *overrides]
    )  # fmt: skip


TEACHES, EQUAL, LOST = (0.0, 1.0), (1.0, 1.0), (None, None)
DYNAMIC = ("algo.dynamic_sampling.enabled=true", "algo.dynamic_sampling.max_refills=2")


@pytest.mark.parametrize(
    ("totals", "rounds", "texts", "dropped"),
    [
        ([TEACHES, TEACHES, TEACHES], [[0, 1, 2]], [0, 1, 2], []),
        ([TEACHES, EQUAL, TEACHES, TEACHES], [[0, 1, 2], [3]], [0, 2, 3], [1]),
        ([EQUAL, LOST, TEACHES, EQUAL, TEACHES, EQUAL], [[0, 1, 2], [3, 4], [5]], [2, 4, 0], [1, 3, 5]),
        ([EQUAL] * 9, [[0, 1, 2], [3, 4, 5], [6, 7, 8]], [0, 1, 2], [3, 4, 5, 6, 7, 8]),
    ],
)
def test_groups_that_teach_nothing_are_replaced_as_often_as_allowed(
    totals: list[Sequence[float | None]], rounds: list[list[int]], texts: list[int], dropped: list[int]
) -> None:
    answerer = Written(config_of(*DYNAMIC), dict(enumerate(totals)))
    found = ExperienceCollector(answerer, InOrder(PROMPTS, seed=1)).collect(START, PhaseClock())
    assert [[request.prompt.prompt_id for request in asked[::2]] for asked in answerer.asked] == rounds
    seeds = [request.seed for asked in answerer.asked for request in asked]
    places = [(group, sample) for group in range(len(seeds) // 2) for sample in (0, 1)]
    run_seed = answerer.config.seed
    assert seeds == [response_seed(run_seed, TRAINING_STREAM, 5, *place) for place in places], "of the fifth step"
    assert [text for text in found.texts] == [f"{number}.{sample}" for number in texts for sample in (0, 1)]
    assert [one.prompt.prompt_id for one in found.rollouts[::2]] == texts
    assert [score.total for score in found.scores] == [total or 0.0 for number in texts for total in totals[number]]
    assert found.group_ids == (0, 0, 1, 1, 2, 2)
    assert found.num_prompts_drawn == sum(map(len, rounds))
    assert found.num_groups_dropped == len(dropped)
    assert found.num_tokens_dropped == sum(2 * (1 + number) for number in dropped)
    assert found.num_response_tokens == sum(2 * (1 + number) for number in texts)
    assert found.greedy_scores is None
    assert (found.pass_counts, found.pass_metrics) == ("", {})


def test_without_dynamic_sampling_every_group_is_kept() -> None:
    answerer = Written(config_of(), dict(enumerate([EQUAL, LOST, TEACHES])))
    found = ExperienceCollector(answerer, InOrder(PROMPTS, seed=1)).collect(START, PhaseClock())
    assert found.texts == ("0.0", "0.1", "1.0", "1.1", "2.0", "2.1")
    assert (len(answerer.asked), found.num_prompts_drawn, found.num_groups_dropped) == (1, 3, 0)


def test_a_step_without_any_score_says_how_many_answers_have_none_and_why() -> None:
    answerer = Written(config_of(), dict.fromkeys(range(12), LOST))
    with pytest.raises(UnscoredError) as caught:
        ExperienceCollector(answerer, InOrder(PROMPTS, seed=1)).collect(START, PhaseClock())
    scorer = answerer.config.data.scorer
    told = f"step 5: has no figures, for 6 answers have no score; {scorer} failed, the last time: no scorer"
    assert str(caught.value) == told
    assert str(all_unscored_error("x", "s", ["a"] * 1_234 + ["b"])) == (
        "x: has no figures, for 1,235 answers have no score; s failed, the last time: b"
    )


def test_the_baseline_of_remax_is_one_greedy_answer_to_each_prompt() -> None:
    """Its sample has the number -1: here the last score of the prompt."""
    totals: dict[int, Sequence[float | None]] = {0: (0.0, 0.25), 1: (1.0, None), 2: (0.5, 0.75)}
    answerer = Written(config_of("algo=remax"), totals)
    found = ExperienceCollector(answerer, InOrder(PROMPTS, seed=1)).collect(START, PhaseClock())
    assert answerer.asked[1] == [SamplingRequest(prompt, -1, seed=0) for prompt in PROMPTS[:3]]
    assert answerer.temperatures == [1.0, 0.0]
    assert found.greedy_scores is not None
    assert [None if math.isnan(score) else score for score in found.greedy_scores] == [
        0.25, 0.25, None, None, 0.75, 0.75
    ]  # fmt: skip


def test_the_penalty_of_long_answers_is_in_their_totals_and_a_part_of_its_own() -> None:
    words = ("algo.overlong.enabled=true", "algo.overlong.buffer_tokens=2", "rollout.max_response_tokens=3")
    answerer = Written(config_of("algo=remax", *words), dict.fromkeys(range(12), (1.0, 1.0)))
    found = ExperienceCollector(answerer, InOrder(PROMPTS, seed=1)).collect(START, PhaseClock())
    assert [score.total for score in found.scores] == [1.0, 1.0, 0.5, 0.5, 0.0, 0.0]
    assert [score.parts for score in found.scores[::2]] == [
        {"correct": 1.0, "overlong": 0.0}, {"correct": 1.0, "overlong": -0.5}, {"correct": 1.0, "overlong": -1.0}
    ]  # fmt: skip
    assert found.greedy_scores == (1.0, 1.0, 0.5, 0.5, 0.0, 0.0)


def test_every_group_counts_for_its_row_kept_or_not() -> None:
    settings = PassRatesConfig(draw="band", band=(0.25, 0.75), rest_weight=0.1, fade=0.5)
    counted = RowSampler(range(12), PassCounts.of([0] * 12, [0] * 12), settings)
    totals: list[Sequence[float | None]] = [EQUAL, LOST, TEACHES, (1.0, None), TEACHES, TEACHES]
    answerer = Written(config_of(*DYNAMIC), dict.fromkeys(range(12), LOST) | dict(enumerate(totals)))

    weighed: list[list[float]] = []

    class Unweighed(InOrder):
        def weigh(self, weights: np.ndarray) -> None:
            weighed.append(weights.tolist())

    found = ExperienceCollector(answerer, Unweighed(PROMPTS, seed=1), counted).collect(START, PhaseClock())
    assert weighed == [[1.0] * 12], "once a step"
    after = PassCounts.read(found.pass_counts, 12)
    assert after.samples.tolist() == [2, 0, 2, 1, 2, 2, *[0] * 6]
    assert after.passes.tolist() == [2, 0, 1, 1, 1, 1, *[0] * 6]
    assert found.pass_metrics["pass_rates/rows_retired"] == 2.0
    tally = {7: (1, 3)}
    count_solved([answerer._written(SamplingRequest(PROMPTS[number], 1, 0)) for number in (0, 2, 2, 1)], tally)
    assert tally == {7: (1, 3), 0: (1, 1), 2: (2, 2)}


def test_prompts_drawn_ahead_are_shared_out_with_their_answers_together() -> None:
    requests = [SamplingRequest(PROMPTS[number], sample, 0) for number in (5, 0, 1) for sample in range(2)]
    assert split_requests(requests, 1) == [[0, 1, 2, 3, 4, 5]]
    assert split_requests(requests, 2) == [[0, 1], [2, 3, 4, 5]]
    assert split_requests(requests, 4) == [[0, 1], [4, 5], [2, 3], []]
    twice = [replace(request, seed=1) for request in requests[:2]]
    assert split_requests([*requests[:2], *requests[2:4], *twice], 3) == [[0, 1], [4, 5], [2, 3]]
