"""A transformers directory from a GGUF file: config, float32 weights and tokenizer, written once.

Departs from transformers' own `gguf_file=` in what that leaves out (5.19): ends of an answer other than the defaults of
the config class, widths of heads that the file names, Llama 3's scaled rotary positions, pre-tokenizers of its own (it
cuts SmolLM2's text by GPT-2's rule, which keeps digits and the white space before them together), and tensors without a
place, which it skips in silence. The weights are equal bit for bit (tests/models/test_gguf.py).
"""

from collections.abc import Mapping
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rlcore.config.gguf import INSTALL_READER, GgufHeader, GgufTensor, read_header
from rlcore.errors import ModelError
from rlcore.models.progress_bars import no_progress_bars

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE = "rope_freqs.weight"
# Llama 3.1 and 3.2 as published; the file holds no factors, only what they do to each frequency.
_LLAMA3_FACTORS = (8.0, 32.0)
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8_192}
_ROUNDING = 1e-4
_LONGEST_DETAIL = 300

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_CONTROL, _USER_DEFINED = 3, 4
_SPECIAL = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))


def write_model(file: Path, directory: Path) -> None:
    """Write the model of a GGUF file, dequantized to float32, and its tokenizer into `directory`.

    Raises:
        ModelError: it cannot be trained here, its tensors are not those of its architecture, or gguf is not whole.
    """
    header = read_header(file)
    try:
        model = _model(file, header)
        tokenizer = _tokenizer(header)
    except ModelError:
        raise
    except ImportError as error:
        raise ModelError(
            f"model.path: the package gguf, which reads {file}, must be whole; got {error}. Install: {INSTALL_READER}"
        ) from error
    except Exception as error:  # the tokenizers library raises nothing narrower; a damaged file may break anything
        detail = " ".join(str(error).split())[:_LONGEST_DETAIL]
        raise ModelError(
            "model.path: must be a GGUF file with all tensors of its architecture, no others, and its tokenizer; got "
            f"{file} ({type(error).__name__}: {detail}). Copy it again, or give a model directory instead"
        ) from error
    with no_progress_bars():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _model(file: Path, header: GgufHeader) -> PreTrainedModel:
    config = header.config() | {"dtype": "float32"}
    if _ROPE in header.tensors:
        (factors,) = _tensors(file, [header.tensors[_ROPE]])
        config["rope_parameters"] = _scaled_positions(factors, config, file)
    with torch.device("meta"):
        plain = AutoConfig.for_model(**config)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(plain)  # type: ignore[no-untyped-call]
    weights = _weights(file, header)
    if config["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model


def _weights(file: Path, header: GgufHeader) -> dict[str, Tensor]:
    """All weights by transformers' names, float32."""
    found: dict[str, Tensor] = {}
    kept = [tensor for tensor in header.tensors.values() if tensor.name != _ROPE]
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    config = header.config()
    for tensor, weight in zip(kept, _tensors(file, kept), strict=True):
        *block, name, kind = tensor.name.split(".")
        if header.architecture == "llama" and name in heads:
            # llama.cpp turns neighbours (2i, 2i + 1) of a head, transformers i and i + half.
            number = config[heads[name]]
            weight = weight.view(number, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
        prefix = f"model.layers.{block[1]}." if block else ""
        found[f"{prefix}{_NAMES.get(name, name)}.{kind}"] = weight
    return found


def _tensors(file: Path, tensors: list[GgufTensor]) -> list[Tensor]:
    """Read tensors, dequantized to float32."""
    from gguf import GGMLQuantizationType, dequantize

    data = np.memmap(file, dtype=np.uint8, mode="r")
    found = []
    for tensor in tensors:
        kind = GGMLQuantizationType(tensor.kind)
        blocks = data[tensor.offset : tensor.offset + tensor.num_bytes]
        if kind.name in ("F32", "F16"):
            blocks = blocks.view(np.float32 if kind.name == "F32" else np.float16)
        values = dequantize(blocks.reshape(*tensor.shape[:-1], -1), kind)
        found.append(torch.from_numpy(np.array(values, dtype=np.float32)))
    return found


def _scaled_positions(factors: Tensor, config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Llama 3's scaling whose divisors of the frequencies are `factors` (half the width of a head)."""
    half, theta = config["head_dim"] // 2, config["rope_theta"]
    lengths = 2 * pi * theta ** (torch.arange(half, dtype=torch.float64) / half)
    low, high, context = _LLAMA3.values()
    smooth = ((context / lengths - low) / (high - low)).clamp(0, 1)
    for factor in _LLAMA3_FACTORS:
        if factors.shape == smooth.shape and torch.allclose(
            1 / factors.double(), (1 - smooth) / factor + smooth, rtol=_ROUNDING
        ):
            return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3}
    raise ModelError(
        f"model.path: {file} must scale its rotary positions as Llama 3.1 or 3.2 does, or not at all; its {_ROPE} says "
        "otherwise. Give a folder with config.json and safetensors instead"
    )


def _tokenizer(header: GgufHeader) -> PreTrainedTokenizerFast:
    meta = {key.removeprefix("tokenizer.ggml."): value for key, value in header.metadata.items()}
    tokens: list[str] = meta["tokens"]
    is_llama3 = meta["pre"] == "llama-bpe"
    bpe = models.BPE(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in meta["merges"]],
        ignore_merges=is_llama3,
    )
    tokenizer = Tokenizer(bpe)
    if meta["pre"] in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_cuts(meta["pre"]))
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta.get("token_type", [])
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, normalized=False, special=kind == _CONTROL)
            tokenizer.add_special_tokens([added]) if kind == _CONTROL else tokenizer.add_tokens([added])
    named = {f"{name}_token": tokens[meta[f"{key}_token_id"]] for name, key in _SPECIAL if f"{key}_token_id" in meta}
    if meta.get("add_bos_token", is_llama3) and "bos_token" in named:
        first = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, meta["bos_token_id"])]
        )
    settings = {"clean_up_tokenization_spaces": False, "chat_template": header.metadata.get("tokenizer.chat_template")}
    length = header.metadata[f"{header.architecture}.context_length"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **named, **settings)  # type: ignore[no-untyped-call]


def _cuts(name: str) -> list[pre_tokenizers.PreTokenizer]:
    """How text is cut into words, by llama.cpp's name of a pre-tokenizer."""
    if name == "smollm":
        return [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if name == "gpt-2":
        return [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    words = Regex(_LLAMA3_WORDS if name == "llama-bpe" else _QWEN2_WORDS)
    return [
        pre_tokenizers.Split(words, behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
