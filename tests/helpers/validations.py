"""Validation results from plain scores, for tests."""

import json
from collections.abc import Sequence

import numpy as np

from rlcore.config import EvaluationConfig
from rlcore.evaluation.result import ProblemResult, Response, ValidationResult

FAILED = -1.0  # A score that stands for a failed scorer


def answer(score: float, text: str = "3 + 4") -> Response:
    if score == FAILED:
        return Response(text, 0.0, {}, 5, "stop", failure="RuntimeError: no")
    return Response(text, score, {"correct": float(score >= 1), "format": 1.0}, 5, "stop")


def problem(prompt_id: int, scores: Sequence[float], *, greedy: float | None = None, difficulty: int = 2):
    samples = tuple(answer(score, f"answer {index} of {score}") for index, score in enumerate(scores))
    truth = json.dumps({"target": prompt_id, "numbers": [prompt_id, 1, 2]})
    greedy_response = None if greedy is None else answer(greedy)
    return ProblemResult(prompt_id, difficulty, f"problem {prompt_id}", truth, greedy_response, samples)


def result(problems: Sequence[ProblemResult], *, name: str = "after", step: int = 20, **settings: object):
    chosen = EvaluationConfig(**settings) if settings else EvaluationConfig()
    return ValidationResult(name, step, step, "countdown", tuple(problems), chosen)


def random_result(seed: int, chance: float, *, num_problems: int = 60, num_samples: int = 4, **settings: object):
    """Return a result of problems of different difficulty. `chance` is the mean share of correct samples."""
    rng = np.random.default_rng(seed)
    chances = np.clip(rng.normal(chance, 0.2, num_problems), 0, 1)
    return result(
        [
            problem(
                index,
                (rng.random(num_samples) < chances[index]).astype(float).tolist(),
                greedy=float(chances[index] > 0.5),
                difficulty=1 + index % 3,
            )
            for index in range(num_problems)
        ],
        **settings,
    )
