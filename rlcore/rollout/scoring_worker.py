"""One scoring process: `python -m rlcore.rollout.scoring_worker FD SCORER DEADLINE_S FIRST_CALL WEIGHTS`.

Messages are lines of JSON over a socket, so nothing that a model wrote is ever unpickled; it imports the scorer's
module and little else. It first sends {"ready": true} or {"failed": reason}, then receives lists of [answer, ground
truth] and sends a result for each answer as it comes. Before the first answer (in a mixture: the first of each part)
the scorer is called on an empty answer and the result dropped, so that what a scorer imports or builds at its first
call counts for no answer's deadline; not where FIRST_CALL is 0. WEIGHTS, as JSON, are those of the parts
(`reward.weights`).
"""

import ctypes
import faulthandler
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

# Beyond the deadlines of all its answers and of a first call (120 s): the parent, which kills sooner, is gone then.
_ORPHAN_GRACE_S = 150.0
_PR_SET_PDEATHSIG = 1
JUDGE_VARIABLE = "MILLRACE_JUDGE"
"""Environment variable of a scoring process with `reward.judge` as JSON."""
MAX_SCORE = (2 - 2**-23) * 2.0**127
"""The largest number of float32, in which training holds scores."""
WEIGHTS_PROBLEM = "reward.weights: must name parts of the score, got "
"""Beginning of the failure of a score that lacks a part with a weight."""
SCORER_KEY = "scorer"
"""Field of a mixture's ground truths that names the scorer; the run writes it from its settings, over the row's own."""


def resolve_scorer(name: str) -> Scorer:
    """The function at `module:function`. Raises ImportError, AttributeError or ValueError where there is none."""
    found: Any = resolve_name(name)
    if not callable(found):
        raise ValueError(f"{name} is {type(found).__name__}, not a function")
    scorer: Scorer = found
    return scorer


def score_one(
    scorer: Scorer, response: str, ground_truth_json: str, weights: Mapping[str, float] | None = None
) -> Score:
    """One answer's score with its numbers checked. Raises what the scorer raises, or TypeError, ValueError.

    A ground truth that is no mapping reaches the scorer as `{"answer": ...}`. With `weights` the total is the sum of
    weight x part, the scorer's own total is the part `total`, and whether that is a full score is `correct`, where the
    scorer has no such part.
    """
    truth = json.loads(ground_truth_json)
    found = scorer(response, truth if isinstance(truth, Mapping) else {"answer": truth})
    if isinstance(found, Real):
        found = Score(float(found), {})
    if not isinstance(found, Score):
        raise TypeError(f"a scorer returns a number or rlcore.score.Score, got {type(found).__name__}")
    parts = {str(name): float(value) for name, value in found.parts.items()}
    total = float(found.total)
    if not all(math.isfinite(value) for value in (total, *parts.values())):
        raise ValueError(f"a score is a finite number, got {found}")
    if any(abs(value) > MAX_SCORE for value in (total, *parts.values())):
        raise ValueError(f"a score is at most {MAX_SCORE:.4g} (float32), got {found}")
    if weights:
        parts["total"] = total
        if missing := [name for name in weights if name not in parts]:
            raise ValueError(
                f"{WEIGHTS_PROBLEM}{', '.join(missing)}. Use the parts of this score: {', '.join(sorted(parts))}"
            )
        parts.setdefault("correct", float(found.solved))  # weights make no answer right or wrong
        total = math.fsum(weight * parts[name] for name, weight in weights.items())
        if abs(total) > MAX_SCORE:
            raise ValueError(
                f"reward.weights: the weighted score must be at most {MAX_SCORE:.4g} (float32), got {total}"
            )
    # A scorer that reads JSON or escapes finds lone surrogates in a model's text; they have no UTF-8.
    return Score(total, parts, None if found.said is None else str(found.said).encode("utf-8", "replace").decode())


def weights_problem(failure: str | None) -> str:
    """What a failure says of `reward.weights` that name no parts of the score; '' for any other failure, or none.

    >>> weights_problem(f"ValueError: {WEIGHTS_PROBLEM}foo. Use correct, total")
    'reward.weights: must name parts of the score, got foo. Use correct, total'
    """
    _, beginning, rest = (failure or "").partition(WEIGHTS_PROBLEM)
    return f"{beginning}{rest}"


def describe(error: BaseException) -> str:
    """An exception in one line, without what a terminal would act on: it may quote what a model wrote."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in f"{type(error).__name__}: {error}"[:500])


def serve(
    connection: socket.socket, scorer: Scorer, deadline_s: float, *, first_call: bool, weights: Mapping[str, float]
) -> None:
    """Score until the other side is gone."""
    warm: set[object] = set()

    def renew_deadline() -> None:
        faulthandler.dump_traceback_later(longest_s, exit=True)
        connection.sendall(encode_line({"warm": True}))

    rlcore.score.renew_deadline = renew_deadline
    for line in connection.makefile("rb"):
        answers = json.loads(line)
        longest_s = len(answers) * deadline_s + _ORPHAN_GRACE_S
        # A C thread that needs no interpreter lock ends this process if it hangs after its parent was killed.
        faulthandler.dump_traceback_later(longest_s, exit=True)
        for response, ground_truth_json in answers:
            if first_call and (part := _mixture_scorer(ground_truth_json)) not in warm:
                faulthandler.dump_traceback_later(longest_s, exit=True)  # each first call has the time of a start
                connection.sendall(encode_line({"warm": False}))
                _result(scorer, "", ground_truth_json, weights)
                connection.sendall(encode_line({"warm": True}))
                warm.add(part)
            connection.sendall(encode_line(_result(scorer, response, ground_truth_json, weights)))
        faulthandler.cancel_dump_traceback_later()


def _mixture_scorer(ground_truth_json: str) -> object:
    """The scorer of this answer's part of a mixture; None without a mixture."""
    truth = json.loads(ground_truth_json)
    return truth.get(SCORER_KEY) if isinstance(truth, dict) else None


def _result(scorer: Scorer, response: str, ground_truth_json: str, weights: Mapping[str, float]) -> list[object]:
    try:
        score = score_one(scorer, response, ground_truth_json, weights)
    except (Exception, SystemExit) as error:  # whatever the scorer raises costs this answer and nothing else
        return [None, describe(error), None]
    return [score.total, dict(score.parts), score.said]


def encode_line(message: object) -> bytes:
    """A message as it is sent: JSON has no line break of its own.

    >>> encode_line(["two\\nlines", 1.0])
    b'["two\\\\nlines", 1.0]\\n'
    """
    return json.dumps(message).encode() + b"\n"


def _end_with_parent() -> None:
    """The kernel kills this process when the pool's thread ends, even in the middle of a scorer that hangs."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux alone has it; elsewhere the timer above must do
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Entry point of the process."""
    stacks.register("scorer")
    _end_with_parent()
    descriptor, name, deadline_s, first_call, weights = sys.argv[1:6]
    connection = socket.socket(fileno=int(descriptor))
    try:
        try:
            user_code.import_from_environment()
            scorer = resolve_scorer(name)
        except Exception as error:  # whatever importing the module raises; the parent reports it
            connection.sendall(encode_line({"failed": describe(error)}))
            return
        connection.sendall(encode_line({"ready": True}))
        serve(connection, scorer, float(deadline_s), first_call=first_call == "1", weights=json.loads(weights))
    except (BrokenPipeError, ConnectionResetError):
        return  # the parent is gone


if __name__ == "__main__":
    main()
