"""Held-out problems are sampled at the configured temperature and greedily."""

from dataclasses import replace

import numpy as np
import pytest

from rlcore.config.compose import load_config
from rlcore.config.data import ALL_SOURCES
from rlcore.evaluation.result import Response
from rlcore.rollout.engine import VALIDATION_STREAM, response_seed
from rlcore.trainer.validate import response_results, validate
from rlcore.types import Prompt, Rollout, Score
from tests.trainer.batches import Written

PROMPTS = [Prompt(4, (5, 6), "countdown", "{}", 2), Prompt(9, (7,), "countdown", '{"a": 1}', 0)]
TOTALS = {4: (0.0, 1.0, 2.0), 9: (0.0, 1.0, 2.0)}


@pytest.mark.parametrize("greedy", [False, True])
def test_validate_collects_responses_by_problem(greedy: bool) -> None:
    words = ("validation.samples_per_problem=3", f"validation.greedy={greedy}", "validation.sampling.temperature=0.5")
    config = load_config(["experiment=debug", *words, "seed=8"])
    answerer, kept = Written(config, TOTALS), []
    found = validate(
        answerer, PROMPTS, name="after", step=5, policy_version=4, suite="abc",
        on_scored=lambda answers, is_greedy: kept.append((len(answers), is_greedy)),
    )  # fmt: skip
    assert (found.name, found.step, found.policy_version, found.suite) == ("after", 5, 4, "abc")
    assert (found.data_source, found.settings) == ("countdown", config.validation.evaluation)
    texts = [[answer.text for answer in one.samples] for one in found.problems]
    assert texts == [["4.0", "4.1", "4.2"], ["9.0", "9.1", "9.2"]]
    assert [one.greedy and one.greedy.text for one in found.problems] == (["4.0", "9.0"] if greedy else [None, None])
    assert answerer.temperatures == [0.5, 0.0][: 1 + greedy]
    asked = [request for requests in answerer.asked for request in requests]
    episodes = {one.environment_seed for one in asked}
    assert episodes == {response_seed(1, VALIDATION_STREAM, 0, group, 2**32 - 1) for group in (0, 1)}, "by data.seed"
    assert kept == [(6, False), (2, True)][: 1 + greedy]
    facts = [
        (one.prompt_id, one.difficulty, one.prompt_text, one.ground_truth_json, one.data_source)
        for one in found.problems
    ]
    assert facts == [(4, 2, "5 6", "{}", "countdown"), (9, 0, "7", '{"a": 1}', "countdown")]
    seeds = [response_seed(8, VALIDATION_STREAM, 0, group, sample) for group in (0, 1) for sample in (0, 1, 2)]
    assert [request.seed for request in asked[:6]] == seeds, "independent of the step"
    several = [PROMPTS[0], replace(PROMPTS[1], data_source="other")]
    mixed = validate(answerer, several, name="x", step=0, policy_version=4)
    assert (mixed.data_source, mixed.suite) == (ALL_SOURCES, "")


def test_response_results() -> None:
    rollout = Rollout(PROMPTS[0], 0, np.array([7, 8]), np.array([-0.25, -1.5], np.float32), "length", 6)
    score = Score(0.5, {"format": 1.0}, said="12", failure=None)
    lost = Score(0.0, {}, failure="no scorer")
    assert response_results([(rollout, score, "text"), (rollout, lost, "")]) == [
        Response("text", 0.5, {"format": 1.0}, 2, "length", -1.75, said="12", failure=None),
        Response("", 0.0, {}, 2, "length", -1.75, said=lost.said, failure="no scorer"),
    ]
