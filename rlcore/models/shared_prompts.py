"""Shared prompts: a prompt's tokens are computed once for all of its responses in a micro-batch. The first response
keeps the whole prompt. The others begin with its last token, whose output predicts their first token. Attention still
uses whole sequences, so prompt keys and values are copied to each response."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlcore.models.memory import to_device

IntArray: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Mapping of c computed tokens to T tokens of a batch.

    Attributes:
        places: Int[T], computed token of each token, in attention order.
        first_tokens: Int[c], inverse: the first token of each computed one.
        shared: Int[p], computed tokens with several tokens.
        duplicates: Int[p, m], their further tokens; `is_duplicate` Bool[p, m] marks valid entries.
        cu_seqlens: Int32[N+1], sequence bounds among computed tokens.
    """

    places: Int[Tensor, "T"]
    first_tokens: Int[Tensor, "c"]
    shared: Int[Tensor, "p"]
    duplicates: Int[Tensor, "p m"]
    is_duplicate: Bool[Tensor, "p m"]
    cu_seqlens: Int[Tensor, "N_plus_1"]

    def expand(self, computed: Float[Tensor, "c ..."]) -> Float[Tensor, "T ..."]:
        """Return the computed row of each token."""
        order = (self.places, self.first_tokens, self.shared, self.duplicates, self.is_duplicate)
        found: Tensor = _Expand.apply(computed, *order)  # type: ignore[no-untyped-call]
        return found


class _Expand(torch.autograd.Function):
    """`index_select` whose gradient sums the rows of a token deterministically, in float32."""

    @staticmethod
    def forward(ctx: Any, computed: Tensor, places: Tensor, *backward: Tensor) -> Tensor:
        ctx.save_for_backward(*backward)
        return computed.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        firsts, shared, others, is_one = ctx.saved_tensors
        found = gradient.index_select(0, firsts)
        ones = is_one.view(*is_one.shape, *[1] * (gradient.ndim - 1))
        more = torch.where(ones, gradient[others].float(), 0.0).sum(1)
        summed = (found.index_select(0, shared).float() + more).to(gradient.dtype)
        return found.index_copy(0, shared, summed), None, None, None, None, None


@dataclass(frozen=True, slots=True)
class SharedOrder:
    """Computed tokens of a batch, on the host. `computed` Int[c]. `places` Int[T]: index of each token among them.
    `dropped` Int[d]: tokens that are not computed. `further` Int[d]: index of each among the duplicates of its token.
    """

    computed: IntArray
    places: IntArray
    dropped: IntArray
    further: IntArray

    @classmethod
    def of(cls, bounds: IntArray, shared: IntArray) -> "SharedOrder":
        """Build from sequence `bounds` Int[N+1]. `shared` Int[N]: see `build_layout`.

        >>> order = SharedOrder.of(np.array([0, 4, 7, 9]), np.array([0, 2, 0]))
        >>> order.computed.tolist(), order.places.tolist()
        ([0, 1, 2, 3, 6, 7, 8], [0, 1, 2, 3, 0, 1, 4, 5, 6])
        """
        lengths, indices = np.diff(bounds), np.arange(len(shared))
        first = np.maximum.accumulate(np.where(shared == 0, indices, 0))
        sequence = np.repeat(indices, lengths)
        tokens = np.arange(bounds[-1])
        at = tokens - bounds[sequence]
        is_dropped = at < shared[sequence]
        stands_for = np.where(is_dropped, bounds[first[sequence]] + at, tokens)
        places = (np.cumsum(~is_dropped) - 1)[stands_for]
        dropped = np.flatnonzero(is_dropped)
        return cls(np.flatnonzero(~is_dropped), places, dropped, (sequence - first[sequence] - 1)[dropped])

    def on_device(self, cu_seqlens: IntArray, order: Int[Tensor, "T"] | None, device: torch.device) -> SharedPrompts:
        """Build the device tensors. `order`: token at each position of attention order, None for batch order."""
        at = np.arange(len(self.places))  # position of each token in that order
        if order is not None:
            at[order.numpy()] = np.arange(len(self.places))
        shared, rows = np.unique(self.places[self.dropped], return_inverse=True)
        others = np.zeros((len(shared), int(self.further.max(initial=-1)) + 1), dtype=np.int64)
        is_one = np.zeros(others.shape, dtype=bool)
        others[rows, self.further] = at[self.dropped]
        is_one[rows, self.further] = True
        bounds = np.searchsorted(self.computed, cu_seqlens)

        def sent(values: npt.NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
            return to_device(torch.from_numpy(values), device, dtype)

        places = self.places if order is None else self.places[order.numpy()]
        return SharedPrompts(
            sent(places), sent(at[self.computed]), sent(shared), sent(others), sent(is_one), sent(bounds, torch.int32)
        )
