"""Held-out problems are answered at the settings' temperature, and once greedily."""

from collections.abc import Sequence
from pathlib import Path

from rlcore.config.rollout import SamplingConfig
from rlcore.rollout.engine import SamplingRequest
from rlcore.rollout.scoring import ScoringPool
from rlcore.run.problems import Problems
from rlcore.runtime.local import LocalGroup
from rlcore.trainer.experience import Answerer, ScoredAnswer
from rlcore.trainer.validate import validate
from rlcore.types import Rollout
from rlcore.workers.worker import Worker
from tests.small_run import prepare


def test_greedy_answers_are_those_of_temperature_0(tmp_path: Path) -> None:
    run = prepare(tmp_path, "runtime=local", "validation.greedy=true", "validation.samples_per_problem=2")
    config = run.config
    problems = Problems.read(config, run.inputs)
    prompts = problems.held_out(limited=False)[:6]
    kept: dict[bool, list[Rollout]] = {}

    def keep(answers: Sequence[ScoredAnswer], greedy: bool) -> None:
        kept[greedy] = [rollout for rollout, _, _ in answers]

    group = LocalGroup(config, str(run.model_directory))
    try:
        group.each(Worker.hand_over, 0)
        (worker,) = group.each(lambda worker: worker)
        with ScoringPool(config.data.scorer, config.reward) as scoring:
            answerer = Answerer(config, group, scoring, problems.decode)
            found = validate(answerer, prompts, name="before", step=0, policy_version=0, keep=keep)
        assert [len(kept[greedy]) for greedy in (False, True)] == [12, 6]
        requests = [SamplingRequest(prompt, 0, seed=99) for prompt in prompts]
        likeliest = worker._engine.generate(
            requests, SamplingConfig(temperature=0.0), config.rollout.max_response_tokens
        )
        assert [one.response_ids.tolist() for one in kept[True]] == [one.response_ids.tolist() for one in likeliest]
        assert {one.prompt for one in kept[False]} == set(prompts)
        assert len(found.problems) == 6
    finally:
        group.close()
