"""GGUF files of tiny models, written as llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Bytes of the alphabet in which byte-level BPE writes text, and two words.
WORDS = ["<|end|>", *map(chr, range(33, 127)), "\u0120", "\u010a", "\u0120a", "\u0120\u0120"]
MERGES = ["\u0120 a", "\u0120 \u0120"]
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}",
}


def llama_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The order of llama.cpp's rows of queries and keys (LlamaModel.permute of convert_hf_to_gguf.py)."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def write_gguf(
    model: PreTrainedModel,
    file: Path,
    *,
    quantized: str = "F32",
    extra: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
    **entries: Any,
) -> Path:
    """`model` as a GGUF file. `entries` replace metadata (`_` for `.`), None leaves out; `quantized`: type of matrices
    whose rows have whole blocks."""
    config = model.config
    kind = config.model_type
    writer = gguf.GGUFWriter(file, kind)
    rope = config.rope_parameters["rope_theta"]
    meta: dict[str, Any] = {
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{kind}.rope.freq_base": float(rope),
        **({f"{kind}.attention.key_length": config.head_dim} if getattr(config, "head_dim", None) else {}),
        **TOKENIZER,
        "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.token_type": [3] + [1] * (len(WORDS) - 1),
        "tokenizer.ggml.merges": MERGES,
    }
    meta |= {key.replace("__", "."): value for key, value in entries.items()}
    for key, value in meta.items():
        if value is not None:
            _add(writer, key, value)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in _tensors(model).items():
        *_, short, _ = name.split(".")
        if kind == "llama" and short in heads:
            weight = llama_rows(weight, heads[short])
        if name not in without:
            _add_tensor(writer, name, weight, quantized)
    for name, weight in (extra or {}).items():
        _add_tensor(writer, name, weight, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    found = {}
    for name, parameter in model.named_parameters():
        plain, kind = name.rpartition(".")[::2]
        block = plain.split(".")[2] if plain.startswith("model.layers.") else None
        inner = plain if block is None else plain.partition(f"layers.{block}.")[2]
        prefix = "" if block is None else f"blk.{block}."
        weight: Tensor = parameter.detach()
        found[f"{prefix}{NAMES[inner]}.{kind}"] = weight.numpy()
    return found


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    else:
        writer.add_uint32(key, value)


def stored(weight: np.ndarray, quantized: str) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """What the file holds of a tensor: matrices of whole blocks are quantized."""
    kind = gguf.GGMLQuantizationType[quantized]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if weight.ndim == 1 or weight.shape[-1] % block:
        kind = gguf.GGMLQuantizationType.F32
    return gguf.quantize(weight, kind), kind


def _add_tensor(writer: gguf.GGUFWriter, name: str, weight: np.ndarray, quantized: str) -> None:
    data, kind = stored(weight, quantized)
    writer.add_tensor(name, data, raw_dtype=kind)
