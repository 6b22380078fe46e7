"""Which sequences go to which mini-batch, rank and micro-batch: balanced by length, under a token budget.

Ranks and micro-batches use the largest differencing method of Karmarkar and Karp ("The differencing method of set
partitioning", 1982).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from rlcore.types import PackedBatch


def partition(lengths: Sequence[int], num_parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Indices of `lengths` in `num_parts` parts whose sums are nearly equal; each part ascending.

    With `equal_counts` each part holds the same number of indices (`num_parts` divides their number). Without it a
    part is never empty while there are at least `num_parts` indices and all lengths are positive.

    >>> partition([8, 7, 6, 5, 4], 2)
    [[1, 3, 4], [0, 2]]
    """
    if num_parts < 1 or num_parts > len(lengths):
        raise ValueError(f"cannot cut {len(lengths)} sequences into {num_parts} non-empty parts")
    if equal_counts and len(lengths) % num_parts:
        raise ValueError(f"{num_parts} parts of equal count do not divide {len(lengths)} sequences")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    step = num_parts if equal_counts else 1
    # Each heap entry is a partial solution: parts sorted by falling sum; the key is the spread between its ends.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for serial, start in enumerate(range(0, len(order), step)):
        parts = [(lengths[i], [i]) for i in order[start : start + step]]
        parts += [(0, []) for _ in range(num_parts - len(parts))]
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], serial, parts))
    serial = len(order)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, left + right) for (a, left), (b, right) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [sorted(indices) for _, indices in heap[0][2]]


def num_micro_batches(lengths: Sequence[int], max_tokens: int) -> int:
    """Fewest parts of `partition` in which no part of more than one sequence is over `max_tokens`."""
    count = max(1, -(-sum(lengths) // max_tokens))
    while count < len(lengths):
        parts = partition(lengths, count)
        if all(len(part) == 1 or sum(lengths[i] for i in part) <= max_tokens for part in parts):
            break
        count += 1
    return min(count, len(lengths))


@dataclass(frozen=True, slots=True)
class Shares:
    """`sequences[rank]`: indices of the sequences that a rank works on; `num_micro` is the same on all ranks, since
    sharded parameters are gathered by all ranks together."""

    sequences: tuple[tuple[int, ...], ...]
    num_micro: int


def share_out(batch: PackedBatch, candidates: Sequence[int], *, num_ranks: int, max_tokens: int) -> Shares:
    """Deal `candidates` (indices into the batch) to the ranks, equal in number and nearly equal in tokens."""
    lengths = batch.sequence_lengths().tolist()
    parts = partition([lengths[i] for i in candidates], num_ranks, equal_counts=True)
    sequences = tuple(tuple(candidates[i] for i in part) for part in parts)
    num_micro = max(num_micro_batches([lengths[i] for i in part], max_tokens) for part in sequences)
    return Shares(sequences, num_micro)


def mini_batches(group_ids: Int[Tensor, "N"], groups_per_mini_batch: int) -> list[list[int]]:
    """Indices of the sequences of each optimizer step: whole groups, in the order they were drawn."""
    order: dict[int, list[int]] = {}
    for index, group in enumerate(group_ids.tolist()):
        order.setdefault(group, []).append(index)
    groups = list(order.values())
    return [
        [index for group in groups[start : start + groups_per_mini_batch] for index in group]
        for start in range(0, len(groups), groups_per_mini_batch)
    ]


def rank_tokens(batch: PackedBatch, shares: Shares) -> Int[Tensor, "R"]:
    """Tokens on each rank."""
    lengths = batch.sequence_lengths()
    return torch.stack([lengths[torch.tensor(part)].sum() for part in shares.sequences])
