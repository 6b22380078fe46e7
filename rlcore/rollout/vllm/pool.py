"""The memory that vLLM maps by itself, and can put to sleep."""

import sys


def engine_pool_bytes() -> int:
    """What vLLM holds in it; 0 where it has none. Imports nothing of vLLM: a process without it asks too."""
    module = sys.modules.get("vllm.device_allocator.cumem")
    allocator = None if module is None else module.CuMemAllocator.instance
    return 0 if allocator is None else int(allocator.get_current_usage())
