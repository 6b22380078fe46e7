"""The one place that chooses an engine."""

import torch

from rlcore.config import RunConfig
from rlcore.models.load import end_of_text_ids, load_policy
from rlcore.rollout.engine import RolloutEngine


def engine_dtype(config: RunConfig, computing: torch.dtype) -> torch.dtype:
    """`rollout.dtype`, or the type in which the trainer computes."""
    return {"auto": computing, "float32": torch.float32, "bfloat16": torch.bfloat16}[config.rollout.dtype]


def build_engine(config: RunConfig, model_directory: str, *, device: torch.device, dtype: torch.dtype) -> RolloutEngine:
    """The engine of `rollout.engine` in `dtype`, without valid weights until its first hand-over.

    Raises:
        EngineError: vLLM is missing, or cannot run this model with these settings.
    """
    end_of_text = end_of_text_ids(model_directory)
    if config.rollout.engine == "vllm":
        from rlcore.rollout.vllm import VllmEngine
        from rlcore.rollout.vllm.start import EngineShape

        max_model_len = config.filter.max_prompt_tokens + config.rollout.max_response_tokens
        shape = EngineShape(model_directory, max_model_len, device, dtype)
        return VllmEngine(shape, config.rollout, eos_token_ids=end_of_text)

    from rlcore.rollout.hf import HfEngine

    # Of its own type in its products too: weights in float32 would otherwise compute in the trainer's.
    computing = config.model.model_copy(update={"dtype": str(dtype).removeprefix("torch.")})
    policy = load_policy(model_directory, model=computing, device=device).to(dtype)
    return HfEngine(policy, eos_token_ids=end_of_text, max_num_seqs=config.rollout.max_num_seqs)
