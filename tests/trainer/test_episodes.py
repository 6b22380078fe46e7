"""Episodes: token order, gradients, and lost environments."""

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from rlcore.batching.pack import pack, place_turn_rewards
from rlcore.config.algo import AlgoConfig
from rlcore.config.rollout import SamplingConfig
from rlcore.evaluation.result import vote
from rlcore.rollout.engine import SamplingRequest, make_requests, turn_seed
from rlcore.rollout.environment import Episode
from rlcore.rollout.hf import HfEngine
from rlcore.run.problems import Problems
from rlcore.trainer.episodes import _OpenEpisode
from rlcore.trainer.update import ForwardResults, estimate, score_parts
from rlcore.types import Prompt, Rollout, Score
from rlcore.workers.group import LocalGroup
from rlcore.workers.worker import Worker
from tests.helpers.forked import run_module
from tests.helpers.running import small, steps_of, write_record
from tests.helpers.small_run import SmallRun, prepare
from tests.rollout.odd_environments import SLEEP_S, Odd

ODD = "tests.rollout.odd_environments"
SMALL = ("trainer.batch_size=8", "trainer.mini_batch_size=8", "rollout.samples_per_prompt=2", "episode.max_turns=5",
         "rollout.max_response_tokens=24", "episode.max_turn_tokens=3", "episode.max_tool_tokens=2",
         "filter.max_prompt_tokens=8", "data.train_size=48", "data.validation_size=16")  # fmt: skip
