"""Canary on SmolLM2-135M with the real vLLM: correct weight syncs pass, planted faults are detected.

Weights move by one training step (1e-5) between two syncs, which bfloat16's rounding hides from log-probabilities.
"""

import json
from pathlib import Path

import pytest

from tests.rollout.real_vllm import real_vllm, run_vllm

pytestmark = [*real_vllm(timeout_s=600), pytest.mark.lengthy]  # on a small model: test_vllm_engine.py


def test_canary_finds_the_stale_tensors_of_a_real_model(smollm2: Path, tmp_path: Path) -> None:
    output = run_vllm("tests.rollout.vllm_real_model", str(tmp_path / "facts"), str(smollm2), timeout_s=500)
    assert (tmp_path / "facts").exists(), output
    seen = json.loads((tmp_path / "facts").read_text(encoding="utf-8"))
    for difference, warning in seen["right"]:
        assert 1e-3 < difference < 0.1
        assert warning == ""
    assert "Tensors that differ (" in seen["layer"]
    assert "model.layers.17." in seen["layer"]
    assert "Tensors that differ (1): model.layers.12.mlp.gate_proj.weight. Nothing was sampled" in seen["shard"]
    assert "Tensors that differ (1): the head, tied to model.embed_tokens.weight. Nothing" in seen["head"]
    assert "vLLM kept its prefix cache" in seen["prefix cache"]
