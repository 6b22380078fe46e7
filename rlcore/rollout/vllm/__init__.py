"""vLLM in the worker's process; the only package that imports vllm. This module itself loads neither vllm nor torch."""

import sys
from importlib.util import find_spec

from rlcore.errors import EngineError

ENGINE_FIXED_BYTES = 1_500_000_000
"""Measured memory of vLLM's CUDA graphs, buffers and activations."""


def require_vllm() -> None:
    """Check that vLLM is installed, without loading it. Raises EngineError if it is not installed."""
    if find_spec("vllm") is None:
        raise EngineError(missing_vllm_message())


def missing_vllm_message(detail: str = "") -> str:
    """Return the message for a vLLM that cannot be imported."""
    return (
        f"rollout.engine: vllm is not installed here{f' ({detail})' if detail else ''}. In the checkout, on a GPU: "
        "pip install -c constraints.txt -e '.[vllm]'; on a CPU: make install-vllm; or use rollout=hf."
    )


def engine_pool_bytes() -> int:
    """Return the bytes of device memory that vLLM can unmap in sleep; 0 without vLLM in this process."""
    module = sys.modules.get("vllm.device_allocator.cumem")
    allocator = None if module is None else module.CuMemAllocator.instance
    return 0 if allocator is None else int(allocator.get_current_usage())
