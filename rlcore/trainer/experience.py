"""From prompts to scored answers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rlcore.algos.dynamic_sampling import informative_groups
from rlcore.algos.overlong import overlong_penalty
from rlcore.batching.loader import PromptStream
from rlcore.batching.mixing import MixedStream
from rlcore.config import RunConfig
from rlcore.config.rollout import SamplingConfig
from rlcore.rollout.engine import TRAINING_STREAM, SamplingRequest, requests_for
from rlcore.rollout.scoring import ScoringPool
from rlcore.trainer.answers import Decode, EarlyScores, generate
from rlcore.trainer.clock import PhaseClock
from rlcore.types import Prompt, Rollout, Score
from rlcore.workers.group import WorkerGroup


@dataclass(frozen=True, slots=True)
class Experience:
    """The answers of one step: `group_ids[i]` counts prompts within the step; `texts[i]` is what was scored.
    `greedy_scores[i]`: score of the greedy answer to the same prompt, NaN where the scorer failed on it; empty where
    the algorithm needs none."""

    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    group_ids: tuple[int, ...]
    texts: tuple[str, ...]
    num_prompts_drawn: int
    num_groups_dropped: int
    greedy_scores: tuple[float, ...]


class ExperienceCollector:
    """Draws prompts, has them answered and scored; replaces groups that teach nothing, if asked."""

    def __init__(
        self,
        config: RunConfig,
        group: WorkerGroup,
        stream: PromptStream | MixedStream,
        scoring: ScoringPool,
        decode: Decode,
    ) -> None:
        self._config = config
        self._group = group
        self._stream = stream
        self._scoring = scoring
        self._decode = decode

    def collect(self, *, step: int, position: int, policy_version: int, clock: PhaseClock) -> Experience:
        """The experience of one step, from prompt number `position` of the stream on."""
        config = self._config
        wanted = config.trainer.batch_size
        dynamic = config.algo.dynamic_sampling
        kept: list[tuple[Rollout, Score, str]] = []
        rest: list[tuple[Rollout, Score, str]] = []
        drawn = 0
        group_size = config.rollout.samples_per_prompt
        for _ in range(dynamic.max_refills if dynamic.enabled else 1):
            missing = wanted - len(kept) // group_size
            prompts = self._stream.take(position + drawn, missing)
            answers = self._answer(prompts, step=step, first_group=drawn, version=policy_version, clock=clock)
            drawn += missing
            if not dynamic.enabled:
                kept = answers
                break
            useful = self._informative(answers)
            kept += [answer for answer, good in zip(answers, useful, strict=True) if good]
            rest += [answer for answer, good in zip(answers, useful, strict=True) if not good]
            if len(kept) == wanted * group_size:
                break
        filled = kept + rest[: wanted * group_size - len(kept)]
        return Experience(
            rollouts=tuple(rollout for rollout, _, _ in filled),
            scores=tuple(score for _, score, _ in filled),
            group_ids=tuple(index // group_size for index in range(len(filled))),
            texts=tuple(text for _, _, text in filled),
            num_prompts_drawn=drawn,
            num_groups_dropped=drawn - len(filled) // group_size,
            greedy_scores=self._greedy_scores([rollout.prompt for rollout, _, _ in filled], policy_version, clock),
        )

    def _greedy_scores(self, prompts: Sequence[Prompt], version: int, clock: PhaseClock) -> tuple[float, ...]:
        """ReMax's baseline: for each answer the score of the greedy answer to its prompt, written once a prompt."""
        if self._config.algo.advantage != "remax":
            return ()
        unique = list(dict.fromkeys(prompts))
        requests = [SamplingRequest(prompt, sample_index=-1, seed=0) for prompt in unique]
        limit = self._config.rollout.max_response_tokens
        with clock.phase("gen"):
            rollouts = generate(self._group, requests, SamplingConfig(temperature=0), limit, policy_version=version)
        with clock.phase("reward"):
            scores = self._with_overlong_penalty(rollouts, self._score(rollouts)[0])
            found = dict(zip(unique, scores, strict=True))
        return tuple(found[prompt].total if found[prompt].failure is None else math.nan for prompt in prompts)

    def _answer(
        self, prompts: Sequence[Prompt], *, step: int, first_group: int, version: int, clock: PhaseClock
    ) -> list[tuple[Rollout, Score, str]]:
        config = self._config
        requests = requests_for(
            prompts,
            config.rollout.samples_per_prompt,
            run_seed=config.seed,
            stream=TRAINING_STREAM,
            step=step,
            first_group=first_group,
        )
        early = EarlyScores(self._scoring, self._decode) if config.reward.num_processes else None
        with clock.phase("gen"):
            rollouts = generate(
                self._group,
                requests,
                config.rollout.sampling,
                config.rollout.max_response_tokens,
                policy_version=version,
                take=None if early is None else early.take,
            )
        with clock.phase("reward"):
            scores, texts = self._score(rollouts) if early is None else early.collect()
            scores = self._with_overlong_penalty(rollouts, scores)
        return list(zip(rollouts, scores, texts, strict=True))

    def _score(self, rollouts: Sequence[Rollout]) -> tuple[list[Score], list[str]]:
        texts = self._decode([rollout.response_ids for rollout in rollouts])
        return self._scoring.score(texts, [rollout.prompt.ground_truth_json for rollout in rollouts]), texts

    def _with_overlong_penalty(self, rollouts: Sequence[Rollout], scores: list[Score]) -> list[Score]:
        overlong = self._config.algo.overlong
        if not overlong.enabled:
            return scores
        lengths = torch.tensor([len(rollout.response_ids) for rollout in rollouts])
        limit = self._config.rollout.max_response_tokens
        penalties = overlong_penalty(lengths, max_response_tokens=limit, settings=overlong)
        return [
            replace(score, total=score.total + extra, parts={**score.parts, "overlong": extra})
            for score, extra in zip(scores, penalties.tolist(), strict=True)
        ]

    def _informative(self, answers: Sequence[tuple[Rollout, Score, str]]) -> list[bool]:
        group_size = self._config.rollout.samples_per_prompt
        scores = torch.tensor([score.total for _, score, _ in answers])
        score_mask = torch.tensor([score.failure is None for _, score, _ in answers])
        groups = torch.arange(len(answers)) // group_size
        return informative_groups(scores, score_mask, groups).tolist()
