"""The collection of scored responses. Responses are scored while the engines generate further responses."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from rlcore.algos.advantages import groups_with_signal, overlong_penalty
from rlcore.batching.balance import partition
from rlcore.batching.prompts import MixedStream, PromptStream, RowSampler
from rlcore.checkpoint.catalog import LoopState
from rlcore.config import RunConfig
from rlcore.config.rollout import SamplingConfig
from rlcore.errors import EngineError, UnscoredError
from rlcore.models.tokenizer import Decode
from rlcore.rollout.engine import (
    TRAINING_STREAM,
    Carried,
    GroupsInProgress,
    SamplingRequest,
    carried_from_text,
    make_requests,
)
from rlcore.rollout.scoring import ScoringPool
from rlcore.trainer import PhaseClock
from rlcore.trainer.episodes import Episodes
from rlcore.types import Prompt, Rollout, Score
from rlcore.workers.group import WorkerGroup
from rlcore.workers.worker import Worker


def split_requests(requests: Sequence[SamplingRequest], world_size: int) -> list[list[int]]:
    """Return the request indices of each rank, balanced by prompt tokens. All samples of a prompt are on one rank."""
    by_prompt = [list(same) for _, same in itertools.groupby(range(len(requests)), key=lambda i: requests[i].prompt)]
    num_parts = min(world_size, len(by_prompt))
    parts = partition([len(requests[same[0]].prompt.token_ids) * len(same) for same in by_prompt], num_parts)
    parts += [[] for _ in range(world_size - num_parts)]
    return [[i for block in part for i in by_prompt[block]] for part in parts]


class StreamScorer:
    """A scorer that works while other responses are generated. A thread decodes the responses, and the pool's processes
    score them. If the pool has no processes, `collect` decodes and scores the responses."""

    def __init__(self, scoring: ScoringPool, decode: Decode, *, has_processes: bool) -> None:
        self._scoring, self._decode = scoring, decode
        self._thread = ThreadPoolExecutor(1) if has_processes else None
        self._jobs: list[tuple[list[int], Callable[[], tuple[list[str], list[Future[Score]]]]]] = []

    def submit(self, finished: Sequence[tuple[int, Rollout]]) -> None:
        """Add a few finished responses with their request indices, without waiting for their scores."""
        start = partial(self._start, [rollout for _, rollout in finished])
        job = start if self._thread is None else self._thread.submit(start).result
        self._jobs.append(([index for index, _ in finished], job))

    def _start(self, rollouts: Sequence[Rollout]) -> tuple[list[str], list[Future[Score]]]:
        texts = self._decode([rollout.response_ids for rollout in rollouts])
        return texts, self._scoring.submit(texts, [rollout.prompt.ground_truth_json for rollout in rollouts])

    def collect(self) -> dict[int, tuple[Score, str]]:
        """Wait for all scores. Return the score and the text of each submitted response, by request index."""
        scored: dict[int, tuple[Score, str]] = {}
        for indices, result in self._jobs:
            texts, scores = result()
            for index, score, text in zip(indices, scores, texts, strict=True):
                scored[index] = score.result(), text
        if self._thread is not None:
            self._thread.shutdown()
        return scored


ScoredResponse = tuple[Rollout, Score, str]
"""A response, its score, and the text that was scored."""


class ResponseSampler:
    """An object that samples and scores responses. If `episodes` is given, each response is a multi-turn episode."""

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
        """The number of responses without a score so far, and the reason for the last failure."""
        return (self._episodes or self.scoring).unscored

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        sampling: SamplingConfig,
        *,
        policy_version: int,
        clock: PhaseClock | None = None,
    ) -> list[ScoredResponse]:
        """Return the scored responses in the order of the requests (see `generate`)."""
        clock = clock or PhaseClock()
        run = partial(self.generate, sampling=sampling, policy_version=policy_version)
        if self._episodes is not None:
            shares = split_requests(requests, self.group.world_size)
            return self._episodes.play(run, requests, shares, policy_version=policy_version, clock=clock)
        scorer = self._new_scorer()
        with clock.phase("gen"):
            rollouts = run(requests, on_finished=scorer.submit)
        with clock.phase("reward"):
            scored = scorer.collect()
        return [(rollout, *scored[index]) for index, rollout in enumerate(rollouts)]

    def sample_and_carry(
        self,
        carried: Sequence[Carried],
        requests: Sequence[SamplingRequest],
        *,
        policy_version: int,
        clock: PhaseClock,
    ) -> tuple[list[ScoredResponse], tuple[Carried, ...], int]:
        """Generate until enough groups for a batch are finished, then cut the other responses. Return the scored
        responses to train on, the responses that the next step continues, and the length in tokens to which the
        continued responses were cut."""
        config = self.config
        groups = GroupsInProgress(carried, requests, config.rollout.samples_per_prompt, policy_version)
        scorer = self._new_scorer()

        def on_finished(finished: Sequence[tuple[int, Rollout]]) -> None:
            scorer.submit([pair for index, rollout in finished for pair in groups.add(index, rollout)])

        count = config.trainer.batch_size - len(carried) // config.rollout.samples_per_prompt
        with clock.phase("gen"):
            scorer.submit(groups.finished())
            self.generate(
                requests,
                config.rollout.sampling,
                policy_version=policy_version,
                on_finished=on_finished,
                num_finished=count,
            )
            trained, after, cut_length = groups.settle(count)
        with clock.phase("reward"):
            scored = scorer.collect()
        return [(rollout, *scored[index]) for index, rollout in trained.items()], after, cut_length

    def _new_scorer(self) -> StreamScorer:
        return StreamScorer(self.scoring, self.decode, has_processes=self.config.reward.num_processes > 0)

    def generate(
        self,
        requests: Sequence[SamplingRequest],
        sampling: SamplingConfig,
        *,
        policy_version: int,
        on_finished: Callable[[Sequence[tuple[int, Rollout]]], None] = lambda finished: None,
        shares: Sequence[Sequence[int]] | None = None,
        num_finished: int = 0,
    ) -> list[Rollout]:
        """Generate a response to each request, and return the responses in the order of the requests. Whenever a few
        responses have finished, `on_finished` is called with them and their request indices. `shares`: the request
        indices of each rank. If `num_finished` is positive, unfinished responses are cut as soon as `num_finished`
        groups are finished. Raises EngineError if a response comes from another policy version."""
        indices = split_requests(requests, self.group.world_size) if shares is None else shares
        limit = self.config.rollout.max_response_tokens
        arguments = [([requests[i] for i in mine], sampling, limit, num_finished) for mine in indices]
        rollouts: dict[int, Rollout] = {}

        def receive(rank: int, finished: Sequence[tuple[int, Rollout]]) -> None:
            indexed = [(indices[rank][place], rollout) for place, rollout in finished]
            for _, rollout in indexed:
                if rollout.policy_version != policy_version:
                    raise EngineError(
                        f"stale rollout: prompt {rollout.prompt.prompt_id} was sampled by policy version "
                        f"{rollout.policy_version}, the trainer is at {policy_version}"
                    )
            rollouts.update(indexed)
            on_finished(indexed)

        self.group.stream(Worker.generate, arguments, receive)
        return [rollouts[index] for index in range(len(requests))]


@dataclass(frozen=True, slots=True)
class Experience:
    """The responses of one step with their scores. `greedy_scores`: the scores of greedy responses to the same prompts,
    NaN where scoring failed, or None if no greedy responses are needed."""

    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    group_ids: tuple[int, ...]  # the number of the response's prompt within the step
    texts: tuple[str, ...]
    num_prompts_drawn: int
    num_groups_dropped: int
    greedy_scores: tuple[float, ...] | None
    num_tokens_dropped: int = 0  # in dropped groups
    pass_counts: str = ""  # `PassCounts.text` after this step
    pass_metrics: Mapping[str, float] = field(default_factory=dict)
    carried: tuple[Carried, ...] = ()  # continued by the next step
    cut_length: int = 0  # of the carried responses, 0 without a tail cut

    @property
    def num_response_tokens(self) -> int:
        """The number of tokens in all responses, including the tokens of environments."""
        return sum(len(rollout.response_ids) for rollout in self.rollouts)

    @property
    def num_stale_tokens(self) -> int:
        """The number of response tokens that were sampled in the previous step."""
        return sum(rollout.num_stale for rollout in self.rollouts)

    @property
    def num_carried_tokens(self) -> int:
        """The number of tokens so far in the responses that the next step will continue."""
        return sum(len(each.ids) for each in self.carried)

    @property
    def num_generated_tokens(self) -> int:
        """The number of tokens that the step has sampled. Tokens of dropped groups, and of responses that the next step
        will continue, are included."""
        return self.num_response_tokens - self.num_stale_tokens + self.num_tokens_dropped + self.num_carried_tokens


class ExperienceCollector:
    """A collector that draws prompts and samples scored responses."""

    def __init__(
        self, sampler: ResponseSampler, stream: PromptStream[Prompt] | MixedStream, counted: RowSampler | None = None
    ) -> None:
        """Create a collector. `counted`: a sampler that weights each prompt by how many of its earlier responses were
        scored and solved, or None for equal weights."""
        self._config, self._sampler, self._stream, self._counted = sampler.config, sampler, stream, counted
        self._prepared: dict[LoopState, list[SamplingRequest]] = {}

    def prepare(self, state: LoopState) -> None:
        """Draw the prompts of the step after `state` in advance, while the ranks may still be busy with the previous
        step."""
        self._prepared = {state: self._first_requests(state)}

    def _first_requests(self, state: LoopState) -> list[SamplingRequest]:
        if self._counted is not None:
            self._stream.set_weights(self._counted.weights(state.pass_counts))
        carried, longest = carried_from_text(state.carried), self._config.rollout.max_response_tokens
        continued = [each.request(longest) for each in carried if each.is_cut]
        num_carried = len(carried) // self._config.rollout.samples_per_prompt
        return continued + self._requests(state, 0, self._config.prompts_in_progress - num_carried)

    def _requests(self, state: LoopState, num_drawn: int, count: int) -> list[SamplingRequest]:
        requests = make_requests(
            self._stream.take(state.num_prompts_drawn + num_drawn, count),
            self._config.rollout.samples_per_prompt,
            run_seed=self._config.seed,
            stream=TRAINING_STREAM,
            step=state.step + 1,
            first_group=num_drawn,
        )
        if self._config.rollout.finish_share == 1:
            return requests
        size = self._config.rollout.samples_per_prompt
        return [replace(request, group=index // size) for index, request in enumerate(requests)]

    def collect(self, state: LoopState, clock: PhaseClock) -> Experience:
        """Collect the scored responses of the step after `state`. Raises UnscoredError if no response has a score."""
        config = self._config
        requests = self._prepared.get(state) or self._first_requests(state)
        dynamic = config.algo.dynamic_sampling
        group_size = config.rollout.samples_per_prompt
        num_wanted = config.trainer.batch_size * group_size
        kept: list[ScoredResponse] = []
        rest: list[ScoredResponse] = []
        num_drawn = 0
        before, carried, cut_length = carried_from_text(state.carried), tuple[Carried, ...](), 0
        tally: dict[int, tuple[int, int]] = {}
        for refill in range(1 + dynamic.max_refills):
            if refill:
                missing = (num_wanted - len(kept)) // group_size
                requests = self._requests(state, num_drawn, missing)
            if config.rollout.finish_share < 1:
                responses, carried, cut_length = self._sampler.sample_and_carry(
                    before, requests, policy_version=state.policy_version, clock=clock
                )
            else:
                responses = self._sampler.sample(
                    requests, config.rollout.sampling, policy_version=state.policy_version, clock=clock
                )
            count_solved(responses, tally)  # counts all groups, before the length penalty
            num_drawn += (len(responses) + len(carried) - len(before)) // group_size
            has_signal = self._has_signal(responses) if dynamic.enabled else [True] * len(responses)
            kept += [response for response, good in zip(responses, has_signal, strict=True) if good]
            rest += [response for response, good in zip(responses, has_signal, strict=True) if not good]
            if len(kept) == num_wanted:
                break
        if not tally:
            failures = [str(score.failure) for _, score, _ in responses]
            raise all_unscored_error(f"step {state.step + 1}", config.data.environment or config.data.scorer, failures)
        num_spare = num_wanted - len(kept)
        # The penalty follows the filter, which requires different scores, not different lengths.
        batch, dropped = self._with_overlong_penalty(kept + rest[:num_spare]), rest[num_spare:]
        counted = self._counted
        pass_counts, metrics = ("", {}) if counted is None else counted.update(state.pass_counts, tally)
        rollouts, scores, texts = zip(*batch, strict=True)
        return Experience(
            rollouts=rollouts,
            scores=scores,
            group_ids=tuple(index // group_size for index in range(len(batch))),
            texts=texts,
            num_prompts_drawn=num_drawn,
            num_groups_dropped=len(dropped) // group_size,
            greedy_scores=self._greedy_scores([rollout.prompt for rollout in rollouts], state.policy_version, clock),
            num_tokens_dropped=sum(len(rollout.response_ids) for rollout, _, _ in dropped),
            pass_counts=pass_counts,
            pass_metrics=metrics,
            carried=carried,
            cut_length=cut_length,
        )

    def _greedy_scores(self, prompts: Sequence[Prompt], version: int, clock: PhaseClock) -> tuple[float, ...] | None:
        """Return for each response the score of a greedy response to the same prompt (the baseline of ReMax). Return
        None for methods other than ReMax."""
        if self._config.algo.advantage != "remax":
            return None
        unique = list(dict.fromkeys(prompts))
        requests = [SamplingRequest(prompt, sample_index=-1, seed=0) for prompt in unique]
        responses = self._with_overlong_penalty(
            self._sampler.sample(requests, SamplingConfig(temperature=0), policy_version=version, clock=clock)
        )
        scores = dict(zip(unique, (score for _, score, _ in responses), strict=True))
        return tuple(scores[prompt].total if scores[prompt].failure is None else math.nan for prompt in prompts)

    def _with_overlong_penalty(self, responses: list[ScoredResponse]) -> list[ScoredResponse]:
        overlong = self._config.algo.overlong
        if not overlong.enabled:
            return responses
        lengths = torch.tensor([len(rollout.response_ids) for rollout, _, _ in responses])
        limit = self._config.rollout.max_response_tokens
        penalties = overlong_penalty(lengths, max_response_tokens=limit, settings=overlong)
        return [
            (rollout, replace(score, total=score.total + extra, parts={**score.parts, "overlong": extra}), text)
            for (rollout, score, text), extra in zip(responses, penalties.tolist(), strict=True)
        ]

    def _has_signal(self, responses: Sequence[ScoredResponse]) -> list[bool]:
        scores = torch.tensor([score.total for _, score, _ in responses])
        score_mask = torch.tensor([score.failure is None for _, score, _ in responses])
        groups = torch.arange(len(responses)) // self._config.rollout.samples_per_prompt
        return groups_with_signal(scores, score_mask, groups).tolist()


def all_unscored_error(where: str, scorer: str, failures: Sequence[str]) -> UnscoredError:
    """Return the error to raise for a step or validation without any score. `failures`: for each response, the reason
    why it has no score."""
    return UnscoredError(
        f"{where}: has no metrics, for {len(failures):,} responses have no score; {scorer} failed, the last time: "
        f"{failures[-1]}"
    )


def count_solved(responses: Sequence[ScoredResponse], tally: dict[int, tuple[int, int]]) -> None:
    """Add the responses to `tally`, which maps each prompt id to the numbers of solved and of scored responses."""
    for rollout, score, _ in responses:
        if score.failure is None:
            num_solved, num_scored = tally.get(rollout.prompt.prompt_id, (0, 0))
            tally[rollout.prompt.prompt_id] = num_solved + score.solved, num_scored + 1
