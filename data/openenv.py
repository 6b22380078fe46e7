"""Episodes on an OpenEnv server. Each episode is a separate session with the server, over a WebSocket.

millrace run data=openenv episode.server=http://127.0.0.1:8000 'data.options=["Game {game}. ..."]'
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import httpx
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from data.rows import Message, Row, TaskRows
from rlcore.config.data import CustomData
from rlcore.errors import ConfigError
from rlcore.rollout.environment import OWN_SEED, Turn
from rlcore.rollout.scoring_worker import describe

GAME = "{game}"  # the place of the game's number in the prompt
_SEED_STEP = 1_000_003
_SEEDS = 2**31
_SERVER_SHARE = 0.9  # of `episode.deadline_s`; below 1, so that a late reply ends only the episode and not the process
_MAX_BYTES = 2**24
_GENERAL = ("metadata", "done", "reward")
_INVALID = "VALIDATION_ERROR"
_UNREACHED = "Start it, correct the address, or raise episode.deadline_s"
_CHANGED = "Restart the run with the server that it began with"
_CAPACITY = "Start it with a session for each open episode: trainer.batch_size x rollout.samples_per_prompt, or more"


def build(settings: CustomData, seed: int) -> TaskRows:
    """Return numbered games, each with a separate seed. `data.options`: the prompt and its form, `text` or `chat`.
    Raises ConfigError for other options."""
    prompt, form = (*settings.options, "chat", "chat")[:2] if settings.options else ("", "chat")
    if GAME not in prompt or form not in ("chat", "text"):
        raise ConfigError(
            f"data.options: must be a prompt with {GAME}, the game's number, and optionally text for a prompt without "
            f"chat template; got {list(settings.options)}. Such as data.options=['Game {GAME}. Guess the number.']"
        )
    held_out, total = settings.validation_size, settings.validation_size + settings.train_size
    splits = {"validation": range(held_out), "train": range(held_out, total)}
    return TaskRows(
        data_source="openenv",
        ability="environment",
        prompt_form="text" if form == "text" else "chat",
        splits={
            split: [
                Row((Message("user", prompt.replace(GAME, str(game))),), {"seed": (seed * _SEED_STEP + game) % _SEEDS})
                for game in games
            ]
            for split, games in splits.items()
        },
    )


Fields = dict[str, dict[str, Any]]
_fields: dict[str, Fields] = {}  # of each server: the schemas of the fields of `action` and `observation`


class OpenEnv:
    """A session of an OpenEnv server. The arguments are `episode.server`, `server_key_variable` and `deadline_s`."""

    repeatable = False

    def __init__(self, server: str, key_variable: str = "", deadline_s: float = 10.0) -> None:
        self.server, self._limit_s = server.rstrip("/"), _SERVER_SHARE * deadline_s
        self._key_variable, self._end = key_variable, 0.0
        self._session: ClientConnection | None = None
        self._num_invalid = 0

    def reset(self, row: Mapping[str, Any]) -> str | None:
        """Open a session and return the first observation. The row is sent to the server."""
        asked = {name: value for name, value in row.items() if name != OWN_SEED}
        asked["seed"] = row.get(OWN_SEED, row["seed"]) % _SEEDS
        headers, self._end = self._headers(), time.monotonic() + self._limit_s
        try:
            if self.server not in _fields:
                _fields[self.server] = self._read_fields()
            self._session = connect(
                f"ws{self.server.removeprefix('http')}/ws", additional_headers=headers, proxy=None,
                open_timeout=self._left_s(), close_timeout=1, ping_interval=None, max_size=_MAX_BYTES,
            )  # fmt: skip
        except (OSError, WebSocketException, httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise self._error(describe(error), _UNREACHED) from error
        found = self._ask("reset", asked)
        if found is None or found["done"]:
            raise self._error(f"to reset: {found}", "Correct the environment or the row")
        return self.reply(found["observation"]) or None

    def step(self, text: str) -> Turn:
        """Send the model's text as an action. If the text is not an action, the reply begins with `error:`."""
        try:
            action = self.action(text)
        except (ValueError, RecursionError):
            action = None
        self._end = time.monotonic() + self._limit_s
        found = None if action is None else self._ask("step", action)
        self._num_invalid += found is None
        parts = {"invalid_actions": float(self._num_invalid)}
        if found is None:
            return Turn(f"error: an action has the fields {', '.join(_fields[self.server]['action'])}", parts=parts)
        return Turn(self.reply(found["observation"]), found["done"], float(found["reward"] or 0), parts)

    def action(self, text: str) -> Mapping[str, Any] | None:
        """Return the action that the model's text describes. If actions have several fields, the text must be JSON.

        Return None if the JSON is not an object.
        """
        fields = _fields[self.server]["action"]
        if len(fields) == 1:
            return {name: text for name in fields}
        found = json.loads(text)
        return found if isinstance(found, dict) else None

    def reply(self, observation: Mapping[str, Any]) -> str:
        """Convert an observation to text: its text field if it has exactly one, otherwise all fields as JSON."""
        fields = _fields[self.server]["observation"]
        if missing := fields.keys() - observation.keys():
            raise self._error(f"an observation without {', '.join(sorted(missing))}", _CHANGED)
        texts = [name for name, schema in fields.items() if schema.get("type") == "string"]
        shown = {name: observation[name] for name in fields}
        return str(shown[texts[0]]) if len(texts) == 1 else json.dumps(shown)

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            self._session.close()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any] | None:
        assert self._session is not None
        try:
            with suppress(WebSocketException):  # a closed session may have sent its reason
                self._session.send(json.dumps({"type": kind, "data": data}))
            text = self._session.recv(self._left_s())
        except (OSError, WebSocketException) as error:
            self.close()
            raise self._error(describe(error), _UNREACHED) from error
        found = _read(text)
        if found is not None and found.get("code") == _INVALID and kind == "step":
            if self._read_fields() != _fields[self.server]:
                raise self._error("another schema than before", _CHANGED)
            return None
        if found is None or "observation" not in found:
            self.close()
            remedy = _CAPACITY if found and found.get("code") == "CAPACITY_REACHED" else "Correct the environment"
            raise self._error(f"to {kind}: {text[:300]!r}", remedy)
        return found

    def _left_s(self) -> float:
        return max(self._end - time.monotonic(), 0.001)

    def _headers(self) -> dict[str, str]:
        if not self._key_variable:
            return {}
        if not (key := os.environ.get(self._key_variable, "")):
            raise self._error(f"no key in {self._key_variable} (episode.server_key_variable)", "Export the variable")
        return {"Authorization": f"Bearer {key}"}

    def _read_fields(self) -> Fields:
        reply = httpx.get(f"{self.server}/schema", headers=self._headers(), timeout=self._left_s(), trust_env=False)
        schemas = reply.raise_for_status().json()
        parts = {part: schemas[part]["properties"] for part in ("action", "observation")}
        return {part: {name: each[name] for name in each if name not in _GENERAL} for part, each in parts.items()}

    def _error(self, got: str, remedy: str) -> ConnectionError:
        return ConnectionError(f"episode.server: must be an OpenEnv server; got from {self.server} {got}. {remedy}")


class RepeatableOpenEnv(OpenEnv):
    """A session whose replies depend only on the row, the seed and the model's texts."""

    repeatable = True


def _read(text: str | bytes) -> dict[str, Any] | None:
    """Return the data of an observation, `{"code": ...}` for an error, or None for any other message."""
    try:
        message = json.loads(text)
        data = message["data"]
        if message["type"] == "observation":
            is_valid = isinstance(data["observation"], dict) and isinstance(data["done"], bool)
            return data if is_valid and isinstance(data["reward"], int | float | None) else None
        return {"code": data["code"]} if message["type"] == "error" else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
