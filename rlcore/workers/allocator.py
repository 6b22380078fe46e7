"""How a worker's memory is handed out: the C library's on a CPU, torch's on a GPU.

glibc gives large blocks back to the system as soon as they are free, and every page of the next one is cleared and
mapped anew. For the activations of a small model that is a fifth of a training step's time. torch cuts a GPU's memory
into segments of fixed size, and micro-batches of unlike lengths leave remainders in them that nothing fits.
"""

import ctypes
import os

import torch

KEPT_BYTES = 1 << 30
"""Freed memory at the heap's end that is kept, and the size from which a block has a mapping of its own."""

GROWING = "expandable_segments:True"
_TORCH_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> bool:
    """Tell glibc so for this process; whether it was told.

    It is not where the environment has a word of its own on malloc (`MALLOC_*`, `GLIBC_TUNABLES`), and cannot be where
    the C library is another.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all([mallopt(option, KEPT_BYTES) == 1 for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD)])


def let_segments_grow() -> bool:
    """Let torch's segments on a GPU grow page by page in this process; whether they do by this call.

    Not where the environment has a word of its own on torch's allocator. It gets this one: vLLM reads there that it
    must turn growing off around the memory that it maps by itself.
    """
    if any(name in os.environ for name in _TORCH_VARIABLES):
        return False
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = GROWING
    torch._C._accelerator_setAllocatorSettings(GROWING)  # the environment is not read again once CUDA is in use
    return True
