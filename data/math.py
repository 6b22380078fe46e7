"""Scorer for mathematics of any kind: the math-verify library decides whether two expressions are equal.

It computes what the answer says, and some answers never end (`9^{9^{9}}`), so it belongs into scoring processes with a
deadline: `reward.num_processes` of 1 or more. Its own time limit uses signals, which a thread may not; it is off.
"""

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rlcore.score import Score

# What the answer is follows near its end; a long text costs the parser minutes.
_LONGEST_CHARS = 2_000

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its time limit is off


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """1 where the answer equals the reference, else 0. `format` says whether it stands in `\\boxed{}`."""
    from math_verify import parse, verify

    boxed = float("\\boxed{" in response)
    found = parse(response[-_LONGEST_CHARS:], parsing_timeout=None)
    wanted = str(ground_truth["answer"])
    correct = bool(found) and verify(_reference(wanted), found, timeout_seconds=None)
    # All that equals the reference says the same; of what does not, the expression as it is parsed.
    said = wanted if correct else _written(found) if found else None
    return Score(float(correct), {"correct": float(correct), "format": boxed}, said)


def _written(found: list[Any]) -> str:
    """What was parsed as one text: 1/2 for 0.5. A number of thousands of digits stays as it was written."""
    try:
        return str(found[0])
    except ValueError:
        return str(found[-1])


@lru_cache(maxsize=4_096)
def _reference(answer: str) -> Any:
    """The reference parsed; a bare expression is taken as LaTeX mathematics."""
    from math_verify import parse

    marked = answer if "\\boxed{" in answer or "$" in answer else f"${answer}$"
    return parse(marked, parsing_timeout=None)
