"""Packed attention, where a token attends only to earlier tokens of the same sequence, without a [T, T] mask.

transformers calls the registered `packed_attention`, with a `PackedLayout` for packed tokens and with a mask for
decoding. The `sdpa` backend runs on every device, with one dense causal attention for each length group."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface

from rlcore.errors import ModelError
from rlcore.models.layout import Backend, LengthGroup, PackedLayout

# Ampere: the oldest GPUs that flash attention supports.
_MIN_CAPABILITY = (8, 0)
# Modules of flash-attn 3, 2 and 4, and the major compute capabilities that they support.
_FLASH_3, _FLASH_2, _FLASH_4 = "flash_attn_interface", "flash_attn", "flash_attn.cute"
_CAPABILITIES = {_FLASH_3: (9,), _FLASH_4: (9, 10, 11, 12)}
_FLASH_FUNCTION = "flash_attn_varlen_func"
# Import errors: no such package, a wheel for another torch or CUDA, another version.
_IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError)
# Limits of the flash kernels' registers and loads.
_MAX_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The selected attention backend and the reason for it."""

    name: Backend
    reason: str


def choose_attention(
    requested: Literal["auto", "flash_attn", "varlen", "sdpa"], device: torch.device, dtype: torch.dtype, head_dim: int
) -> AttentionChoice:
    """Return the requested attention backend, or for "auto" the first of flash_attn, varlen and sdpa that runs here.
    Raises ModelError if the requested backend does not support this device, compute type or head size."""
    if requested == "sdpa":
        return AttentionChoice("sdpa", "requested by model.attention")
    refused: list[str] = []
    candidates: tuple[Backend, ...] = ("flash_attn", "varlen") if requested == "auto" else (requested,)
    for name in candidates:
        problem = _flash_problem(device, dtype, head_dim) or _load_kernel(name)
        if not problem and requested == "auto" and _KERNELS[name].module == _FLASH_4:
            problem = "flash-attn 4 is a pre-release, used with model.attention=flash_attn only"
        if not problem:
            here = "requested by model.attention" if requested != "auto" else f"{name} runs here"
            return AttentionChoice(name, "; ".join([*refused, f"{here} ({_KERNELS[name].module})"]))
        refused.append(f"{name}: {problem}")
    if requested == "auto":
        return AttentionChoice("sdpa", "; ".join(refused))
    raise ModelError(
        f"model.attention: must be a backend that runs here, got {requested!r} ({'; '.join(refused)}). "
        "Use model.attention=auto or sdpa."
    )


def _flash_problem(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Return why no flash-attention kernel can run with these arguments, or '' if one can."""
    if device.type != "cuda":
        return f"needs CUDA, the device is {device.type}"
    if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return f"needs compute capability 8.0, the GPU has {torch.cuda.get_device_capability(device)}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, the compute type is {dtype}"
    if head_dim > _MAX_HEAD_DIM or head_dim % _HEAD_DIM_MULTIPLE:
        return f"needs a head size that is a multiple of {_HEAD_DIM_MULTIPLE} up to {_MAX_HEAD_DIM}, got {head_dim}"
    return ""


@dataclass(frozen=True, slots=True)
class _Kernel:
    """An attention kernel. `no_window`: the argument for an unbounded window. `supports_gqa`: torch >= 2.12."""

    function: Callable[..., Any]
    module: str
    no_window: Any
    supports_gqa: bool


# Filled by `choose_attention`. A table, since the compiler cannot trace a cached function.
_KERNELS: dict[Backend, _Kernel] = {}


def _load_kernel(name: Backend) -> str:
    """Import a kernel once per process. Return an error message or ''."""
    if name in _KERNELS:
        return ""
    try:
        module, attribute = "torch.nn.attention.varlen", "varlen_attn"
        if name == "flash_attn":
            module, attribute = flash_package(torch.cuda.get_device_capability()[0]), _FLASH_FUNCTION
        function = getattr(importlib.import_module(module), attribute)
    except _IMPORT_ERRORS as error:
        return f"not installed here ({error})"
    parameters = inspect.signature(function).parameters
    window = parameters.get("window_size")
    if module == _FLASH_4:
        function = torch.compiler.disable(function)  # the compiler cannot trace another compiler's kernels
    no_window = None if window is None else window.default
    _KERNELS[name] = _Kernel(function, module, no_window, supports_gqa="enable_gqa" in parameters)
    return ""


def flash_package(capability: int) -> str:
    """Return the flash-attn module for this major compute capability: version 3, else 2, else 4 (a pre-release). Raises
    ImportError with the error of each version."""
    problems = []
    for module in (_FLASH_3, _FLASH_2, _FLASH_4):
        if capability in _CAPABILITIES.get(module, (capability,)):
            try:
                getattr(importlib.import_module(module), _FLASH_FUNCTION)
            except _IMPORT_ERRORS as error:
                problems.append(f"{module}: {error}")
            else:
                return module
    raise ImportError("; ".join(problems))


def _kernel_attention(
    query: Float[Tensor, "c Hq D"],
    key: Float[Tensor, "T Hkv D"],
    value: Float[Tensor, "T Hkv D"],
    layout: PackedLayout,
    scale: float | None,
    window: int | None,
) -> Float[Tensor, "c Hq D"]:
    kernel, longest = _KERNELS[layout.backend], layout.max_seqlen
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
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    return cast(Tensor, kernel.function(query, key, value, of_queries, layout.cu_seqlens, longest, longest, **options))


ATTENTION_NAME = "millrace_packed"
"""The name under which the packed attention is registered in transformers.

No mask function has this name, so transformers builds no mask."""


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
    """Compute the attention of one layer for transformers, with the mask if there is no layout. With a layout, B is 1,
    and both L and S count the computed tokens. Raises ModelError if the model caps scores, adds attention sinks or uses
    dropout."""
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
    """Compute one dense causal attention for each length group: [1, T, Hq, D]."""
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
    """Return the causal mask of the last `num_new` of `num_seen` tokens. `window`: a sliding window's size or None."""
    at = torch.arange(num_seen - num_new, num_seen, device=device)[:, None]
    seen = torch.arange(num_seen, device=device)[None, :]
    causal = seen <= at
    return causal if window is None else causal & (seen > at - window)
