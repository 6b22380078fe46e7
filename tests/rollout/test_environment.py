"""Turns of an episode, played in this process."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from rlcore.config import RunConfig
from rlcore.errors import ConfigError
from rlcore.rollout import environment
from rlcore.rollout.environment import TODAY, Episode, Turn, TurnTokens, play, resolve_environment, turn_from_score
from rlcore.rollout.scoring import require_environment
from rlcore.score import Score

HERE = "tests.rollout.test_environment"
made: list[dict[str, Any]] = []  # arguments of each created environment, in order


class Echo:
    """Replies with the number of turns and what was written; ends at `stop`."""

    def __init__(self, **options: Any) -> None:
        made.append(options)
        self.texts: list[str] = []

    def reset(self, row: Mapping[str, Any]) -> str | None:
        self.row = row
        hello: str | None = row.get("hello")
        return hello

    async def step(self, text: str) -> Turn:
        self.texts.append(text)
        return Turn(f"{len(self.texts)}: {text}", text == "stop", float(len(text)), {"turns": len(self.texts)})


class Wrong(Echo):
    async def step(self, text: str) -> Any:
        return Turn(3) if text == "number" else text  # type: ignore[arg-type]


class Closing(Echo):
    """Notes its end, and fails in it. It is not repeated."""

    repeatable = False
    closed: ClassVar[list[list[str]]] = []

    def close(self) -> None:
        self.closed.append(self.texts)
        raise OSError("gone")


class Silent:
    def reset(self, row: Mapping[str, Any]) -> None: ...


@pytest.fixture(autouse=True)
def environments() -> Iterator[dict[str, Any]]:
    environment._environments.clear()
    made.clear()
    yield environment._environments
    environment._environments.clear()


def truth(kind: str = "Echo", **more: Any) -> dict[str, Any]:
    return {"environment": f"{HERE}:{kind}", "options": {}, "row": {"seed": 3}} | more


def played(
    texts: list[str], replies: list[str], *, name: str = "a", limit: int = 100, most: int = 9, **more: Any
) -> Score:
    episode = Episode(name, "", limit, texts, replies, most)
    return play(episode.to_json(), truth(**more))


def test_turns_continue_in_their_environment(environments: dict[str, Any]) -> None:
    assert turn_from_score(played([], [])) == Turn("", False)
    assert turn_from_score(played(["one"], [""])) == Turn("1: one", False, 3.0, {"turns": 1})
    assert list(environments) == ["a"]
    assert turn_from_score(played(["one", "three"], ["", "1: one"])) == Turn("2: three", False, 5.0, {"turns": 2})
    assert len(made) == 1, "it is stored between turns"
    last = turn_from_score(played(["one", "three", "stop"], ["", "1: one", "2: three"]))
    assert last == Turn("3: stop", True, 4.0, {"turns": 3})
    assert list(environments) == [], "an ended episode is dropped"
    assert turn_from_score(played([], [], row={"hello": "welcome"})) == Turn("welcome", False)
    assert turn_from_score(played(["x"], ["welcome"], row={"hello": "welcome"})).reply == "1: x"
    assert len(made) == 2


def test_lost_environment_repeats_turns(environments: dict[str, Any]) -> None:
    played(["one"], [""])
    environments.clear()
    assert turn_from_score(played(["one", "two"], ["", "1: one"])).reply == "2: two"
    assert len(made) == 2
    assert turn_from_score(played(["other", "two"], ["", "1: other"])).reply == "2: two"
    assert len(made) == 3
    assert turn_from_score(played([], [])).reply == ""
    assert len(made) == 4, "a new episode has a new one"


@pytest.mark.parametrize(
    ("texts", "replies", "message"),
    [
        (["one", "two"], ["", "1: eins"], "got the reply '1: one' instead of '1: eins'"),
        (["one", "two"], ["hello", "1: one"], "got the reply '' instead of 'hello'"),
        (["stop", "two"], ["", "1: stop"], "got the reply '1: stop' instead of '1: stop'"),
        (["x" * 90, "two"], ["", "y" * 90], f"got the reply '1: {'x' * 77}' instead of '{'y' * 80}'"),
    ],
)
def test_different_reply_of_repeated_turn_is_an_error(texts: list[str], replies: list[str], message: str) -> None:
    with pytest.raises(ValueError, match="must depend on its row, its seed and the texts alone") as caught:
        played(texts, replies)
    assert str(caught.value).startswith(f"a repeated turn {message}: replies of")


def test_unrepeatable_environment_is_lost_and_not_repeated(environments: dict[str, Any]) -> None:
    assert turn_from_score(played([], [], kind="Closing")).reply == ""
    assert turn_from_score(played(["one"], [""], kind="Closing")).reply == "1: one"
    environments.clear()
    with pytest.raises(LookupError, match=r"was lost, and its turns are not repeated \(repeatable=False\)"):
        played(["one", "two"], ["", "1: one"], kind="Closing")
    assert len(made) == 1, "nothing is created again"


def test_environment_is_closed_at_its_end() -> None:
    Closing.closed.clear()
    played([], [], kind="Closing")
    played(["stop"], [""], kind="Closing")
    assert Closing.closed == [["stop"]]
    for name in ("b", "c"):
        played([], [], kind="Closing", name=name, most=1)
    assert Closing.closed == [["stop"], []], "the dropped one"
    played([], [], kind="Closing", name="c", most=1)
    assert Closing.closed == [["stop"], [], []], "the one that begins again"


def test_replies_are_truncated_and_valid_utf8() -> None:
    assert turn_from_score(played(["word"], [""], limit=5)).reply == "1: wo"
    assert turn_from_score(played([], [], row={"hello": "welcome"}, limit=3, name="b")).reply == "wel"
    assert turn_from_score(played(["\ud83d"], [""], name="c")).reply == "1: ?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("number", "a reply must be text, got int"),
        ("text", "step must return rlcore.rollout.environment.Turn, got str"),
    ],
)
def test_invalid_turns_are_errors(text: str, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        played([text], [""], kind="Wrong")
    assert str(caught.value) == message


def test_least_recently_used_environment_is_dropped(environments: dict[str, Any]) -> None:
    for name in ("a", "b"):
        played([], [], name=name, most=2)
    assert list(environments) == ["a", "b"]
    played(["x"], [""], name="a", most=2)
    played([], [], name="c", most=2)
    assert list(environments) == ["a", "c"]
    played([], [], name="d", most=1)
    assert list(environments) == ["d"], "the limit applies"


def test_empty_response_only_creates_environment(environments: dict[str, Any]) -> None:
    created = play("", truth(options={"tools": ["a:b"]}))
    assert created == Score(0.0, {})
    assert turn_from_score(created) == Turn("", True)
    assert made == [{"tools": ["a:b"]}]
    assert list(environments) == []


def test_episode_starts_with_row_seed_and_options() -> None:
    config = RunConfig.model_validate({"data": {"task": "countdown", "environment": "a:B"}})
    episode = Episode.start("e", config, '{"target": 3, "seed": 9}', 77)
    assert json.loads(episode.truth) == {
        "environment": "a:B",
        "options": {},
        "row": {"target": 3, "seed": 77, "own_seed": 9},
    }
    assert (episode.name, episode.max_characters) == ("e", 16 * config.episode.max_tool_tokens)
    asked = {"name": "e", "max_characters": episode.max_characters, "texts": [], "replies": [], "max_kept": 1}
    assert json.loads(episode.to_json()) == asked
    server = {"server": "http://127.0.0.1:1", "server_key_variable": "KEY", "deadline_s": 3.0}
    served = RunConfig.model_validate({"data": {"task": "custom", "environment": "a:B"}, "episode": server})
    options = json.loads(Episode.start("a", served, "{}", 1).truth)["options"]
    assert options == {"server": "http://127.0.0.1:1", "key_variable": "KEY", "deadline_s": 3.0}
    tools = RunConfig.model_validate({"episode": {"tools": ["x:y"]}, "data": {"task": "countdown", "scorer": "m:s"}})
    plain = json.loads(Episode.start("e", tools, "3", 5).truth)
    assert (plain["options"], plain["row"]) == ({"tools": ["x:y"], "scorer": "m:s"}, {"answer": 3, "seed": 5})


def test_incomplete_class_is_rejected() -> None:
    assert resolve_environment(f"{HERE}:Echo") is Echo
    with pytest.raises(ValueError, match=r"Silent has no methods reset\(row\) and step\(text\)"):
        resolve_environment(f"{HERE}:Silent")
    with pytest.raises(ConfigError, match=r"^data\.environment: must name a class as module:Class, got '.*:Silent' \("):
        require_environment(f"{HERE}:Silent")


class Letters:
    """Tokenizer with a chat template in Python: `<u>..$`, and `<a>` at the start of the model's turn."""

    def __init__(self, **changes: Any) -> None:
        self._changes = changes
        self.given: list[Mapping[str, Any]] = []
        self.days: set[str] = set()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids)) + self._changes.get("mark", "")

    def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool, **others: Any) -> str:
        assert not tokenize
        self.days.add(others.pop("strftime_now")("%d %B %Y"))
        self.given.append(others)
        if len(messages) > self._changes.get("most", 99):
            raise ValueError("too many turns")
        shown = [f"<{one['role'][0]}>{one['content']}$\n" for one in messages]
        if self._changes.get("counts"):
            shown.append(f"{len(messages)} in all")
        return "".join(shown) + "<a>" * add_generation_prompt


