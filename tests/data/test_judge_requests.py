"""What is asked of a judge's endpoint, how often, and what each broken answer of it is told as."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from data import judge
from data.judge import JudgeError, judge_response, read_verdict
from rlcore.config.rollout import JudgeConfig
from tests.data.judges import Judge, Reply, judging, told

FIRST_PAUSE_S = judge._FIRST_PAUSE_S


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    monkeypatch.setattr(judge, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(judge, "_cache", judge._cache.__wrapped__)  # no verdict of another test
    monkeypatch.setenv("JUDGE_KEY", " sk-1 ")
    with judging((200, told('{"score": 3}'), {})) as made:
        yield made


Settings = Callable[..., JudgeConfig]


@pytest.fixture
def settings(server: Judge) -> Settings:
    def make(**changes: object) -> JudgeConfig:
        given = {"url": f"{server.url}/", "model": "m", "highest": 4, "deadline_s": 30}
        return JudgeConfig.model_validate(given | changes)

    return make


def test_a_request_has_prompt_key_and_form_of_the_answer(
    server: Judge, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # the key goes to the endpoint alone
    asking = settings(
        prompt="{response}|{ground_truth}|{other}", key_variable="JUDGE_KEY", max_tokens=77, levels=5, highest=2
    )
    server.replies = [(200, told("Fine.\n<score>1.5</score>"), {})]
    assert judge_response(asking, "says {ground_truth}", '{"a": 1}') == 0.75
    ((path, headers, asked),) = server.asked
    assert path == "/v1/chat/completions"
    assert [headers[name] for name in ("Content-Type", "Accept-Encoding", "Authorization")] == [
        "application/json", "identity", "Bearer sk-1",
    ]  # fmt: skip
    assert asked.pop("response_format") == {
        "type": "json_schema",
        "json_schema": {
            "name": "verdict",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": {"score": {"type": "number", "enum": [0, 0.5, 1, 1.5, 2]}},
                "required": ["score"],
                "additionalProperties": False,
            },
        },
    }
    assert asked == {
        "model": "m",
        "messages": [{"role": "user", "content": 'says {ground_truth}|{"a": 1}|{other}'}],
        "temperature": 0,
        "max_tokens": 77,
    }
    judge_response(settings(levels=None), "x", "{}")
    assert server.asked[1][2].keys() == {"model", "messages", "temperature", "max_tokens"}
    assert "Authorization" not in server.asked[1][1]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ((400, b"{}", {}), "the endpoint answered with status 400"),
        ((499, b"{}", {}), "the endpoint answered with status 499"),
        ((201, told('{"score": 3}'), {}), "the endpoint answered with status 201"),
        ((200, told('{"score": 3}'), {"Content-Type": "text/html"}), "must be application/json, uncompressed"),
        ((200, told('{"score": 3}'), {"Content-Encoding": "gzip"}), "must be application/json, uncompressed"),
        ((200, b"{}", {}), "holds no choices[0].message.content"),
        ((200, told(None), {}), "holds no choices[0].message.content"),
        ((200, b'{"choices": 3}', {}), "holds no choices[0].message.content"),
        ((200, told("3"), {}), "the judge's text must end with its one score; it has 0 in 1 characters"),
    ],
)
def test_an_answer_without_verdict_is_not_retried(server: Judge, settings: Settings, reply: Reply, why: str) -> None:
    server.replies = [reply]
    with pytest.raises(JudgeError) as error:
        judge_response(settings(tries=3), "x", "{}")
    assert why in str(error.value)
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_a_busy_endpoint_is_asked_again(server: Judge, settings: Settings, status: int) -> None:
    busy: Reply = (status, b"{}", {})
    server.replies = [busy, busy, (200, told('{"score": 4}'), {})]
    assert judge_response(settings(tries=3), "x", "{}") == 1.0
    server.replies = [busy]
    with pytest.raises(JudgeError) as error:
        judge_response(settings(tries=2), "x", "{}")
    url = settings().url
    assert str(error.value) == (
        f"no verdict of {url} (reward.judge.url) in 2 tries (reward.judge.tries); the last one: the endpoint answered "
        f"with status {status}"
    )
    assert len(server.asked) == 3 + 2


def test_each_pause_is_twice_the_one_before(server: Judge, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(judge, "_FIRST_PAUSE_S", FIRST_PAUSE_S)
    server.replies = [(503, b"", {})]
    with pytest.raises(JudgeError, match="in 4 tries"):
        judge_response(settings(tries=4), "x", "{}")
    assert pauses == [0.5, 1.0, 2.0]


def test_a_deadline_ends_the_tries(server: Judge, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_FIRST_PAUSE_S", 60.0)
    server.replies = [(503, b"", {})]
    with pytest.raises(JudgeError) as error:
        judge_response(settings(tries=4, deadline_s=0.25), "x", "{}")
    assert str(error.value) == (
        f"no verdict of {settings().url} within 0.25 s (reward.judge.deadline_s); before that the endpoint answered "
        "with status 503"
    )


def test_an_answer_may_be_as_long_as_the_bound(
    server: Judge, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = told('{"score": 3}')
    monkeypatch.setattr(judge, "_MOST_BYTES", len(text))
    assert judge_response(settings(), "x", "{}") == 0.75
    server.replies = [(200, text + b" ", {})]
    with pytest.raises(JudgeError, match=rf"^the endpoint's answer is longer than {len(text)} bytes$"):
        judge_response(settings(), "x", "{}")


def test_a_verdict_is_cached_by_request_and_highest_score(
    server: Judge, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "new" / "deeper" / "verdicts.sqlite"
    for _ in range(2):
        assert judge_response(settings(cache=str(file)), "x", "{}") == 0.75
    assert len(server.asked) == 1
    assert judge_response(settings(cache=str(file), highest=6), "x", "{}") == 0.5
    judge_response(settings(cache=str(file)), "y", "{}")
    judge_response(settings(cache=str(file), model="n"), "x", "{}")
    assert len(server.asked) == 4
    judge_response(settings(), "x", "{}")
    assert len(server.asked) == 5, "without a file each process has its own"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deeper", "new", "verdicts.sqlite"]
    (tmp_path / "notes.txt").write_text("no database, and longer than the head of one" * 9)
    for cache in (tmp_path, tmp_path / "notes.txt", tmp_path / "notes.txt" / "below"):
        with pytest.raises(JudgeError, match=rf"^reward\.judge\.cache: must be a file of verdicts, .*; got {cache} \("):
            judge_response(settings(cache=str(cache)), "x", "{}")


@pytest.mark.parametrize("key", [None, "  ", "two\nlines", "ä"])
def test_an_unusable_key_is_named_by_its_variable(
    server: Judge, settings: Settings, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_KEY")
    if key is not None:
        monkeypatch.setitem(os.environ, "JUDGE_KEY", key)
    with pytest.raises(JudgeError, match=r"^the environment variable JUDGE_KEY \(reward\.judge\.key_variable\) must"):
        judge_response(settings(key_variable="JUDGE_KEY"), "x", "{}")
    assert server.asked == []


def test_a_verdict_is_a_share_of_the_highest_score() -> None:
    assert read_verdict("<score> 4 </score>\n", 4) == 1.0
    assert read_verdict('{"score": 0}', 4) == 0.0
    assert read_verdict('```json\n{ "score" : 0.5 }\n```', 2) == 0.25
    for number in ("4.01", "-0.01"):
        with pytest.raises(JudgeError) as error:
            read_verdict(f"<score>{number}</score>", 4.0)
        assert str(error.value) == f"the judge's score must be from 0 to 4 (reward.judge.highest), got {number}"
    with pytest.raises(JudgeError) as error:
        read_verdict("<score>1</score> <score>2</score>", 4)
    assert str(error.value) == "the judge's text must end with its one score; it has 2 in 33 characters"
