"""Episodes on OpenEnv servers: the protocol, failures of a server, and lost processes."""

import json
import random

import pytest

from data import openenv
from data.openenv import OpenEnv, RepeatableOpenEnv, build
from flows.stack.services import free_port
from rlcore.config import RewardConfig, RunConfig
from rlcore.config.data import CustomData
from rlcore.errors import ConfigError
from rlcore.rollout.environment import PLAY, Episode, turn_from_score
from rlcore.rollout.scoring import ScoringPool
from tests.data.openenv_servers import any_server, failed, game_server, observed
from tests.helpers.mlflow import wait_until

LOST = "LookupError: the process of this episode was lost, and its turns are not repeated (repeatable=False)"


@pytest.fixture
def server():
    openenv._fields.clear()
    with any_server() as replies:
        yield replies


def opened(server, **settings):
    environment = OpenEnv(server.address, **settings)
    environment.reset({"seed": 1})
    return environment


def test_session_sends_row_and_texts(server):
    more = {"turn": 3, "reward": 0.5}
    server.reply = lambda message: observed(hint=message["type"], done=message["data"].get("guess") == "7", **more)
    environment = OpenEnv(server.address + "/")
    assert environment.reset({"seed": 2**40 + 5, "own_seed": 2**31 + 9, "answer": "x"}) == "reset"
    turns = [environment.step(text) for text in "67"]
    steps = [{"type": "step", "data": {"guess": guess}} for guess in "67"]
    assert server.received == [{"type": "reset", "data": {"seed": 9, "answer": "x"}}, *steps]
    assert [(turn.reply, turn.done, turn.reward) for turn in turns] == [("step", False, 0.5), ("step", True, 0.5)]
    assert turns[1].parts == {"invalid_actions": 0}
    assert server.num_open == 1
    environment.close()
    wait_until(lambda: server.num_open == 0)


def test_actions_and_observations_of_several_fields_are_json(server):
    server.action["times"] = {"type": "integer"}
    server.observation = {"board": {"type": "string"}, "score": {"type": "string"}}
    good, bad = observed(board="ab", score="1"), failed("VALIDATION_ERROR")
    server.reply = lambda message: bad if message["data"].get("times") == 0 else good
    environment = OpenEnv(server.address)
    assert environment.reset({"seed": 1}) == '{"board": "ab", "score": "1"}'
    wrong = [environment.step(text) for text in ("4", "what", "[" * 100_000, '{"times": 0}')]
    assert {turn.reply for turn in wrong} == {"error: an action has the fields guess, times"}
    assert [turn.parts["invalid_actions"] for turn in wrong] == [1, 2, 3, 4]
    turn = environment.step('{"guess": "a", "times": 2}')
    assert (turn.reply, turn.reward, turn.parts["invalid_actions"]) == ('{"board": "ab", "score": "1"}', 0, 4)
    assert [message["data"] for message in server.received[1:]] == [{"times": 0}, {"guess": "a", "times": 2}]


@pytest.mark.parametrize(("reply", "message"), [
    ("no JSON", "to step: 'no JSON'. Correct the environment"), ("[" * 100_000, r"to step: '\[{300}'"),
    ('{"type": "observation", "data": {"observation": {}, "done": "no", "reward": 1}}', "to step"),
    (observed(hint="+", turn=1, reward="1"), "to step"),
    (observed(hint="+"), "an observation without turn. Restart the run with the server that it began with"),
    (failed("EXECUTION_ERROR"), "to step: .*as asked.* Correct the environment"),
    (failed("CAPACITY_REACHED", max_sessions=1), "max_sessions.* Start it with a session for each open episode"),
    (None, "ConnectionClosed.* Start it, correct the address, or raise episode.deadline_s"),
])  # fmt: skip
def test_wrong_replies_are_errors_with_the_address(server, reply, message):
    environment = opened(server)
    server.reply = lambda _: reply
    with pytest.raises(ConnectionError, match=message) as caught:
        environment.step("4")
    assert str(caught.value).startswith(f"episode.server: must be an OpenEnv server; got from {server.address} ")


