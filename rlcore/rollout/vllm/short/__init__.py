"""Short steps: steps in which every answer grows by one token, past vLLM's general code. The door to vLLM's insides.

    shortened_scheduler(base)   vLLM's scheduler class with short steps, to be given to vLLM before an engine starts
    shorten_runner(engine)      short steps for the model runner of an engine that has started

All that they rely on in vLLM is in this module: releases, names, records and settings. `scheduler_obstacle` and
`runner_obstacle` check it when an engine starts; where anything differs vLLM's own steps are used, and one warning
gives the reason. `check.py` then compares a few answers written both ways.

`docs/rollout.md` ("A new release of vLLM") lists the steps to take in another release.
"""

from collections.abc import Mapping
from typing import Any

# ---------------------------------------------------------------- vLLM's scheduler

SCHEDULER_NAMES = {
    "": "requests running finished_req_ids current_step max_model_len max_num_running_reqs log_stats num_spec_tokens "
    "num_lookahead_tokens lora_config connector ec_connector needs_kv_cache_zeroing defer_block_free dcp_world_size "
    "use_v2_model_runner prev_step_scheduled_req_ids",
    "kv_cache_config": "kv_cache_groups",
    "parallel_config": "pipeline_parallel_size",
    "kv_cache_manager": "new_step_starts allocate_slots",
    "kv_cache_manager.block_pool": "get_num_free_blocks",
}
"""Attributes of the scheduler that `scheduler.py` uses, by the object that has them."""
REQUEST_NAMES = (
    "request_id num_computed_tokens num_output_placeholders num_prompt_tokens max_tokens is_prefill_chunk "
    "sampling_params update_block_hashes _output_token_ids _all_token_ids"
)
"""The same for a request."""
SAMPLING_NAMES = "all_stop_token_ids repetition_detection"
"""The same for its sampling parameters."""
REQUEST_CHANGES = frozenset(
    {"num_computed_tokens", "num_output_placeholders", "num_in_flight_tokens", "next_decode_eligible_step"}
)
"""What a token changes in vLLM's record of its request, lists that grow apart. Releases after 0.25 count tokens in
flight. Where vLLM's own step changes anything else, the scheduler takes no short ones."""
SCHEDULER_CHANGES = frozenset({"current_step", "prefill_capacity_bound"})
"""The same for the scheduler's own numbers and texts."""


def shortened_scheduler(base: Any) -> Any:
    """A subclass of vLLM's scheduler class (the synchronous or the asynchronous one) with short steps."""
    from rlcore.rollout.vllm.short.scheduler import ShortSteps

    return type("ShortScheduler", (ShortSteps, base), {})


def scheduler_obstacle(scheduler: Any) -> str | None:
    """Why this scheduler cannot take short steps; None where it can."""
    missing = _missing("scheduler", scheduler, SCHEDULER_NAMES) + _missing_of_requests()
    if missing:
        return _without(missing)
    groups = scheduler.kv_cache_config.kv_cache_groups
    needs = {
        "full attention": len(groups) == 1 and type(groups[0].kv_cache_spec).__name__ == "FullAttentionSpec",
        "no speculation": scheduler.num_spec_tokens == 0 and scheduler.num_lookahead_tokens == 0,
        "no LoRA": scheduler.lora_config is None,
        "no cache connector": scheduler.connector is None and scheduler.ec_connector is None,
        "no zeroing of blocks": not scheduler.needs_kv_cache_zeroing,
        "blocks freed at once": not scheduler.defer_block_free,
        "no statistics": not scheduler.log_stats,
        "no pipeline": scheduler.parallel_config.pipeline_parallel_size == 1,
        "no context parallelism": scheduler.dcp_world_size == 1,
    }
    return _unmet(needs)


# ---------------------------------------------------------------- vLLM's model runner

