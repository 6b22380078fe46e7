"""Episodes: multi-turn responses with an environment's messages between the turns.

All open episodes generate one turn per round. The next round starts when all environments have replied, failed or timed
out, so the engine's input does not depend on the order of the replies. All turns of an episode run on one rank, because
the prefix cache of this rank contains the earlier turns.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from rlcore.config import RewardConfig, RunConfig
from rlcore.evaluation.result import vote
from rlcore.models.tokenizer import Decode
from rlcore.rollout.engine import SamplingRequest, turn_seed
from rlcore.rollout.environment import PLAY, Episode, TurnTokens, turn_from_score
from rlcore.rollout.scoring import ScoringPool, require_environment
from rlcore.trainer import PhaseClock
from rlcore.types import FinishReason, Prompt, Rollout, Score

_MARK = "[environment]"
"""The prefix of an environment's lines in the text of an episode."""


@dataclass(slots=True)
class _OpenEpisode:
    """An episode that is being played: its tokens so far, and the `record` of its turns, which is sent to its
    environment's process."""

    request: SamplingRequest
    prompt: Prompt
    limit: int
    record: Episode
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    finish_reason: FinishReason = "stop"
    is_open: bool = True

    def next_request(self, turn: int, max_turn_tokens: int) -> SamplingRequest:
        num_left = self.limit - len(self.token_ids)
        prompt = replace(self.prompt, token_ids=(*self.prompt.token_ids, *self.token_ids))
        tokens = min(num_left, max_turn_tokens) if max_turn_tokens else num_left
        return SamplingRequest(prompt, self.request.sample_index, turn_seed(self.request.seed, turn), tokens)

    def add_response(self, rollout: Rollout, text: str) -> None:
        self._add_tokens(rollout.response_ids.tolist(), rollout.behavior_logprobs.tolist(), sampled=True)
        self.record.texts.append(text)
        self.lines.append(text)
        if rollout.finish_reason == "length" and len(self.token_ids) >= self.limit:
            self._end_at_limit()

    def add_reply(self, reply: str, ids: Sequence[int]) -> bool:
        """Add the environment's reply and return True. If the reply would fill the response up to its token limit, end
        the episode without the reply and return False."""
        if len(self.token_ids) + len(ids) >= self.limit:
            self._end_at_limit()
            return False
        self._add_tokens(ids, [0.0] * len(ids), sampled=False)
        self._add_lines(reply)
        return True

    def add_reward(self, score: Score, *, last: bool) -> str:
        """Add a turn's reward and return the environment's reply. A failed turn ends the episode without a score.
        `last`: whether this turn is the last one allowed."""
        if score.failure is not None:
            self.failure, self.is_open = score.failure, False
            return ""
        turn = turn_from_score(score)
        self.reward += turn.reward
        self.parts |= turn.parts
        if turn.reward:
            self.rewards.append((len(self.token_ids) - 1, turn.reward))
            self._add_lines(f"reward {turn.reward:.3g}")
        self.record.replies.append(turn.reply)
        if turn.done or last:
            self.is_open = False
        return turn.reply

    def rollout(self, version: int) -> Rollout:
        return Rollout(
            prompt=self.prompt,
            sample_index=self.request.sample_index,
            response_ids=np.array(self.token_ids, dtype=np.int32),
            behavior_logprobs=np.array(self.logprobs, dtype=np.float32),
            finish_reason=self.finish_reason,
            policy_version=version,
            is_sampled=np.array(self.is_sampled, dtype=bool),
            turn_rewards=tuple((place, reward) for place, reward in self.rewards if place >= 0),
        )

    def score(self) -> Score:
        """Return the sum of the turns' rewards. The answer for majority votes is read from the model's turns, without
        the environment's replies."""
        if self.failure is not None:
            return Score(0.0, {}, failure=self.failure)
        parts = {**self.parts, "turns": float(len(self.record.texts))}
        return Score(self.reward, parts, said=vote("\n".join(self.record.texts)))

    def _add_lines(self, text: str) -> None:
        self.lines += [f"{_MARK} {line}" for line in text.splitlines() or [""]]

    def _add_tokens(self, ids: Sequence[int], logprobs: Sequence[float], *, sampled: bool) -> None:
        self.token_ids += ids
        self.logprobs += logprobs
        self.is_sampled += [sampled] * len(ids)

    def _end_at_limit(self) -> None:
        self.finish_reason, self.is_open = "length", False


