"""Canary on SmolLM2-135M with the real vLLM: correct weight syncs pass, planted faults are detected.

`vllm_real_model` runs in a separate process. Weights move by one training step (1e-5) between two syncs, which
log-probabilities do not show because of bfloat16's rounding.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.side_by_side import ROOT
from tests.rollout.real_vllm import real_vllm

pytestmark = [*real_vllm(timeout_s=600), pytest.mark.lengthy]  # on a small model: test_vllm_engine.py


@pytest.fixture(scope="module")
def seen(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Findings of the process."""
    file = tmp_path_factory.mktemp("real") / "facts.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.rollout.vllm_real_model", str(file), str(smollm2)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert file.exists(), done.stdout[-2_000:] + done.stderr[-6_000:]
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_correct_weight_syncs_pass(seen: dict[str, Any]) -> None:
    for difference, warning in seen["right"]:
        assert 1e-3 < difference < 0.1
        assert warning == ""


def test_stale_layer_is_detected(seen: dict[str, Any]) -> None:
    assert "Tensors that differ (" in seen["layer"]
    assert "model.layers.17." in seen["layer"]


def test_stale_shard_is_detected(seen: dict[str, Any]) -> None:
    assert "Tensors that differ (1): model.layers.12.mlp.gate_proj.weight. Nothing was sampled" in seen["shard"]


def test_stale_tied_head_is_detected(seen: dict[str, Any]) -> None:
    assert "Tensors that differ (1): the head, tied to model.embed_tokens.weight. Nothing" in seen["head"]


def test_kept_prefix_cache_is_detected(seen: dict[str, Any]) -> None:
    assert "vLLM kept its prefix cache" in seen["prefix cache"]
