"""The collection of scored responses. Responses are scored while the engines generate further responses."""

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
from rlcore.trainer.carry import Carried, GroupsInProgress, from_text
from rlcore.trainer.clock import PhaseClock
from rlcore.trainer.episodes import Episodes, generate, split_requests
from rlcore.types import Prompt, Rollout, Score
from rlcore.workers.group import WorkerGroup


class StreamScorer:
    """A scorer that works while responses are generated. It decodes responses in a thread and scores them in the
    processes of a `ScoringPool`."""

    def __init__(self, scoring: ScoringPool, decode: Decode) -> None:
        self._scoring = scoring
        self._decode = decode
        self._thread = ThreadPoolExecutor(1)
        self._jobs: list[tuple[list[int], Future[tuple[list[str], ScoringJob]]]] = []

    def submit(self, finished: Sequence[tuple[int, Rollout]]) -> None:
        """Start to score a few finished responses, without waiting for the scores."""
        job = self._thread.submit(self._start, [rollout for _, rollout in finished])
        self._jobs.append(([index for index, _ in finished], job))

    def _start(self, rollouts: Sequence[Rollout]) -> tuple[list[str], ScoringJob]:
        texts = self._decode([rollout.response_ids for rollout in rollouts])
        return texts, self._scoring.submit(texts, [rollout.prompt.ground_truth_json for rollout in rollouts])

    def collect(self) -> dict[int, tuple[Score, str]]:
        """Wait for all scores. Return the score and the text of each submitted response."""
        scored: dict[int, tuple[Score, str]] = {}
        for indices, future in self._jobs:
            texts, job = future.result()
            scored.update(zip(indices, zip(self._scoring.collect(job), texts, strict=True), strict=True))
        self._thread.shutdown()
        return scored


ScoredResponse = tuple[Rollout, Score, str]
"""A response, its score, and the text that was scored."""


class ResponseSampler:
    """A sampler that generates responses with the engines of all ranks and scores them. If `episodes` is given, each
    response is a multi-turn episode."""

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
        """The number of responses without a score so far, and the reason of the last failure."""
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
        """Return the scored responses in the order of the requests. `shares`: the request indices of each rank (see
        `generate`). Raises EngineError if an engine used a policy version other than `policy_version`."""
        clock = clock or PhaseClock()
        if self._episodes is not None:
            played = self._episodes.play(self.group, requests, sampling, policy_version=policy_version, clock=clock)
            return list(zip(*played, strict=True))
        scorer = self._stream_scorer()
        with clock.phase("gen"):
            rollouts = generate(
                self.group,
                requests,
                sampling,
                self.config.rollout.max_response_tokens,
                policy_version=policy_version,
                on_finished=None if scorer is None else scorer.submit,
                shares=shares,
            )
        return self._scored(dict(enumerate(rollouts)), scorer, clock)

    def sample_and_carry(
        self,
        carried: Sequence[Carried],
        requests: Sequence[SamplingRequest],
        *,
        policy_version: int,
        clock: PhaseClock,
        shares: Sequence[Sequence[int]] | None,
    ) -> tuple[list[ScoredResponse], tuple[Carried, ...], int]:
        """Return the scored responses to train on, the carried responses, and the length to which the carried responses
        were cut. A group is scored when its last response ends. See `GroupsInProgress`."""
        config = self.config
        groups = GroupsInProgress(carried, requests, config.rollout.samples_per_prompt, policy_version)
        scorer = self._stream_scorer()

        def on_finished(finished: Sequence[tuple[int, Rollout]]) -> None:
            whole = [pair for index, rollout in finished for pair in groups.add(index, rollout)]
            if scorer is not None and whole:
                scorer.submit(whole)

        count = config.trainer.batch_size - len(carried) // config.rollout.samples_per_prompt
        with clock.phase("gen"):
            if scorer is not None and (finished := groups.finished()):
                scorer.submit(finished)
            generate(
                self.group,
                requests,
                config.rollout.sampling,
                config.rollout.max_response_tokens,
                policy_version=policy_version,
                on_finished=on_finished,
                shares=shares,
                num_finished=count,
            )
            trained, after, cut_length = groups.settle(count)
        return self._scored(trained, scorer, clock), after, cut_length

    def _stream_scorer(self) -> StreamScorer | None:
        return StreamScorer(self.scoring, self.decode) if self.config.reward.num_processes else None

    def _scored(
        self, rollouts: Mapping[int, Rollout], scorer: StreamScorer | None, clock: PhaseClock
    ) -> list[ScoredResponse]:
        with clock.phase("reward"):
            if scorer is not None:
                scored = scorer.collect()
                return [(rollout, *scored[index]) for index, rollout in rollouts.items()]
            texts = self.decode([rollout.response_ids for rollout in rollouts.values()])
            scores = self.scoring.score(texts, [rollout.prompt.ground_truth_json for rollout in rollouts.values()])
            return list(zip(rollouts.values(), scores, texts, strict=True))


