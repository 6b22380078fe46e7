"""What keeps short steps off, by the insides of vLLM as it would have them. vLLM itself is not loaded."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.rollout.vllm import short
from rlcore.rollout.vllm.short import (
    REQUEST_NAMES,
    RUNNER_NAMES,
    SCHEDULER_NAMES,
    UNUSED_PARTS,
    runner_obstacle,
    runner_of,
    scheduler_obstacle,
)


class FullAttentionSpec:
    """Of vLLM's name."""


class DefaultModelState:
    """Of vLLM's name."""


class Sampler:
    """Of vLLM's name."""


class KVConnector:
    """Of vLLM's name."""


class FlashAttentionMetadataBuilder:
    """Of vLLM's name."""


class Runner:
    """Of vLLM's name and module."""


Runner.__module__ = "vllm.v1.worker.gpu.model_runner"


def put(owner: Any, path: str, value: Any) -> None:
    *above, last = path.split(".")
    for name in above:
        owner = getattr(owner, name)
    setattr(owner, last, value)


def filled(owner: Any, names: dict[str, str]) -> Any:
    """The object with every one of these names, each None."""
    for path, of_path in names.items():
        inner = owner
        for name in filter(None, path.split(".")):
            if getattr(inner, name, None) is None:
                setattr(inner, name, SimpleNamespace())
            inner = getattr(inner, name)
        for name in of_path.split():
            if not hasattr(inner, name):
                setattr(inner, name, None)
    return owner


GROUP = SimpleNamespace(kv_cache_spec=FullAttentionSpec())


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(short, "_missing_of_requests", list)
    found = filled(SimpleNamespace(), dict(SCHEDULER_NAMES))
    for path, value in {
        "kv_cache_config.kv_cache_groups": [GROUP], "num_spec_tokens": 0, "num_lookahead_tokens": 0,
        "needs_kv_cache_zeroing": False, "defer_block_free": False, "log_stats": False,
        "parallel_config.pipeline_parallel_size": 1, "dcp_world_size": 1,
    }.items():  # fmt: skip
        put(found, path, value)
    return found


