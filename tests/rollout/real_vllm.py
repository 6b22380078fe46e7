"""Marks of test files that need the real vLLM, and the call of their processes."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.helpers.forked import ROOT


def real_vllm(timeout_s: int) -> list[pytest.MarkDecorator]:
    return [
        pytest.mark.vllm,
        pytest.mark.slow,
        pytest.mark.timeout(timeout_s),
        pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed here: make install-vllm"),
    ]


def run_vllm(module: str, *arguments: str, timeout_s: int, **variables: str) -> str:
    """Run a module of the tests in a separate process, and return the end of its output."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, **variables, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return done.stdout[-4_000:] + done.stderr[-8_000:]
