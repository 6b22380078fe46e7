"""Conditions that disable short steps, with simulated vLLM objects."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from rlcore.rollout.vllm import short_steps as short
from rlcore.rollout.vllm.short_steps import REQUEST_NAMES, unsupported_reason


class FullAttentionSpec:
    """Class with vLLM's name."""


GROUP = SimpleNamespace(kv_cache_spec=FullAttentionSpec())


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Mock:
    monkeypatch.setattr(short, "_missing_request_names", list)
    found = Mock(
        num_spec_tokens=0, num_lookahead_tokens=0, lora_config=None, connector=None, ec_connector=None,
        needs_kv_cache_zeroing=False, defer_block_free=False, log_stats=False, dcp_world_size=1,
    )  # fmt: skip
    found.kv_cache_config.kv_cache_groups, found.parallel_config.pipeline_parallel_size = [GROUP], 1
    return found


@pytest.mark.parametrize(
    ("path", "value", "needs"),
    [
        ("kv_cache_config.kv_cache_groups", [GROUP, GROUP], "full attention"),
        ("kv_cache_config.kv_cache_groups", [SimpleNamespace(kv_cache_spec=object())], "full attention"),
        ("num_spec_tokens", 1, "no speculation"),
        ("num_lookahead_tokens", 1, "no speculation"),
        ("lora_config", object(), "no LoRA"),
        ("connector", object(), "no cache connector"),
        ("ec_connector", object(), "no cache connector"),
        ("needs_kv_cache_zeroing", True, "no zeroing of blocks"),
        ("defer_block_free", True, "blocks freed immediately"),
        ("log_stats", True, "no statistics"),
        ("parallel_config.pipeline_parallel_size", 2, "no pipeline"),
        ("dcp_world_size", 2, "no context parallelism"),
    ],
)
def test_unsupported_scheduler_is_reported(scheduler: Any, path: str, value: Any, needs: str) -> None:
    assert unsupported_reason(scheduler) is None
    scheduler.configure_mock(**{path: value})
    assert unsupported_reason(scheduler) == f"it needs {needs}"


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    vllm = SimpleNamespace(__version__="0.25.1")
    monkeypatch.setitem(sys.modules, "vllm", vllm)  # type: ignore[arg-type]
    return vllm


def test_missing_names_are_reported_together(
    scheduler: Any, release: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    del scheduler.connector
    monkeypatch.setattr(short, "_missing_request_names", lambda: ["request.max_tokens"])
    assert unsupported_reason(scheduler) == "vLLM 0.25.1 has no scheduler.connector, request.max_tokens"


def test_request_names_are_checked(monkeypatch: pytest.MonkeyPatch, release: SimpleNamespace) -> None:
    def constructor(self: Any) -> None:
        self.request_id = self.num_computed_tokens = self.num_output_placeholders = self.num_prompt_tokens = 0
        self.max_tokens = self.is_prefill_chunk = self.sampling_params = self._output_token_ids = 0
        self.num_in_flight_tokens = 0

    request = type("Request", (), {"__init__": constructor, "update_block_hashes": None})
    release.SamplingParams = lambda: SimpleNamespace(all_stop_token_ids=set())
    monkeypatch.setitem(sys.modules, "vllm.v1", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "vllm.v1.request", SimpleNamespace(Request=request))  # type: ignore[arg-type]
    assert "_all_token_ids" in REQUEST_NAMES.split()
    assert short._missing_request_names() == ["request._all_token_ids", "sampling_params.repetition_detection"]
