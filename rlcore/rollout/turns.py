"""The tokens between two turns of the model: end of turn, message of the environment, and start of the next turn.
Earlier tokens are never tokenized again, so a chat template must render longer conversations with the same beginning.
"""

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from rlcore.errors import ConfigError

TODAY = date(2024, 7, 26)
"""The date for chat templates (Llama 3's default), so that the same rows give the same tokens every day."""
_USER_MESSAGE = {"role": "user", "content": "MillraceAsk"}
_RESPONSES, _REPLIES = ("MillraceFirst", "MillraceSecond"), ("MillraceOne", "MillraceTwo")


class TurnTokens:
    """The token ids of an environment's messages. `chat`: by the chat template instead of as plain text. Raises
    ConfigError if the template cannot render later turns, or drops or changes earlier turns."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat: bool,
        max_reply_tokens: int,
        role: str = "user",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = chat_template_kwargs or {}
        self._chat = chat
        self._max_reply_tokens = max_reply_tokens
        self._role = role
        if not chat:
            return
        try:
            start = self._render([_USER_MESSAGE]) + _RESPONSES[0]
            one = self._conversation(1)
            two = self._conversation(2)
        except Exception as error:  # errors of jinja and templates
            raise ConfigError(
                f"data.environment: the tokenizer's chat template cannot render a second turn ({type(error).__name__}: "
                f"{error}). Fix chat_template.jinja, or choose another model"
            ) from error
        if not (one.startswith(start) and two.startswith(one + _RESPONSES[1]) and _REPLIES[1] in two):
            raise ConfigError(
                "data.environment: the tokenizer's chat template drops or changes earlier turns of a conversation, so "
                "the model's tokens could not be reused. Use a template that keeps every turn (chat_template.jinja of "
                "the tokenizer)"
            )
        self._head = len(start)

    def reply_tokens(self, last_token: int, reply: str) -> tuple[str, list[int]]:
        """Return the truncated reply, and the ids of all tokens between `last_token` and the model's next text. If
        `last_token` already ends the model's turn, the ids do not repeat this end."""
        reply = self._truncate(reply)
        if not self._chat:
            return reply, self._ids(reply)
        shown = [_USER_MESSAGE, {"role": "assistant", "content": _RESPONSES[0]}, self._message(reply)]
        ids = self._ids(self._render(shown)[self._head :])
        return reply, ids[1:] if ids[:1] == [last_token] else ids

    def first_message_tokens(self, prompt: Sequence[int], message: str) -> tuple[str, tuple[int, ...], list[int]]:
        """Return the truncated first message, the prompt without the start of the model's turn, and the ids that follow
        it. Raises ConfigError if the prompt does not end with the template's start of a turn."""
        message = self._truncate(message)
        if not self._chat:
            return message, tuple(prompt), self._ids(message)
        closed, opened = self._render([_USER_MESSAGE], opened=False), self._render([_USER_MESSAGE])
        begin = self._ids(opened[len(closed) :])
        both = self._render([_USER_MESSAGE, self._message(message)])
        kept = len(prompt) - len(begin)
        if not (opened.startswith(closed) and both.startswith(closed) and list(prompt[kept:]) == begin and kept > 0):
            raise ConfigError(
                "data.environment: reset returned a first message, which the chat template does not support after the "
                "prompt. Move it to the row's prompt, and return None"
            )
        return message, tuple(prompt[:kept]), self._ids(both[len(closed) :])

    def _truncate(self, reply: str) -> str:
        ids = self._ids(reply)
        return reply if len(ids) <= self._max_reply_tokens else self._tokenizer.decode(ids[: self._max_reply_tokens])

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _conversation(self, num_turns: int) -> str:
        messages = [_USER_MESSAGE]
        for answer, reply in list(zip(_RESPONSES, _REPLIES, strict=True))[:num_turns]:
            messages += [{"role": "assistant", "content": answer}, self._message(reply)]
        return self._render(messages)

    def _message(self, text: str) -> dict[str, str]:
        return {"role": self._role, "content": text}

    def _render(self, messages: Sequence[Mapping[str, str]], *, opened: bool = True) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=opened,
                strftime_now=TODAY.strftime,
                **self._template_kwargs,
            )
        )
