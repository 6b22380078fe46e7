"""Naive twins in Python floats."""

import math
from collections.abc import Sequence

Rows = Sequence[Sequence[float]]


def token_logprob_and_entropy(
    hidden: Sequence[float], weight: Rows, target: int, temperature: float
) -> tuple[float, float]:
    """Return log-probability of `target` and entropy of softmax(weight hidden / temperature)."""
    logits = [sum(h * w for h, w in zip(hidden, row, strict=True)) / temperature for row in weight]
    norm = math.fsum(math.exp(z) for z in logits)
    probs = [math.exp(z) / norm for z in logits]
    return math.log(probs[target]), -math.fsum(p * math.log(p) for p in probs)


def causal_attention(query: Rows, key: Rows, value: Rows, scale: float, window: int | None) -> list[list[float]]:
    """Compute one head of one sequence: a weighted mean of the last `window` values."""
    out = []
    for at, q in enumerate(query):
        first = 0 if window is None else max(0, at - window + 1)
        scores = [math.exp(scale * sum(a * b for a, b in zip(q, key[j], strict=True))) for j in range(first, at + 1)]
        total = math.fsum(scores)
        out.append(
            [math.fsum(s / total * value[first + j][d] for j, s in enumerate(scores)) for d in range(len(value[0]))]
        )
    return out
