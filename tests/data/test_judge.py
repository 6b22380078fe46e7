"""A judge model over HTTP: requests, retries, and failures that cost the response its score alone."""

import asyncio
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from unittest.mock import AsyncMock

import pytest

from data import judge
from data.judge import JudgeError, judge_response, read_verdict
from rlcore.config.rollout import JudgeConfig, RewardConfig
from rlcore.rollout.scoring import ScoringPool
from tests.data.judges import GOOD, HOSTILE, Judge, Reply, judge_server, message

SECRET, JUDGE = "sk-do-not-tell-1234", "data.judge:score"
FIRST_PAUSE_S, VERDICTS = judge._FIRST_PAUSE_S, judge._verdict
Settings = Callable[..., JudgeConfig]
VERDICT = message('{"score": 3}')
RANGE = "the judge's score must be from 0 to 4 (reward.judge.highest), got"


@pytest.fixture(scope="module")
def cases() -> Iterator[Judge]:
    """Return a server with one reply for each case."""
    with judge_server() as server:
        yield server


@pytest.fixture
def reward(cases: Judge, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RewardConfig]:
    monkeypatch.setenv("JUDGE_KEY", SECRET)

    def make(*, num_processes: int = 4, **changes: object) -> RewardConfig:
        values = {"url": cases.url, "model": "judge", "key_variable": "JUDGE_KEY", "deadline_s": 4, **changes}
        return RewardConfig(num_processes=num_processes, deadline_s=8, judge=JudgeConfig.model_validate(values))

    return make


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    """Start a server with replies in order, for `judge_response` without pauses and without stored verdicts."""
    monkeypatch.setattr(judge, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(judge, "_verdict", VERDICTS.__wrapped__)
    monkeypatch.setenv("JUDGE_KEY", " sk-1 ")
    with judge_server((200, message('{"score": 3}'), {})) as made:
        yield made


@pytest.fixture
def settings(server: Judge) -> Settings:
    values = {"url": f"{server.url}/", "model": "m", "highest": 4, "deadline_s": 30}
    return lambda **changes: JudgeConfig.model_validate(values | changes)


def test_broken_judges_give_no_score_and_are_counted(cases, reward, caplog):
    names = [*GOOD, *HOSTILE]
    with caplog.at_level(logging.DEBUG), ScoringPool(JUDGE, reward()) as pool:
        scores = pool.score([f"a response, case={name}" for name in names], ['{"answer": "3"}'] * len(names))
        num_unscored = pool.unscored[0]
    found = dict(zip(names, scores, strict=True))
    for name in GOOD:
        assert (found[name].total, dict(found[name].parts), found[name].failure) == (0.75, {"judge": 0.75}, None)
    assert [name for name in HOSTILE if not found[name].failure or SECRET in found[name].failure] == []
    assert num_unscored == len(HOSTILE)
    assert SECRET not in caplog.text
    assert "elsewhere" not in cases.seen, "the key followed a redirection"
    assert [cases.seen[name] for name in ("flaky", "status_500", "closes", "cut_off")] == [3] * 4
    assert [cases.seen[name] for name in ("tag", "wrong_key", "redirect", "not_a_number")] == [1] * 4
    assert "status 401" in str(found["wrong_key"].failure)


@pytest.mark.parametrize(("levels", "highest", "scores"), [
    (2, 1, [0, 1]), (5, 4, [0, 1, 2, 3, 4]), (3, 7, [0, 3.5, 7]), (4, 0.6666667, [0, 0.222222, 0.444444, 0.6666667]),
])  # fmt: skip
def test_structured_output_allows_levels_up_to_the_highest(server, settings, levels, highest, scores):
    server.replies = [(200, message(json.dumps({"score": scores[-1]})), {})]
    assert judge_response(settings(levels=levels, highest=highest), "x", "{}") == 1.0
    schema = server.requests[0][2]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["score"]["enum"] == scores


def test_rules_and_weights_combine_with_the_judge(reward: Callable[..., RewardConfig]) -> None:
    made = reward(num_processes=1, rules="data.countdown:score")
    truth = json.dumps({"numbers": [3, 4], "target": 7})
    with ScoringPool(JUDGE, made) as pool:
        (score,) = pool.score(["<answer>3 + 4</answer>"], [truth])
    assert (score.total, score.parts["correct"], score.parts["judge"]) == (1.75, 1.0, 0.75)
    weighted = made.model_copy(update={"weights": {"correct": 2.0, "judge": -1.0}})
    with ScoringPool(JUDGE, weighted) as pool:
        (score, failed) = pool.score(["<answer>3 + 4</answer>", "case=not_a_number"], [truth] * 2)
    assert (score.total, score.parts["total"]) == (1.25, 1.75)
    assert failed.failure, "a rule's score alone is not trained on"


def test_unreachable_endpoints_are_named(settings: Settings) -> None:
    with socket.socket() as taken:  # bound and not listening
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(JudgeError, match=rf"no verdict of {address} \(reward\.judge\.url\) in 1 tries"):
            judge_response(settings(url=address, tries=1), "1", "{}")


def test_requests_have_prompt_key_and_response_format(server, settings, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # the key is for the endpoint alone
    prompt = "{response}|{ground_truth}|{other}"
    made = settings(prompt=prompt, key_variable="JUDGE_KEY", max_tokens=77, levels=5, highest=2)
    server.replies = [(200, message("Fine.\n<score>1.5</score>"), {})]
    assert judge_response(made, "says {ground_truth}", '{"a": 1}') == 0.75
    ((path, headers, request),) = server.requests
    assert path == "/v1/chat/completions"
    expected = {"Content-Type": "application/json", "Accept-Encoding": "identity", "Authorization": "Bearer sk-1"}
    assert headers.items() >= expected.items()
    score = {"type": "number", "enum": [0, 0.5, 1, 1.5, 2]}
    schema = {"type": "object", "properties": {"score": score}, "required": ["score"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}
    content = 'says {ground_truth}|{"a": 1}|{other}'
    assert request == {
        "model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 77,
        "response_format": form,
    }  # fmt: skip
    judge_response(settings(levels=None), "x", "{}")
    assert server.requests[1][2].keys() == {"model", "messages", "temperature", "max_tokens"}
    assert "Authorization" not in server.requests[1][1]


@pytest.mark.parametrize(("reply", "problem"), [
    *(((status, b"{}", {}), f"the endpoint answered with status {status}") for status in (400, 499)),
    ((201, VERDICT, {}), "the endpoint answered with status 201"),
    ((200, VERDICT, {"Content-Type": "text/html"}), "must be application/json, uncompressed"),
    ((200, VERDICT, {"Content-Encoding": "gzip"}), "must be application/json, uncompressed"),
    *(((200, body, {}), "holds no choices[0].message.content")
      for body in (b"{}", message(None), b'{"choices": 3}', b'{"choices": []}')),
    ((200, message("3"), {}), "the judge's text must end with its one score; it has 0 in 1 characters"),
])  # fmt: skip
def test_invalid_replies_are_not_retried(server: Judge, settings: Settings, reply: Reply, problem: str) -> None:
    server.replies = [reply]
    with pytest.raises(JudgeError, match=re.escape(problem)):
        judge_response(settings(tries=3), "x", "{}")
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_busy_endpoints_are_retried(server, settings, status, monkeypatch):
    sleep = AsyncMock()
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(judge, "_FIRST_PAUSE_S", FIRST_PAUSE_S)
    busy: Reply = (status, b"{}", {})
    server.replies = [busy, busy, (200, message('{"score": 4}'), {})]
    assert judge_response(settings(tries=3), "x", "{}") == 1.0
    server.replies = [busy]
    problem = f"in 4 tries (reward.judge.tries); the last one: the endpoint answered with status {status}"
    with pytest.raises(JudgeError, match=re.escape(problem)):
        judge_response(settings(tries=4), "x", "{}")
    assert [pause.args[0] for pause in sleep.await_args_list] == [0.5, 1.0, 0.5, 1.0, 2.0]


def test_time_and_length_of_replies_are_bounded(
    server: Judge, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "_FIRST_PAUSE_S", 60.0)
    server.replies = [(503, b"", {})]
    problem = r"within 1 s \(reward\.judge\.deadline_s\); before that the endpoint answered with status 503"
    with pytest.raises(JudgeError, match=problem):
        judge_response(settings(tries=4, deadline_s=1), "x", "{}")
    monkeypatch.setattr(judge, "_MOST_BYTES", len(VERDICT))
    server.replies = [(200, VERDICT, {})]
    assert judge_response(settings(), "x", "{}") == 0.75
    server.replies = [(200, VERDICT + b" ", {})]
    with pytest.raises(JudgeError, match=rf"^the endpoint's answer is longer than {len(VERDICT)} bytes$"):
        judge_response(settings(), "x", "{}")


def test_equal_requests_are_sent_once(server: Judge, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_verdict", VERDICTS)
    assert [judge_response(settings(), "x", "{}") for _ in range(2)] == [0.75, 0.75]
    assert len(server.requests) == 1
    assert judge_response(settings(highest=6), "x", "{}") == 0.5
    judge_response(settings(), "y", "{}")
    judge_response(settings(model="n"), "x", "{}")
    assert len(server.requests) == 4


@pytest.mark.parametrize("key", [None, "  ", "two\nlines", "ä"])
def test_unusable_keys_are_named_by_their_variable(server, settings, key, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY")
    if key is not None:
        monkeypatch.setitem(os.environ, "JUDGE_KEY", key)
    with pytest.raises(JudgeError, match=r"^the environment variable JUDGE_KEY \(reward\.judge\.key_variable\) must"):
        judge_response(settings(key_variable="JUDGE_KEY"), "x", "{}")
    assert server.requests == []


@pytest.mark.parametrize(("text", "problem"), [
    *((text, "the judge's text must end with its one score; it has 0 in") for text in (
        "", "1", '{"score": true}', '{"score": "1"}', '{"score": 1e400}', '{"score": 1.0, "x": 2}',
    )),
    ('{"score": 1} or so', "the judge's text must end with its one score; it has 1 in 18 characters"),
    ("<score>1</score> <score>2</score>", "the judge's text must end with its one score; it has 2 in 33"),
    ("<score>4.01</score>", f"{RANGE} 4.01"), ('{"score": -0.1}', f"{RANGE} -0.1"),
])  # fmt: skip
def test_verdicts_need_one_final_number_in_range(text: str, problem: str) -> None:
    for valid, verdict in (("<score> 4 </score>\n", 1.0), ('```json\n{ "score" : 1 }\n```', 0.25)):
        assert read_verdict(valid, 4) == verdict
    with pytest.raises(JudgeError, match=f"^{re.escape(problem)}"):
        read_verdict(text, 4)
