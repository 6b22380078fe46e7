"""The names of vLLM's attributes that short steps use. An engine checks at its start that they exist."""

from collections.abc import Mapping
from typing import Any

SCHEDULER_NAMES = {
    "": "requests running finished_req_ids current_step max_model_len max_num_running_reqs log_stats num_spec_tokens "
    "num_lookahead_tokens lora_config connector ec_connector needs_kv_cache_zeroing defer_block_free dcp_world_size "
    "use_v2_model_runner prev_step_scheduled_req_ids",
    "kv_cache_config": "kv_cache_groups",
    "parallel_config": "pipeline_parallel_size",
    "kv_cache_manager": "new_step_starts allocate_slots",
    "kv_cache_manager.block_pool": "get_num_free_blocks",
}
"""The scheduler's attributes, by the path from the scheduler to the object that has them."""
REQUEST_NAMES = (
    "request_id num_computed_tokens num_output_placeholders num_prompt_tokens max_tokens is_prefill_chunk "
    "sampling_params update_block_hashes _output_token_ids _all_token_ids"
)
"""The attributes of a request."""
SAMPLING_NAMES = "all_stop_token_ids repetition_detection"  # attributes of a request's sampling parameters
REQUEST_CHANGES = frozenset(
    {"num_computed_tokens", "num_output_placeholders", "num_in_flight_tokens", "next_decode_eligible_step"}
)
"""The attributes of a request that vLLM changes for each token, in releases after 0.25 with `num_in_flight_tokens`. Any
other change disables short steps. Lists that grow are not listed."""
SCHEDULER_CHANGES = frozenset({"current_step", "prefill_capacity_bound"})
"""The numbers and texts in the scheduler that vLLM changes for each token."""


def unsupported_reason(scheduler: Any) -> str | None:
    """Return the reason why this scheduler does not support short steps, or None."""
    missing = _missing_names("scheduler", scheduler, SCHEDULER_NAMES) + _missing_request_names()
    if missing:
        return _without(missing)
    groups = scheduler.kv_cache_config.kv_cache_groups
    needs = {
        "full attention": len(groups) == 1 and type(groups[0].kv_cache_spec).__name__ == "FullAttentionSpec",
        "no speculation": scheduler.num_spec_tokens == 0 and scheduler.num_lookahead_tokens == 0,
        "no LoRA": scheduler.lora_config is None,
        "no cache connector": scheduler.connector is None and scheduler.ec_connector is None,
        "no zeroing of blocks": not scheduler.needs_kv_cache_zeroing,
        "blocks freed immediately": not scheduler.defer_block_free,
        "no statistics": not scheduler.log_stats,
        "no pipeline": scheduler.parallel_config.pipeline_parallel_size == 1,
        "no context parallelism": scheduler.dcp_world_size == 1,
    }
    return next((f"it needs {name}" for name, holds in needs.items() if not holds), None)


_ABSENT = object()


def _part(owner: Any, path: str, absent: Any = None) -> Any:
    for name in filter(None, path.split(".")):
        owner = getattr(owner, name, absent)
    return owner


def _missing_names(kind: str, owner: Any, names: Mapping[str, str]) -> list[str]:
    wanted = [f"{path}.{name}".lstrip(".") for path, of_path in names.items() for name in of_path.split()]
    return [f"{kind}.{name}" for name in wanted if _part(owner, name, _ABSENT) is _ABSENT]


def _missing_request_names() -> list[str]:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    defined = {*dir(Request), *Request.__init__.__code__.co_names}
    missing = [f"request.{name}" for name in REQUEST_NAMES.split() if name not in defined]
    return missing + _missing_names("sampling_params", SamplingParams(), {"": SAMPLING_NAMES})


def _without(missing: list[str]) -> str:
    import vllm

    return f"vLLM {vllm.__version__} has no {', '.join(missing)}"
