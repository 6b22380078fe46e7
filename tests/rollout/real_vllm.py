"""Marks of test files that need the real vLLM."""

from importlib.util import find_spec

import pytest


def real_vllm(timeout_s: int) -> list[pytest.MarkDecorator]:
    """Value of `pytestmark`."""
    return [
        pytest.mark.vllm,
        pytest.mark.slow,
        pytest.mark.timeout(timeout_s),
        pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed here: make install-vllm"),
    ]
