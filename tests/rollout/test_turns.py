"""Tokens between two turns, by a tokenizer of one token a character."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from rlcore.errors import ConfigError
from rlcore.rollout.turns import TODAY, TurnTokens


class Letters:
    """A tokenizer whose chat template is Python: `<u>..$`, and `<a>` where the model's turn begins."""

    def __init__(self, **changes: Any) -> None:
        self._changes = changes
        self.given: list[Mapping[str, Any]] = []
        self.days: set[str] = set()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids)) + self._changes.get("mark", "")

    def apply_chat_template(
        self,
        messages: Any,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        strftime_now: Callable[[str], str],
        **others: Any,
    ) -> str:
        assert not tokenize
        self.given.append(others)
        self.days.add(strftime_now("%d %B %Y"))
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
def test_a_reply_is_cut_where_it_is_longer_than_its_limit(reply: str, cut: str, chat: bool) -> None:
    tokens = TurnTokens(Letters(mark="|"), chat=chat, max_reply_tokens=5)
    shown, between = tokens.reply_tokens(ord("$"), reply)
    assert shown == cut
    assert between == ids(f"\n<u>{cut}$\n<a>" if chat else cut)


def test_a_reply_has_the_role_that_was_asked_for() -> None:
    tokens = TurnTokens(Letters(), chat=True, max_reply_tokens=5, role="tool")
    assert tokens.reply_tokens(ord("$"), "hi") == ("hi", ids("\n<t>hi$\n<a>"))
    assert tokens.first_message_tokens(ids("<u>x$\n<a>"), "go")[2] == ids("<t>go$\n<a>")


def test_the_template_has_what_the_settings_give_it() -> None:
    letters = Letters()
    TurnTokens(letters, chat=True, max_reply_tokens=5, chat_template_kwargs={"thinking": False}).reply_tokens(0, "hi")
    assert letters.given == [{"thinking": False}] * 4
    assert letters.days == {TODAY.strftime("%d %B %Y")}, "as in the prompts: a day of another length moves all turns"
    plain = Letters()
    TurnTokens(plain, chat=True, max_reply_tokens=5)
    assert plain.given == [{}] * 3


def test_without_a_chat_template_a_first_message_follows_the_prompt() -> None:
    letters = Letters()
    tokens = TurnTokens(letters, chat=False, max_reply_tokens=5)
    assert tokens.first_message_tokens(ids("<a>"), "0123456") == ("01234", tuple(ids("<a>")), ids("01234"))
    assert letters.given == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"most": 3},
            "cannot render a second turn (ValueError: too many turns). Mend chat_template.jinja, or choose another "
            "model",
        ),
        (
            {"counts": True},
            "drops or changes earlier turns of a conversation, so tokens that the model wrote could not be kept. Use a "
            "template that keeps every turn (chat_template.jinja beside the tokenizer)",
        ),
    ],
)
def test_a_template_without_further_turns_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TurnTokens(Letters(**changes), chat=True, max_reply_tokens=5)
    assert str(caught.value) == f"data.environment: the tokenizer's chat template {told}"


@pytest.mark.parametrize("prompt", ["<a>", "", "<u>x$\n<b>", "a>"])
def test_a_prompt_without_the_models_turn_takes_no_message(prompt: str) -> None:
    tokens = TurnTokens(Letters(), chat=True, max_reply_tokens=5)
    assert tokens.first_message_tokens(ids("x<a>"), "go") == ("go", (ord("x"),), ids("<u>go$\n<a>"))
    with pytest.raises(ConfigError) as caught:
        tokens.first_message_tokens(ids(prompt), "go")
    assert str(caught.value) == (
        "data.environment: reset returned a first message, and the chat template has no place for it after the prompt. "
        "Put it into the row's prompt, and return None"
    )
