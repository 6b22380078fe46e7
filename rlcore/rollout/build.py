"""Construction of the configured rollout engine."""

import torch

from rlcore.config import RunConfig
from rlcore.models.load import load_policy
from rlcore.models.policy import round_weights
from rlcore.models.tokenizer import end_of_text_ids
from rlcore.rollout.engine import NoEngine, RolloutEngine


def build_engine(config: RunConfig, model_directory: str, *, device: torch.device, dtype: torch.dtype) -> RolloutEngine:
    """Return the engine without weights. Raises EngineError if vLLM is missing or cannot run this model."""
    if config.rollout.engine == "none":
        return NoEngine()
    end_of_text = end_of_text_ids(model_directory)
    if config.rollout.engine == "vllm":
        from rlcore.rollout.vllm.engine import VllmEngine
        from rlcore.rollout.vllm.start import EngineShape

        max_model_len = config.filter.max_prompt_tokens + config.rollout.max_response_tokens
        shape = EngineShape(model_directory, max_model_len, config.concurrent_responses, device, dtype)
        return VllmEngine(shape, config.rollout, eos_token_ids=end_of_text)

    from rlcore.rollout.hf import HfEngine

    # The engine computes in its own type, and without a 4-bit base, since it gets merged weights.
    lora = config.model.lora and config.model.lora.model_copy(update={"base": "native"})
    computing = config.model.model_copy(update={"dtype": str(dtype).removeprefix("torch."), "lora": lora})
    policy = round_weights(load_policy(model_directory, model=computing, device=device), dtype)
    return HfEngine(policy, eos_token_ids=end_of_text, max_num_seqs=config.rollout.max_num_seqs)
