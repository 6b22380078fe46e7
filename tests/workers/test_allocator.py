"""Freed memory stays with a process that computes on the CPU; torch's segments grow in one that computes on a GPU."""

import os
import subprocess
import sys

import pytest

FAULTS_OF_LARGE_BLOCKS = """
import resource
import numpy as np
from rlcore.workers.device import keep_freed_memory
print(keep_freed_memory())
def fill():
    np.ones(5_000_000)
fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def printed_by(program: str, environment: dict[str, str]) -> list[str]:
    """The lines that a Python program prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("given", [{}, {"MALLOC_MMAP_THRESHOLD_": "65536"}])
def test_a_freed_block_is_used_again_unless_the_environment_says_otherwise(given: dict[str, str]) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    told, faults = printed_by(FAULTS_OF_LARGE_BLOCKS, plain | given)
    if given:
        assert told == "False"
        assert int(faults) >= 200  # ten blocks of 40 MB; a page may be as large as 2 MB
    else:
        assert told == "True"
        assert int(faults) < 100


SETTINGS_OF_TORCH = """
import os
import torch
from rlcore.workers.device import let_segments_grow
print(let_segments_grow())
print(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["True", "expandable_segments:True", "expandable_segments:True"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, ["False", "max_split_size_mb:64"]),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, ["False", ""]),
    ],
)
def test_torchs_segments_grow_unless_the_environment_says_otherwise(given: dict[str, str], expected: list[str]) -> None:
    """What torch and vLLM are told; that memory then grows so is `benchmarks.device_checks` on a GPU."""
    plain = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    found = printed_by(SETTINGS_OF_TORCH, plain | given)
    assert found[: len(expected)] == expected
    if given:
        assert "expandable_segments:True" not in found[2]
