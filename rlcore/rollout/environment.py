"""What an environment is, and how a turn of an episode is played in a process of its own.

A turn is played by the scoring pool's processes (`rlcore.rollout.scoring`): it has a deadline, and a process that hangs
or dies is killed and replaced. An environment lives in one process from turn to turn. If that process is lost, another
one makes the environment anew and repeats the turns so far, so its replies must follow from its row and the texts
alone: a repeated turn with another reply is an error. This module loads no torch.
"""

import asyncio
import inspect
import json
from collections import OrderedDict
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import cache
from pkgutil import resolve_name
from typing import Any, Protocol, TypeVar, cast

import rlcore.score
from rlcore.config import RunConfig
from rlcore.score import Score

OWN_SEED = "own_seed"
"""Field of an environment's row with the ground truth's own `seed`, if it has one."""
PLAY = "rlcore.rollout.environment:play"
"""Name of `play` for the pool."""
_CHARACTERS_PER_TOKEN = 16
"""A reply is cut to so many characters for each token allowed before it leaves its process."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """An environment's reply to one turn of the model.

    `reply` is what the model reads next; without effect in the last turn. `reward` is added to the episode's score.
    `parts` are named components for metrics; a later turn's value replaces an earlier one's.
    """

    reply: str = ""
    done: bool = False
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One episode's other side. A new object is made for every episode; both methods may be `async`.

    With `episode.tools` the class is called with `tools` and `scorer`, as `rlcore.rollout.tools.Tools` is; else without
    arguments.
    """

    def reset(self, row: Mapping[str, Any]) -> str | Awaitable[str | None] | None:
        """Begin. `row`: the row's ground truth, and `seed`, a number for whatever is random, which all answers to one
        prompt in a step share; a ground truth's own `seed` is `own_seed` there.

        Returns a first message after the prompt, or None.
        """
        ...

    def step(self, text: str) -> Turn | Awaitable[Turn]:
        """Reply to what the model wrote in one turn."""
        ...


@dataclass(slots=True)
class Episode:
    """An episode so far: `replies[0]` is the first message, `replies[i]` the reply to `texts[i - 1]`.

    `truth`: the ground truth that `play` takes, as JSON: environment, arguments of its class (`options`), and `row`.
    `max_kept`: environments that its process keeps between turns, one for each episode that it plays at the same time;
    one that is dropped is made again by repeating its turns.
    """

    name: str
    truth: str
    max_characters: int
    texts: list[str] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    max_kept: int = 1

    @classmethod
    def start(cls, name: str, config: RunConfig, ground_truth_json: str, seed: int, *, max_kept: int = 1) -> "Episode":
        """An episode of `data.environment` before its first turn; `row` is the ground truth with the seed."""
        truth = json.loads(ground_truth_json)
        row = truth if isinstance(truth, dict) else {"answer": truth}
        own = {OWN_SEED: row["seed"]} if "seed" in row else {}
        options = {"tools": config.episode.tools, "scorer": config.data.scorer} if config.episode.tools else {}
        asked = {"environment": config.data.environment, "options": options, "row": {**row, **own, "seed": seed}}
        limit = _CHARACTERS_PER_TOKEN * config.episode.max_tool_tokens
        return cls(name, json.dumps(asked), limit, max_kept=max_kept)

    def to_json(self) -> str:
        """The JSON text that `play` takes."""
        names = ("name", "max_characters", "texts", "replies", "max_kept")
        return json.dumps({name: getattr(self, name) for name in names})


def turn_from_score(score: Score) -> Turn:
    """The turn that `play` has made a score of."""
    reply, done = json.loads(score.said or '["", true]')
    return Turn(reply, done, score.total, score.parts)


def resolve_environment(name: str) -> type[Environment]:
    """The class at `module:Class`. Raises ImportError, AttributeError or ValueError where there is none."""
    found = resolve_name(name)
    if not (callable(getattr(found, "reset", None)) and callable(getattr(found, "step", None))):
        raise ValueError(f"{name} has no methods reset(row) and step(text)")
    return cast(type[Environment], found)


_environments: OrderedDict[str, tuple[Environment, list[str]]] = OrderedDict()
"""Environments between turns by their episodes' names, with the texts that each has read."""
_event_loop = cache(asyncio.new_event_loop)
"""One loop for all episodes of the process, so that clients which an environment opens live on."""


def play(response: str, ground_truth: Mapping[str, object]) -> Score:
    """The last turn of an `Episode` as a score: `said` holds reply and end as JSON. An empty response only imports and
    makes an environment, which no deadline counts."""
    kind = resolve_environment(str(ground_truth["environment"]))
    options = cast(Mapping[str, Any], ground_truth["options"])
    if not response:
        kind(**options)
        return Score(0.0, {})
    asked = json.loads(response)
    texts, replies, limit = asked["texts"], asked["replies"], asked["max_characters"]
    environment, read = _environments.pop(asked["name"], (None, []))
    if environment is None or not texts or read != texts[:-1]:
        environment = kind(**options)
        first = await_value(environment.reset(cast(Mapping[str, Any], ground_truth["row"])))
        turn = Turn(_clean_reply(first or "", limit))
        for text, expected in zip(texts, replies, strict=True):
            _require_same_reply(turn, expected)
            rlcore.score.renew_deadline()  # it is for one turn
            turn = _step(environment, text, limit)
    else:
        turn = _step(environment, texts[-1], limit)
    if not turn.done:
        _environments[asked["name"]] = environment, texts
        while len(_environments) > asked["max_kept"]:
            _environments.popitem(last=False)
    return Score(turn.reward, turn.parts, json.dumps([turn.reply, turn.done]))


def _step(environment: Environment, text: str, limit: int) -> Turn:
    turn = await_value(environment.step(text))
    if not isinstance(turn, Turn):
        raise TypeError(f"step returns rlcore.rollout.environment.Turn, got {type(turn).__name__}")
    return Turn(_clean_reply(turn.reply, limit), bool(turn.done), turn.reward, turn.parts)


def _require_same_reply(turn: Turn, expected: str) -> None:
    if turn.reply != expected or turn.done:
        raise ValueError(
            f"a repeated turn got the reply {turn.reply[:80]!r} in place of {expected[:80]!r}: the replies of an "
            "environment must follow from its row, its seed and the texts alone"
        )


def _clean_reply(reply: object, limit: int) -> str:
    """Reject what is no text; lone surrogates have no UTF-8 and no tokens."""
    if not isinstance(reply, str):
        raise TypeError(f"a reply is a text, got {type(reply).__name__}")
    return reply[:limit].encode("utf-8", "replace").decode()


def await_value(value: T | Awaitable[T]) -> T:
    """The value, awaited if it has to be."""
    if inspect.isawaitable(value):
        return _event_loop().run_until_complete(cast(Coroutine[Any, Any, T], value))
    return value
