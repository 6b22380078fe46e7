"""Assignment of sequences to mini-batches, ranks and micro-batches, balanced by cost under a token budget.

The largest differencing method of Karmarkar and Karp ("The differencing method of set partitioning", 1982) balances
ranks and micro-batches. If there are several ranks, they wait for each other at every micro-batch. The balanced cost is
therefore the number of operations. For a single rank, the cost is the number of tokens, because this number determines
the memory."""

import bisect
import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from rlcore.batching.pack import shared_prompts
from rlcore.models.shape import ModelShape
from rlcore.types import PackedBatch

_Part: TypeAlias = tuple[int, list[int]]
"""The sum of a part's lengths, negated so that the heaviest part is sorted first, and the indices in the part."""
BALANCE_TOLERANCE = 1e-3
"""The accepted relative excess of the heaviest part over the mean. Above it, indices are exchanged between parts."""


def partition(lengths: Sequence[int], num_parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Split the indices of `lengths` into `num_parts` parts with nearly equal sums. Each part is in ascending order.
    With `equal_counts`, all parts have the same number of indices. No part is empty if all lengths are positive. Raises
    ValueError if there are fewer indices than parts, or if equal counts are impossible.

    >>> partition([8, 7, 6, 5, 4], 2)
    [[1, 3, 4], [0, 2]]
    """
    if num_parts < 1 or num_parts > len(lengths):
        raise ValueError(f"cannot cut {len(lengths)} sequences into {num_parts} non-empty parts")
    if equal_counts and len(lengths) % num_parts:
        raise ValueError(f"{num_parts} parts of equal count do not divide {len(lengths)} sequences")
    return [[*part] for part in _partition(tuple(lengths), num_parts, equal_counts)]


@functools.lru_cache(maxsize=16)
def _partition(lengths: tuple[int, ...], num_parts: int, equal_counts: bool) -> list[list[int]]:
    """Compute the parts of `partition`, cached because a training step needs them several times."""
    if num_parts == 1:
        return [[*range(len(lengths))]]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    step = num_parts if equal_counts else 1
    # Each heap entry is a partial solution: the parts that are not empty, by falling sum. The key is the spread.
    heap: list[tuple[int, int, list[_Part]]] = []
    for serial, start in enumerate(range(0, len(order), step)):
        parts: list[_Part] = [(-lengths[i], [i]) for i in order[start : start + step]]
        heapq.heappush(heap, (_spread(parts, num_parts), serial, parts))
    serial = len(order)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        alone, rest = num_parts - len(second), num_parts - len(first)  # heaviest parts, joined to empty ones
        merged = first[:alone] + second[:rest]
        pairs = zip(first[alone:], reversed(second[rest:]), strict=True)
        merged += [(a + b, left + right) for (a, left), (b, right) in pairs]
        merged.sort()
        heapq.heappush(heap, (_spread(merged, num_parts), serial, merged))
        serial += 1
    found = [indices for _, indices in heap[0][2]]
    return [sorted(indices) for indices in (_exchange(found, lengths) if equal_counts else found)]


def _spread(parts: Sequence[_Part], num_parts: int) -> int:
    """Return the difference between the largest and the smallest sum of a part, negated for Python's heap. If `parts`
    has fewer than `num_parts` parts, the smallest sum is 0.
    """
    return parts[0][0] - (parts[-1][0] if len(parts) == num_parts else 0)


def _exchange(parts: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Exchange indices between the heaviest part and another part, until no exchange makes the heaviest part lighter or
    this part's sum is close enough to the mean."""
    sums = [sum(lengths[i] for i in part) for part in parts]
    enough = (1 + BALANCE_TOLERANCE) * sum(sums) / len(sums)
    while max(sums) > enough:
        by_sum = sorted(range(len(parts)), key=sums.__getitem__)
        heavy, found = by_sum.pop(), None
        for light in by_sum:
            if (found := _best_exchange(parts[heavy], parts[light], lengths, sums[heavy] - sums[light])) is not None:
                break
        if found is None:
            break
        out, back = found
        for part, gone, come in ((heavy, out, back), (light, back, out)):
            parts[part] = [come if i == gone else i for i in parts[part]]
            sums[part] += lengths[come] - lengths[gone]
    return parts


def _best_exchange(heavy: list[int], light: list[int], lengths: Sequence[int], gap: int) -> tuple[int, int] | None:
    """Return the index in `heavy` and the index in `light` whose exchange makes the sums of both parts most nearly
    equal. Return None if no exchange helps. `gap`: the difference of the sums before the exchange."""
    candidates = sorted(light, key=lambda i: (lengths[i], i))
    values = [lengths[i] for i in candidates]
    best, closest = None, gap
    for out in sorted(heavy):
        at = bisect.bisect_left(values, lengths[out] - gap / 2)
        for back in candidates[max(at - 1, 0) : at + 1]:
            left = abs(gap - 2 * (lengths[out] - lengths[back]))
            if left < closest:
                best, closest = (out, back), left
    return best


@dataclass(frozen=True, slots=True)
class Sizes:
    """The token counts of n sequences. `lengths`: all tokens. `targets`: tokens with a loss. `shared`: leading tokens
    that are computed only for an earlier sequence with the same prompt."""

    lengths: Int[Tensor, "n"]
    targets: Int[Tensor, "n"]
    shared: Int[Tensor, "n"]

    @classmethod
    def from_batch(cls, batch: PackedBatch, *, share_prompts: bool) -> "Sizes":
        """Count the tokens of each sequence in a batch."""
        targets = batch.loss_lengths()
        shared = torch.from_numpy(shared_prompts(batch)) if share_prompts else torch.zeros_like(targets)
        return cls(batch.sequence_lengths(), targets, shared)

    def select(self, batch: PackedBatch, rows: Sequence[int]) -> "Sizes":
        """Return the sizes of some sequences of the batch. `rows`: their indices, in the order of the result."""
        chosen = torch.tensor(list(rows))
        shared = self.shared[chosen]
        is_next = chosen.diff(prepend=chosen[:1]) == 1
        if bool((shared > 0)[~is_next].any()):  # a response is not next to the one that computes its prompt
            shared = torch.from_numpy(shared_prompts(batch, rows))
        return Sizes(self.lengths[chosen], self.targets[chosen], shared)

    def without_sharing(self) -> "Sizes":
        """Return the same sizes with `shared` set to 0, for a pass that computes every prompt again."""
        return replace(self, shared=torch.zeros_like(self.shared))

    def num_computed(self) -> int:
        """Return the number of tokens that a forward pass computes. Shared tokens count once."""
        return int((self.lengths - self.shared).sum())

    def costs(self, shape: ModelShape | None) -> list[int]:
        """Return the cost of each sequence. Without `shape`, the cost is the number of computed tokens. With `shape`,
        it is a sixth of `ModelShape.update_flops`.
        """
        found = self.lengths - self.shared
        if shape is not None:
            layers, width = shape.layers * shape.layer_weights, shape.layers * shape.query_width
            found = layers * found + shape.embedding * self.targets + width * self.lengths**2
        return found.tolist()


def micro_batches(
    batch: PackedBatch, num_micro: int, shape: ModelShape | None = None, *, share_prompts: bool = False
) -> list[list[int]]:
    """Split a batch into `num_micro` micro-batches of nearly equal cost. Return the sequences of each micro-batch. If
    `shape` is None, the cost of a sequence is its number of tokens. With `share_prompts`, responses to one prompt stay
    together if they fit.
    """
    return _cut(Sizes.from_batch(batch, share_prompts=share_prompts), num_micro, shape)[0]


def _cut(sizes: Sizes, num_micro: int, shape: ModelShape | None) -> tuple[list[list[int]], list[int]]:
    """Split sequences into `num_micro` micro-batches. Return the sequences and the number of computed tokens of each
    micro-batch.
    """
    blocks, tokens = _blocks(sizes.lengths.tolist(), sizes.shared.tolist(), num_micro)
    if len(blocks) < num_micro:
        sizes = sizes.without_sharing()
        blocks, tokens = [[i] for i in range(len(sizes.lengths))], sizes.lengths.tolist()
    weights = sizes.costs(shape)
    parts = partition([sum(weights[i] for i in block) for block in blocks], num_micro)
    return [[i for block in part for i in blocks[block]] for part in parts], [
        sum(tokens[block] for block in part) for part in parts
    ]


def _blocks(lengths: list[int], shared: list[int], num_micro: int) -> tuple[list[list[int]], list[int]]:
    """Group neighboring sequences that share a prompt. A group has at most the mean number of tokens per micro-batch,
    unless it is a single sequence. Return the groups, and the number of computed tokens of each group.
    """
    most = -(-(sum(lengths) - sum(shared)) // num_micro)
    blocks: list[list[int]] = []
    tokens: list[int] = []
    for i, (length, common) in enumerate(zip(lengths, shared, strict=True)):
        if common and tokens[-1] + length - common <= most:
            blocks[-1].append(i)
            tokens[-1] += length - common
        else:
            blocks.append([i])
            tokens.append(length)
    return blocks, tokens


@dataclass(frozen=True, slots=True)
class RankShares:
    """The sequences of each rank, and the number of micro-batches into which every rank splits its sequences."""

    sequences: tuple[tuple[int, ...], ...]
    num_micro: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """The sequences that each rank computes. `mini_batches`: the sequences for each optimizer step. `whole`: the
    sequences of all mini-batches together, for a pass over the whole batch. `num_shared`: the number of prompt tokens
    that are skipped, because another sequence with the same prompt computes them.
    """

    mini_batches: tuple[RankShares, ...]
    whole: RankShares
    num_shared: int


@dataclass(frozen=True, slots=True)
class Balancer:
    """A balancer that assigns the same number of sequences and nearly the same total cost to each
    rank. `max_tokens`: the token limit of a micro-batch. With `share_prompts`, all responses to a prompt go to the same
    rank, if prompts have equally many responses and ranks can get equally many prompts."""

    num_ranks: int
    max_tokens: int
    shape: ModelShape | None
    share_prompts: bool = False

    def assign(self, batch: PackedBatch, groups_per_mini_batch: int) -> Assignment:
        """Assign sequences to ranks, for each mini-batch and for a pass over the whole batch."""
        sizes = Sizes.from_batch(batch, share_prompts=self.share_prompts)
        cut = mini_batches(batch.group_ids, groups_per_mini_batch)
        found = tuple(self.shares(batch, sizes, sequences) for sequences in cut)
        by_rank = zip(*(each.sequences for each in found), strict=True)
        of_ranks = tuple(tuple(chain.from_iterable(parts)) for parts in by_rank)
        whole = RankShares(of_ranks, self._num_micro(batch, sizes, of_ranks))
        return Assignment(found, whole, int(sizes.shared.sum()))

    @property
    def _shape(self) -> ModelShape | None:
        return self.shape if self.num_ranks > 1 else None

    def shares(self, batch: PackedBatch, sizes: Sizes, sequences: Sequence[int]) -> RankShares:
        """Assign the given `sequences` of the batch to ranks. `sizes`: the sizes of the whole batch."""
        parts = self._parts(batch.group_ids[list(sequences)], sizes.select(batch, sequences))
        of_ranks = tuple(tuple(sequences[i] for i in part) for part in parts)
        return RankShares(of_ranks, self._num_micro(batch, sizes, of_ranks))

    def _parts(self, group_ids: Int[Tensor, "n"], sizes: Sizes) -> list[list[int]]:
        prompts = mini_batches(group_ids, 1) if self.share_prompts else []
        if len({len(rows) for rows in prompts}) != 1 or len(prompts) % self.num_ranks:
            return partition(sizes.without_sharing().costs(self._shape), self.num_ranks, equal_counts=True)
        weights = sizes.costs(self._shape)
        of_prompts = [sum(weights[i] for i in rows) for rows in prompts]
        parts = partition(of_prompts, self.num_ranks, equal_counts=True)
        return [[i for prompt in part for i in prompts[prompt]] for part in parts]

    def _num_micro(self, batch: PackedBatch, sizes: Sizes, of_ranks: Sequence[Sequence[int]]) -> int:
        return max(self._num_cut(sizes.select(batch, mine)) for mine in of_ranks)

    def _num_cut(self, sizes: Sizes) -> int:
        """Return the smallest number of micro-batches with at most `max_tokens` tokens each. The limit holds whether
        micro-batches are balanced by cost or by tokens. Only a micro-batch of a single sequence may exceed it."""
        num_sequences = len(sizes.lengths)
        fewest = _fewest_bins((sizes.lengths - sizes.shared).tolist(), self.max_tokens)
        count = max(fewest, -(-sizes.num_computed() // self.max_tokens))
        while count < num_sequences and any(
            len(part) > 1 and tokens > self.max_tokens
            for shape in {self._shape, None}
            for part, tokens in zip(*_cut(sizes, count, shape), strict=True)
        ):
            count += 1
        return min(count, num_sequences)


def _fewest_bins(lengths: Sequence[int], budget: int) -> int:
    """Return a lower bound on the number of bins of size `budget` that are needed for `lengths`. A length above
    `budget` has its own bin. The bound is L2 of Martello and Toth ("Lower bounds and reduction procedures for the bin
    packing problem", 1990)."""
    ordered = sorted(min(length, budget) for length in lengths)
    sums, half = [0, *accumulate(ordered)], bisect.bisect_right(ordered, budget // 2)
    found = 1
    for least in {0, *ordered[:half]}:  # without lengths below `least`, each over `budget - least` is alone
        begin, alone = bisect.bisect_left(ordered, least), bisect.bisect_right(ordered, budget - least)
        others = max(alone - half, -(-(sums[alone] - sums[begin]) // budget))  # no two lengths over half fit together
        found = max(found, len(ordered) - alone + others)
    return found


def mini_batches(group_ids: Int[Tensor, "N"], groups_per_mini_batch: int) -> list[list[int]]:
    """Return the sequences of each optimizer step. The groups of a batch stay whole and in order."""
    order: dict[int, list[int]] = {}
    for index, group in enumerate(group_ids.tolist()):
        order.setdefault(group, []).append(index)
    groups = list(order.values())
    return [
        [index for group in groups[start : start + groups_per_mini_batch] for index in group]
        for start in range(0, len(groups), groups_per_mini_batch)
    ]
