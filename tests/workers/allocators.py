"""Print a process's allocator settings: `python -m tests.workers.allocators of_the_host|of_a_gpu`."""

import os
import resource
import sys

import numpy as np

from rlcore.workers.device import enable_expandable_segments, raise_malloc_thresholds


def of_the_host() -> None:
    """Print the page faults of ten large blocks after a first one. By default glibc keeps blocks up to 32 MiB."""
    raise_malloc_thresholds()
    fill()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        fill()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def fill() -> None:
    np.ones(5_000_000)


def of_a_gpu() -> None:
    enable_expandable_segments()
    print(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))


if __name__ == "__main__":
    {"of_the_host": of_the_host, "of_a_gpu": of_a_gpu}[sys.argv[1]]()
