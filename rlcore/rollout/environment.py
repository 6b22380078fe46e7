"""Environments, and the calls that play their episodes in the processes of the scoring pool. Each turn has a deadline,
and a process that hangs or dies is replaced. Another process then creates the environment again and repeats the earlier
turns. Replies must therefore depend only on the prompt's row, the episode's seed and the model's texts. This module
does not load torch."""

import asyncio
import contextlib
import inspect
import json
from collections import OrderedDict
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from pkgutil import resolve_name
from typing import Any, Protocol, TypeVar, cast

import rlcore.score
from rlcore.config import RunConfig
from rlcore.errors import ConfigError
from rlcore.score import Score

OWN_SEED = "own_seed"  # field of an environment's row that holds the `seed` of the ground truth
PLAY = "rlcore.rollout.environment:play"
_CHARACTERS_PER_TOKEN = 16
"""The number of characters that a reply may have for each permitted token. A longer reply is truncated."""
TODAY = date(2024, 7, 26)
"""The date for chat templates (Llama 3's default), so that the same rows give the same tokens every day."""
_USER_MESSAGE = {"role": "user", "content": "MillraceAsk"}
_RESPONSES, _REPLIES = ("MillraceFirst", "MillraceSecond"), ("MillraceOne", "MillraceTwo")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """The reply of an environment to one turn of the model. `reply`: the text that the model reads next. `reward`: a
    number that is added to the episode's score. `parts`: metrics of the episode by name, where values of later turns
    replace those of earlier turns."""

    reply: str = ""
    done: bool = False
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """The environment of one episode, whose methods may be `async`. If `episode.tools` is set, the class gets the
    arguments `tools` and `scorer`. If `episode.server` is set, it gets `server`, `key_variable` and `deadline_s`. An
    optional method `close` is called at the end."""

    # A class attribute `repeatable = False` declares that replies depend on more than the row, its seed and the texts.

    def reset(self, row: Mapping[str, Any]) -> str | Awaitable[str | None] | None:
        """Start the episode, and return an optional first message, which follows the prompt. `row`: the prompt's ground
        truth with a `seed`, which is the same for all responses to the prompt in a step. If the ground truth
        itself has a `seed`, `row` contains it as `own_seed`."""

    def step(self, text: str) -> Turn | Awaitable[Turn]:
        """Return the environment's reply and reward for one turn. `text`: the text that the model wrote in this
        turn."""


@dataclass(slots=True)
class Episode:
    """The state of an episode. `texts[i]` is the model's text in turn i. `replies[0]` opens the episode, and
    `replies[i]` follows `texts[i - 1]`. `truth`: JSON with the name of the environment, the arguments of its class
    (`options`) and the `row`. `max_kept`: the maximum number of environments that a process stores between turns. An
    environment that is not stored is created again and repeats its turns."""

    name: str
    truth: str
    max_characters: int
    texts: list[str] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    max_kept: int = 1

    @classmethod
    def start(cls, name: str, config: RunConfig, ground_truth_json: str, seed: int, *, max_kept: int = 1) -> "Episode":
        """Return a new episode of `data.environment` without any turn. Its row is the ground truth, with the argument
        `seed` under the key `seed`."""
        truth = json.loads(ground_truth_json)
        row = truth if isinstance(truth, dict) else {"answer": truth}
        own = {OWN_SEED: row["seed"]} if "seed" in row else {}
        episode, options = config.episode, dict[str, Any]()
        if episode.tools:
            options |= {"tools": episode.tools, "scorer": config.data.scorer}
        if episode.server:
            key, limit_s = episode.server_key_variable, episode.deadline_s
            options |= {"server": episode.server, "key_variable": key, "deadline_s": limit_s}
        asked = {"environment": config.data.environment, "options": options, "row": {**row, **own, "seed": seed}}
        limit = _CHARACTERS_PER_TOKEN * config.episode.max_tool_tokens
        return cls(name, json.dumps(asked), limit, max_kept=max_kept)

    def to_json(self) -> str:
        """Return the state without `truth` as JSON, which `play` takes as its `response`."""
        names = ("name", "max_characters", "texts", "replies", "max_kept")
        return json.dumps({name: getattr(self, name) for name in names})


def turn_from_score(score: Score) -> Turn:
    """Return the turn that `play` encoded as a score."""
    reply, done = json.loads(score.said or '["", true]')
    return Turn(reply, done, score.total, score.parts)


