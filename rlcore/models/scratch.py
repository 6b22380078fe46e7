"""A small model made from nothing: no download, the same bytes for the same settings."""

from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlcore.config.model import ScratchModel
from rlcore.models.progress_bars import no_progress_bars


def build_scratch_model(
    config: ScratchModel, *, vocab_size: int, eos_token_id: int, pad_token_id: int, seed: int, directory: Path
) -> Path:
    """Write a randomly initialised Qwen2 model (tied embeddings, float32) into `directory` and return it.

    `seed` alone decides the weights; the process's own random state is left as it was. Put the tokenizer into the
    same directory with `build_scratch_tokenizer` and the result is a complete transformers directory.
    """
    shape = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=True,
        dtype=torch.float32,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )
    shape.architectures = ["Qwen2ForCausalLM"]
    # The CPU generator alone: torch.manual_seed would also reset the generators of every accelerator.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = Qwen2ForCausalLM(shape)  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=eos_token_id, pad_token_id=pad_token_id
    )
    directory.mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        model.save_pretrained(directory)
    return directory
