"""A model judged on held-out problems: sampled and greedy answers with the weights in use.

The random numbers of an answer depend on the seed of the run and the problem alone, so two checkpoints are compared on
the same draws.
"""

from collections.abc import Callable, Sequence

import numpy as np

from rlcore.config import RunConfig, SamplingConfig
from rlcore.config.data import ALL_SOURCES
from rlcore.evaluation.result import Answer, ProblemResult, ValidationResult
from rlcore.rollout.engine import VALIDATION_STREAM, SamplingRequest, requests_for
from rlcore.rollout.scoring import ScoringPool
from rlcore.trainer.clock import PhaseClock
from rlcore.trainer.episodes import Episodes
from rlcore.trainer.experience import Decode, generate
from rlcore.types import Prompt, Rollout, Score
from rlcore.workers.group import WorkerGroup

Keep = Callable[[Sequence[Rollout], Sequence[Score], Sequence[str], bool], None]
"""Takes answers, their scores and texts, and whether they are the greedy ones."""


def keep_nothing(rollouts: Sequence[Rollout], scores: Sequence[Score], texts: Sequence[str], greedy: bool) -> None:
    """A `Keep` for answers that nobody wants to read."""


def validate(
    config: RunConfig,
    group: WorkerGroup,
    prompts: Sequence[Prompt],
    scoring: ScoringPool,
    decode: Decode,
    *,
    name: str,
    step: int,
    policy_version: int,
    episodes: Episodes | None = None,
    suite: str = "",
    keep: Keep = keep_nothing,
) -> ValidationResult:
    """Answers to all `prompts` and their scores, which `keep` is given. `suite`: the fingerprint of theirs, if any."""
    settings = config.validation

    def answered(num_samples: int, sampling: SamplingConfig, *, greedy: bool = False) -> list[Answer]:
        requests = requests_for(prompts, num_samples, run_seed=config.seed, stream=VALIDATION_STREAM, step=0)
        found = _answered(
            config, group, requests, sampling, scoring, decode, policy_version=policy_version, episodes=episodes
        )
        keep(*found, greedy)
        return _with_scores(*found)

    answers = answered(settings.samples_per_problem, settings.sampling)
    greedy_answers = answered(1, SamplingConfig(temperature=0.0), greedy=True) if settings.greedy else []
    texts = decode([prompt.token_ids for prompt in prompts])
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
        settings=settings.judging,
        suite=suite,
    )


def answers_to(
    config: RunConfig,
    group: WorkerGroup,
    requests: Sequence[SamplingRequest],
    sampling: SamplingConfig,
    scoring: ScoringPool,
    decode: Decode,
    *,
    policy_version: int,
    episodes: Episodes | None = None,
) -> list[Answer]:
    """Answers to requests with their scores, in the order of the requests."""
    return _with_scores(
        *_answered(config, group, requests, sampling, scoring, decode, policy_version=policy_version, episodes=episodes)
    )


def _answered(
    config: RunConfig,
    group: WorkerGroup,
    requests: Sequence[SamplingRequest],
    sampling: SamplingConfig,
    scoring: ScoringPool,
    decode: Decode,
    *,
    policy_version: int,
    episodes: Episodes | None,
) -> tuple[Sequence[Rollout], Sequence[Score], Sequence[str]]:
    if episodes is not None:
        return episodes.play(group, requests, sampling, policy_version=policy_version, clock=PhaseClock())
    limit = config.rollout.max_response_tokens
    rollouts = generate(group, requests, sampling, limit, policy_version=policy_version)
    texts = decode([rollout.response_ids for rollout in rollouts])
    return rollouts, scoring.score(texts, [rollout.prompt.ground_truth_json for rollout in rollouts]), texts


def _with_scores(rollouts: Sequence[Rollout], scores: Sequence[Score], texts: Sequence[str]) -> list[Answer]:
    return [
        Answer(
            text=text,
            score=score.total,
            parts=dict(score.parts),
            num_tokens=len(rollout.response_ids),
            finish_reason=rollout.finish_reason,
            logprob=float(rollout.behavior_logprobs.sum(dtype=np.float64)),
            said=score.said,
            failure=score.failure,
        )
        for rollout, text, score in zip(rollouts, texts, scores, strict=True)
    ]
