"""The choice of an attention backend, and the kernels of flash attention."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rlcore.errors import ModelError

Backend = Literal["flash_attn", "varlen", "sdpa"]

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
    """Return the requested attention backend, or for "auto" the first of flash_attn, varlen and sdpa that this machine
    supports. Raises ModelError if the requested backend does not support this device, compute type or head size."""
    if requested == "sdpa":
        return AttentionChoice("sdpa", "requested by model.attention")
    refused: list[str] = []
    candidates: tuple[Backend, ...] = ("flash_attn", "varlen") if requested == "auto" else (requested,)
    for name in candidates:
        problem = _flash_problem(device, dtype, head_dim) or _load_kernel(name)
        if not problem and requested == "auto" and KERNELS[name].module == _FLASH_4:
            problem = "flash-attn 4 is a pre-release, used with model.attention=flash_attn only"
        if not problem:
            here = "requested by model.attention" if requested != "auto" else f"{name} runs here"
            return AttentionChoice(name, "; ".join([*refused, f"{here} ({KERNELS[name].module})"]))
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
class Kernel:
    """An attention kernel. `no_window`: the window argument that disables the sliding window. `supports_gqa`: True if
    the function has the argument `enable_gqa` (torch >= 2.12)."""

    function: Callable[..., Any]
    module: str
    no_window: Any
    supports_gqa: bool


# Filled by `choose_attention`. A table, since the compiler cannot trace a cached function.
KERNELS: dict[Backend, Kernel] = {}


def _load_kernel(name: Backend) -> str:
    """Import the kernel of a backend into `KERNELS`, once per process. Return an error message, or '' on success."""
    if name in KERNELS:
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
    KERNELS[name] = Kernel(function, module, no_window, supports_gqa="enable_gqa" in parameters)
    return ""


def flash_package(capability: int) -> str:
    """Return the name of an importable flash-attn module for a GPU's major compute capability. Version 3 is tried
    first, then 2, then the pre-release 4. Raises ImportError with the error of each version."""
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
