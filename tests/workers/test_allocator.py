"""Freed memory stays with a process that computes on the CPU."""

import os
import subprocess
import sys

import pytest

FAULTS_OF_LARGE_BLOCKS = """
import resource
import numpy as np
from rlcore.workers.allocator import keep_freed_memory
print(keep_freed_memory())
def fill():
    np.ones(5_000_000)
fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("given", [{}, {"MALLOC_MMAP_THRESHOLD_": "65536"}])
def test_a_freed_block_is_used_again_unless_the_environment_says_otherwise(given: dict[str, str]) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS_OF_LARGE_BLOCKS],
        env=plain | given,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    told, faults = done.stdout.split()
    if given:
        assert told == "False"
        assert int(faults) >= 200  # ten blocks of 40 MB; a page may be as large as 2 MB
    else:
        assert told == "True"
        assert int(faults) < 100
