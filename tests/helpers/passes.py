"""A pass that needs a number of micro-batches, and a batch for the pass."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rlcore.batching.pack import pack
from rlcore.types import PackedBatch, Prompt, Rollout, Score


def needs(bound: int) -> Callable[[Sequence[Sequence[int]]], int]:
    """Return a pass that fits in memory with at least `bound` micro-batches, and otherwise fails in torch."""

    def work(parts: Sequence[Sequence[int]]) -> int:
        if len(parts) < bound:
            torch.empty(1 << 60, dtype=torch.uint8)
        return len(parts)

    return work


def answers(number: int) -> PackedBatch:
    rollouts = [
        Rollout(Prompt(index, (3, 4), "countdown", "{}"), 0, np.array([5, 6]), np.zeros(2, dtype=np.float32), "stop", 0)
        for index in range(number)
    ]
    return pack(rollouts, [Score(0.0, {})] * number, list(range(number)))
