"""Marks of test files that need the real vLLM, and the call of their processes."""

import os
from importlib.util import find_spec

import pytest

from tests.helpers.forked import ROOT, run_side_by_side


def real_vllm(timeout_s: int) -> list[pytest.MarkDecorator]:
    return [
        pytest.mark.vllm,
        pytest.mark.slow,
        pytest.mark.timeout(timeout_s),
        pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed here: make install-vllm"),
    ]


def run_vllm(module: str, *arguments: str, timeout_s: int, **variables: str) -> None:
    """Run a module of the tests in a new interpreter. A failure has the end of its output."""
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}  # vLLM reads the variables at its import
    run_side_by_side([module, *arguments], environment=environment, timeout_s=timeout_s)
