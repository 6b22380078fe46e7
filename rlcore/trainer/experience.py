"""From prompts to scored answers: the engines of all ranks write them, and scoring goes on meanwhile."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from rlcore.algos.advantages import groups_with_signal, overlong_penalty
from rlcore.batching.loader import MixedStream, PromptStream, RowSampler
from rlcore.checkpoint.state import LoopState
from rlcore.config import RunConfig
from rlcore.config.rollout import SamplingConfig
from rlcore.errors import UnscoredError
from rlcore.models.tokenizer import Decode
from rlcore.rollout.engine import TRAINING_STREAM, SamplingRequest, make_requests
from rlcore.rollout.scoring import ScoringJob, ScoringPool
from rlcore.trainer.clock import PhaseClock
from rlcore.trainer.episodes import Episodes
from rlcore.trainer.generate import generate, split_requests
from rlcore.types import Prompt, Rollout, Score
from rlcore.workers.group import WorkerGroup


class StreamScorer:
    """Decodes answers as they end, in a thread, and gives them to the scoring pool, whose processes work beside the
    engine too."""

    def __init__(self, scoring: ScoringPool, decode: Decode) -> None:
        self._scoring = scoring
        self._decode = decode
        self._beside = ThreadPoolExecutor(1)
        self._jobs: list[tuple[list[int], Future[tuple[list[str], ScoringJob]]]] = []

    def submit(self, some: Sequence[tuple[int, Rollout]]) -> None:
        """Start to score a few answers; returns at once."""
        self._jobs.append(([index for index, _ in some], self._beside.submit(self._start, [one for _, one in some])))

    def _start(self, rollouts: Sequence[Rollout]) -> tuple[list[str], ScoringJob]:
        texts = self._decode([rollout.response_ids for rollout in rollouts])
        return texts, self._scoring.submit(texts, [rollout.prompt.ground_truth_json for rollout in rollouts])

    def collect(self) -> tuple[list[Score], list[str]]:
        """Scores and texts in the order of the requests; waits for the last."""
        scored: dict[int, tuple[Score, str]] = {}
        for indices, begun in self._jobs:
            texts, job = begun.result()
            scored.update(zip(indices, zip(self._scoring.collect(job), texts, strict=True), strict=True))
        self._beside.shutdown()
        found = [scored[index] for index in sorted(scored)]
        return [score for score, _ in found], [text for _, text in found]


ScoredResponse = tuple[Rollout, Score, str]
"""An answer, its score, and its text, which was scored."""


class ResponseSampler:
    """Has requests answered by the engines of all ranks, in episodes where `episodes` plays them, and scored."""

    def __init__(
        self,
        config: RunConfig,
        group: WorkerGroup,
        scoring: ScoringPool,
        decode: Decode,
        episodes: Episodes | None = None,
    ) -> None:
        self.config, self.group, self.scoring, self.decode = config, group, scoring, decode
        self._episodes = episodes

    @property
    def unscored(self) -> tuple[int, str]:
        """See `ScoringPool.unscored`."""
        return (self._episodes or self.scoring).unscored

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        sampling: SamplingConfig,
        *,
        policy_version: int,
        clock: PhaseClock | None = None,
        shares: Sequence[Sequence[int]] | None = None,
    ) -> list[ScoredResponse]:
        """Answers in the order of the requests; with scoring processes they are scored while others are written.
        `shares`: see `generate`.

        Raises:
            EngineError: an engine answered with other weights than `policy_version`.
        """
        clock = clock or PhaseClock()
        if self._episodes is not None:
            played = self._episodes.play(self.group, requests, sampling, policy_version=policy_version, clock=clock)
            return list(zip(*played, strict=True))
        limit = self.config.rollout.max_response_tokens
        early = StreamScorer(self.scoring, self.decode) if self.config.reward.num_processes else None
        take = None if early is None else early.submit
        with clock.phase("gen"):
            rollouts = generate(
                self.group, requests, sampling, limit, policy_version=policy_version, on_finished=take, shares=shares
            )
        with clock.phase("reward"):
            if early is not None:
                return list(zip(rollouts, *early.collect(), strict=True))
            texts = self.decode([rollout.response_ids for rollout in rollouts])
            scores = self.scoring.score(texts, [rollout.prompt.ground_truth_json for rollout in rollouts])
            return list(zip(rollouts, scores, texts, strict=True))


@dataclass(frozen=True, slots=True)
class Experience:
    """The answers of one step: `group_ids[i]` counts prompts within the step; `texts[i]` is what was scored.
    `greedy_scores[i]`: score of the greedy answer to the same prompt, NaN where the scorer failed on it; None where
    the algorithm needs none."""

    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    group_ids: tuple[int, ...]
    texts: tuple[str, ...]
    num_prompts_drawn: int
    num_groups_dropped: int
    greedy_scores: tuple[float, ...] | None
    num_tokens_dropped: int = 0
    """Answer tokens of the groups dropped: what their replacement has cost."""
    pass_counts: str = ""
    """Of all rows after this step, where rows are drawn by them (`PassCounts.text`)."""
    pass_metrics: Mapping[str, float] = field(default_factory=dict)
    """What the step has changed of them."""

    @property
    def num_response_tokens(self) -> int:
        """Tokens of all answers, those of environments among them."""
        return sum(len(rollout.response_ids) for rollout in self.rollouts)

    @property
    def num_generated_tokens(self) -> int:
        """The same with the groups dropped."""
        return self.num_response_tokens + self.num_tokens_dropped


class ExperienceCollector:
    """Draws prompts, has them answered and scored; replaces groups that teach nothing, if asked."""

    def __init__(
        self, sampler: ResponseSampler, stream: PromptStream[Prompt] | MixedStream, counted: RowSampler | None = None
    ) -> None:
        """`counted`: the rows of `stream` with their passes, where they are drawn by weights."""
        self._config = sampler.config
        self._answerer = sampler
        self._stream = stream
        self._counted = counted
        self._prepared: dict[LoopState, tuple[list[SamplingRequest], list[list[int]]]] = {}

    def prepare(self, state: LoopState) -> None:
        """Draw the prompts of the step after `state` ahead and share them out, while the ranks work on something
        else."""
        requests = self._first_requests(state)
        self._prepared = {state: (requests, split_requests(requests, self._answerer.group.world_size))}

    def _first_requests(self, state: LoopState) -> list[SamplingRequest]:
        if self._counted is not None:
            self._stream.set_weights(self._counted.weights(state.pass_counts))
        return self._requests(state, 0, self._config.trainer.batch_size)

    def _requests(self, state: LoopState, drawn: int, count: int) -> list[SamplingRequest]:
        """Requests for the next prompts; `drawn`: those of this step before them."""
        return make_requests(
            self._stream.take(state.num_prompts_drawn + drawn, count),
            self._config.rollout.samples_per_prompt,
            run_seed=self._config.seed,
            stream=TRAINING_STREAM,
            step=state.step + 1,
            first_group=drawn,
        )

    def collect(self, state: LoopState, clock: PhaseClock) -> Experience:
        """The experience of the step after `state`.

        Raises:
            UnscoredError: no answer has a score.
        """
        config = self._config
        requests, shares = self._prepared.get(state) or (self._first_requests(state), None)
        wanted = config.trainer.batch_size
        dynamic = config.algo.dynamic_sampling
        kept: list[ScoredResponse] = []
        rest: list[ScoredResponse] = []
        drawn = 0
        tally: dict[int, tuple[int, int]] = {}
        group_size = config.rollout.samples_per_prompt
        for refill in range(1 + dynamic.max_refills):
            if refill:
                requests, shares = self._requests(state, drawn, wanted - len(kept) // group_size), None
            answers = self._answerer.sample(
                requests, config.rollout.sampling, policy_version=state.policy_version, clock=clock, shares=shares
            )
            count_solved(answers, tally)  # of every group, kept or not, and before the penalty on lengths
            drawn += len(requests) // group_size
            useful = self._informative(answers) if dynamic.enabled else [True] * len(answers)
            kept += [answer for answer, good in zip(answers, useful, strict=True) if good]
            rest += [answer for answer, good in zip(answers, useful, strict=True) if not good]
            if len(kept) == wanted * group_size:
                break
        if not tally:
            failures = [str(score.failure) for _, score, _ in answers]
            raise all_unscored_error(f"step {state.step + 1}", config.data.environment or config.data.scorer, failures)
        num_spare = wanted * group_size - len(kept)
        # the penalty comes after the filter, which asks for differing scores, not for differing lengths
        filled, dropped = self._with_overlong_penalty(kept + rest[:num_spare]), rest[num_spare:]
        counted = self._counted
        after, metrics = ("", {}) if counted is None else counted.update(state.pass_counts, tally)
        return Experience(
            rollouts=tuple(rollout for rollout, _, _ in filled),
            scores=tuple(score for _, score, _ in filled),
            group_ids=tuple(index // group_size for index in range(len(filled))),
            texts=tuple(text for _, _, text in filled),
            num_prompts_drawn=drawn,
            num_groups_dropped=drawn - len(filled) // group_size,
            greedy_scores=self._greedy_scores(
                [rollout.prompt for rollout, _, _ in filled], state.policy_version, clock
            ),
            num_tokens_dropped=sum(len(rollout.response_ids) for rollout, _, _ in dropped),
            pass_counts=after,
            pass_metrics=metrics,
        )

    def _greedy_scores(self, prompts: Sequence[Prompt], version: int, clock: PhaseClock) -> tuple[float, ...] | None:
        """ReMax's baseline: for each answer the score of the greedy answer to its prompt, written once a prompt."""
        if self._config.algo.advantage != "remax":
            return None
        unique = list(dict.fromkeys(prompts))
        requests = [SamplingRequest(prompt, sample_index=-1, seed=0) for prompt in unique]
        answers = self._with_overlong_penalty(
            self._answerer.sample(requests, SamplingConfig(temperature=0), policy_version=version, clock=clock)
        )
        found = dict(zip(unique, (score for _, score, _ in answers), strict=True))
        return tuple(found[prompt].total if found[prompt].failure is None else math.nan for prompt in prompts)

    def _with_overlong_penalty(self, answers: list[ScoredResponse]) -> list[ScoredResponse]:
        overlong = self._config.algo.overlong
        if not overlong.enabled:
            return answers
        lengths = torch.tensor([len(rollout.response_ids) for rollout, _, _ in answers])
        limit = self._config.rollout.max_response_tokens
        penalties = overlong_penalty(lengths, max_response_tokens=limit, settings=overlong)
        return [
            (rollout, replace(score, total=score.total + extra, parts={**score.parts, "overlong": extra}), text)
            for (rollout, score, text), extra in zip(answers, penalties.tolist(), strict=True)
        ]

    def _informative(self, answers: Sequence[ScoredResponse]) -> list[bool]:
        group_size = self._config.rollout.samples_per_prompt
        scores = torch.tensor([score.total for _, score, _ in answers])
        score_mask = torch.tensor([score.failure is None for _, score, _ in answers])
        groups = torch.arange(len(answers)) // group_size
        return groups_with_signal(scores, score_mask, groups).tolist()


def all_unscored_error(where: str, scorer: str, failures: Sequence[str]) -> UnscoredError:
    """The error where nothing can be made of the answers, given why those that have no score have none."""
    return UnscoredError(
        f"{where}: has no figures, for {len(failures):,} answers have no score; {scorer} failed, the last time: "
        f"{failures[-1]}"
    )


def count_solved(answers: Sequence[ScoredResponse], tally: dict[int, tuple[int, int]]) -> None:
    """Add (right answers, scored answers) of each prompt to a tally by `prompt_id`."""
    for rollout, score, _ in answers:
        if score.failure is None:
            passes, scored = tally.get(rollout.prompt.prompt_id, (0, 0))
            tally[rollout.prompt.prompt_id] = passes + score.solved, scored + 1
