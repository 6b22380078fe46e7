"""A scorer that adds one metric to the scorer of countdown.

    COMMAND

The added metric is `reward/short/mean`, the share of short responses. It does not change the reward, which is `total`.
docs/data.md describes what a scorer may return. Model output is untrusted: parse it, never evaluate it.
"""

from collections.abc import Mapping

from data.countdown import score as score_countdown
from rlcore.score import Score

_SHORT = 20


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """Score one response. The response may be any text, and it may be empty."""
    score = score_countdown(response, ground_truth)
    is_short = float(len(response) <= _SHORT)
    return Score(score.total, {**score.parts, "short": is_short}, score.said)
