"""The vLLM engine in the worker's process. Only this package imports vllm, and this module loads neither vllm nor
torch."""

import sys
from collections.abc import Callable
from importlib.util import find_spec

from rlcore.errors import EngineError

ENGINE_FIXED_BYTES = 1_500_000_000
"""The measured memory of vLLM's CUDA graphs, buffers and activations, in bytes."""


def require_vllm(has: Callable[[str], object] = find_spec) -> None:
    """Check that vLLM is installed, without loading it. Raises EngineError if vLLM is not installed.

    `has`: a function that says whether a package is installed.
    """
    if not has("vllm"):
        raise EngineError(missing_vllm_message())


def missing_vllm_message(detail: str = "") -> str:
    """Return the error message for the case that vLLM cannot be imported."""
    return (
        f"rollout.engine: vllm is not installed here{f' ({detail})' if detail else ''}. In the checkout, on a GPU: "
        "pip install -c constraints.txt -e '.[vllm]'; on a CPU: make install-vllm; or use rollout=hf."
    )


def engine_pool_bytes() -> int:
    """Return the bytes of device memory that vLLM can release when it sleeps, or 0 if this process runs no vLLM."""
    module = sys.modules.get("vllm.device_allocator.cumem")
    allocator = None if module is None else module.CuMemAllocator.instance
    return 0 if allocator is None else int(allocator.get_current_usage())