@dataclass(frozen=True, slots=True)
class Experience:
    """The responses of one step. `group_ids[i]`: the number of the response's prompt within the step. `texts[i]`: the
    text that was scored. `greedy_scores[i]`: the score of the greedy response to the same prompt, or NaN if the scorer
    failed. `greedy_scores` is None if the algorithm does not need it."""

    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    group_ids: tuple[int, ...]
    texts: tuple[str, ...]
    num_prompts_drawn: int
    num_groups_dropped: int
    greedy_scores: tuple[float, ...] | None
    num_tokens_dropped: int = 0
    """The number of response tokens in dropped groups."""
    pass_counts: str = ""
    """The pass counts of all rows after this step (`PassCounts.text`), or '' if rows are not drawn by them."""
    pass_metrics: Mapping[str, float] = field(default_factory=dict)
    carried: tuple[Carried, ...] = ()
    """The responses of the groups that the next step continues."""
    cut_length: int = 0
    """The length at which these responses were cut, or 0 without a tail cut."""

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
        """The number of tokens that the step has sampled, including the tokens of dropped and carried groups."""
        return self.num_response_tokens - self.num_stale_tokens + self.num_tokens_dropped + self.num_carried_tokens


class ExperienceCollector:
    """A collector that draws prompts and samples scored responses. With dynamic sampling, it replaces groups whose
    scores are all equal."""

    def __init__(
        self, sampler: ResponseSampler, stream: PromptStream[Prompt] | MixedStream, counted: RowSampler | None = None
    ) -> None:
        """Create a collector. `counted`: a sampler that draws rows by their pass counts. If it is None, all rows have
        equal weight."""
        self._config = sampler.config
        self._sampler = sampler
        self._stream = stream
        self._counted = counted
        self._prepared: dict[LoopState, tuple[list[SamplingRequest], list[list[int]]]] = {}

    def prepare(self, state: LoopState) -> None:
        """Draw the prompts of the step after `state` and assign them to ranks. The ranks are not called, so they may
        still be busy."""
        requests = self._first_requests(state)
        self._prepared = {state: (requests, split_requests(requests, self._sampler.group.world_size))}

    def _first_requests(self, state: LoopState) -> list[SamplingRequest]:
        if self._counted is not None:
            self._stream.set_weights(self._counted.weights(state.pass_counts))
        carried, longest = from_text(state.carried), self._config.rollout.max_response_tokens
        continued = [each.request(longest) for each in carried if each.is_cut]
        num_carried = len(carried) // self._config.rollout.samples_per_prompt
        return continued + self._requests(state, 0, self._config.prompts_in_progress - num_carried)

    def _requests(self, state: LoopState, num_drawn: int, count: int) -> list[SamplingRequest]:
        """Return requests for the next `count` prompts. `num_drawn`: the number of prompts already drawn in this
        step."""
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
        requests, shares = self._prepared.get(state) or (self._first_requests(state), None)
        dynamic = config.algo.dynamic_sampling
        group_size = config.rollout.samples_per_prompt
        num_wanted = config.trainer.batch_size * group_size
        kept: list[ScoredResponse] = []
        rest: list[ScoredResponse] = []
        num_drawn = 0
        before, carried, cut_length = from_text(state.carried), tuple[Carried, ...](), 0
        tally: dict[int, tuple[int, int]] = {}
        for refill in range(1 + dynamic.max_refills):
            if refill:
                missing = (num_wanted - len(kept)) // group_size
                requests, shares = self._requests(state, num_drawn, missing), None
            if config.rollout.finish_share < 1:
                responses, carried, cut_length = self._sampler.sample_and_carry(
                    before, requests, policy_version=state.policy_version, clock=clock, shares=shares
                )
            else:
                responses = self._sampler.sample(
                    requests, config.rollout.sampling, policy_version=state.policy_version, clock=clock, shares=shares
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
        return Experience(
            rollouts=tuple(rollout for rollout, _, _ in batch),
            scores=tuple(score for _, score, _ in batch),
            group_ids=tuple(index // group_size for index in range(len(batch))),
            texts=tuple(text for _, _, text in batch),
            num_prompts_drawn=num_drawn,
            num_groups_dropped=len(dropped) // group_size,
            greedy_scores=self._greedy_scores([rollout.prompt for rollout, _, _ in batch], state.policy_version, clock),
            num_tokens_dropped=sum(len(rollout.response_ids) for rollout, _, _ in dropped),
            pass_counts=pass_counts,
            pass_metrics=metrics,
            carried=carried,
            cut_length=cut_length,
        )

    def _greedy_scores(self, prompts: Sequence[Prompt], version: int, clock: PhaseClock) -> tuple[float, ...] | None:
        """Return, for each response, the score of one greedy response to the same prompt (the baseline of ReMax)."""
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
    """Return the error for a step or validation without any score. `failures`: one reason for each response."""
    return UnscoredError(
        f"{where}: has no metrics, for {len(failures):,} responses have no score; {scorer} failed, the last time: "
        f"{failures[-1]}"
    )


def count_solved(responses: Sequence[ScoredResponse], tally: dict[int, tuple[int, int]]) -> None:
    """Count the responses to each prompt in `tally`. A key of `tally` is a prompt id, and its value is the number of
    solved and the number of scored responses."""
    for rollout, score, _ in responses:
        if score.failure is None:
            num_solved, num_scored = tally.get(rollout.prompt.prompt_id, (0, 0))
            tally[rollout.prompt.prompt_id] = num_solved + score.solved, num_scored + 1
