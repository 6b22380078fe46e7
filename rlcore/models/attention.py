"""Packed attention: every token sees the earlier tokens of its own sequence, and no [T, T] mask is ever built.

One function is registered with transformers. A packed pass hands it a `PackedLayout` as a keyword argument (no global
state, so gradient checkpointing recomputes the same thing); a decoding pass hands it a small four-dimensional mask.

The `sdpa` backend runs anywhere and uses no padding: tokens are put in order of their sequence's length once, at the
model's entrance, and then each distinct length is one dense causal attention over a slice.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rlcore.errors import ModelError
from rlcore.models.kernels import flash_varlen, torch_varlen
from rlcore.models.layout import LengthGroup, PackedLayout
from rlcore.models.library import AttentionInterface

ATTENTION_NAME = "millrace_packed"
"""Name under which transformers finds this attention. It is in no mask registry: transformers builds no mask."""


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
    """Attention of one layer as transformers calls it: packed where a layout is given, masked where a mask is.

    With a layout B is 1 and L = S = T. Raises ModelError for score changes that no backend here computes.
    """
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ModelError(
            f"model.path: {type(module).__name__} caps attention scores or adds attention sinks, which the packed "
            "attention does not compute. Choose a model without them (Qwen2, Qwen3, Llama, Mistral)."
        )
    if dropout:
        raise ModelError(f"model.path: attention dropout must be 0 for log-probabilities to repeat, got {dropout}")
    if packed_layout is None:
        return _masked(query, key, value, attention_mask, scaling, sliding_window), None
    if packed_layout.backend == "sdpa":
        return _by_length(query, key, value, packed_layout, scaling, sliding_window), None
    kernel = flash_varlen if packed_layout.backend == "flash_attn" else torch_varlen
    # Under autocast the rotary embedding leaves query and key in float32, which the kernels refuse.
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    return kernel(q, k, v, layout=packed_layout, scale=scaling, window=sliding_window)[None], None


AttentionInterface.register(ATTENTION_NAME, packed_attention)


def _masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, window: int | None
) -> Tensor:
    """Dense attention of left-padded rows with a key-value cache."""
    if mask is None:
        raise ModelError(
            "this model computes packed attention: call it through CausalPolicy.forward or CausalPolicy.decode, "
            "not through the transformers model inside"
        )
    num_new, num_seen = query.shape[2], key.shape[2]
    if window is not None and num_seen > window:
        # Rows are padded on the left alone, so distances between columns are distances between tokens.
        mask = mask & causal_band(num_new, num_seen, window, query.device)
    key, value = _repeated(key, query.shape[1]), _repeated(value, query.shape[1])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale).transpose(1, 2)


def _by_length(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float | None, window: int | None
) -> Tensor:
    """One dense causal attention for each group of sequences of equal length; [1, T, Hq, D]."""
    num_heads = query.shape[1]
    key, value = _repeated(key, num_heads), _repeated(value, num_heads)
    # One split and not a slice for each group: the gradient of a slice fills the whole tensor with zeros.
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
    """The group's tokens [H, tokens, D] as [sequences, H, length, D]; shorter sequences end in zeros."""
    if not group.is_exact:
        # Zeros stand after the last token, where causal attention never looks. index_copy and not a gather with
        # repeated indices: its gradient is a plain selection, which is the same in every run.
        padded = part.new_zeros(part.shape[0], group.num_sequences * group.length, part.shape[2])
        part = padded.index_copy(1, group.slots, part)
    return part.view(part.shape[0], group.num_sequences, group.length, part.shape[2]).transpose(0, 1)


def _repeated(tensor: Tensor, num_heads: int) -> Tensor:
    """Key or value heads repeated so that each query head has its own (grouped-query attention)."""
    return tensor if tensor.shape[1] == num_heads else tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1)


def causal_band(num_new: int, num_seen: int, window: int | None, device: torch.device) -> Bool[Tensor, "L S"]:
    """Causal mask (of a sliding window); the last of `num_new` queries stands at the last of `num_seen` keys."""
    at = torch.arange(num_seen - num_new, num_seen, device=device)[:, None]
    seen = torch.arange(num_seen, device=device)[None, :]
    causal = seen <= at
    return causal if window is None else causal & (seen > at - window)