def ids(text: str) -> list[int]:
    return [*map(ord, text)]


@pytest.mark.parametrize(("reply", "cut"), [("0123", "0123"), ("01234", "01234"), ("012345", "01234|")])
@pytest.mark.parametrize("chat", [True, False])
def test_long_reply_is_truncated(reply: str, cut: str, chat: bool) -> None:
    tokens = TurnTokens(Letters(mark="|"), chat=chat, max_reply_tokens=5)
    shown, between = tokens.reply_tokens(ord("$"), reply)
    assert shown == cut
    assert between == ids(f"\n<u>{cut}$\n<a>" if chat else cut)


def test_reply_has_requested_role() -> None:
    tokens = TurnTokens(Letters(), chat=True, max_reply_tokens=5, role="tool")
    assert tokens.reply_tokens(ord("$"), "hi") == ("hi", ids("\n<t>hi$\n<a>"))
    assert tokens.first_message_tokens(ids("<u>x$\n<a>"), "go")[2] == ids("<t>go$\n<a>")


def test_template_gets_configured_arguments() -> None:
    letters = Letters()
    TurnTokens(letters, chat=True, max_reply_tokens=5, chat_template_kwargs={"thinking": False}).reply_tokens(0, "hi")
    assert letters.given == [{"thinking": False}] * 4
    assert letters.days == {TODAY.strftime("%d %B %Y")}, "as in the prompts: a day of another length moves all turns"
    plain = Letters()
    TurnTokens(plain, chat=True, max_reply_tokens=5)
    assert plain.given == [{}] * 3


