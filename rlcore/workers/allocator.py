"""The C library's memory on a CPU: what a pass frees is kept for the next one.

glibc gives large blocks back to the system as soon as they are free, and every page of the next one is cleared and
mapped anew. For the activations of a small model that is a fifth of a training step's time.
"""

import ctypes
import os

KEPT_BYTES = 1 << 30
"""Freed memory at the heap's end that is kept, and the size from which a block has a mapping of its own."""

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