def test_slow_reply_and_episode_over_at_reset_are_errors(server):
    environment = opened(server, deadline_s=2.0)
    server.reply = lambda _: str(server.ends.wait(60))
    with pytest.raises(ConnectionError, match=r"TimeoutError.* or raise episode\.deadline_s"):
        environment.step("4")
    server.reply = lambda _: observed(hint="", turn=0, done=True)
    with pytest.raises(ConnectionError, match=r"to reset: .* Correct the environment or the row"):
        opened(server)


@pytest.mark.parametrize("schema", ["[]", "no JSON", '{"action": {}}'])
def test_server_without_schema_is_an_error(server, schema, monkeypatch):
    monkeypatch.setattr(server, "schema", lambda: schema)
    with pytest.raises(ConnectionError, match=rf"got from {server.address} \w+Error"):
        opened(server)
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match=f"got from {address} ConnectError: .* Start it, correct the address"):
        OpenEnv(address).reset({"seed": 1})


def test_changed_schema_is_an_error(server):
    environment = opened(server)
    server.reply = lambda _: failed("VALIDATION_ERROR")
    assert environment.step("4").reply == "error: an action has the fields guess"
    server.action = {"number": {"type": "string"}}
    with pytest.raises(ConnectionError, match=r"got from .* another schema than before\. Restart the run"):
        environment.step("4")


def test_key_is_sent_and_never_shown(server, monkeypatch):
    with pytest.raises(ConnectionError, match=r"no key in MY_KEY \(episode.server_key_variable\). Export the variable"):
        opened(server, key_variable="MY_KEY")
    monkeypatch.setenv("MY_KEY", "sesame")
    environment = opened(server, key_variable="MY_KEY")
    assert server.keys == ["Bearer sesame"] * 2
    server.reply = lambda _: None
    with pytest.raises(ConnectionError) as caught:
        environment.step("4")
    assert "sesame" not in str(caught.value)


def test_games_have_own_numbers_and_seeds():
    settings = CustomData(options=("Game {game} of many", "text"), train_size=20, validation_size=5)
    rows = build(settings, 3)
    every = [*rows.splits["validation"], *rows.splits["train"]]
    assert [row.prompt[0].content for row in every] == [f"Game {number} of many" for number in range(25)]
    seeds = {row.ground_truth["seed"] for row in every}
    assert len(seeds) == 25
    assert seeds.isdisjoint(row.ground_truth["seed"] for row in build(settings, 4).splits["train"])
    assert (rows.prompt_form, build(CustomData(options=("{game}",)), 1).prompt_form) == ("text", "chat")
    for options in ((), ("no number",), ("{game}", "plain")):
        with pytest.raises(ConfigError, match=r"data\.options: must be a prompt with {game}"):
            build(CustomData(options=options), 1)


def episode_of(kind, address, seed):
    data = {"task": "custom", "environment": f"data.openenv:{kind.__name__}"}
    config = RunConfig.model_validate({"data": data, "episode": {"server": address, "deadline_s": 30}})
    return Episode.start(str(seed), config, json.dumps({"seed": seed}), 0, max_kept=9)


def test_games_of_the_package_survive_a_killed_process_if_repeatable(tmp_path):
    with game_server(tmp_path) as address, ScoringPool(PLAY, RewardConfig(num_processes=1, deadline_s=60)) as pool:
        for kind in (RepeatableOpenEnv, OpenEnv):
            episodes = [episode_of(kind, address, seed) for seed in range(5)]
            for turn in range(4):
                scores = pool.score([one.to_json() for one in episodes], [one.truth for one in episodes])
                if turn == 2 and kind is OpenEnv:
                    assert {score.failure for score in scores} == {LOST}
                    break
                for episode, score in zip(list(episodes), scores, strict=True):
                    assert score.failure is None
                    found, number = turn_from_score(score), random.Random(int(episode.name)).randint(1, 7)
                    if turn:  # the naive twin of the game
                        guess = int(episode.texts[-1])
                        assert (found.done, found.reward) == (guess == number, float(guess == number))
                    assert found.reply == (":" if turn == 0 else "+" if guess < number else "-")
                    episode.replies.append(found.reply)
                    episode.texts.append("426"[turn - 1] if turn else "1")
                    if found.done:
                        episodes.remove(episode)
                if turn == 1:
                    pool._workers[0].process.kill()
