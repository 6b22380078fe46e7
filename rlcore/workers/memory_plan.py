"""Bytes of GPU memory that each phase of a step holds on one rank, and settings by which a run fits its GPU. No torch.

Weights, gradients and moments are exact; activations follow the tensors that autograd keeps in a Llama layer, plain or
compiled, times one measured factor. All measured constants stand here, at the top:
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import JsonValue

from rlcore.config import RunConfig
from rlcore.config.base import Section, leaves
from rlcore.config.problems import format_value
from rlcore.errors import ConfigError
from rlcore.models.shape import ModelShape, critic_shape, shape_of
from rlcore.rollout.vllm import ENGINE_FIXED_BYTES
from rlcore.storage.publish import write_json_atomically
from rlcore.tracking.lineage import first_gpu

CONTEXT_BYTES = 1_000_000_000
"""What a CUDA context, its libraries and NCCL take beside all tensors."""
ENGINE_ASLEEP_BYTES = 600_000_000
"""What vLLM keeps at sleep levels 1 and 2."""
ACTIVATION_FACTOR = 1.05
"""Measured over counted activations: 14,744 packed tokens of Llama-3.2-1B in bfloat16 held 26.2 GB where the count says
25.9 GB. Compiled layers (`model.compile`): 24,711 tokens held 29.7 to 31.2 GB (the step of
`benchmarks/baselines/NVIDIA_H200.json`) where their own count says 30.4."""
HEAD_TEMPORARIES_BYTES = 3 * 134_217_728
"""Temporaries of the chunked head beside its logits (`rlcore.models.head`); compiled it has none."""
PREFETCHED_LAYERS = 2
"""Layers whose gathered weights exist at one time under FSDP2: the one at work and the one fetched ahead."""
SAMPLING_BYTES = 24
"""Of a token of the vocabulary in the hf engine's draw: logits and log-probabilities in float32, probabilities and
their running sum in float64."""
FULL, MOMENTS = 4, 8
"""Bytes of a float32 master weight or gradient, and of its two moments in AdamW."""
NF4 = 0.5 + 4 / 64
"""Bytes of a weight in 4 bits, with a float32 scale for each block of 64."""

TOKENS_STEP = 1_024
"""Token budgets are multiples of it."""
MAX_MICRO_BATCH_TOKENS = 65_536
"""Larger micro-batches gain nothing."""
ENOUGH_TOKENS = 16_384
"""A token budget that is not worth more memory: the engine stays awake where this much is left beside it."""
SHORT_PASS_TOKENS = 8_192
"""Tokens of vLLM's largest pass where its cache has no room for all answers: what a larger one keeps for itself the
cache lacks. Of a 7B model in 24 GB 512 answers took 17.9 s with it and with 2,048, and 77 s with 32,768."""
FREE_SHARE = 0.08
"""Share of the device that the chosen settings leave: fragments of the allocator (it had reserved 7 to 9% more than its
tensors on an H200 with room to spare), and what the plan gets wrong."""
GB = 1e9

S = TypeVar("S", bound=Section)

FROZEN_BASE = "policy: frozen base"
GENERATION, PASSES, POLICY_UPDATE, CRITIC_UPDATE, HAND_OVER = (
    "generation",
    "log-probabilities",
    "policy update",
    "critic update",
    "hand-over",
)


@dataclass(frozen=True, slots=True)
class Device:
    """What a rank computes on. `itemsize`: bytes of the compute type. `total_bytes` None: not known."""

    name: str
    itemsize: int
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by phase and part. `floor_bytes`: the largest phase with one longest answer in each micro-batch, below
    which nothing can be cut finer."""

    device: Device
    phases: Mapping[str, Mapping[str, int]]
    floor_bytes: int

    @property
    def peak_phase(self) -> str:
        """The phase that holds most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors in that phase."""
        return sum(self.phases[self.peak_phase].values())

    @property
    def usable_bytes(self) -> int | None:
        """Bytes of the device that tensors may take; None where they are not known."""
        total = self.device.total_bytes
        return None if total is None else max(0, total - CONTEXT_BYTES)

    @property
    def fits(self) -> bool:
        """Whether the planned peak is no more than the device has, as far as that is known."""
        return self.usable_bytes is None or self.peak_bytes <= self.usable_bytes

    @property
    def cannot_fit(self) -> bool:
        """Whether even the finest cut holds more than the device has."""
        return self.usable_bytes is not None and self.floor_bytes > self.usable_bytes