RUNNER_RELEASES = ("0.25.1", "0.32.0")
"""Releases of vLLM whose runner was read; another one keeps its own steps."""
RUNNER_NAMES = {
    "": "execute_model sample_tokens finish_requests device max_num_reqs max_num_tokens max_model_len attn_groups "
    "kernel_block_sizes lora_config speculative_config num_speculative_steps use_dcp is_encoder_decoder "
    "supports_mm_inputs is_pooling_model use_aux_hidden_state_outputs kv_connector",
    "parallel_config": "world_size data_parallel_size enable_eplb",
    "model_config": "rswa_window",
    "kv_cache_config": "kv_cache_groups num_blocks",
    "model": "compute_logits",
    "model_state": "prepare_attn rope_state",
    "cudagraph_manager": "graphs hidden_states dispatch run_fullgraph",
    "input_buffers": "input_ids positions seq_lens query_start_loc is_padding",
    "block_tables": "block_tables input_block_tables block_sizes num_blocks slot_mappings cp_size "
    "get_dummy_block_tables get_dummy_slot_mappings",
    "req_states": "req_id_to_index prefill_len num_computed_tokens last_sampled_tokens total_len all_token_ids",
    "sampler": "sampling_states use_fp64_gumbel compute_nans",
    "sampler.sampling_states": "vocab_size seeds temperature top_k top_p min_p num_logprobs",
    "sampler.logprob_token_ids_state": "num_token_ids",
    "prompt_logprobs_worker": "uses_prompt_logprobs",
}
"""Attributes of the runner that `runner.py` and `check.py` use, by the object that has them."""
UNUSED_PARTS = (
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


def shorten_runner(engine: Any) -> Any:
    """The `ShortRunner` that takes the steps of this `vllm.LLMEngine` from now on, or a text: why vLLM's own stay.

    Before the engine's first request, and after whatever changes its head.
    """
    runner = runner_of(engine)
    try:
        reason = runner_obstacle(runner)
        if reason is not None:
            return reason
        from rlcore.rollout.vllm.short.check import disagreement
        from rlcore.rollout.vllm.short.runner import ShortRunner

        short = ShortRunner(runner)
        reason = disagreement(short, runner)
    except Exception as error:  # vLLM differs in something that is not checked above
        return f"{type(error).__name__}: {error}"
    if reason is not None:
        return reason
    short.install()
    return short


def runner_of(engine: Any) -> Any:
    """The model runner of a `vllm.LLMEngine` in this process."""
    return engine.model_executor.driver_worker.worker.model_runner


def runner_obstacle(runner: Any) -> str | None:
    """Why this runner cannot take short steps; None where it can."""
    import vllm

    if vllm.__version__.partition("+")[0] not in RUNNER_RELEASES:
        return f"vLLM {vllm.__version__} is not one of {', '.join(RUNNER_RELEASES)}"
    if type(runner).__module__ != "vllm.v1.worker.gpu.model_runner":
        return f"the runner is {type(runner).__module__}.{type(runner).__name__}"
    if missing := _missing("runner", runner, RUNNER_NAMES):
        return _without(missing)
    parallel, manager = runner.parallel_config, runner.cudagraph_manager
    groups = runner.kv_cache_config.kv_cache_groups
    backends = [type(group.get_metadata_builder(0)).__name__ for each in runner.attn_groups for group in each]
    needs = {
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
        **{f"no {name}": _part(runner, name) in (None, False) for name in UNUSED_PARTS},
    }
    return _unmet(needs)


# ---------------------------------------------------------------- both

_ABSENT = object()


def _part(owner: Any, path: str, absent: Any = None) -> Any:
    """The attribute at a dotted path ("" is the object itself), or `absent`."""
    for name in filter(None, path.split(".")):
        owner = getattr(owner, name, absent)
    return owner


def _missing(kind: str, owner: Any, names: Mapping[str, str]) -> list[str]:
    """Names that an object of vLLM lacks."""
    wanted = [f"{path}.{name}".lstrip(".") for path, of_path in names.items() for name in of_path.split()]
    return [f"{kind}.{name}" for name in wanted if _part(owner, name, _ABSENT) is _ABSENT]


def _missing_of_requests() -> list[str]:
    """Names that a request of vLLM lacks, by what its class defines and its constructor sets."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    defined = {*dir(Request), *Request.__init__.__code__.co_names}
    missing = [f"request.{name}" for name in REQUEST_NAMES.split() if name not in defined]
    return missing + _missing("sampling_params", SamplingParams(), {"": SAMPLING_NAMES})


def _without(missing: list[str]) -> str:
    import vllm

    return f"vLLM {vllm.__version__} has no {', '.join(missing)}"


def _unmet(needs: Mapping[str, bool]) -> str | None:
    return next((f"it needs {name}" for name, holds in needs.items() if not holds), None)
