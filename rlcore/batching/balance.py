"""Assignment of sequences to mini-batches, ranks and micro-batches, balanced by cost under a token budget.

Ranks and micro-batches use the largest differencing method of Karmarkar and Karp ("The differencing method of set
partitioning", 1982). Ranks synchronize at every micro-batch, so several ranks are balanced by operations. One rank is
balanced by tokens, which determine its memory.
"""

import bisect
import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from rlcore.batching.pack import shared_prompts
from rlcore.models.shape import ModelShape
from rlcore.types import PackedBatch

_Part: TypeAlias = tuple[int, int, Any]
"""-(sum of a part), one of its indices, and all indices as nested pairs, because joining lists takes quadratic time."""
BALANCE_TOLERANCE = 1e-3
"""Relative excess of the heaviest part over the mean above which sequences are exchanged."""


def partition(lengths: Sequence[int], num_parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Return the indices of `lengths` in `num_parts` parts of nearly equal sums, each part ascending.

    With `equal_counts` each part has the same number of indices. The differencing method then takes one of every
    `num_parts` neighbouring lengths, and exchanges of pairs correct skewed lengths. Otherwise no part is empty if there
    are at least `num_parts` indices and all lengths are positive.

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
    """Compute the parts once: a step needs them for counting micro-batches, for the reference and for the update."""
    if num_parts == 1:
        return [[*range(len(lengths))]]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    step = num_parts if equal_counts else 1
    # Each heap entry is a partial solution: its parts that are not empty, by falling sum; the key is the spread between
    # its ends.
    heap: list[tuple[int, int, list[_Part]]] = []
    for serial, start in enumerate(range(0, len(order), step)):
        parts: list[_Part] = [(-lengths[i], i, i) for i in order[start : start + step]]
        heapq.heappush(heap, (_spread(parts, num_parts), serial, parts))
    serial = len(order)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        alone, rest = num_parts - len(second), num_parts - len(first)  # the heaviest of each, joined to empty parts
        merged = first[:alone] + second[:rest]
        pairs = zip(first[alone:], reversed(second[rest:]), strict=True)
        merged += [(a + b, i, (left, right)) for (a, i, left), (b, _, right) in pairs]
        merged.sort()
        heapq.heappush(heap, (_spread(merged, num_parts), serial, merged))
        serial += 1
    found = [_indices(tree) for _, _, tree in heap[0][2]]
    return [sorted(indices) for indices in (_exchange(found, lengths) if equal_counts else found)]


def _spread(parts: Sequence[_Part], num_parts: int) -> int:
    """Return -(sum of the heaviest part less that of the lightest). Parts that are not listed are empty."""
    return parts[0][0] - (parts[-1][0] if len(parts) == num_parts else 0)


def _indices(tree: Any) -> list[int]:
    """Return the leaves of nested pairs."""
    found, rest = [], [tree]
    while rest:
        node = rest.pop()
        if isinstance(node, tuple):
            rest += node
        else:
            found.append(node)
    return found


def _exchange(parts: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Exchange two indices between the heaviest part and another until none makes it lighter."""
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
    """Return one index of each part whose exchange brings the sums, `gap` apart, closest, or None."""
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
    """Token counts of n sequences: all tokens, targets, and first tokens that are shared with another sequence."""

    lengths: Int[Tensor, "n"]
    targets: Int[Tensor, "n"]
    shared: Int[Tensor, "n"]

    @classmethod
    def from_batch(cls, batch: PackedBatch, *, share_prompts: bool) -> "Sizes":
        """Count the tokens of a batch."""
        targets = batch.loss_lengths()
        shared = torch.from_numpy(shared_prompts(batch)) if share_prompts else torch.zeros_like(targets)
        return cls(batch.sequence_lengths(), targets, shared)

    def select(self, batch: PackedBatch, rows: Sequence[int]) -> "Sizes":
        """Return the sizes of some sequences of the batch, in this order."""
        chosen = torch.tensor(list(rows))
        shared = self.shared[chosen]
        is_next = chosen.diff(prepend=chosen[:1]) == 1
        if bool((shared > 0)[~is_next].any()):  # responses are separated from those that compute their prompt
            shared = torch.from_numpy(shared_prompts(batch, rows))
        return Sizes(self.lengths[chosen], self.targets[chosen], shared)

    def without_sharing(self) -> "Sizes":
        """Return the sizes without shared prompts."""
        return replace(self, shared=torch.zeros_like(self.shared))

    def num_computed(self) -> int:
        """Return the tokens that a pass computes."""
        return int((self.lengths - self.shared).sum())

    def costs(self, shape: ModelShape | None) -> list[int]:
        """Return the cost of each sequence in a pass: its tokens if the model's shape is unknown. The unit is the
        operations of `ModelShape.update_flops` over 6: products of a token with the layers' weights, of a target with
        the head, and attention with the square of the length."""
        found = self.lengths - self.shared
        if shape is not None:
            layers, width = shape.layers * shape.layer_weights, shape.layers * shape.query_width
            found = layers * found + shape.embedding * self.targets + width * self.lengths**2
        return found.tolist()


def micro_batches(
    batch: PackedBatch, num_micro: int, shape: ModelShape | None = None, *, share_prompts: bool = False
) -> list[list[int]]:
    """Return the sequences of each micro-batch, of nearly equal cost for this shape (without one, in tokens). With
    `share_prompts` responses to one prompt stay together if they fit into a micro-batch."""
    return _cut(Sizes.from_batch(batch, share_prompts=share_prompts), num_micro, shape)[0]


def _cut(sizes: Sizes, num_micro: int, shape: ModelShape | None) -> tuple[list[list[int]], list[int]]:
    """Return the sequences of each micro-batch, and how many tokens each computes."""
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
    """Return neighbouring sequences that share a prompt, bounded by the size of one of `num_micro` parts, and their
    tokens."""
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
    """Indices of the sequences of each rank, and the micro-batches of every rank. Their number is equal because all
    ranks gather sharded parameters together."""

    sequences: tuple[tuple[int, ...], ...]
    num_micro: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assignment of a step's sequences to ranks: `mini_batches` of each optimizer step, `whole` of a pass over all
    sequences in the same order, and the number of tokens that share a computed prompt."""

    mini_batches: tuple[RankShares, ...]
    whole: RankShares
    num_shared: int


@dataclass(frozen=True, slots=True)
class Balancer:
    """Assigns equally many sequences of nearly equal cost to each rank. With `share_prompts` it assigns whole prompts,
    if they have equally many responses and the ranks divide their number. `max_tokens` bounds a micro-batch."""

    num_ranks: int
    max_tokens: int
    shape: ModelShape | None
    share_prompts: bool = False

    def assign(self, batch: PackedBatch, groups_per_mini_batch: int) -> Assignment:
        """Assign the sequences of each mini-batch, and of all of them, to ranks."""
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
        """Assign some sequences of the batch. `sizes` are those of the whole batch."""
        parts = self._parts(batch.group_ids[list(sequences)], sizes.select(batch, sequences))
        of_ranks = tuple(tuple(sequences[i] for i in part) for part in parts)
        return RankShares(of_ranks, self._num_micro(batch, sizes, of_ranks))

    def _parts(self, group_ids: Int[Tensor, "n"], sizes: Sizes) -> list[list[int]]:
        """Return the sequences of each rank, as indices into `sizes`."""
        prompts = mini_batches(group_ids, 1) if self.share_prompts else []
        if len({len(rows) for rows in prompts}) != 1 or len(prompts) % self.num_ranks:
            return partition(sizes.without_sharing().costs(self._shape), self.num_ranks, equal_counts=True)
        weights = sizes.costs(self._shape)
        of_prompts = [sum(weights[i] for i in rows) for rows in prompts]
        parts = partition(of_prompts, self.num_ranks, equal_counts=True)
        return [[i for prompt in part for i in prompts[prompt]] for part in parts]

    def _num_micro(self, batch: PackedBatch, sizes: Sizes, of_ranks: Sequence[Sequence[int]]) -> int:
        """Return the micro-batches of the rank that needs most."""
        return max(self._num_cut(sizes.select(batch, mine)) for mine in of_ranks)

    def _num_cut(self, sizes: Sizes) -> int:
        """Return the fewest micro-batches, by cost and by tokens, in which no part of several sequences exceeds the
        budget."""
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
    """Return a lower bound on the bins of `budget` that hold the lengths: L2 of Martello and Toth ("Lower bounds and
    reduction procedures for the bin packing problem", 1990). A length over the budget has its own bin."""
    ordered = sorted(min(length, budget) for length in lengths)
    sums, half = [0, *accumulate(ordered)], bisect.bisect_right(ordered, budget // 2)
    found = 1
    for least in {0, *ordered[:half]}:  # without shorter ones, those over `budget - least` are alone
        begin, alone = bisect.bisect_left(ordered, least), bisect.bisect_right(ordered, budget - least)
        others = max(alone - half, -(-(sums[alone] - sums[begin]) // budget))  # of those over half no two go together
        found = max(found, len(ordered) - alone + others)
    return found


def mini_batches(group_ids: Int[Tensor, "N"], groups_per_mini_batch: int) -> list[list[int]]:
    """Return the sequences of each optimizer step: whole groups, in the order they were drawn."""
    order: dict[int, list[int]] = {}
    for index, group in enumerate(group_ids.tolist()):
        order.setdefault(group, []).append(index)
    groups = list(order.values())
    return [
        [index for group in groups[start : start + groups_per_mini_batch] for index in group]
        for start in range(0, len(groups), groups_per_mini_batch)
    ]
