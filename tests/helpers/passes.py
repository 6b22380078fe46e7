"""A pass that needs a number of micro-batches, and a batch for the pass."""

from collections.abc import Callable, Sequence

import torch

from rlcore.types import PackedBatch
from tests.models.tiny import answers as random_answers


def needs(bound: int) -> Callable[[Sequence[Sequence[int]]], int]:
    """Return a pass that fits in memory with at least `bound` micro-batches, and otherwise fails in torch."""

    def work(parts: Sequence[Sequence[int]]) -> int:
        if len(parts) < bound:
            torch.empty(1 << 60, dtype=torch.uint8)
        return len(parts)

    return work


def answers(number: int) -> PackedBatch:
    return random_answers([(2, (2,))] * number)