def test_first_message_without_chat_template() -> None:
    letters = Letters()
    tokens = TurnTokens(letters, chat=False, max_reply_tokens=5)
    assert tokens.first_message_tokens(ids("<a>"), "0123456") == ("01234", tuple(ids("<a>")), ids("01234"))
    assert letters.given == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"most": 3}, "cannot render a second turn (ValueError: too many turns). Fix chat_template.jinja, or choose"),
        (
            {"counts": True},
            "drops or changes earlier turns of a conversation, so the model's tokens could not be reused.",
        ),
    ],
)
def test_template_without_later_turns_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"data.environment: the tokenizer's chat template {message}")):
        TurnTokens(Letters(**changes), chat=True, max_reply_tokens=5)


@pytest.mark.parametrize("prompt", ["<a>", "", "<u>x$\n<b>", "a>"])
def test_prompt_must_end_with_start_of_turn(prompt: str) -> None:
    tokens = TurnTokens(Letters(), chat=True, max_reply_tokens=5)
    assert tokens.first_message_tokens(ids("x<a>"), "go") == ("go", (ord("x"),), ids("<u>go$\n<a>"))
    with pytest.raises(ConfigError, match=r"data\.environment: reset returned a first message.*Move it to the row's"):
        tokens.first_message_tokens(ids(prompt), "go")