@pytest.mark.parametrize(
    ("path", "value", "needs"),
    [
        ("kv_cache_config.kv_cache_groups", [GROUP, GROUP], "full attention"),
        ("kv_cache_config.kv_cache_groups", [SimpleNamespace(kv_cache_spec=Sampler())], "full attention"),
        ("num_spec_tokens", 1, "no speculation"),
        ("num_lookahead_tokens", 1, "no speculation"),
        ("lora_config", object(), "no LoRA"),
        ("connector", object(), "no cache connector"),
        ("ec_connector", object(), "no cache connector"),
        ("needs_kv_cache_zeroing", True, "no zeroing of blocks"),
        ("defer_block_free", True, "blocks freed at once"),
        ("log_stats", True, "no statistics"),
        ("parallel_config.pipeline_parallel_size", 2, "no pipeline"),
        ("dcp_world_size", 2, "no context parallelism"),
    ],
)
def test_what_a_scheduler_must_not_do_is_named(scheduler: Any, path: str, value: Any, needs: str) -> None:
    assert scheduler_obstacle(scheduler) is None
    put(scheduler, path, value)
    assert scheduler_obstacle(scheduler) == f"it needs {needs}"


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A release of vLLM by its version alone."""
    vllm = SimpleNamespace(__version__="0.25.1")
    monkeypatch.setitem(sys.modules, "vllm", vllm)  # type: ignore[arg-type]
    return vllm


def test_names_that_a_scheduler_and_its_requests_lack_are_told_together(
    scheduler: Any, release: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    del scheduler.connector
    monkeypatch.setattr(short, "_missing_of_requests", lambda: ["request.max_tokens"])
    assert scheduler_obstacle(scheduler) == "vLLM 0.25.1 has no scheduler.connector, request.max_tokens"


@pytest.fixture
def runner(release: SimpleNamespace) -> Any:
    builder = SimpleNamespace(get_metadata_builder=lambda index: [FlashAttentionMetadataBuilder()][index])
    found: Any = Runner()
    found.model_state, found.sampler, found.kv_connector = DefaultModelState(), Sampler(), KVConnector()
    filled(found, dict(RUNNER_NAMES))
    for path, value in {
        "kv_cache_config.kv_cache_groups": [GROUP], "attn_groups": [[builder]], "parallel_config.world_size": 1,
        "parallel_config.data_parallel_size": 1, "parallel_config.enable_eplb": False, "use_dcp": False,
        "block_tables.cp_size": 1, "num_speculative_steps": 0, "is_encoder_decoder": False,
        "supports_mm_inputs": False, "is_pooling_model": False, "sampler.compute_nans": False,
        "kernel_block_sizes": [16], "block_tables.block_sizes": [16], "cudagraph_manager.graphs": {1: 1},
        "cudagraph_manager.hidden_states": object(), "use_aux_hidden_state_outputs": False,
    }.items():  # fmt: skip
        put(found, path, value)
    return found


@pytest.mark.parametrize(
    ("path", "value", "needs"),
    [
        ("parallel_config.world_size", 2, "one GPU"),
        ("parallel_config.data_parallel_size", 2, "one GPU"),
        ("use_dcp", True, "no context parallelism"),
        ("block_tables.cp_size", 2, "no context parallelism"),
        ("parallel_config.enable_eplb", True, "no expert balancing"),
        ("lora_config", object(), "no LoRA"),
        ("speculative_config", object(), "no speculation"),
        ("num_speculative_steps", 1, "no speculation"),
        ("is_encoder_decoder", True, "text in, text out"),
        ("supports_mm_inputs", True, "text in, text out"),
        ("is_pooling_model", True, "text in, text out"),
        ("model_state.rope_state", object(), "a plain model"),
        ("model_config.rswa_window", 4, "a plain model"),
        ("sampler.compute_nans", True, "vLLM's sampler"),
        ("kv_connector", object(), "no cache connector"),
        ("kv_cache_config.kv_cache_groups", [GROUP, GROUP], "full attention"),
        ("kv_cache_config.kv_cache_groups", [SimpleNamespace(kv_cache_spec=Sampler())], "full attention"),
        ("attn_groups", [], "FlashAttention"),
        ("kernel_block_sizes", [8], "one size of blocks"),
        ("cudagraph_manager.graphs", {}, "full CUDA graphs"),
        ("cudagraph_manager.hidden_states", None, "full CUDA graphs"),
        ("use_aux_hidden_state_outputs", True, "no auxiliary states"),
        *[(name, object(), f"no {name}") for name in UNUSED_PARTS],
    ],
)
def test_what_a_runner_must_not_do_is_named(runner: Any, path: str, value: Any, needs: str) -> None:
    assert runner_obstacle(runner) is None
    put(runner, path, value)
    assert runner_obstacle(runner) == f"it needs {needs}"


def test_another_release_and_another_runner_keep_their_own_steps(runner: Any, release: SimpleNamespace) -> None:
    release.__version__ = "0.25.1+cu130"
    assert runner_obstacle(runner) is None, "a build of the same release"
    release.__version__ = "0.26.0"
    assert runner_obstacle(runner) == "vLLM 0.26.0 is not one of 0.25.1, 0.32.0"
    release.__version__ = "0.32.0"
    assert runner_obstacle(SimpleNamespace()) == "the runner is types.SimpleNamespace"
    del runner.device
    assert runner_obstacle(runner) == "vLLM 0.32.0 has no runner.device"


def test_a_runner_is_found_in_its_engine(runner: Any) -> None:
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
    assert runner_of(engine) is runner
    runner.use_dcp = True
    assert short.shorten_runner(engine) == "it needs no context parallelism"
    runner.parallel_config = SimpleNamespace(world_size=1, data_parallel_size=1, enable_eplb=False)
    del runner.block_tables.cp_size
    assert short.shorten_runner(engine) == "vLLM 0.25.1 has no runner.block_tables.cp_size"


def test_all_names_of_a_request_are_asked_for(monkeypatch: pytest.MonkeyPatch, release: SimpleNamespace) -> None:
    def constructor(self: Any) -> None:
        self.request_id = self.num_computed_tokens = self.num_output_placeholders = self.num_prompt_tokens = 0
        self.max_tokens = self.is_prefill_chunk = self.sampling_params = self._output_token_ids = 0

    request = type("Request", (), {"__init__": constructor, "update_block_hashes": None})
    release.SamplingParams = lambda: SimpleNamespace(all_stop_token_ids=set())
    monkeypatch.setitem(sys.modules, "vllm.v1", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "vllm.v1.request", SimpleNamespace(Request=request))  # type: ignore[arg-type]
    assert "_all_token_ids" in REQUEST_NAMES.split()
    assert short._missing_of_requests() == ["request._all_token_ids", "sampling_params.repetition_detection"]
