"""Freed memory stays with a process that computes on the CPU; torch's segments grow in one that computes on a GPU."""

import os
from pathlib import Path

import pytest

from tests.helpers.forked import run_module


def printed_by(what: str, environment: dict[str, str], folder: Path) -> list[str]:
    """The lines of `tests.workers.allocators`, forked before torch has read the environment."""
    output = folder / "printed"
    code = run_module(
        "tests.workers.allocators", [what], output=output, errors=folder / "e", environment=environment, timeout_s=120
    )
    assert code == 0, (folder / "e").read_text()
    return output.read_text().splitlines()


@pytest.mark.parametrize("given", [{}, {"MALLOC_MMAP_THRESHOLD_": "65536"}])
def test_a_freed_block_is_used_again_unless_the_environment_says_otherwise(
    given: dict[str, str], tmp_path: Path
) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    told, faults = printed_by("of_the_host", plain | given, tmp_path)
    if given:
        assert told == "False"
        assert int(faults) >= 200  # ten blocks of 40 MB; a page may be as large as 2 MB
    else:
        assert told == "True"
        assert int(faults) < 100


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["True", "expandable_segments:True"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, ["False", "max_split_size_mb:64"]),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, ["False", ""]),
    ],
)
def test_torchs_segments_grow_unless_the_environment_says_otherwise(
    given: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    """What torch and vLLM are told; that memory then grows so is `benchmarks.device_checks` on a GPU."""
    plain = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    assert printed_by("of_a_gpu", plain | given, tmp_path) == expected
