"""The sizes of a decoder, counts of its parameters and operations, peak speeds of GPUs, and checks of model files. This
module does not import torch. The counts are valid for Llama, Mistral, Qwen2 and Qwen3 in transformers."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlcore.config import RunConfig
from rlcore.config.model import PUBLISHED, TESTED, LoraConfig, ModelConfig, ScratchModel
from rlcore.errors import ConfigError, ModelError
from rlcore.models.hub import config_file

NUM_WORDS = 13
"""The number of tokens of the arithmetic tokenizer that are not integers: padding, end, unknown and ten operators."""
TRAINABLE = (
    f"Supported are dense text decoders: {', '.join(TESTED)}, and others whose log-probabilities on packed and "
    "separate sequences are equal, which is checked when they load"
)


def untrainable(config: Mapping[str, Any]) -> str | None:
    """Return why a model with this `config.json` cannot be trained, or None if it can."""
    kind = str(config.get("model_type", "not named"))
    quantized = config.get("quantization_config")
    inner = config.get("text_config")
    if has_experts(config) or (isinstance(inner, Mapping) and has_experts(inner)):
        return f"must have no mixture of experts (model_type {kind})"
    if any(config.get(part) for part in ("vision_config", "audio_config", "text_config")):
        return f"must read text alone, without pictures or sound (model_type {kind})"
    if config.get("is_encoder_decoder"):
        return f"must be a decoder without an encoder (model_type {kind})"
    if quantized:
        method = quantized.get("quant_method", "") if isinstance(quantized, Mapping) else quantized
        return f"must have weights that are not quantized ({method})"
    return None


def require_trainable(key: str, path: str) -> None:
    """Raise ModelError if the model `path` cannot be trained. The message names the setting `key`. The check is skipped
    if the model has no local `config.json`."""
    config = _read_config(path)
    reason = untrainable(config) if isinstance(config, Mapping) else None
    if reason is not None:
        raise ModelError(f"{key}: {reason}, got {path}. {TRAINABLE}")


def require_embeddings(key: str, path: str, tokens: Mapping[str, int]) -> None:
    """Raise ModelError if a token's id is not below the `vocab_size` of the model `path`. The message names the setting
    `key`. The check is skipped if the model has no local `config.json`."""
    config, highest = _read_config(path), max(tokens.values(), default=-1)
    size = config.get("vocab_size") if isinstance(config, Mapping) else None
    if isinstance(size, int) and size <= highest:
        raise ModelError(
            f"{key}: must have an embedding of every token; got {path}, whose vocab_size is {size}, with a tokenizer "
            f"whose highest id is {highest}. Set a model with its own tokenizer"
        )


def require_same_tokens(key: str, path: str, tokens: Mapping[str, int]) -> None:
    """Raise ModelError if a token of the policy (`tokens`) has a different id or no embedding in the model `path`. The
    message names the setting `key`. Only local files are read."""
    require_embeddings(key, path, tokens)
    own = vocabulary_of(path)
    if differing := [token for token, number in tokens.items() if own.get(token, number) != number]:
        raise ModelError(
            f"{key}: must have the policy's tokenizer; got {path}, where {len(differing)} of {len(tokens)} tokens have "
            f"another id, such as {differing[0]!r}. Set a model with the tokenizer of model.path"
        )


def vocabulary_of(path: str) -> dict[str, int]:
    """Return the id of each vocabulary token in `tokenizer.json`, or {} if it cannot be read. Added tokens are
    excluded, since some models never embed them (Gemma 3: image tokens)."""
    file = config_file(path, "tokenizer.json")
    try:
        found = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
        words = found["model"]["vocab"]  # for unigram models pairs of a token and its score
        return words if isinstance(words, dict) else {word: number for number, (word, _) in enumerate(words)}
    except (OSError, ValueError, LookupError, TypeError):
        return {}  # loading the tokenizer reports the problem


def require_base(lora: LoraConfig | None, has: Callable[[str], object] = find_spec) -> None:
    """Raise ConfigError if `lora` needs the package bitsandbytes, but the package is not installed. `has` returns
    whether a package is installed."""
    if lora is not None and lora.base == "nf4" and not has("bitsandbytes"):
        raise ConfigError(
            "model.lora.base: nf4 needs the package bitsandbytes, which is not installed here. In the checkout: "
            "pip install -c constraints.txt -e '.[nf4]'; or set model.lora.base=native."
        )


def has_experts(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` describes a mixture of experts."""
    return any("experts" in name and isinstance(value, int) and value > 1 for name, value in config.items())


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder. Attention heads and key-value heads have the size `head_dim`."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Build the shape from the content of a `config.json`. Raises KeyError if it describes no dense decoder."""
        if has_experts(config):
            raise KeyError("intermediate_size of all experts")
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        kind = str(config.get("model_type", ""))
        return cls(
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),  # a qwen2 config does not state it
            qk_norm=kind == "qwen3",
        )

    @classmethod
    def of_scratch(cls, model: ScratchModel) -> "ModelShape":
        """Return the shape of a scratch model (Qwen2 with tied embeddings)."""
        config = {
            "model_type": "qwen2",
            "hidden_size": model.hidden_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "intermediate_size": model.intermediate_size,
            "vocab_size": NUM_WORDS + model.max_integer + 1,
            "tie_word_embeddings": True,
        }
        return cls.of_config(config)

    @property
    def query_width(self) -> int:
        """The number of attention heads times the head size."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """The number of key-value heads times the head size."""
        return self.kv_heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """The number of entries in the matrices of one layer."""
        return self.hidden * (2 * self.query_width + 2 * self.kv_width) + 3 * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """The number of parameters of one layer."""
        biases = self.query_width + 2 * self.kv_width if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return self.layer_weights + biases + norms

    @property
    def embedding(self) -> int:
        """The number of parameters of the embedding, V x H."""
        return self.vocab * self.hidden

    @property
    def root_parameters(self) -> int:
        """The number of parameters outside the layers: the embedding, an untied head and the last norm."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def policy_parameters(self) -> int:
        """The number of parameters of the policy."""
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def critic_parameters(self) -> int:
        """The number of parameters of a value model, whose head is a linear unit with a bias."""
        return self.layers * self.layer_parameters + self.embedding + 2 * self.hidden + 1

    def adapter_parameters(self, lora: LoraConfig) -> int:
        """Return the number of parameters of LoRA adapters: rank x (input + output size) for each target and layer."""
        sizes = {
            "q_proj": self.hidden + self.query_width,
            "k_proj": self.hidden + self.kv_width,
            "v_proj": self.hidden + self.kv_width,
            "o_proj": self.query_width + self.hidden,
            "gate_proj": self.hidden + self.intermediate,
            "up_proj": self.hidden + self.intermediate,
            "down_proj": self.intermediate + self.hidden,
        }
        return self.layers * lora.rank * sum(sizes.get(name, 0) for name in lora.target_modules)

    def update_flops(
        self, lengths: Iterable[int], *, num_targets: int, num_shared: int = 0, lora: LoraConfig | None = None
    ) -> float:
        """Return the number of operations of a forward and backward pass over sequences of these lengths.

            6 N T + 6 V H M + 6 A sum(s^2)                without adapters
            4 N T + 4 V H M + 6 R T + 6 A sum(s^2)        with adapters

        N: weights of the layers. T: tokens. V: vocabulary size. H: hidden size. M: `num_targets`, the tokens that the
        head processes, 0 for a value model. A: attention width over all layers. s: sequence lengths. R: adapter weights
        of `lora`. `num_shared` tokens of shared prompts count only for attention. Only half of the s^2 scores are
        counted, because attention is causal. With adapters, the embedding is frozen, so the input gradients of query,
        key and value in the first layer are not counted. Recomputation is not counted."""
        sizes = list(lengths)
        num_tokens, weights = sum(sizes) - num_shared, self.layers * self.layer_weights
        matrices = weights * num_tokens + self.embedding * num_targets
        attention = 6 * self.layers * self.query_width * sum(s * s for s in sizes)
        if lora is None:
            return float(6 * matrices + attention)
        adapted = sum(name in lora.target_modules for name in ("q_proj", "k_proj", "v_proj"))
        first = self.hidden * (self.query_width + 2 * self.kv_width + lora.rank * adapted)
        return float(4 * matrices + (6 * self.adapter_parameters(lora) - 2 * first) * num_tokens + attention)

    def verl_flops(self, lengths: Iterable[int]) -> float:
        """Return the number of operations of an update by veRL's formula, in which every token passes through all
        weights, including the embedding and the head."""
        sizes = list(lengths)
        return self.update_flops(sizes, num_targets=2 * sum(sizes))

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the number of bytes that the keys and values of one token take in all layers."""
        return 2 * self.layers * self.kv_width * itemsize


def shape_of(model: ModelConfig) -> ModelShape | None:
    """Return the shape of a run's model, or None if its `config.json` is missing or describes no dense decoder."""
    if model.path is None:
        return ModelShape.of_scratch(model.scratch)
    return shape_from_config(_read_config(model.path))


