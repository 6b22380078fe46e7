"""Rules of the model: its shape, its context, its path."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.config.base import expanded
from rlcore.config.data import CountdownData, CustomData, MixtureData
from rlcore.config.model import LINEAR_LAYERS, PUBLISHED, SMOLLM2, TESTED
from rlcore.config.problems import Problem
from rlcore.config.rules.registry import Rule, rule
from rlcore.config.run import RunConfig


@rule("model.path", "model.scratch.hidden_size", "model.scratch.num_heads")
def heads_divide_width(config: RunConfig) -> Problem | None:
    """All heads have one width, and an even one: rotary positions turn pairs."""
    scratch = config.model.scratch
    if config.model.path is not None or scratch.hidden_size % (2 * scratch.num_heads) == 0:
        return None
    return Problem(
        "model.scratch.hidden_size",
        "must be an even multiple of model.scratch.num_heads",
        f"{scratch.hidden_size} with num_heads {scratch.num_heads}",
        f"Take a multiple of {2 * scratch.num_heads}, such as {32 * scratch.num_heads}",
    )


# Widths that vLLM's attention on a CPU has a kernel for.
_VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


@rule("model.path", "model.scratch.hidden_size", "model.scratch.num_heads", "rollout.engine", "runtime.device")
def heads_fit_vllm(config: RunConfig) -> Problem | None:
    """vLLM's attention has no kernel for narrow heads, and on a CPU only for some widths."""
    width = _head_width(config)
    if config.rollout.engine != "vllm" or width is None:
        return None
    on_cpu = config.runtime.device == "cpu"

    def fits(each: int) -> bool:
        return each in _VLLM_CPU_HEADS if on_cpu else each >= 32

    if fits(width):
        return None
    key = "model.scratch.num_heads" if config.model.path is None else "model.path"
    hidden, heads = config.model.scratch.hidden_size, config.model.scratch.num_heads
    others = (f"{n} heads, " for n in range(hidden // 32, 0, -1) if hidden % (2 * n) == 0 and fits(hidden // n))
    return Problem(
        key,
        "must have heads of a width that vLLM knows with rollout.engine=vllm: "
        + (f"on a CPU one of {', '.join(map(str, _VLLM_CPU_HEADS))}" if on_cpu else "32 or more"),
        f"heads of {width}",
        f"Use {next(others, '')}hidden_size={32 * heads}, or rollout.engine=hf"
        if config.model.path is None
        else "Use rollout.engine=hf, or another model",
    )


@rule("model.path", "data.task", "data.template")
def scratch_reads_the_prompts(config: RunConfig) -> Problem | None:
    """The tokenizer made from nothing has integers and operators, no words."""
    data = config.data
    bare = isinstance(data, CountdownData) and data.template == "bare"
    # The prompts of a custom task are not known here; the filter refuses words without a token.
    if config.model.path is not None or bare or isinstance(data, CustomData | MixtureData):
        return None
    countdown = isinstance(data, CountdownData)
    return Problem(
        "model.path",
        "is unset, and a model made from nothing reads bare countdown prompts only",
        f"data.template={data.template}" if isinstance(data, CountdownData) else f"data={data.task}",
        "Set model.path to a directory or hub id"
        + (", or data.template=bare, or start from experiment=countdown_demo" if countdown else ""),
    )


@rule("rollout.tensor_parallel_size", "model.path", "model.scratch.num_heads", "model.scratch.intermediate_size")
def heads_are_dealt_to_the_gpus(config: RunConfig) -> Problem | None:
    """The ranks of an engine have equal parts of the heads and of the feed-forward layer. Where there are fewer heads
    of keys and values than ranks, several ranks share one."""
    size, scratch = config.rollout.tensor_parallel_size, config.model.scratch
    heads = _number(config, "num_attention_heads", scratch.num_heads)
    width = _number(config, "intermediate_size", scratch.intermediate_size) or 0
    if size == 1 or heads is None:
        return None
    kv_heads = _number(config, "num_key_value_heads", heads) or heads

    def fits(size: int) -> bool:
        return heads % size == width % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    if fits(size):
        return None
    return Problem(
        "rollout.tensor_parallel_size",
        "must divide the model's heads and its feed-forward width",
        f"{size} with {heads} heads, {kv_heads} of keys and values, and a width of {width}",
        f"Use one of {', '.join(str(size) for size in range(1, heads + 1) if fits(size))}",
    )


@rule("model.path", "model.lora.target_modules")
def adapters_name_layers(config: RunConfig) -> Problem | None:
    """Layers that get adapters are those of a decoder layer; a model of an unknown type says so when it loads."""
    path, lora = config.model.path, config.model.lora
    if lora is None or (path is not None and _shape(path).get("model_type") not in TESTED):
        return None
    unknown = [name for name in lora.target_modules if name not in LINEAR_LAYERS]
    if lora.target_modules and not unknown:
        return None
    remedy = f"Choose of {', '.join(LINEAR_LAYERS)}"
    return Problem(
        "model.lora.target_modules", "must name linear layers of the decoder", ", ".join(unknown) or "none", remedy
    )


@rule("model.path", "model.scratch.max_integer", "data")
def integers_are_tokens(config: RunConfig) -> Problem | None:
    """Every number and target is one token of the tokenizer made from nothing."""
    data, largest = config.data, config.model.scratch.max_integer
    if config.model.path is not None or not isinstance(data, CountdownData) or data.template != "bare":
        return None
    if data.target_low >= 0 and max(data.number_high, data.target_high) <= largest:
        return None
    return Problem(
        "model.scratch.max_integer",
        "must cover every number and target from 0 up",
        f"{largest} with number_high {data.number_high} and targets {data.target_low} to {data.target_high}",
        f"Set model.scratch.max_integer={max(data.number_high, data.target_high)}, or narrow the data's ranges",
    )


@rule("model.path")
def local_model_is_there(config: RunConfig) -> Problem | None:
    """A path that cannot be a hub id is a transformers directory. (The package need not be installed for a plan.)"""
    path = config.model.path
    return None if path == SMOLLM2 else _missing_model("model.path", path)


@rule("critic.path")
def local_critic_is_there(config: RunConfig) -> Problem | None:
    """The critic's path is one too; otherwise it would fail after policy and engine have been loaded."""
    path = None if config.critic is None else config.critic.path
    if path != SMOLLM2:
        return _missing_model("critic.path", path)
    remedy = "Set model.path to it and critic.path=null: the critic starts from the same weights"
    return Problem("critic.path", "must be a transformers model directory", path, remedy)


def _missing_model(key: str, path: str | None) -> Problem | None:
    if path is None or not _is_local(path) or (expanded(path) / "config.json").is_file():
        return None
    state = "has no config.json" if expanded(path).is_dir() else "is no directory"
    remedy = "Give a directory that AutoModelForCausalLM.from_pretrained reads, or a hub id such as Qwen/Qwen2.5-0.5B"
    return Problem(key, "must be a transformers model directory", f"{path or repr(path)}, which {state}", remedy)


@rule("model.path", "model.scratch.max_position_embeddings", "filter.max_prompt_tokens", "rollout.max_response_tokens")
def sequences_fit_the_context(config: RunConfig) -> Problem | None:
    """The longest prompt with the longest answer fits the model's positions."""
    prompt, response = config.filter.max_prompt_tokens, config.rollout.max_response_tokens
    context = _number(config, "max_position_embeddings", config.model.scratch.max_position_embeddings)
    if context is None or prompt + response <= context:
        return None
    where = "model.scratch.max_position_embeddings" if config.model.path is None else "config.json of model.path"
    return Problem(
        "rollout.max_response_tokens",
        f"with filter.max_prompt_tokens must be at most the model's context ({where})",
        f"{prompt} + {response} = {prompt + response} tokens with a context of {context}",
        "Lower one of the two" + (", or raise the context" if config.model.path is None else ""),
    )


def _is_local(path: str) -> bool:
    # A hub id is a name, or an owner and a name.
    return path.startswith(("/", ".", "~")) or ":" in path or path.count("/") > 1 or Path(path).exists()


def _head_width(config: RunConfig) -> int | None:
    """Width of an attention head; None where it is not known here."""
    scratch = config.model.scratch
    hidden = _number(config, "hidden_size", scratch.hidden_size)
    heads = _number(config, "num_attention_heads", scratch.num_heads)
    return _number(config, "head_dim", None) or (hidden // heads if hidden and heads else None)


def _number(config: RunConfig, name: str, of_scratch: int | None) -> int | None:
    """A number of the model's config.json, or that of a model made from nothing; None where it is not known here."""
    if config.model.path is None:
        return of_scratch
    found = _shape(config.model.path).get(name)
    return found if isinstance(found, int) else None


def _shape(path: str) -> Mapping[str, Any]:
    """The decoder's part of a model's config.json, local or published; empty where neither is there."""
    if path in PUBLISHED and not Path(path).is_dir():
        return PUBLISHED[path]
    try:
        shape = json.loads((expanded(path) / "config.json").read_text(encoding="utf-8"))
        found = shape.get("text_config", shape)
    except (OSError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


RULES: tuple[Rule, ...] = (
    heads_divide_width,
    heads_fit_vllm,
    scratch_reads_the_prompts,
    heads_are_dealt_to_the_gpus,
    adapters_name_layers,
    integers_are_tokens,
    local_model_is_there,
    local_critic_is_there,
    sequences_fit_the_context,
)
