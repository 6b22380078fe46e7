"""For which vLLM, and for which of its settings, short steps were made."""

from typing import Any

import vllm

KNOWN_RELEASES = ("0.25.1", "0.32.0")
"""Releases of vLLM whose runner was read; another one is left alone."""

_PARTS = (
    "pcp_manager",
    "ubatch_runner",
    "adaptive_verification",
    "aux_output_connector",
    "batch_sharder",
    "fast_prefill",
    "check_ep_fault",
    "uses_inputs_embeds",
    "sampler.trace_replay_state",
    "sampler.return_sampling_mask",
    "model_state.prompt_embeds_state",
)
"""What newer runners have for some settings, and a short step leaves out."""


def runner_of(engine: Any) -> Any:
    """The model runner of a `vllm.LLMEngine` in this process."""
    return engine.model_executor.driver_worker.worker.model_runner


def obstacle(runner: Any) -> str | None:
    """Why the short way cannot serve this runner; None: it can."""
    if vllm.__version__.partition("+")[0] not in KNOWN_RELEASES:
        return f"vLLM {vllm.__version__} is not one of {', '.join(KNOWN_RELEASES)}"
    if type(runner).__module__ != "vllm.v1.worker.gpu.model_runner":
        return f"the runner is {type(runner).__module__}.{type(runner).__name__}"
    parallel, manager = runner.parallel_config, runner.cudagraph_manager
    groups = runner.kv_cache_config.kv_cache_groups
    backends = [type(group.get_metadata_builder(0)).__name__ for each in runner.attn_groups for group in each]
    allowed = {
        "one GPU": parallel.world_size == 1 and parallel.data_parallel_size == 1,
        "no context parallelism": not runner.use_dcp and runner.block_tables.cp_size == 1,
        "no expert balancing": not parallel.enable_eplb,
        "no LoRA": runner.lora_config is None,
        "no speculation": runner.speculative_config is None and runner.num_speculative_steps == 0,
        "text in, text out": not (runner.is_encoder_decoder or runner.supports_mm_inputs or runner.is_pooling_model),
        "a plain model": type(runner.model_state).__name__ == "DefaultModelState"
        and runner.model_state.rope_state is None
        and runner.model_config.rswa_window is None,
        "vLLM's sampler": type(runner.sampler).__name__ == "Sampler" and not runner.sampler.compute_nans,
        "no cache connector": type(runner.kv_connector).__name__ == "KVConnector",
        "full attention": len(groups) == 1 and type(groups[0].kv_cache_spec).__name__ == "FullAttentionSpec",
        "FlashAttention": backends == ["FlashAttentionMetadataBuilder"],
        "one size of blocks": runner.kernel_block_sizes == runner.block_tables.block_sizes,
        "full CUDA graphs": bool(manager.graphs) and manager.hidden_states is not None,
        "no auxiliary states": not runner.use_aux_hidden_state_outputs,
        **{f"no {name}": not _has(runner, name) for name in _PARTS},
    }
    return next((f"it needs {name}" for name, holds in allowed.items() if not holds), None)


def _has(runner: Any, name: str) -> bool:
    """Whether the runner has this part, and it is in use."""
    *owners, last = name.split(".")
    for owner in owners:
        runner = getattr(runner, owner, None)
    return getattr(runner, last, None) not in (None, False)
