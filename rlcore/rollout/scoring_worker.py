"""The scoring process: `python -m rlcore.rollout.scoring_worker FD SCORER FIRST_CALL WEIGHTS`. Messages are lines of
JSON over a socket, so model output is never unpickled. The first call of each scorer gets an empty response (unless
FIRST_CALL is 0), so that no response's deadline includes imports. WEIGHTS is `reward.weights` as JSON."""

import ctypes
import json
import math
import signal
import socket
import sys
from collections.abc import Mapping
from numbers import Real
from pkgutil import resolve_name
from typing import Any

import rlcore.score
from rlcore import stacks, user_code
from rlcore.score import Score, Scorer

_PR_SET_PDEATHSIG = 1
JUDGE_VARIABLE = "MILLRACE_JUDGE"  # name of the environment variable that holds `reward.judge` as JSON
MAX_SCORE = (2 - 2**-23) * 2.0**127  # largest float32 number, since training stores scores in this type
WEIGHTS_PROBLEM = "reward.weights: must name parts of the score, got "
"""The start of the failure message for a score that lacks a part named in `reward.weights`."""
SCORER_KEY = "scorer"
"""The field of a ground truth that names the row's scorer in a mixture of data sources. If a row already has a field of
this name, the run overwrites it."""


def resolve_scorer(name: str) -> Scorer:
    """Return the function named `module:function`. Raises ImportError, AttributeError or ValueError if it does not
    exist."""
    found: Any = resolve_name(name)
    if not callable(found):
        raise ValueError(f"{name} is {type(found).__name__}, not a function")
    scorer: Scorer = found
    return scorer


def score_one(
    scorer: Scorer, response: str, ground_truth_json: str, weights: Mapping[str, float] | None = None
) -> Score:
    """Return the checked score of one response. Raises the scorer's exceptions, and TypeError or ValueError for an
    invalid score. With `weights`, the scorer's total becomes a part named `total`, and the new total is the weighted
    sum of the parts. A missing part `correct` is set to 1 if the scorer's total is 1, otherwise to 0."""
    truth = json.loads(ground_truth_json)
    found = scorer(response, truth if isinstance(truth, Mapping) else {"answer": truth})
    if isinstance(found, Real):
        found = Score(float(found), {})
    if not isinstance(found, Score):
        raise TypeError(f"a scorer must return a number or rlcore.score.Score, got {type(found).__name__}")
    parts = {str(name): float(value) for name, value in found.parts.items()}
    total = float(found.total)
    if not all(math.isfinite(value) for value in (total, *parts.values())):
        raise ValueError(f"a score must be finite, got {found}")
    if any(abs(value) > MAX_SCORE for value in (total, *parts.values())):
        raise ValueError(f"a score must be at most {MAX_SCORE:.4g} (float32), got {found}")
    if weights:
        parts["total"] = total
        if missing := [name for name in weights if name not in parts]:
            raise ValueError(
                f"{WEIGHTS_PROBLEM}{', '.join(missing)}. Use the parts of this score: {', '.join(sorted(parts))}"
            )
        parts.setdefault("correct", float(found.solved))  # weights do not change correctness
        total = math.fsum(weight * parts[name] for name, weight in weights.items())
        if abs(total) > MAX_SCORE:
            raise ValueError(
                f"reward.weights: the weighted score must be at most {MAX_SCORE:.4g} (float32), got {total}"
            )
    # UTF-8 cannot encode lone surrogates in a model's text.
    return Score(total, parts, None if found.said is None else str(found.said).encode("utf-8", "replace").decode())


def weights_problem(failure: str | None) -> str:
    """Return the part of a failure's message that concerns `reward.weights`, or ''.

    >>> weights_problem(f"ValueError: {WEIGHTS_PROBLEM}foo. Use correct, total")
    'reward.weights: must name parts of the score, got foo. Use correct, total'
    """
    _, beginning, rest = (failure or "").partition(WEIGHTS_PROBLEM)
    return f"{beginning}{rest}"


def describe(error: BaseException) -> str:
    """Describe an exception in one line. Control characters are escaped, because the message may quote model output."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in f"{type(error).__name__}: {error}"[:500])


def serve(connection: socket.socket, scorer: Scorer, *, first_call: bool, weights: Mapping[str, float]) -> None:
    """Score the responses that arrive over `connection`, until the pool closes it."""
    warm: set[object] = set()
    rlcore.score.renew_deadline = lambda: connection.sendall(encode_line({"warm": True}))
    for line in connection.makefile("rb"):
        for response, ground_truth_json in json.loads(line):
            truth = json.loads(ground_truth_json)
            part = truth.get(SCORER_KEY) if isinstance(truth, dict) else None
            if first_call and part not in warm:
                connection.sendall(encode_line({"warm": False}))
                _result(scorer, "", ground_truth_json, weights)
                connection.sendall(encode_line({"warm": True}))
                warm.add(part)
            connection.sendall(encode_line(_result(scorer, response, ground_truth_json, weights)))


def _result(scorer: Scorer, response: str, ground_truth_json: str, weights: Mapping[str, float]) -> list[object]:
    try:
        score = score_one(scorer, response, ground_truth_json, weights)
    except (Exception, SystemExit) as error:  # an exception affects only this response
        return [None, describe(error), None]
    return [score.total, dict(score.parts), score.said]


def encode_line(message: object) -> bytes:
    r"""Return a message as one line of JSON."""
    return json.dumps(message).encode() + b"\n"


def main() -> None:
    """Run the scoring process until its parent closes the connection."""
    stacks.register("scorer")
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # only on Linux: other systems do not notice a lost parent
    if prctl is not None:  # the kernel kills this process when the pool's thread ends, even if a scorer hangs
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    descriptor, name, first_call, weights = sys.argv[1:5]
    connection = socket.socket(fileno=int(descriptor))
    try:
        try:
            user_code.import_from_environment()
            scorer = resolve_scorer(name)
        except Exception as error:  # the parent reports it
            connection.sendall(encode_line({"failed": describe(error)}))
            return
        connection.sendall(encode_line({"ready": True}))
        serve(connection, scorer, first_call=first_call == "1", weights=json.loads(weights))
    except (BrokenPipeError, ConnectionResetError):
        return  # the parent is gone


if __name__ == "__main__":
    main()
