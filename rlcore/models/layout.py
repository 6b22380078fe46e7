"""Where the sequences of a packed micro-batch lie: made once for each micro-batch, read by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from rlcore.models.memory import to_device

Backend = Literal["flash_attn", "varlen", "sdpa"]
Array: TypeAlias = Tensor | np.ndarray[Any, Any]
"""A tensor, or an array of the host: FSDP sends tensors that a model is called with to the device, and to read them
there waits for it."""

# With more distinct lengths than this the launches cost more than a little padding inside attention does.
_MAX_EXACT_LENGTHS = 48
# Then lengths are rounded up to steps of an eighth of a power of two: at most 1/8 of the attended tokens are zeros.
_STEPS_PER_DOUBLING = 8
# Kernels need an upper bound of the longest sequence only; few distinct bounds mean few compiled shapes.
_MAX_SEQLEN_STEP = 256


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Sequences attended in one dense call: tokens `start` to `stop`, in sorted order.

    `slots` Int[stop - start]: place of each token among `num_sequences` x `length` rows; empty where every sequence
    has exactly `length` tokens.
    """

    start: int
    stop: int
    num_sequences: int
    length: int
    slots: Int[Tensor, "n"]

    @property
    def is_exact(self) -> bool:
        """Whether all sequences of the group have the same length."""
        return self.stop - self.start == self.num_sequences * self.length


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """How T tokens run through the model.

    `token_order` Int[T]: which token of the batch stands at each place the model computes; `place` Int[T] is its
    inverse. `cu_seqlens` Int32[N+1] bounds the sequences in the order computed. `groups` is empty but for `sdpa`.
    """

    backend: Backend
    cu_seqlens: Int[Tensor, "N_plus_1"]
    max_seqlen: int
    token_order: Int[Tensor, "T"]
    place: Int[Tensor, "T"]
    groups: tuple[LengthGroup, ...]


def build_layout(cu_seqlens: Int[Array, "N_plus_1"], *, backend: Backend, device: torch.device) -> PackedLayout:
    """Layout of the sequences that `cu_seqlens` bounds. With bounds on the host nothing waits for the device.

    >>> layout = build_layout(torch.tensor([0, 3, 5, 8]), backend="sdpa", device=torch.device("cpu"))
    >>> layout.token_order.tolist()
    [3, 4, 0, 1, 2, 5, 6, 7]
    >>> [(group.num_sequences, group.length) for group in layout.groups]
    [(1, 2), (2, 3)]
    """
    bounds = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in pairwise(bounds)]
    longest = max(lengths, default=0)
    if backend != "sdpa":
        identity = torch.arange(bounds[-1], device=device)
        return PackedLayout(
            backend=backend,
            cu_seqlens=to_device(torch.as_tensor(cu_seqlens), device, torch.int32),
            max_seqlen=-(-longest // _MAX_SEQLEN_STEP) * _MAX_SEQLEN_STEP,
            token_order=identity,
            place=identity,
            groups=(),
        )
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (lengths[i], i))
    sorted_lengths = torch.tensor([lengths[i] for i in order], dtype=torch.int64)
    first = torch.tensor([bounds[i] for i in order], dtype=torch.int64)
    sorted_bounds = torch.cat([sorted_lengths.new_zeros(1), sorted_lengths.cumsum(0)])
    # Token of the batch at each sorted place: first token of its sequence plus its distance from the sorted start.
    token_order = torch.repeat_interleave(first - sorted_bounds[:-1], sorted_lengths) + torch.arange(bounds[-1])
    place = torch.empty_like(token_order)
    place[token_order] = torch.arange(bounds[-1])
    return PackedLayout(
        backend=backend,
        cu_seqlens=to_device(sorted_bounds, device, torch.int32),
        max_seqlen=longest,
        token_order=to_device(token_order, device),
        place=to_device(place, device),
        groups=_length_groups([lengths[i] for i in order], device),
    )


def _length_groups(lengths: Sequence[int], device: torch.device) -> tuple[LengthGroup, ...]:
    """Groups of the ascending `lengths`: one for each distinct length, or for each step where they are too many."""
    exact = len(set(lengths)) <= _MAX_EXACT_LENGTHS
    groups: list[LengthGroup] = []
    start = 0
    for _, members in groupby(lengths, key=lambda length: length if exact else _rounded_up(length)):
        group = list(members)
        longest, stop = group[-1], start + sum(group)
        slots = torch.empty(0, dtype=torch.int64)
        if group[0] != longest:
            slots = torch.cat([torch.arange(row * longest, row * longest + n) for row, n in enumerate(group)])
        groups.append(LengthGroup(start, stop, len(group), longest, to_device(slots, device)))
        start = stop
    return tuple(groups)


def _rounded_up(length: int) -> int:
    """`length` rounded up to a step of an eighth of the power of two below it.

    >>> [_rounded_up(length) for length in (7, 16, 17, 100, 1000)]
    [7, 16, 18, 104, 1024]
    """
    step = max(1, (1 << (length.bit_length() - 1)) // _STEPS_PER_DOUBLING)
    return -(-length // step) * step