Found = list[tuple[Rollout, Score, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return prepare(tmp_path_factory.mktemp("artifacts"), *SMALL, experiment="number_guessing")


@pytest.fixture(scope="module")
def group(run: SmallRun) -> LocalGroup:
    group = LocalGroup(run.config, str(run.model_directory))
    group.each(Worker.sync_weights, 0)
    return group


def with_environment(run: SmallRun, environment: str, **episode: Any) -> SmallRun:
    config = run.config
    data = config.data.model_copy(update={"environment": f"{ODD}:{environment}"})
    changed = config.model_copy(update={"data": data, "episode": config.episode.model_copy(update=episode)})
    return replace(run, config=changed)


def play_all(run: SmallRun, group: LocalGroup, num_prompts: int = 8) -> tuple[Found, tuple[int, str]]:
    """Play the episodes. Return `ResponseSampler.unscored` with them."""
    problems = Problems.read(run.config, run.inputs)
    requests = make_requests(problems.stream.take(0, num_prompts), 2, run_seed=1, stream=1, step=1)
    with ExitStack() as opened:
        sampler = problems.build_sampler(run.inputs, opened)(group)
        return sampler.sample(requests, SamplingConfig(), policy_version=0), sampler.unscored


def play(run: SmallRun, group: LocalGroup, num_prompts: int = 8) -> Found:
    return play_all(run, group, num_prompts)[0]


def is_same(*found: Found) -> bool:
    one, other = ([(r.response_ids.tolist(), r.behavior_logprobs.tolist(), *more) for r, *more in of] for of in found)
    return one == other


@pytest.mark.parametrize("environment", ["Counting", "Greeting"])
def test_episode_tokens_are_the_engines(run, group, environment, monkeypatch) -> None:
    turns: list[tuple[SamplingRequest, Rollout]] = []
    stream = HfEngine.stream

    def streaming(self: HfEngine, requests: Sequence[SamplingRequest], *args: Any) -> Any:
        for index, rollout in stream(self, requests, *args):
            turns.append((requests[index], rollout))
            yield index, rollout

    monkeypatch.setattr(HfEngine, "stream", streaming)
    rollouts, scores, texts = zip(*play(with_environment(run, environment), group), strict=True)
    assert len({request.seed for request, _ in turns}) == len(turns), "each turn has its own seed"
    by_seed = {request.seed: (request, rollout) for request, rollout in turns}
    problems = Problems.read(run.config, run.inputs)
    requests = make_requests(problems.stream.take(0, 8), 2, run_seed=1, stream=1, step=1)
    for request, rollout, score, text in zip(requests, rollouts, scores, texts, strict=True):
        whole = (*rollout.prompt.token_ids, *rollout.response_ids.tolist())
        assert rollout.is_sampled is not None
        sampled = np.array([False] * len(rollout.prompt.token_ids) + rollout.is_sampled.tolist())
        assert score.failure is None
        ends = []
        for turn in range(int(score.parts["turns"])):
            asked, wrote = by_seed[turn_seed(request.seed, turn)]
            start = len(asked.prompt.token_ids)
            stop = start + len(wrote.response_ids)
            assert whole[:start] == asked.prompt.token_ids
            assert whole[start:stop] == tuple(wrote.response_ids.tolist())
            assert sampled[start:stop].all()
            ends.append(stop - 1 - len(rollout.prompt.token_ids))
            sampled[start:stop] = False
        assert not sampled.any(), "nothing else counts as sampled"
        assert {place for place, _ in rollout.turn_rewards} <= set(ends), "a reward is at its turn's last token"
        assert sum(reward for _, reward in rollout.turn_rewards) == pytest.approx(score.total)
        assert score.parts["turns"] == 4 or rollout.finish_reason == "length"
        assert text.count("[environment]") >= 1
        assert text.count("[environment] reward ") == len(rollout.turn_rewards), "the text shows each turn's reward"
        own = [line for line in text.split("\n") if not line.startswith("[environment]")]
        assert score.said == vote("\n".join(own)), "rewards and replies do not count in majority votes"
    packed = pack(rollouts, scores, [index // 2 for index in range(len(rollouts))])
    logprobs = group.each(Worker.old_logprobs, packed, 1)[0]
    mask = packed.loss_mask
    assert 0 < int(mask.sum()) == sum(int(r.is_sampled.sum()) for r in rollouts if r.is_sampled is not None)
    torch.testing.assert_close(packed.behavior_logprobs[mask], logprobs[mask], rtol=1e-5, atol=1e-5)


def test_episodes_are_independent_of_processes(run, group, tmp_path, monkeypatch) -> None:
    plain = play(with_environment(run, "Counting", num_processes=1), group)
    found, lost = play_all(with_environment(run, "Counting", num_processes=3), group)
    assert is_same(plain, found)
    assert lost == (0, "")
    monkeypatch.setenv("BEGUN", str(tmp_path / "begun"))
    assert is_same(plain, play(with_environment(run, "Noted", num_processes=3), group))
    assert (tmp_path / "begun").read_text() == "!" * 16, "each environment is created once"
    monkeypatch.setenv("KILLED_ONCE", str(tmp_path / "killed"))
    assert is_same(plain, play(with_environment(run, "KilledOnce", num_processes=1), group))
    assert (tmp_path / "killed").exists()


def test_unrepeatable_episodes_of_killed_process_are_lost(run, group, tmp_path, monkeypatch) -> None:
    plain = play(with_environment(run, "Counting", num_processes=2), group)
    monkeypatch.setenv("KILLED_ONCE", str(tmp_path / "killed"))
    found = play(with_environment(run, "KilledForGood", num_processes=2), group)
    lost = [score.failure is not None for _, score, _ in found]
    why = "LookupError: the process of this episode was lost, and its turns are not repeated (repeatable=False)"
    assert {score.failure for _, score, _ in found} == {None, why}
    assert {index % 2 for index, is_lost in enumerate(lost) if is_lost} in ({0}, {1}), "those of one process"
    kept = [place for place, is_lost in enumerate(lost) if not is_lost]
    assert is_same([found[place] for place in kept], [plain[place] for place in kept])


def test_episode_without_end_has_max_turns(run: SmallRun, group: LocalGroup) -> None:
    found = play(with_environment(run, "Counting", num_processes=1, max_turns=3), group)
    assert {score.parts["turns"] for rollout, score, _ in found if rollout.finish_reason != "length"} == {3}


def test_too_long_first_message_fails_episode(run: SmallRun, group: LocalGroup) -> None:
    short = with_environment(run, "Greeting", num_processes=1)
    rollout = short.config.rollout.model_copy(update={"max_response_tokens": 1})
    short = replace(short, config=short.config.model_copy(update={"rollout": rollout}))
    found = [(len(r.response_ids), r.finish_reason, score.failure, text) for r, score, text in play(short, group, 2)]
    failure = "the first message leaves no token to the model (rollout.max_response_tokens)"
    assert found == [(0, "length", failure, "")] * 4


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the unique command line of the process that a hanging game starts."""
    seconds = f"{3_600 + os.getpid()}.5"
    monkeypatch.setenv(SLEEP_S, seconds)
    return ["sleep", seconds]


def test_lost_environments_fail_only_their_episodes(run: SmallRun, group: LocalGroup, sleep: list[str]) -> None:
    odd = with_environment(run, "Odd", deadline_s=20.0)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    found, (number, last) = play_all(odd, group, 48)
    rollouts, scores, _ = zip(*found, strict=True)
    plain = play(with_environment(run, "Counting"), group, 48)
    for rollout, score, (whole, expected, _) in zip(rollouts, scores, plain, strict=True):
        game = int(rollout.prompt.ground_truth_json.strip('{}"game: '))
        assert (score.failure is not None) == (Odd.is_lost(game) and expected.parts["turns"] > 1)
        if not Odd.is_lost(game) and game % 8 != 3:
            np.testing.assert_array_equal(rollout.response_ids, whole.response_ids)
            assert score == expected
    failures = [score.failure for score in scores if score.failure]
    assert (number, last in failures) == (len(failures), True)
    why = " ".join(failures)
    for words in ("episode.deadline_s", "its process ended", "RuntimeError: no", "a reply must be text, got int"):
        assert words in why
    packed = pack(rollouts, scores, [index // 2 for index in range(len(rollouts))])
    lost = torch.tensor([score.failure is not None for score in scores])
    assert not packed.loss_mask[lost[packed.sequence_ids()]].any()
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert left == []
    assert not [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == sleep]


@pytest.mark.multiprocess
def test_run_killed_during_episode_ends_the_same(tmp_path: Path) -> None:
    settings = (*SMALL, f"data.environment={ODD}:KillsTheRun")
    (tmp_path / "killed").touch()
    whole = small(tmp_path / "whole", *settings, steps=4, experiment="number_guessing")
    killed = small(tmp_path / "cut", *settings, steps=4, experiment="number_guessing")
    for run, mark, ends in ((whole, "killed", [0]), (killed, "not yet", [-9, 0])):
        words, log = ["--run", str(write_record(run))], tmp_path / f"{mark}.log"
        variables = {**os.environ, "KILLED_ONCE": str(tmp_path / mark), "JOURNAL": str(run.layout.journal)}
        for end in ends:
            code = run_module("tests.helpers.whole_run", words, output=log, environment=variables, timeout_s=240)
            assert code == end, log.read_text()
    assert steps_of(killed) == steps_of(whole)


def ragged_rollouts() -> list[Rollout]:
    """Return twelve responses with tokens of an environment."""
    rng, rollouts = np.random.default_rng(5), []
    for index in range(12):
        prompt = Prompt(index // 4, (5,) * int(rng.integers(1, 4)), "a", "{}")
        length = int(rng.integers(2, 9))
        sampled = rng.random(length) < 0.6
        sampled[0] = sampled[-1] = True
        behavior = rng.standard_normal(length).astype(np.float32)
        rollouts.append(Rollout(prompt, index % 4, np.arange(length), behavior, "stop", 0, sampled))
    return rollouts


@pytest.mark.parametrize("method", ["gae", "reinforce_pp"])
def test_turn_rewards_match_naive_twin(method: str) -> None:
    rollouts, gamma = ragged_rollouts(), 0.9
    for index, rollout in enumerate(rollouts):
        ends = [place for place in range(len(rollout.response_ids) - 1) if rollout.is_sampled[place]][:2]
        rollouts[index] = replace(rollout, turn_rewards=tuple((place, 1.5 - place) for place in ends))
    scores = [Score(float(index), {}, failure="lost" if index == 7 else None) for index in range(12)]
    packed = pack(rollouts, scores, [0] * 12)
    zeros = torch.zeros(packed.num_tokens)
    algo = AlgoConfig(advantage=method, gamma=gamma, lam=1.0)
    found = estimate(
        packed, ForwardResults(zeros, None, zeros), None, algo=algo, kl_coef=0.0, parts=score_parts(scores, {}),
        is_truncated=torch.zeros(12, dtype=torch.bool), turn_rewards=place_turn_rewards(rollouts, packed),
    )  # fmt: skip
    for rollout, score, start in zip(rollouts, scores, packed.cu_seqlens.tolist(), strict=False):
        written = [place for place in range(len(rollout.response_ids)) if rollout.is_sampled[place]]
        rewards = dict(rollout.turn_rewards)
        rewards[written[-1]] = rewards.get(written[-1], 0.0) + score.total - sum(rewards.values())
        for number, place in enumerate(written):
            later = written[number:]
            expected = sum(gamma**away * rewards.get(other, 0.0) for away, other in enumerate(later))
            returned = found.returns[start + len(rollout.prompt.token_ids) + place - 1].item()
            assert returned == pytest.approx(0.0 if score.failure else expected, abs=1e-5)


def open_episode(limit: int, **given: Any) -> _OpenEpisode:
    prompt = Prompt(3, (5, 6), "countdown", "{}")
    return _OpenEpisode(SamplingRequest(prompt, 1, seed=7), prompt, limit, Episode("1", "", 100), **given)


def make_rollout(*ids: int, end: Any = "stop") -> Rollout:
    prompt = Prompt(3, (5, 6), "countdown", "{}")
    return Rollout(prompt, 1, np.array(ids), -np.arange(1, len(ids) + 1, dtype=np.float32), end, 0)


@pytest.mark.parametrize(("limit", "is_open"), [(4, False), (5, False), (6, True)])
def test_reply_at_token_limit_ends_episode(limit: int, is_open: bool) -> None:
    episode = open_episode(limit, token_ids=[7, 8])
    assert episode.add_reply("no", [9, 9, 9]) == episode.is_open == is_open
    assert (episode.finish_reason, episode.token_ids) == (("stop", [7, 8, 9, 9, 9]) if is_open else ("length", [7, 8]))


def test_turn_at_token_limit_ends_episode() -> None:
    """A turn at its own limit does not end the episode."""
    for end, limit, is_open in (("length", 2, False), ("length", 3, True), ("stop", 2, True), ("length", 1, False)):
        episode = open_episode(limit)
        episode.add_response(make_rollout(7, 8, end=end), "text")
        assert (episode.is_open, episode.finish_reason) == (is_open, "stop" if is_open else "length"), (end, limit)
        assert (episode.token_ids, episode.logprobs, episode.is_sampled) == ([7, 8], [-1.0, -2.0], [True, True])
        assert (episode.record.texts, episode.lines) == (["text"], ["text"])


def test_episode_sums_its_turns() -> None:
    def replied(reply: str, reward: float, **parts: float) -> Score:
        return Score(reward, parts, said=json.dumps([reply, False]))

    episode = open_episode(20)
    assert episode.add_reward(replied("", 0.25), last=False) == ""
    episode.add_response(make_rollout(7, 8), "first")
    assert episode.add_reward(replied("next\n\nnow", 0.0, won=0.0), last=False) == "next\n\nnow"
    assert episode.add_reply("next\n\nnow", [9])
    episode.add_response(make_rollout(4), "second")
    assert episode.is_open
    assert episode.add_reward(replied("well done", 1.25, won=1.0), last=True) == "well done"
    assert not episode.is_open
    assert episode.record.replies == ["", "next\n\nnow", "well done"]
    assert episode.lines == [
        "[environment] reward 0.25", "first", "[environment] next", "[environment] ", "[environment] now", "second",
        "[environment] reward 1.25",
    ]  # fmt: skip
    rollout = episode.rollout(4)
    assert rollout.is_sampled is not None
    assert (rollout.response_ids.tolist(), rollout.is_sampled.tolist()) == ([7, 8, 9, 4], [True, True, False, True])
    assert rollout.behavior_logprobs.tolist() == [-1.0, -2.0, 0.0, -1.0]
    assert rollout.turn_rewards == ((3, 1.25),), "a reward before the first turn has no token"
    assert (rollout.policy_version, rollout.sample_index, rollout.finish_reason) == (4, 1, "stop")
    assert episode.score() == Score(1.5, {"won": 1.0, "turns": 2.0}, said=vote("first\nsecond"))


def test_done_or_failed_turn_ends_episode() -> None:
    done = open_episode(20)
    done.add_reward(Score(0.0, {}, said='["bye", true]'), last=False)
    assert not done.is_open
    failed = open_episode(20, reward=2.0)
    assert failed.add_reward(Score(1.0, {}, failure="its process ended"), last=False) == ""
    assert (failed.is_open, failed.record.replies, failed.reward) == (False, [], 2.0)
    assert failed.score() == Score(0.0, {}, failure="its process ended")
