"""A model judged on held-out problems: sampled and greedy answers with the weights in use.

The random numbers of an answer depend on the seed of the run and the problem alone, so two checkpoints are compared on
the same draws. What is random in an environment is part of the problem: `data.seed` fixes it.
"""

from collections.abc import Callable, Sequence

import numpy as np

from rlcore.config import SamplingConfig
from rlcore.config.data import ALL_SOURCES
from rlcore.evaluation.result import ProblemResult, Response, ValidationResult
from rlcore.rollout.engine import VALIDATION_STREAM, make_requests
from rlcore.trainer.experience import ResponseSampler, ScoredResponse
from rlcore.types import Prompt

OnScored = Callable[[Sequence[ScoredResponse], bool], None]
"""Takes scored answers, and whether they are the greedy ones."""


def validate(
    sampler: ResponseSampler,
    prompts: Sequence[Prompt],
    *,
    name: str,
    step: int,
    policy_version: int,
    suite: str = "",
    on_scored: OnScored = lambda answers, greedy: None,
) -> ValidationResult:
    """Answers to all `prompts` and their scores, which `keep` is given. `suite`: the fingerprint of theirs, if any."""
    config, settings = sampler.config, sampler.config.validation

    def answered(num_samples: int, sampling: SamplingConfig, *, greedy: bool = False) -> list[Response]:
        requests = make_requests(
            prompts,
            num_samples,
            run_seed=config.seed,
            stream=VALIDATION_STREAM,
            step=0,
            episode_seed=config.data.seed,
        )
        found = sampler.sample(requests, sampling, policy_version=policy_version)
        on_scored(found, greedy)
        return response_results(found)

    answers = answered(settings.samples_per_problem, settings.sampling)
    greedy_answers = answered(1, SamplingConfig(temperature=0.0), greedy=True) if settings.greedy else []
    texts = sampler.decode([prompt.token_ids for prompt in prompts])
    count = settings.samples_per_problem
    problems = tuple(
        ProblemResult(
            prompt_id=prompt.prompt_id,
            difficulty=prompt.difficulty,
            prompt_text=texts[index],
            ground_truth_json=prompt.ground_truth_json,
            greedy=greedy_answers[index] if greedy_answers else None,
            samples=tuple(answers[index * count : (index + 1) * count]),
            data_source=prompt.data_source,
        )
        for index, prompt in enumerate(prompts)
    )
    sources = {prompt.data_source for prompt in prompts}
    return ValidationResult(
        name=name,
        step=step,
        policy_version=policy_version,
        data_source=sources.pop() if len(sources) == 1 else ALL_SOURCES,
        problems=problems,
        settings=settings.evaluation,
        suite=suite,
    )


def response_results(answers: Sequence[ScoredResponse]) -> list[Response]:
    """The answers as results keep them."""
    return [
        Response(
            text=text,
            score=score.total,
            parts=dict(score.parts),
            num_tokens=len(rollout.response_ids),
            finish_reason=rollout.finish_reason,
            logprob=float(rollout.behavior_logprobs.sum(dtype=np.float64)),
            said=score.said,
            failure=score.failure,
        )
        for rollout, score, text in answers
    ]
