"""Published shapes of the models that `conf/model` names: what a plan and the rules go by before the files are here."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PUBLISHED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "meta-llama/Llama-3.2-1B-Instruct": {
            "model_type": "llama", "vocab_size": 128_256, "hidden_size": 2_048, "intermediate_size": 8_192,
            "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
            "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        "Qwen/Qwen2.5-0.5B": {
            "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4_864,
            "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
            "max_position_embeddings": 32_768, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    }
)  # fmt: skip
"""By hub id, the fields of `config.json` that decide shape and context."""
