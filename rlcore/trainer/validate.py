"""Validation on held-out problems, with sampled and greedy responses of the current weights.

Sampling depends only on the run's seed and the problem. Environments get random numbers from `data.seed`."""

from collections.abc import Callable, Sequence

import numpy as np

from rlcore.config import SamplingConfig
from rlcore.config.data import ALL_SOURCES
from rlcore.evaluation.result import ProblemResult, Response, ValidationResult
from rlcore.rollout.engine import VALIDATION_STREAM, make_requests
from rlcore.trainer.experience import ResponseSampler, ScoredResponse
from rlcore.types import Prompt

OnScored = Callable[[Sequence[ScoredResponse], bool], None]
"""A function that receives scored responses, and whether these responses are greedy."""


def validate(
    sampler: ResponseSampler,
    prompts: Sequence[Prompt],
    *,
    name: str,
    step: int,
    policy_version: int,
    suite: str = "",
    on_scored: OnScored = lambda responses, greedy: None,
) -> ValidationResult:
    """Sample and score responses to all `prompts`. `suite`: the fingerprint of the problem suite, or ''."""
    config, settings = sampler.config, sampler.config.validation
    count = settings.samples_per_problem

    def sample(num_samples: int, sampling: SamplingConfig, *, greedy: bool = False) -> list[Response]:
        requests = make_requests(
            prompts, num_samples, run_seed=config.seed, stream=VALIDATION_STREAM, step=0, episode_seed=config.data.seed
        )
        scored = sampler.sample(requests, sampling, policy_version=policy_version)
        on_scored(scored, greedy)
        return response_results(scored)

    responses = sample(count, settings.sampling)
    greedy_responses = sample(1, SamplingConfig(temperature=0.0), greedy=True) if settings.greedy else []
    texts = sampler.decode([prompt.token_ids for prompt in prompts])
    problems = tuple(
        ProblemResult(
            prompt_id=prompt.prompt_id,
            difficulty=prompt.difficulty,
            prompt_text=texts[index],
            ground_truth_json=prompt.ground_truth_json,
            greedy=greedy_responses[index] if greedy_responses else None,
            samples=tuple(responses[index * count : (index + 1) * count]),
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


def response_results(responses: Sequence[ScoredResponse]) -> list[Response]:
    """Convert scored responses into the `Response` objects that a `ValidationResult` stores."""
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
        for rollout, score, text in responses
    ]
