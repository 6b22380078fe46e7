"""A scorer for mixtures of data sources. It scores each response with the scorer that the ground truth names."""

import json
from collections.abc import Mapping
from functools import cache

from rlcore.rollout.scoring_worker import SCORER_KEY, resolve_scorer
from rlcore.score import Score

_scorer = cache(resolve_scorer)


def with_scorer(ground_truth_json: str, scorer: str) -> str:
    """Add the scorer's name to a ground truth.

    >>> with_scorer('{"answer": "3"}', "data.gsm8k:score")
    '{"answer": "3", "scorer": "data.gsm8k:score"}'
    """
    return json.dumps({**json.loads(ground_truth_json), SCORER_KEY: scorer}, ensure_ascii=False)


def without_scorer(ground_truth_json: str) -> str:
    """Remove the scorer's name from a ground truth."""
    truth = json.loads(ground_truth_json)
    truth.pop(SCORER_KEY, None)
    return json.dumps(truth, ensure_ascii=False)


def score(response: str, ground_truth: Mapping[str, object]) -> Score | float:
    """Score a response with the scorer named in the ground truth. The scorer gets the ground truth without this
    name."""
    truth = dict(ground_truth)
    if SCORER_KEY not in truth:
        raise ValueError("data.scorer: must be set, since none is known for the row's data_source")
    return _scorer(str(truth.pop(SCORER_KEY)))(response, truth)
