"""Tokens between two turns, with a tokenizer of one token per character."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rlcore.errors import ConfigError
from rlcore.rollout.turns import TODAY, TurnTokens


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
