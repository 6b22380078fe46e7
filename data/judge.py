"""A judge model behind an OpenAI-compatible endpoint. It scores alone or in addition to a rule-based scorer.

No error message contains the API key or the endpoint's output.
"""

import asyncio
import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache

import httpx

from rlcore.config.rollout import JudgeConfig
from rlcore.rollout.scoring_worker import JUDGE_VARIABLE, resolve_scorer, score_one
from rlcore.score import Score

_MOST_BYTES = 1_000_000  # maximum size of a reply
_FIRST_PAUSE_S = 0.5  # before the second try, doubled before each further try
_RETRY_STATUSES = frozenset({408, 425, 429})  # in addition to 500 and above
_NUMBER = r"(-?\d+(?:\.\d+)?)"
_VERDICT = re.compile(rf'<score>\s*{_NUMBER}\s*</score>|\{{\s*"score"\s*:\s*{_NUMBER}\s*\}}')


class JudgeError(ValueError):
    """The judge gave no valid verdict."""


class _BusyError(JudgeError):
    """The endpoint is busy. Another attempt may succeed."""


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """Score a response by the judge's verdict, from 0 to 1, plus the total of the scorer `reward.judge.rules`."""
    settings = JudgeConfig.model_validate_json(os.environ[JUDGE_VARIABLE])
    truth = json.dumps(ground_truth, ensure_ascii=False, sort_keys=True)
    rules = score_one(resolve_scorer(settings.rules), response, truth) if settings.rules else Score(0.0, {})
    verdict = judge_response(settings, response, truth)
    return Score(rules.total + verdict, {**rules.parts, "judge": verdict}, rules.said)


def judge_response(settings: JudgeConfig, response: str, truth: str) -> float:
    """Return the verdict on a response. A stored verdict is reused."""
    # one pass over the template, so that a response is never taken for a placeholder
    words = {"{response}": response, "{ground_truth}": truth}
    text = re.sub(r"\{response\}|\{ground_truth\}", lambda found: words[found[0]], settings.prompt)
    request = json.dumps({
        "model": settings.model, "messages": [{"role": "user", "content": text}], "temperature": 0,
        "max_tokens": settings.max_tokens, **_response_format(settings),
    })  # fmt: skip
    return _verdict(settings, request)


@lru_cache(maxsize=10_000)
def _verdict(settings: JudgeConfig, request: str) -> float:
    return read_verdict(asyncio.run(_request(settings, request)), settings.highest)


def _response_format(settings: JudgeConfig) -> Mapping[str, object]:
    """Return the request field `response_format`: a JSON schema of all allowed scores.

    Return {} if `levels` is None."""
    if settings.levels is None:
        return {}
    evenly = (settings.highest * level / (settings.levels - 1) for level in range(settings.levels))
    scores = [min(settings.highest, float(f"{score:.6g}")) for score in evenly]
    score = {"type": "number", "enum": [int(score) if score.is_integer() else score for score in scores]}
    schema = {"type": "object", "properties": {"score": score}, "required": ["score"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}
    return {"response_format": form}


def read_verdict(text: str, highest: float) -> float:
    """Return the score at the end of a judge's text, divided by `highest`. Raises JudgeError if the score is invalid.

    The score has the form `{"score": 3}` or `<score>3</score>`. The text must contain only one score.
    """
    found = list(_VERDICT.finditer(text))
    if len(found) != 1 or text[found[0].end() :].strip("` \n\t"):
        raise JudgeError(f"the judge's text must end with its one score; it has {len(found)} in {len(text)} characters")
    number = float(found[0][1] or found[0][2])
    if not 0 <= number <= highest:
        raise JudgeError(f"the judge's score must be from 0 to {highest:g} (reward.judge.highest), got {number:g}")
    return number / highest


async def _request(settings: JudgeConfig, content: str) -> str:
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if settings.key_variable:
        headers["Authorization"] = f"Bearer {_secret(settings.key_variable)}"
    last, pause_s = "", _FIRST_PAUSE_S
    try:
        async with asyncio.timeout(settings.deadline_s):
            # a new client for each call, since the endpoint may close an idle connection
            async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
                for number in range(settings.tries):
                    if number:
                        await asyncio.sleep(pause_s)
                        pause_s *= 2
                    try:
                        return await _request_once(client, settings.url, headers, content)
                    except (httpx.TransportError, _BusyError) as error:
                        last = str(error) if isinstance(error, JudgeError) else type(error).__name__
    except TimeoutError:
        limit = f"{settings.deadline_s:g} s (reward.judge.deadline_s)"
        before = f"; before that {last}" if last else ""
        raise JudgeError(f"no verdict of {settings.url} within {limit}{before}") from None
    except httpx.HTTPError as error:
        raise JudgeError(f"no verdict of {settings.url}: {type(error).__name__}") from None
    tries = f"{settings.tries} tries (reward.judge.tries)"
    raise JudgeError(f"no verdict of {settings.url} (reward.judge.url) in {tries}; the last one: {last}")


def _secret(variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value or not value.isascii() or not value.isprintable():
        raise JudgeError(f"the environment variable {variable} (reward.judge.key_variable) must hold the key")
    return value


async def _request_once(client: httpx.AsyncClient, url: str, headers: Mapping[str, str], content: str) -> str:
    address = f"{url.rstrip('/')}/chat/completions"
    async with client.stream("POST", address, headers=headers, content=content.encode()) as reply:
        status, kind = reply.status_code, reply.headers.get("content-type", "").partition(";")[0].strip()
        if status >= 500 or status in _RETRY_STATUSES:
            raise _BusyError(f"the endpoint answered with status {status}")
        if status != 200:
            raise JudgeError(f"the endpoint answered with status {status}")
        if kind != "application/json" or reply.headers.get("content-encoding", "identity") != "identity":
            raise JudgeError("the endpoint's answer must be application/json, uncompressed")
        body = bytearray()
        async for piece in reply.aiter_raw():
            body += piece
            if len(body) > _MOST_BYTES:
                raise JudgeError(f"the endpoint's answer is longer than {_MOST_BYTES} bytes")
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise JudgeError("the endpoint's answer holds no choices[0].message.content")
    return text
