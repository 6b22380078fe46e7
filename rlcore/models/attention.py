"""Packed attention, where a token attends only to earlier tokens of the same sequence, without a [T, T] mask.

transformers calls the registered `packed_attention`, with a `PackedLayout` for packed tokens and with a mask for
decoding. The `sdpa` backend runs on every device. It sorts sequences by length, and computes one dense causal attention
for each group of equal or similar length.

If several responses in a micro-batch have the same prompt, the model computes the prompt only with the first response.
It computes each further response from the last token of the prompt on, because the output of this token predicts the
first token of the response. The keys and values of the prompt are copied to each further response, because attention
needs whole sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface

from rlcore.errors import ModelError
from rlcore.models.kernels import KERNELS, Backend
from rlcore.models.memory import to_device

Array: TypeAlias = Tensor | np.ndarray[Any, Any]
"""A tensor or a numpy array. FSDP leaves numpy arrays on the host, so reading them never waits for the device."""

# With more distinct lengths, kernel launches cost more than padding.
_MAX_EXACT_LENGTHS = 48
# Steps to which lengths are then rounded up: at most 1/8 of the attended tokens are zeros.
_STEPS_PER_DOUBLING = 8
# Kernels need an upper bound of the longest sequence. Few distinct bounds mean few compiled shapes.
_MAX_SEQLEN_STEP = 256

IntArray: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """A mapping from the c computed tokens to the T tokens of a batch. Shared tokens of a prompt are computed once."""

    places: Int[Tensor, "T"]  # computed token of each token, in attention order
    first_tokens: Int[Tensor, "c"]  # first token of each computed token
    shared: Int[Tensor, "p"]  # computed tokens that stand for more than one token
    duplicates: Int[Tensor, "p m"]  # second and later tokens of each entry of `shared`, in padded rows
    is_duplicate: Bool[Tensor, "p m"]  # False where `duplicates` is padded
    cu_seqlens: Int[Tensor, "N_plus_1"]  # int32, bounds of the sequences among the computed tokens

    def expand(self, computed: Float[Tensor, "c ..."]) -> Float[Tensor, "T ..."]:
        """Copy the rows of the c computed tokens to all T tokens, in the order of the attention calls. All occurrences
        of a shared prompt token get the same row."""
        order = (self.places, self.first_tokens, self.shared, self.duplicates, self.is_duplicate)
        found: Tensor = _Expand.apply(computed, *order)  # type: ignore[no-untyped-call]
        return found


class _Expand(torch.autograd.Function):
    """An `index_select` whose gradient sums the rows of duplicate tokens deterministically, in float32."""

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


def _shared_order(bounds: IntArray, shared: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return the indices Int[c] of the tokens that the model computes, and for each token its position Int[T] in that
    array. A duplicate token has the position of the same token in the first response's sequence. Also return the
    indices Int[d] of the duplicate tokens, which are not computed, and their columns Int[d] in
    `SharedPrompts.duplicates`."""
    lengths, indices = np.diff(bounds), np.arange(len(shared))
    first = np.maximum.accumulate(np.where(shared == 0, indices, 0))
    sequence = np.repeat(indices, lengths)
    tokens = np.arange(bounds[-1])
    at = tokens - bounds[sequence]
    is_dropped = at < shared[sequence]
    stands_for = np.where(is_dropped, bounds[first[sequence]] + at, tokens)
    places = (np.cumsum(~is_dropped) - 1)[stands_for]
    dropped = np.flatnonzero(is_dropped)
    return np.flatnonzero(~is_dropped), places, dropped, (sequence - first[sequence] - 1)[dropped]


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """The sequences of one dense attention call. Their tokens are at `start` to `stop` after sorting all sequences by
    length. `slots` Int[stop - start]: the position of each token after padding all sequences to `length`. `slots` is
    empty if all sequences have the same length."""

    start: int
    stop: int
    num_sequences: int
    length: int
    slots: Int[Tensor, "n"]

    @property
    def is_exact(self) -> bool:
        """True if all sequences of the group have the same length."""
        return self.stop - self.start == self.num_sequences * self.length


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The order in which the model computes T packed tokens. `token_order` Int[c]: the batch token at each computed
    position. `computed_index` Int[T]: the computed position of each batch token. `cu_seqlens` Int32[N+1]: the bounds of
    the sequences in computed order. `groups`: the attention calls of `sdpa`. Without shared prompts, c = T."""

    backend: Backend
    cu_seqlens: Int[Tensor, "N_plus_1"]
    max_seqlen: int
    token_order: Int[Tensor, "c"]
    computed_index: Int[Tensor, "T"]
    groups: tuple[LengthGroup, ...]
    shared: SharedPrompts | None = None


def build_layout(
    cu_seqlens: Int[Array, "N_plus_1"], *, backend: Backend, device: torch.device, shared: IntArray | None = None
) -> PackedLayout:
    """Return the layout of the sequences with the bounds `cu_seqlens`. If the bounds are on the host, the call does not
    wait for the device. `shared` Int[N]: the number of leading tokens that each further response shares with the first
    response to the prompt, and 0 for a first response."""
    bounds = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in pairwise(bounds)]
    longest = max(lengths, default=0)
    if backend == "sdpa":
        order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (lengths[i], i))
        sorted_lengths = torch.tensor([lengths[i] for i in order], dtype=torch.int64)
        first = torch.tensor([bounds[i] for i in order], dtype=torch.int64)
        sorted_bounds = torch.cat([sorted_lengths.new_zeros(1), sorted_lengths.cumsum(0)])
        own_order = torch.repeat_interleave(first - sorted_bounds[:-1], sorted_lengths) + torch.arange(bounds[-1])
        place = torch.empty_like(own_order)
        place[own_order] = torch.arange(bounds[-1])
        groups = _length_groups([lengths[i] for i in order], device)
    else:
        own_order = place = torch.arange(bounds[-1], device=device)
        sorted_bounds, groups = torch.as_tensor(cu_seqlens), ()
        longest = -(-longest // _MAX_SEQLEN_STEP) * _MAX_SEQLEN_STEP
    layout = PackedLayout(
        backend=backend,
        cu_seqlens=to_device(sorted_bounds, device, torch.int32),
        max_seqlen=longest,
        token_order=to_device(own_order, device),
        computed_index=to_device(place, device),
        groups=groups,
    )
    if shared is None or not shared.any():
        return layout
    computed, places, dropped, columns = _shared_order(np.array(bounds), shared)
    attended = own_order.numpy() if backend == "sdpa" else np.arange(len(places))
    at = np.empty_like(attended)  # position of each token in attention order
    at[attended] = np.arange(len(places))
    several, rows = np.unique(places[dropped], return_inverse=True)
    others = np.zeros((len(several), int(columns.max(initial=-1)) + 1), dtype=np.int64)
    is_one = np.zeros(others.shape, dtype=bool)
    others[rows, columns], is_one[rows, columns] = at[dropped], True
    bounds_of_computed = torch.from_numpy(np.searchsorted(computed, bounds)).to(torch.int32)
    arrays = (torch.from_numpy(each) for each in (places[attended], at[computed], several, others, is_one))
    return replace(
        layout,
        token_order=to_device(torch.from_numpy(computed), device),
        computed_index=to_device(torch.from_numpy(places), device),
        shared=SharedPrompts(*(to_device(each, device) for each in (*arrays, bounds_of_computed))),
    )


def _length_groups(lengths: Sequence[int], device: torch.device) -> tuple[LengthGroup, ...]:
    """Return groups of sequences with equal length. If there are more than `_MAX_EXACT_LENGTHS` different lengths,
    group by rounded length. `lengths` is sorted in ascending order."""
    exact = len(set(lengths)) <= _MAX_EXACT_LENGTHS
    groups: list[LengthGroup] = []
    start = 0
    for _, members in groupby(lengths, key=lambda length: length if exact else _round_up(length)):
        group = list(members)
        longest, stop = group[-1], start + sum(group)
        slots = torch.empty(0, dtype=torch.int64)
        if group[0] != longest:
            slots = torch.cat([torch.arange(row * longest, row * longest + n) for row, n in enumerate(group)])
        groups.append(LengthGroup(start, stop, len(group), longest, to_device(slots, device)))
        start = stop
    return tuple(groups)


def _round_up(length: int) -> int:
    """Round a length up to a multiple of p / 8, where p is the largest power of two up to that length."""
    step = max(1, (1 << (length.bit_length() - 1)) // _STEPS_PER_DOUBLING)
    return -(-length // step) * step


def _kernel_attention(
    query: Float[Tensor, "c Hq D"],
    key: Float[Tensor, "T Hkv D"],
    value: Float[Tensor, "T Hkv D"],
    layout: PackedLayout,
    scale: float | None,
    window: int | None,
) -> Float[Tensor, "c Hq D"]:
    kernel, longest = KERNELS[layout.backend], layout.max_seqlen
    # The computed tokens of a sequence are its last tokens, which the kernels' causal mask assumes.
    of_queries = layout.cu_seqlens if layout.shared is None else layout.shared.cu_seqlens
    if layout.backend == "flash_attn":  # it handles grouped-query attention itself
        out = kernel.function(
            query,
            key,
            value,
            cu_seqlens_q=of_queries,
            cu_seqlens_k=layout.cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=scale,
            causal=True,
            # A window of w tokens holds the token itself and w - 1 before it.
            window_size=kernel.no_window if window is None else (window - 1, 0),
        )
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)
    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if key.shape[1] != query.shape[1]:
        if kernel.supports_gqa:
            options["enable_gqa"] = True
        else:
            key, value = _repeat_heads(key, query.shape[1]), _repeat_heads(value, query.shape[1])
    return cast(Tensor, kernel.function(query, key, value, of_queries, layout.cu_seqlens, longest, longest, **options))


ATTENTION_NAME = "millrace_packed"
"""The name of the packed attention in transformers. No mask function has this name, so transformers builds no mask."""


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "B Hq L D"],
    key: Float[Tensor, "B Hkv S D"],
    value: Float[Tensor, "B Hkv S D"],
    attention_mask: Bool[Tensor, "B 1 L S"] | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed_layout: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "B L Hq D"], None]:
    """Compute the attention of one layer for transformers. `attention_mask` is used only without `packed_layout`. With
    a layout, B is 1, and L and S are both the number of computed tokens. Raises ModelError if the model caps attention
    scores, adds attention sinks or uses dropout."""
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ModelError(
            f"model.path: {type(module).__name__} caps attention scores or adds attention sinks, which the packed "
            "attention does not compute. Choose a model without them (Qwen2, Qwen3, Llama, Mistral)."
        )
    if dropout:
        raise ModelError(f"model.path: attention dropout must be 0 for log-probabilities to repeat, got {dropout}")
    if packed_layout is None:
        return _masked_attention(query, key, value, attention_mask, scaling, sliding_window), None
    shared = packed_layout.shared
    if packed_layout.backend == "sdpa":
        if shared is None:
            return _sdpa_by_length(query, key, value, packed_layout, scaling, sliding_window), None
        q, k, v = (shared.expand(tensor[0].transpose(0, 1)).transpose(0, 1)[None] for tensor in (query, key, value))
        return _sdpa_by_length(q, k, v, packed_layout, scaling, sliding_window).index_select(
            1, shared.first_tokens
        ), None
    # Under autocast the rotary embedding leaves query and key in float32, which the kernels refuse.
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    if shared is not None:
        k, v = shared.expand(k), shared.expand(v)
    return _kernel_attention(q, k, v, packed_layout, scaling, sliding_window)[None], None


AttentionInterface.register(ATTENTION_NAME, packed_attention)


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, window: int | None
) -> Tensor:
    """Compute dense attention of left-padded rows with a key-value cache."""
    if mask is None:
        raise ModelError(
            "this model computes packed attention: call it through CausalPolicy.forward or CausalPolicy.decode, "
            "not through the transformers model inside"
        )
    num_new, num_seen = query.shape[2], key.shape[2]
    if window is not None and num_seen > window:
        # Rows are padded on the left alone, so distances between columns are distances between tokens.
        mask = mask & causal_band(num_new, num_seen, window, query.device)
    key, value = _repeat_heads(key, query.shape[1]), _repeat_heads(value, query.shape[1])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale).transpose(1, 2)


def _sdpa_by_length(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float | None, window: int | None
) -> Tensor:
    """Return the attention [1, T, Hq, D], from one dense causal call for each length group."""
    num_heads = query.shape[1]
    key, value = _repeat_heads(key, num_heads), _repeat_heads(value, num_heads)
    # One split, since the gradient of a slice fills the whole tensor with zeros.
    sizes = [group.stop - group.start for group in layout.groups]
    parts = zip(*(tensor[0].split(sizes, dim=1) for tensor in (query, key, value)), strict=True)
    outputs = []
    for group, qkv in zip(layout.groups, parts, strict=True):
        q, k, v = (_group_rows(part, group) for part in qkv)
        banded = window is not None and group.length > window
        mask = causal_band(group.length, group.length, window, query.device) if banded else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not banded, scale=scale)
        flat = out.transpose(1, 2).reshape(group.num_sequences * group.length, num_heads, -1)
        outputs.append(flat if group.is_exact else flat.index_select(0, group.slots))
    return torch.cat(outputs)[None]


def _group_rows(part: Tensor, group: LengthGroup) -> Tensor:
    """Reshape a group's tokens from [H, tokens, D] to [sequences, H, length, D], with zeros after short sequences."""
    if not group.is_exact:
        # Causal attention never reads the zeros after the last token. The gradient of index_copy is a selection,
        # which is deterministic, unlike that of a gather with repeated indices.
        padded = part.new_zeros(part.shape[0], group.num_sequences * group.length, part.shape[2])
        part = padded.index_copy(1, group.slots, part)
    return part.view(part.shape[0], group.num_sequences, group.length, part.shape[2]).transpose(0, 1)


def _repeat_heads(tensor: Tensor, num_heads: int) -> Tensor:
    return tensor if tensor.shape[1] == num_heads else tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1)


def causal_band(num_new: int, num_seen: int, window: int | None, device: torch.device) -> Bool[Tensor, "L S"]:
    """Return a causal mask with one row for each of the last `num_new` tokens and one column for each of the `num_seen`
    tokens. It is True where the row's token may attend to the column's token. `window`: the size of a sliding window,
    or None."""
    at = torch.arange(num_seen - num_new, num_seen, device=device)[:, None]
    seen = torch.arange(num_seen, device=device)[None, :]
    causal = seen <= at
    return causal if window is None else causal & (seen > at - window)
