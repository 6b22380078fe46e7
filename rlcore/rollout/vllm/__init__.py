"""The vLLM engine in the worker's process. Only this package imports vllm. This module loads neither vllm nor torch."""

import sys
from collections.abc import Callable
from importlib.util import find_spec

from rlcore.errors import ConfigError

ENGINE_FIXED_BYTES = 1_500_000_000  # measured memory of vLLM's CUDA graphs, buffers and activations, in bytes


def require_vllm(has: Callable[[str], object] = find_spec) -> None:
    """Raise ConfigError if vLLM is not installed. `has`: a function that finds an installed package."""
    if not has("vllm"):
        raise ConfigError(missing_vllm_message())


def missing_vllm_message(detail: str = "") -> str:
    """Return the error message for a vLLM that cannot be imported. `detail`: the text of the ImportError."""
    return (
        f"rollout.engine: vllm is not installed here{f' ({detail})' if detail else ''}. In the checkout, on a GPU: "
        "pip install -c constraints.txt -e '.[vllm]'; on a CPU: make install-vllm; or use rollout=hf."
    )


def engine_pool_bytes() -> int:
    """Return the bytes of device memory that a sleeping vLLM of this process can release."""
    module = sys.modules.get("vllm.device_allocator.cumem")
    allocator = None if module is None else module.CuMemAllocator.instance
    return 0 if allocator is None else int(allocator.get_current_usage())
