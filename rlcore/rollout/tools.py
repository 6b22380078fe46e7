"""An environment of tools, which are functions with type hints and documented arguments that the model calls. The first
line below shows the settings, and the other lines show the two formats of a call.

    data.environment=rlcore.rollout.tools:Tools episode.tools=[my_tools:search]
    <tool_call>{"name": "search", "arguments": {"text": "..."}}</tool_call>
    {"name": "search", "parameters": {"text": "..."}}

Qwen and Hermes models use the first format, and a turn can contain several such calls. Llama models use the second
format, in which the call is the whole turn.

The model reads the result or error of a call. A turn without a call ends the episode. `data.scorer` scores all text of
the model, without tool results.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from rlcore.errors import ConfigError
from rlcore.rollout.environment import OWN_SEED, Turn, await_value
from rlcore.rollout.scoring_worker import describe, resolve_scorer, score_one

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model. `problem`: the reason why the call is malformed, or ''."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""


class Tools:
    """An environment that runs the calls of each turn. `tools` and `scorer`: functions named `module:function`."""

    def __init__(self, tools: Sequence[str], scorer: str) -> None:
        self._tools = {name.rpartition(":")[2]: resolve_name(name) for name in tools}
        self._scorer = resolve_scorer(scorer)
        self._num_calls = self._num_errors = 0
        self._total = 0.0
        self._texts: list[str] = []

    def reset(self, row: Mapping[str, Any]) -> None:
        """Store the row's ground truth, with which `step` scores the episode."""
        truth = {name: value for name, value in row.items() if name not in ("seed", OWN_SEED)}
        self._truth = json.dumps({**truth, **({"seed": row[OWN_SEED]} if OWN_SEED in row else {})})

    def step(self, text: str) -> Turn:
        """Run the calls of a turn. The reward is the amount by which this turn changes the episode's score."""
        calls = parse_calls(text)
        replies = [self._run_call(call) for call in calls]
        self._texts.append(text)
        score = score_one(self._scorer, "\n".join(self._texts), self._truth)
        reward, self._total = score.total - self._total, score.total
        self._num_calls += len(calls)
        parts = {**score.parts, "tool_calls": self._num_calls, "tool_errors": self._num_errors}
        return Turn("\n".join(replies), done=not calls, reward=reward, parts=parts)

    def _run_call(self, call: ToolCall) -> str:
        problem = call.problem
        if not problem and call.name not in self._tools:
            problem = f"there is no tool {call.name[:80]!r}, only {', '.join(self._tools)}"
        if not problem:
            function = self._tools[call.name]
            try:
                arguments = inspect.signature(function).bind(**call.arguments)
                return str(await_value(function(*arguments.args, **arguments.kwargs)))
            except (Exception, SystemExit) as error:  # the model reads the error
                problem = f"{type(error).__name__}: {error}"[:500]
        self._num_errors += 1
        return f"error: {problem}"


def parse_calls(text: str) -> list[ToolCall]:
    """Return the tool calls of a turn, in linear time.

    >>> parse_calls('so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1}, problem='')]
    >>> parse_calls('{"name": "add", "parameters": {"a": 1}}')[0].arguments
    {'a': 1}
    >>> [parse_calls(bad)[0].problem for bad in ("<tool_call>{}", '<tool_call>{"name": "add"}</tool_call>')]
    ['the call has no </tool_call>', 'a call is JSON with "name" and "arguments"']
    >>> parse_calls("nothing"), parse_calls("{no call}")
    ([], [])
    """
    if _OPEN in text:
        return [_parse_call(*part.partition(_CLOSE)[:2]) for part in text.split(_OPEN)[1:]]
    whole = text.strip()
    if not whole.startswith("{"):
        return []
    call = _parse_call(whole, _CLOSE)
    return [] if call.problem else [call]


def _parse_call(body: str, close: str) -> ToolCall:
    if not close:
        return ToolCall("", {}, f"the call has no {_CLOSE}")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the call is not JSON ({describe(error)[:200]})")
    named = found if isinstance(found, dict) else {}
    arguments = named.get("arguments", named.get("parameters"))
    if not isinstance(named.get("name"), str) or not isinstance(arguments, dict):
        return ToolCall("", {}, 'a call is JSON with "name" and "arguments"')
    return ToolCall(named["name"], arguments)


def tool_schemas(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the JSON schemas of tools. Raises ConfigError if a function, a type hint or a description is missing."""
    from transformers.utils.chat_template_utils import get_json_schema

    found = []
    for name in names:
        try:
            function: Callable[..., Any] = resolve_name(name)
            found.append(get_json_schema(function))
        except Exception as error:  # user code can raise anything
            raise ConfigError(
                f"episode.tools: must name functions as module:function, each with type hints, a docstring and a line "
                f"for each argument under `Args:`; got {name!r} ({describe(error)})"
            ) from error
    return found