def critic_shape(config: RunConfig, shape: ModelShape) -> ModelShape:
    """Return the shape of the critic's model, or the policy's `shape` if `critic.path` is unset or its `config.json` is
    unavailable."""
    path = None if config.critic is None else config.critic.path
    return shape if path is None else shape_from_config(_read_config(path)) or shape


def teacher_shapes(config: RunConfig, shape: ModelShape) -> list[ModelShape]:
    """Return the shape of each teacher model, or the policy's `shape` where the teacher's `config.json` is
    unavailable."""
    teacher = config.algo.teacher
    return [shape_from_config(_read_config(path)) or shape for path in teacher.paths] if teacher else []


def _read_config(path: str) -> object:
    file = config_file(path)
    try:
        return PUBLISHED.get(path) if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # loading the model reports the problem


def shape_from_config(config: object) -> ModelShape | None:
    """Return the shape from the content of a `config.json`, or None if it describes no dense decoder."""
    try:
        return ModelShape.of_config(config) if isinstance(config, Mapping) else None
    except (KeyError, TypeError, ValueError):
        return None


# Dense bfloat16 operations per second in the vendors' data sheets, in units of 1e12. The first name that the device's
# name contains is used, so a name precedes its parts.
PEAK_TFLOPS: Mapping[str, float] = {
    "GB200": 2_500.0,
    "B200": 2_250.0,
    "GH200": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


def peak_flops(device_name: str) -> float | None:
    """Return a device's peak of dense bfloat16 operations per second, or None if its name is unknown."""
    return next((1e12 * peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


def has_code_for(capability: tuple[int, int], architectures: Iterable[str]) -> bool:
    """Return whether a torch build runs on a GPU of this compute capability. `sm_90` code runs on 9.x GPUs from 9.0 on,
    and `sm_90a` code on 9.0 only. `compute_90` code is compiled at first use for any GPU from 9.0 on."""
    for name in architectures:
        kind, _, number = name.partition("_")
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        is_exact = number.endswith("a") and kind != "compute"
        if built == capability or (
            not is_exact and built < capability and (kind == "compute" or built[0] == capability[0])
        ):
            return True
    return False


def is_plain_tokenizer(tokenizer_config: Path) -> bool:
    """Return whether the file names a generic `tokenizer_class`, with which `tokenizer.json` alone defines the
    tokenizer. For some architectures (qwen2), `AutoTokenizer` of transformers 5 ignores this class and splits text
    differently."""
    name = json.loads(tokenizer_config.read_text(encoding="utf-8")).get("tokenizer_class")
    return name in ("TokenizersBackend", "PreTrainedTokenizerFast")