def max_sequence_tokens(config: RunConfig) -> int:
    """Tokens of the longest prompt and answer together."""
    return config.filter.max_prompt_tokens + config.rollout.max_response_tokens


def micro_batch_tokens(config: RunConfig) -> int:
    """Most tokens of one forward and backward: the budget, one longest answer at least, and no more than there are."""
    sequences = config.trainer.mini_batch_size * config.rollout.samples_per_prompt
    per_rank = -(-sequences // config.runtime.num_workers) * max_sequence_tokens(config)
    return min(max(config.trainer.max_tokens_per_micro_batch, max_sequence_tokens(config)), per_rank)


def is_compiled(config: RunConfig, itemsize: int) -> bool:
    """Whether layers and head run compiled: with a flash kernel alone (`rlcore.models.load`), and float32 has none."""
    return config.model.compile and config.model.attention != "sdpa" and itemsize < FULL


def layer_activation_bytes(shape: ModelShape, itemsize: int, *, compiled: bool = False) -> int:
    """What autograd keeps of one layer, bytes a token, counted tensor by tensor (before `ACTIVATION_FACTOR`).

    Two norms (float32 input, normed), input of the projections, rotated query and key, value, attention's output and
    its float32 normalizer, input of the feed-forward layer, gate, its activation, up, and their product. Compiled: in
    place of the norms' four tensors their two inputs in the compute type and two float32 scales, and no activation of
    the gate; the backward computes the rest again.
    """
    hidden, query, kv, inner = shape.hidden, shape.query_width, shape.kv_width, shape.intermediate
    norms = 2 * (itemsize * hidden + FULL) if compiled else 2 * (FULL * hidden + itemsize * hidden)
    inputs = 2 * itemsize * hidden
    attention = itemsize * (2 * query + 2 * kv) + FULL * shape.heads
    return norms + inputs + attention + (3 if compiled else 4) * itemsize * inner


def update_activation_bytes(shape: ModelShape, itemsize: int, *, recompute: bool, compiled: bool = False) -> int:
    """What a forward keeps for its backward, bytes a token; with `recompute` the inputs of all layers and one layer."""
    layer = layer_activation_bytes(shape, itemsize, compiled=compiled)
    ends = (FULL + 2 * itemsize) * shape.hidden  # embedding's output, last norm
    kept = shape.layers * itemsize * shape.hidden + layer if recompute else shape.layers * layer
    return round(ACTIVATION_FACTOR * (kept + ends))


def forward_activation_bytes(shape: ModelShape, itemsize: int) -> int:
    """Most that a forward without gradient holds, bytes a token: one layer's feed-forward part beside its input."""
    return round(ACTIVATION_FACTOR * ((FULL + 2 * itemsize) * shape.hidden + 3 * itemsize * shape.intermediate))


def head_bytes(
    shape: ModelShape,
    itemsize: int,
    chunk_tokens: int,
    tokens: int,
    *,
    gradient: Literal["none", "hidden", "all"],
    compiled: bool = False,
) -> int:
    """The chunked head: one chunk of float32 logits; with a gradient its own chunk of the logits' gradient, and where
    that is the weight's too, two float32 matrices as large, the sum over chunks and the product that is added to it."""
    rows = min(chunk_tokens, tokens)
    logits = rows * shape.vocab * FULL
    beside = 0 if compiled else min(HEAD_TEMPORARIES_BYTES, logits)
    hidden = tokens * shape.hidden * itemsize
    if gradient == "none":
        return logits + beside + hidden
    own = rows * shape.vocab * itemsize if compiled else 0  # uncompiled it takes the logits' memory
    return logits + beside + own + 2 * hidden + (2 * FULL * shape.embedding if gradient == "all" else 0)


def engine_bytes(config: RunConfig, shape: ModelShape, device: Device) -> int:
    """The awake engine: vLLM with room for every answer, within its share of the device; the hf engine's weights and
    cache, and what is larger, all prompts in one pass or a token drawn for each answer (`rlcore.rollout.hf`)."""
    if config.rollout.engine == "none":
        return 0
    if config.rollout.engine == "vllm":
        if device.total_bytes is None:
            return full_engine_bytes(config, shape, device.itemsize, config.concurrent_responses)
        most = full_engine_bytes(config, shape, device.itemsize, config.rollout.max_num_seqs)
        return min(most, round(config.rollout.memory_share * device.total_bytes))
    return (
        shape.policy_parameters * device.itemsize
        + cache_bytes(config, shape, device.itemsize, config.concurrent_responses)
        + max(
            config.concurrent_responses * shape.vocab * SAMPLING_BYTES,
            -(-config.concurrent_responses // config.rollout.samples_per_prompt)
            * config.filter.max_prompt_tokens
            * forward_activation_bytes(shape, device.itemsize),
        )
    )


def cache_bytes(config: RunConfig, shape: ModelShape, itemsize: int, answers: int) -> int:
    """Keys and values of so many answers, each at its longest; of the heads of one rank."""
    heads = -(-shape.kv_heads // config.rollout.tensor_parallel_size)
    per_token = shape.kv_bytes_per_token(itemsize) * heads // shape.kv_heads
    return answers * max_sequence_tokens(config) * per_token


def full_engine_bytes(config: RunConfig, shape: ModelShape, itemsize: int, answers: int) -> int:
    """vLLM with room for so many answers at their longest: one rank's part of its engine."""
    weights = shape.policy_parameters * itemsize // config.rollout.tensor_parallel_size
    return weights + cache_bytes(config, shape, itemsize, answers) + ENGINE_FIXED_BYTES


def plan_memory(config: RunConfig, shape: ModelShape, device: Device, *, tokens: int | None = None) -> MemoryPlan:
    """Every phase of a step on one rank; `tokens` of the largest micro-batch, where they are known."""
    tokens = tokens or micro_batch_tokens(config)
    phases = _phases(config, shape, device, tokens)
    finest = _phases(config, shape, device, min(tokens, max_sequence_tokens(config)))
    return MemoryPlan(device, phases, max(sum(parts.values()) for parts in finest.values()))


@dataclass(frozen=True, slots=True)
class _TrainedModel:
    """The policy or the critic on one rank. `parameters`: that are trained. `gathered`, `whole`: bytes of the
    weights that FSDP2 holds in the compute type during a pass, and of all that it can gather."""

    name: str
    shape: ModelShape
    parameters: int
    offloads: bool
    gathered: int
    whole: int

    def gradients(self, ranks: int) -> dict[str, int]:
        """Float32 gradients; they go with the optimizer's step."""
        return {f"{self.name}: gradients": FULL * self.parameters // ranks}


def _trained_models(config: RunConfig, shape: ModelShape, itemsize: int) -> list[_TrainedModel]:
    """The policy, and the critic where there is one."""
    lora, in_4_bits = config.model.lora, _layer_weights_in_4_bits(config, shape)
    gathered = itemsize * (shape.root_parameters + PREFETCHED_LAYERS * (shape.layer_parameters - in_4_bits))
    if in_4_bits:  # not gathered, but dequantized one by one
        gathered += itemsize * shape.hidden * shape.intermediate
    whole = itemsize * (shape.policy_parameters - shape.layers * in_4_bits)
    parameters = shape.policy_parameters if lora is None else shape.adapter_parameters(lora)
    policy = _TrainedModel("policy", shape, parameters, config.optim.offload, gathered, whole)
    if config.critic is None:
        return [policy]
    own = critic_shape(config, shape)
    gathered = itemsize * (own.embedding + PREFETCHED_LAYERS * own.layer_parameters)
    parameters, offloads = own.critic_parameters, config.critic.optim.offload
    return [policy, _TrainedModel("critic", own, parameters, offloads, gathered, itemsize * parameters)]


def resident_bytes(config: RunConfig, shape: ModelShape, itemsize: int) -> dict[str, int]:
    """What is on the device in every phase."""
    ranks, held = config.runtime.num_workers, {}
    for model in _trained_models(config, shape, itemsize):
        held[f"{model.name}: float32 weights"] = FULL * model.parameters // ranks
        if not model.offloads:
            held[f"{model.name}: moments"] = MOMENTS * model.parameters // ranks
    if config.model.lora is not None:
        in_4_bits = shape.layers * _layer_weights_in_4_bits(config, shape)  # every rank holds all of them
        held[FROZEN_BASE] = round(NF4 * in_4_bits) + itemsize * (shape.policy_parameters - in_4_bits) // ranks
    if _has_reference(config) and not config.algo.kl.offload:
        held["reference"] = itemsize * shape.policy_parameters
    return held


def _phases(config: RunConfig, shape: ModelShape, device: Device, tokens: int) -> dict[str, dict[str, int]]:
    model, itemsize, ranks = config.model, device.itemsize, config.runtime.num_workers
    lora, compiled = model.lora, is_compiled(config, itemsize)
    models, held = _trained_models(config, shape, itemsize), resident_bytes(config, shape, itemsize)
    awake = {"engine": engine_bytes(config, shape, device)}
    asleep = {"engine asleep": asleep_bytes(config, shape, device)}
    offloads_base = lora is not None and lora.offload
    beside_engine = {name: size for name, size in held.items() if not (offloads_base and name == FROZEN_BASE)}
    head = partial(head_bytes, shape, itemsize, model.head_chunk_tokens, tokens, compiled=compiled)
    is_brought_back = _has_reference(config) and config.algo.kl.offload
    layer = tokens * forward_activation_bytes(shape, itemsize)
    whole = FULL * shape.embedding
    if lora is not None:  # or a merged matrix, its float32 sum and what that is made of
        whole = max(itemsize * shape.embedding, 2 * (FULL + itemsize) * shape.hidden * shape.intermediate)
    phases = {
        GENERATION: {**beside_engine, **awake},
        PASSES: {
            **held,
            **asleep,
            **({"reference, brought back": itemsize * shape.policy_parameters} if is_brought_back else {}),
            "gathered weights": models[0].gathered,
            # Without gradients the layers' tensors are gone when the head begins.
            "the head, or a layer": max(layer, head(gradient="none")),
        },
    }
    for each in models:
        kept = update_activation_bytes(
            each.shape, itemsize, recompute=model.gradient_checkpointing, compiled=compiled
        ) + (_adapter_activation_bytes(config, shape, itemsize) if each is models[0] else 0)
        update = {**held, **each.gradients(ranks), **asleep, "gathered weights": each.gathered}
        if model.zero_stage == 1 and ranks > 1:
            update["gathered weights"] = max(each.gathered, each.whole)
            update["whole gradients"] = ranks * sum(each.gradients(ranks).values())
        update["activations"] = tokens * kept
        phases[f"{each.name} update"] = update
    phases[POLICY_UPDATE]["head"] = head(gradient="all" if lora is None else "hidden")
    engine = awake if config.rollout.engine == "vllm" else asleep
    phases[HAND_OVER] = {**beside_engine, **engine, "one whole tensor": whole}
    return phases


def _layer_weights_in_4_bits(config: RunConfig, shape: ModelShape) -> int:
    """Weights of a layer that are in 4 bits: all of its matrices, or none."""
    return shape.layer_weights if config.model.lora is not None and config.model.lora.base == "nf4" else 0


def asleep_bytes(config: RunConfig, shape: ModelShape, device: Device) -> int:
    """What the engine keeps while training runs."""
    if config.rollout.engine == "none":
        return 0
    if config.rollout.engine == "hf":
        return shape.policy_parameters * device.itemsize
    awake = engine_bytes(config, shape, device)
    return awake if config.rollout.sleep_level == 0 else min(awake, ENGINE_ASLEEP_BYTES)


def _has_reference(config: RunConfig) -> bool:
    """Whether the reference is a model of its own, and not the policy without its adapters."""
    return config.algo.kl.where != "off" and config.model.lora is None


def _adapter_activation_bytes(config: RunConfig, shape: ModelShape, itemsize: int) -> int:
    """What autograd keeps for adapters beside what it keeps of the layers, bytes a token: the input of each B."""
    lora = config.model.lora
    layers = 1 if config.model.gradient_checkpointing else shape.layers
    return 0 if lora is None else layers * itemsize * lora.rank * len(lora.target_modules)


def detect_device(config: RunConfig) -> Device:
    """The GPU that a rank of this host computes on; without one, a GPU of unknown size in the type it would use."""
    itemsize = 4 if config.model.dtype == "float32" else 2
    gpu = None if config.runtime.device == "cpu" else first_gpu()
    return Device("a GPU (none here)", itemsize, None) if gpu is None else Device(gpu[0], itemsize, gpu[1])


def fit_settings(config: RunConfig, shape: ModelShape, device: Device) -> tuple[RunConfig, MemoryPlan]:
    """The settings to run with and their plan. With `runtime.fit_memory=auto` and a known device the engine's share,
    its largest pass and its sleep level, the token budget, the places of the reference and of the optimizers' moments,
    and recomputation are chosen.
    """
    if config.runtime.fit_memory == "auto" and device.total_bytes is not None:
        config = _choose_settings(config, shape, device)
    return config, plan_memory(config, shape, device)


def require_fit(config: RunConfig, plan: MemoryPlan) -> None:
    """Refuse a run that cannot fit, unless `runtime.fit_memory` is off.

    Raises:
        ConfigError: not even one longest answer in a micro-batch fits; says how many bytes are missing and what to set.
    """
    if not plan.cannot_fit or config.runtime.fit_memory == "off":
        return
    assert plan.usable_bytes is not None, "without a device nothing is refused"
    missing = plan.floor_bytes - plan.usable_bytes
    parts = sorted(plan.phases[plan.peak_phase].items(), key=lambda entry: -entry[1])[:3]
    largest = ", ".join([plan.peak_phase, *(f"{name} {size / GB:.1f} GB" for name, size in parts)])
    raise ConfigError(
        f"runtime.fit_memory: the run cannot fit {plan.device.name}: {plan.floor_bytes / GB:.1f} GB are needed with "
        f"one longest answer in each micro-batch, {plan.usable_bytes / GB:.1f} GB are there ({missing / GB:.1f} GB "
        f"missing, most of it in: {largest}). {suggestion(config)} "
        + ("runtime.fit_memory=auto chooses by the plan. " if config.runtime.fit_memory == "check" else "")
        + "runtime.fit_memory=off tries it anyway."
    )


def fit_run(config: RunConfig, run_dir: Path, report: Callable[[Mapping[str, object]], None]) -> RunConfig:
    """The settings to start a run's workers with. On a GPU the plan is reported, and kept in `run_dir` for the report.

    Raises:
        ConfigError: the run cannot fit.
    """
    shape, device = shape_of(config.model), detect_device(config)
    if shape is None or device.total_bytes is None:
        return config
    new, plan = fit_settings(config, shape, device)
    require_fit(new, plan)
    chosen = chosen_settings(config, new)
    notes = (f"The phase that holds most is {plan.peak_phase}.", *([f"Chosen: {chosen}"] if chosen else []))
    kept: dict[str, JsonValue] = {"parts": dict(plan.phases[plan.peak_phase]), "notes": list(notes)}
    kept |= {"capacity_bytes": device.total_bytes, "device": device.name}
    write_json_atomically(run_dir / "memory_plan.json", kept)
    told = f"memory plan: {plan.peak_phase} holds most, {plan.peak_bytes / GB:.1f} GB{excess_text(plan)}"
    report({"event": "note", "text": f"{told}; chosen: {chosen}" if chosen else told})
    return new


def excess_text(plan: MemoryPlan) -> str:
    """What to say of a plan that exceeds its device, and need not fail; '' where it fits."""
    if plan.fits:
        return ""
    assert plan.usable_bytes is not None, "without a device everything fits"
    return (
        f", of which {plan.usable_bytes / GB:.1f} GB are there: a pass that runs out of memory is cut finer and "
        "done again; lower trainer.max_tokens_per_micro_batch, or set runtime.fit_memory=auto"
    )


def chosen_settings(before: RunConfig, after: RunConfig) -> str:
    """What `fitted` chose, as overrides; '' where it left all as it was."""
    old, new = (leaves(config.model_dump(mode="json")) for config in (before, after))
    return " ".join(f"{name}={format_value(value)}" for name, value in new.items() if old.get(name) != value)


def suggestion(config: RunConfig) -> str:
    """What would lower the peak, of what is not set yet."""
    found = []
    lora = config.model.lora
    if lora is not None and not lora.offload and config.rollout.engine == "vllm":
        found.append("model.lora.offload=true rollout.sleep_level=1")
    elif config.rollout.engine == "vllm" and config.rollout.sleep_level == 0:
        found.append("rollout.sleep_level=2")
    if _has_reference(config) and not config.algo.kl.offload:
        found.append("algo.kl.offload=true")
    if not (config.optim.offload and (config.critic is None or config.critic.optim.offload)):
        found.append("optim.offload=true" + ("" if config.critic is None else " critic.optim.offload=true"))
    if not config.model.gradient_checkpointing:
        found.append("model.gradient_checkpointing=true")
    if config.rollout.engine == "vllm":
        found.append(f"a rollout.memory_share below {config.rollout.memory_share:g}")
    elif config.rollout.engine == "hf":
        found.append(f"a rollout.max_num_seqs below {config.rollout.max_num_seqs}")
    if lora is None:
        fewer = "LoRA (model.lora.rank=32) "
    else:
        fewer = "" if lora.base == "nf4" else "a base in 4 bits (model.lora.base=nf4) "
    found.append(f"more workers (runtime.num_workers), {fewer}or a smaller model")
    return f"Set {', '.join(found)}."


def _choose_settings(config: RunConfig, shape: ModelShape, device: Device) -> RunConfig:
    """The first variant in which a budget of several answers fits; the last one with a budget of one."""
    for variant, least in variants(config):
        found = with_token_budget(with_memory_share(variant, shape, device), shape, device, least=least)
        if found is not None:
            return found
    least = max_sequence_tokens(config)
    return with_values(with_memory_share(variant, shape, device), {"trainer.max_tokens_per_micro_batch": least})


def variants(config: RunConfig) -> Iterator[tuple[RunConfig, int]]:
    """From the fastest to the one that needs least memory, with the token budget below which the next one is better:
    nothing waits on the host and no layer is recomputed while the engine stays awake, then while it sleeps; the
    reference, or the base under adapters, offloaded; the optimizers' moments as well; layers recomputed as well."""
    several = max(4 * max_sequence_tokens(config), TOKENS_STEP)
    has_lora, has_vllm = config.model.lora is not None, config.rollout.engine == "vllm"
    moments = ["optim.offload", *(["critic.optim.offload"] if config.critic is not None else [])]
    offloads = [*moments, "algo.kl.offload", *(["model.lora.offload"] if has_lora else [])]
    variant = with_values(config, {**dict.fromkeys(offloads, False), "model.gradient_checkpointing": False})
    if has_vllm:
        yield with_values(variant, {"rollout.sleep_level": 0}), max(several, ENOUGH_TOKENS)
        variant = with_values(variant, {"rollout.sleep_level": 2})
    yield variant, several
    variant = with_values(variant, {"algo.kl.offload": _has_reference(config)})
    if has_lora and has_vllm:
        variant = with_values(variant, {"model.lora.offload": True, "rollout.sleep_level": 1})
    yield variant, several
    variant = with_values(variant, dict.fromkeys(moments, True))
    yield variant, several
    yield with_values(variant, {"model.gradient_checkpointing": True}), several


def with_memory_share(config: RunConfig, shape: ModelShape, device: Device) -> RunConfig:
    """The engine gets what every answer at its longest would take, as far as it is free beside what is always held; if
    that is less, its passes are short."""
    if config.rollout.engine != "vllm":
        return config
    assert device.total_bytes is not None
    parts = plan_memory(config, shape, device).phases[HAND_OVER]
    others = sum(size for name, size in parts.items() if name != "engine")
    free = available_bytes(device) - others
    wanted = full_engine_bytes(config, shape, device.itemsize, config.concurrent_responses)
    share = min(wanted, free) / device.total_bytes
    down = math.floor(1_000 * share) / 1_000  # rounded up, no budget would fit beside it
    given = config.rollout.max_batched_tokens
    if free < wanted and given is not None:  # left to vLLM it is no larger
        short = max(SHORT_PASS_TOKENS, config.rollout.max_num_seqs)
        config = with_values(config, {"rollout.max_batched_tokens": min(given, short)})
    return with_values(config, {"rollout.memory_share": min(max(down, 0.05), 0.95)})


def with_token_budget(config: RunConfig, shape: ModelShape, device: Device, *, least: int) -> RunConfig | None:
    """The largest token budget whose plan fits; None where `least` tokens do not."""
    for budget in range(max(MAX_MICRO_BATCH_TOKENS, least), least - 1, -TOKENS_STEP):
        found = with_values(config, {"trainer.max_tokens_per_micro_batch": budget})
        if plan_memory(found, shape, device).peak_bytes <= available_bytes(device):
            return found
    return None


def available_bytes(device: Device) -> int:
    """Bytes of a device that chosen settings may take."""
    assert device.total_bytes is not None
    return device.total_bytes - CONTEXT_BYTES - round(FREE_SHARE * device.total_bytes)


def with_values(section: S, values: Mapping[str, object]) -> S:
    """The settings with other values by dotted key; nothing is validated again."""
    for key, value in values.items():
        name, _, rest = key.partition(".")
        section = section.model_copy(
            update={name: with_values(getattr(section, name), {rest: value}) if rest else value}
        )
    return section