class Episodes(AbstractContextManager["Episodes"]):
    """The processes that run the environments of episodes. Raises ConfigError if `data.environment` does not exist."""

    def __init__(self, config: RunConfig, tokens: TurnTokens, decode: Decode) -> None:
        require_environment(config.data.environment)
        self._config, self._tokens, self._decode = config, tokens, decode
        self._open = ExitStack()
        # One pool per process, since all turns of an episode go to the process with its environment.
        settings = RewardConfig(num_processes=1, deadline_s=config.episode.deadline_s)
        self._pools = [
            self._open.enter_context(ScoringPool(PLAY, settings, section="episode"))
            for _ in range(config.episode.num_processes)
        ]
        self._num_played = 0

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @property
    def unscored(self) -> tuple[int, str]:
        """The number of episodes that ended because their environment failed, and the reason for one such failure."""
        failures = [pool.unscored for pool in self._pools]
        return sum(number for number, _ in failures), next((why for number, why in failures if number), "")

    def play(
        self,
        generate: Callable[..., list[Rollout]],
        requests: Sequence[SamplingRequest],
        shares_by_rank: Sequence[Sequence[int]],
        *,
        policy_version: int,
        clock: PhaseClock,
    ) -> list[tuple[Rollout, Score, str]]:
        """Play an episode for each request, and return its rollout, score and text. `generate`:
        `ResponseSampler.generate` with `sampling` and `policy_version` already given. `shares_by_rank`: the request
        indices of each rank. Raises EngineError if no environment can be started."""
        max_kept = -(-len(requests) // len(self._pools))
        playing = [self._open_episode(request, max_kept) for request in requests]
        with clock.phase("environment"):
            self._reset(playing)
        for turn in range(self._config.episode.max_turns):
            if any(episode.is_open for episode in playing):
                self._play_turn(generate, playing, turn, shares_by_rank, clock)
        return [(episode.rollout(policy_version), episode.score(), "\n".join(episode.lines)) for episode in playing]

    def _open_episode(self, request: SamplingRequest, max_kept: int) -> _OpenEpisode:
        self._num_played += 1
        prompt = request.prompt
        record = Episode.start(
            str(self._num_played), self._config, prompt.ground_truth_json, request.environment_seed, max_kept=max_kept
        )
        return _OpenEpisode(request, prompt, request.limit(self._config.rollout.max_response_tokens), record)

    def _reset(self, playing: Sequence[_OpenEpisode]) -> None:
        jobs = [self._submit_turn(index, episode) for index, episode in enumerate(playing)]
        for episode, job in zip(playing, jobs, strict=True):
            message = episode.add_reward(job.result(), last=False)
            if episode.is_open and message:
                shown, prompt, ids = self._tokens.first_message_tokens(episode.prompt.token_ids, message)
                episode.prompt = replace(episode.prompt, token_ids=prompt)
                if not episode.add_reply(shown, ids):
                    episode.failure = "the first message leaves no token to the model (rollout.max_response_tokens)"

    def _play_turn(
        self,
        generate: Callable[..., list[Rollout]],
        playing: Sequence[_OpenEpisode],
        turn: int,
        shares_by_rank: Sequence[Sequence[int]],
        clock: PhaseClock,
    ) -> None:
        settings = self._config.episode
        indices = [index for index, episode in enumerate(playing) if episode.is_open]
        place_of = {index: place for place, index in enumerate(indices)}
        shares = [[place_of[index] for index in mine if index in place_of] for mine in shares_by_rank]
        jobs: dict[int, Future[Score]] = {}

        def on_finished(finished: Sequence[tuple[int, Rollout]]) -> None:
            texts = self._decode([rollout.response_ids for _, rollout in finished])
            for (place, rollout), text in zip(finished, texts, strict=True):
                episode = playing[indices[place]]
                episode.add_response(rollout, text)
                jobs[indices[place]] = self._submit_turn(indices[place], episode)

        with clock.phase("gen"):
            turn_requests = [playing[index].next_request(turn, settings.max_turn_tokens) for index in indices]
            generate(turn_requests, on_finished=on_finished, shares=shares)
        with clock.phase("environment"):
            for index in indices:
                episode = playing[index]
                reply = episode.add_reward(jobs[index].result(), last=turn + 1 == settings.max_turns)
                if episode.is_open:
                    episode.add_reply(*self._tokens.reply_tokens(episode.token_ids[-1], reply))

    def _submit_turn(self, index: int, episode: _OpenEpisode) -> Future[Score]:
        return self._pools[index % len(self._pools)].submit([episode.record.to_json()], [episode.record.truth])[0]
