"""Checks of the engine before a run starts."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlcore.config.rollout import RolloutConfig
from rlcore.errors import EngineError
from rlcore.rollout.vllm import ENGINE_FIXED_BYTES, require_vllm
from rlcore.rollout.vllm.start import EngineShape, engine_arguments


def test_missing_vllm_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # Python's own way to say that there is none
    with pytest.raises(EngineError, match=r"rollout\.engine: vllm is not installed.*-e '\.\[vllm\]'.*install-vllm"):
        require_vllm()


@pytest.mark.parametrize("head_dim", [16, 32], ids=["of the width", "its own"])
@pytest.mark.parametrize(
    ("share", "answers", "wanted"),
    [
        (0.5, 8, "most"),  # room for max_num_seqs answers
        (0.152, 8, "room"),  # for a batch, and what is left
        (0.152, 512, None),  # not for a batch: vLLM measures
        (0.01, 8, None),
    ],
)
def test_cache_is_planned_within_memory_share(
    share: float, answers: int, wanted: str | None, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM must not measure memory, since two runs may start on one GPU."""
    config = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         head_dim=head_dim, intermediate_size=128, vocab_size=512, dtype="bfloat16")  # fmt: skip
    config.save_pretrained(tmp_path)
    total = 10 * 10**9
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total))
    shape = EngineShape(str(tmp_path), 240, answers, torch.device("cuda"), torch.bfloat16)
    found = engine_arguments(shape, RolloutConfig(memory_share=share, max_num_seqs=512)).get("kv_cache_memory_bytes")
    with torch.device("meta"):
        weights = sum(tensor.nbytes for tensor in LlamaForCausalLM(config).to(torch.bfloat16).parameters())
    keys_and_values = 2 * torch.empty(2, 2, 240 + 16, head_dim, dtype=torch.bfloat16).nbytes
    room = int(share * total) - weights - ENGINE_FIXED_BYTES
    assert found == {"most": 512 * keys_and_values, "room": room, None: None}[wanted]


@pytest.mark.parametrize(
    ("device", "longest", "splits"), [("cuda", 2_048, 1), ("cuda", 2_049, None), ("cpu", 2_048, None)]
)
def test_attention_of_short_sequences_is_not_split(
    device: str, longest: int, splits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=512).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=10**10))
    shape = EngineShape(str(tmp_path), longest, 8, torch.device(device), torch.bfloat16)
    found = engine_arguments(shape, RolloutConfig()).get("attention_config", {})
    assert found.get("flash_attn_max_num_splits_for_cuda_graph") == splits
