"""Attention kernels for packed sequences, and the one choice between them."""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from rlcore.errors import ModelError
from rlcore.models.layout import Backend, PackedLayout

# Ampere: the oldest GPUs for which flash attention has code.
_MIN_CAPABILITY = (8, 0)
# Modules of flash-attn 3, 2 and 4, and the major compute capabilities that they serve.
_FLASH_3, _FLASH_2, _FLASH_4 = "flash_attn_interface", "flash_attn", "flash_attn.cute"
_SERVED = {_FLASH_3: (9,), _FLASH_4: (9, 10, 11, 12)}
_FLASH_FUNCTION = "flash_attn_varlen_func"
# How an import fails: no such package, a wheel built for another torch or CUDA, another version of it.
_NO_KERNEL = (ImportError, OSError, RuntimeError, AttributeError)
# Largest head that the flash kernels hold in registers, and the multiple that their loads want.
_MAX_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The packed attention in use, and why."""

    name: Backend
    reason: str


def choose_attention(
    requested: Literal["auto", "flash_attn", "varlen", "sdpa"],
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
) -> AttentionChoice:
    """The attention asked for, or with "auto" the first of flash_attn, varlen and sdpa that runs here.

    Raises ModelError where the one asked for cannot run on this device, with this compute type or head size.
    """
    if requested == "sdpa":
        return AttentionChoice("sdpa", "asked for by model.attention")
    refused: list[str] = []
    candidates: tuple[Backend, ...] = ("flash_attn", "varlen") if requested == "auto" else (requested,)
    for name in candidates:
        problem = _flash_problem(device, dtype, head_dim) or _missing(name)
        if not problem and requested == "auto" and _KERNELS[name].module == _FLASH_4:
            problem = "flash-attn 4 is a pre-release, and is used where model.attention=flash_attn asks for it"
        if not problem:
            here = "asked for by model.attention" if requested != "auto" else f"{name} runs here"
            return AttentionChoice(name, "; ".join([*refused, f"{here} ({_KERNELS[name].module})"]))
        refused.append(f"{name}: {problem}")
    if requested == "auto":
        return AttentionChoice("sdpa", "; ".join(refused))
    raise ModelError(
        f"model.attention: must be a backend that runs here, got {requested!r} ({'; '.join(refused)}). "
        "Use model.attention=auto or sdpa."
    )


def _flash_problem(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why no flash kernel runs with these; empty where one does."""
    if device.type != "cuda":
        return f"needs CUDA, the device is {device.type}"
    if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return f"needs compute capability 8.0, the GPU has {torch.cuda.get_device_capability(device)}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, the compute type is {dtype}"
    if head_dim > _MAX_HEAD_DIM or head_dim % _HEAD_DIM_MULTIPLE:
        return f"needs a head size that is a multiple of {_HEAD_DIM_MULTIPLE} up to {_MAX_HEAD_DIM}, got {head_dim}"
    return ""


def _missing(name: Backend) -> str:
    """Why the kernel cannot be imported; empty where it can."""
    try:
        _load(name)
    except _NO_KERNEL as error:
        return f"not installed here ({error})"
    return ""


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel, the module that it is of, its sentinel for an unbounded window, and whether it has `enable_gqa` for
    grouped heads (torch's from 2.12 on)."""

    function: Callable[..., Any]
    module: str
    no_window: Any
    takes_groups: bool


# Filled by `choose_attention`. A plain table and no cached function: the compiler looks through it.
_KERNELS: dict[Backend, _Kernel] = {}


def _load(name: Backend) -> None:
    """Import a kernel once."""
    if name in _KERNELS:
        return
    if name == "varlen":
        module, attribute = "torch.nn.attention.varlen", "varlen_attn"
    else:
        module, attribute = flash_package(torch.cuda.get_device_capability()[0]), _FLASH_FUNCTION
    function = getattr(importlib.import_module(module), attribute)
    parameters = inspect.signature(function).parameters
    window = parameters.get("window_size")
    if module == _FLASH_4:
        function = torch.compiler.disable(function)  # the compiler cannot look into another compiler's work
    no_window = None if window is None else window.default
    _KERNELS[name] = _Kernel(function, module, no_window, takes_groups="enable_gqa" in parameters)


def flash_package(capability: int) -> str:
    """The module of the flash-attn package for a GPU of this major compute capability, of those that are installed: 3
    before 2 before 4, which is a pre-release and whose calls part the graphs of compiled layers.

    Raises ImportError where there is none, with what is wrong with each that is there in part.
    """
    wrong = []
    for module in (_FLASH_3, _FLASH_2, _FLASH_4):
        if capability in _SERVED.get(module, (capability,)):
            try:
                getattr(importlib.import_module(module), _FLASH_FUNCTION)
            except _NO_KERNEL as error:
                if not _is_absent(module, error):
                    wrong.append(f"{module}: {error}")
            else:
                return module
    raise ImportError("; ".join(wrong) or "no flash-attn package")


def _is_absent(module: str, error: Exception) -> bool:
    """Whether nothing of a version is installed. The folder `flash_attn` alone says nothing: 4 lies in it without 2."""
    if isinstance(error, AttributeError):
        return module == _FLASH_2 and importlib.import_module(module).__file__ is None
    return isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")


def flash_varlen(
    query: Float[Tensor, "T Hq D"],
    key: Float[Tensor, "T Hkv D"],
    value: Float[Tensor, "T Hkv D"],
    *,
    layout: PackedLayout,
    scale: float | None,
    window: int | None,
) -> Float[Tensor, "T Hq D"]:
    """Causal attention inside each sequence by the flash-attn package; grouped-query attention is its own."""
    kernel = _KERNELS["flash_attn"]
    out = kernel.function(
        query,
        key,
        value,
        cu_seqlens_q=layout.cu_seqlens,
        cu_seqlens_k=layout.cu_seqlens,
        max_seqlen_q=layout.max_seqlen,
        max_seqlen_k=layout.max_seqlen,
        softmax_scale=scale,
        causal=True,
        # A window of w tokens holds the token itself and w - 1 before it.
        window_size=kernel.no_window if window is None else (window - 1, 0),
    )
    return cast(Tensor, out[0] if isinstance(out, tuple) else out)


def torch_varlen(
    query: Float[Tensor, "T Hq D"],
    key: Float[Tensor, "T Hkv D"],
    value: Float[Tensor, "T Hkv D"],
    *,
    layout: PackedLayout,
    scale: float | None,
    window: int | None,
) -> Float[Tensor, "T Hq D"]:
    """Causal attention inside each sequence by `torch.nn.attention.varlen`."""
    kernel = _KERNELS["varlen"]
    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if key.shape[1] != query.shape[1]:
        if kernel.takes_groups:
            options["enable_gqa"] = True
        else:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    bounds, longest = layout.cu_seqlens, layout.max_seqlen
    return cast(Tensor, kernel.function(query, key, value, bounds, bounds, longest, longest, **options))