def is_repeatable(kind: type[Environment]) -> bool:
    """Return whether an environment class gives equal replies for equal rows, seeds and model texts. A class whose
    replies can differ sets `repeatable = False`."""
    return bool(getattr(kind, "repeatable", True))


def resolve_environment(name: str) -> type[Environment]:
    """Return the class named `module:Class`. Raises ImportError, AttributeError or ValueError if there is none."""
    found = resolve_name(name)
    if not (callable(getattr(found, "reset", None)) and callable(getattr(found, "step", None))):
        raise ValueError(f"{name} has no methods reset(row) and step(text)")
    return cast(type[Environment], found)


_environments: OrderedDict[str, tuple[Environment, list[str]]] = OrderedDict()
"""The environments that this process keeps between turns, by episode name. The texts of the earlier turns are stored
with each environment."""
_event_loop = cache(asyncio.new_event_loop)  # event loop of all episodes, so that clients of an environment stay open


def play(response: str, ground_truth: Mapping[str, object]) -> Score:
    """Play the last turn of the `Episode` that `response` encodes. The score's `said` is JSON with the reply and
    whether the episode has ended. If `response` is empty, as in the first call of a process, only create an
    environment. That call does the imports, so that the deadlines of turns do not include them."""
    kind = resolve_environment(str(ground_truth["environment"]))
    options = cast(Mapping[str, Any], ground_truth["options"])
    if not response:
        kind(**options)
        return Score(0.0, {})
    asked = json.loads(response)
    texts, replies, limit = asked["texts"], asked["replies"], asked["max_characters"]
    environment, read = _environments.pop(asked["name"], (None, []))
    if environment is None or not texts or read != texts[:-1]:
        _close(environment)
        if texts and not is_repeatable(kind):
            raise LookupError("the process of this episode was lost, and its turns are not repeated (repeatable=False)")
        environment = kind(**options)
        first = await_value(environment.reset(cast(Mapping[str, Any], ground_truth["row"])))
        turn = Turn(_clean_reply(first or "", limit))
        for text, expected in zip(texts, replies, strict=True):
            _require_same_reply(turn, expected)
            rlcore.score.renew_deadline()  # each turn has a full deadline
            turn = _step(environment, text, limit)
    else:
        turn = _step(environment, texts[-1], limit)
    if turn.done:
        _close(environment)
    else:
        _environments[asked["name"]] = environment, texts
        while len(_environments) > asked["max_kept"]:
            _close(_environments.popitem(last=False)[1][0])
    return Score(turn.reward, turn.parts, json.dumps([turn.reply, turn.done]))


def _close(environment: Environment | None) -> None:
    if (close := getattr(environment, "close", None)) is not None:
        with contextlib.suppress(Exception):  # the turn is finished
            await_value(close())


def _step(environment: Environment, text: str, limit: int) -> Turn:
    turn = await_value(environment.step(text))
    if not isinstance(turn, Turn):
        raise TypeError(f"step must return rlcore.rollout.environment.Turn, got {type(turn).__name__}")
    return Turn(_clean_reply(turn.reply, limit), bool(turn.done), turn.reward, turn.parts)


def _require_same_reply(turn: Turn, expected: str) -> None:
    if turn.reply != expected or turn.done:
        raise ValueError(
            f"a repeated turn got the reply {turn.reply[:80]!r} instead of {expected[:80]!r}: replies of an "
            "environment must depend on its row, its seed and the texts alone"
        )


def _clean_reply(reply: object, limit: int) -> str:
    if not isinstance(reply, str):
        raise TypeError(f"a reply must be text, got {type(reply).__name__}")
    return reply[:limit].encode("utf-8", "replace").decode()


def await_value(value: T | Awaitable[T]) -> T:
    """Return a value, or the result of an awaitable."""
    if inspect.isawaitable(value):
        return _event_loop().run_until_complete(cast(Coroutine[Any, Any, T], value))
    return value


class TurnTokens:
    """An object that converts an environment's messages to token ids. With `chat`, messages are rendered by the chat
    template, otherwise as plain text. Raises ConfigError if the template cannot render later turns, or drops
    or changes earlier turns."""

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
        the shortened prompt. Raises ConfigError if the prompt does not end with the tokens that begin a turn of the
        model."""
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
