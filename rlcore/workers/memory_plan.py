"""Plans of the GPU memory on one rank in each phase of a step, and the choice of settings that make a run fit. This
module does not import torch. The bytes of weights, gradients and moments are exact. Activations are estimated as the
tensors that autograd keeps in a plain or compiled Llama layer, multiplied by a measured factor."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from rlcore.config import RunConfig
from rlcore.config.base import Section, leaves
from rlcore.config.problems import format_value
from rlcore.errors import ConfigError
from rlcore.models.shape import ModelShape, critic_shape, shape_of, teacher_shapes
from rlcore.rollout.vllm import ENGINE_FIXED_BYTES
from rlcore.tracking.lineage import first_gpu

CONTEXT_BYTES = 1_000_000_000  # memory of a CUDA context, its libraries and NCCL
ENGINE_ASLEEP_BYTES = 600_000_000  # memory of vLLM at sleep levels 1 and 2
ACTIVATION_FACTOR = 1.05
"""The factor by which the counted bytes of activations are multiplied. For Llama-3.2-1B in bfloat16, 14,744 tokens took
26.2 GB, where the count without this factor is 25.9 GB. With `model.compile`, 24,711 tokens took 29.7 to 31.2 GB, where
the count is 30.4 GB (`benchmarks/baselines/NVIDIA_H200.json`)."""
PREFETCHED_LAYERS = 2  # number of layers with gathered weights under FSDP2: the current layer and the prefetched one
SAMPLING_BYTES = 24
"""The bytes that the hf engine needs to sample, per response and vocabulary entry: 2 float32 and 2 float64 numbers."""
FULL, MOMENTS = 4, 8  # bytes of a float32 weight or gradient, and of the two AdamW moments of a weight
NF4 = 0.5 + 4 / 64  # bytes of a 4-bit weight, with its share of one float32 scale per block of 64

TOKENS_STEP = 1_024  # step between the token budgets that are tried
MAX_MICRO_BATCH_TOKENS = 65_536  # largest token budget that is tried. Larger micro-batches gain nothing
ENOUGH_TOKENS = 16_384  # smallest token budget with which the engine stays awake
SHORT_PASS_TOKENS = 8_192
"""The maximum number of tokens in a vLLM pass if the cache cannot hold all responses. A longer pass takes memory from
the cache. For example, a 7B model in 24 GB took 17.9 s for 512 responses with this limit, but 77 s with passes of
32,768 tokens."""
FREE_SHARE = 0.08
"""The share of the device's memory that automatic settings leave free for inaccuracies of the plan and for
fragmentation. Fragmentation took 7 to 9% on an H200."""
GB = 1e9

S = TypeVar("S", bound=Section)

FROZEN_BASE = "policy: frozen base"
GENERATION, PASSES, WEIGHT_SYNC = "generation", "log-probabilities", "weight sync"
POLICY_UPDATE, CRITIC_UPDATE = "policy update", "critic update"


@dataclass(frozen=True, slots=True)
class Device:
    """The device of a rank. `itemsize`: the bytes of the compute type. `total_bytes`: None if unknown."""

    name: str
    itemsize: int
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The planned bytes of one rank by phase and tensor. `floor_bytes`: the peak with one sequence per micro-batch."""

    device: Device
    phases: Mapping[str, Mapping[str, int]]
    floor_bytes: int

    @property
    def peak_phase(self) -> str:
        """The phase with the most memory."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak_bytes(self) -> int:
        """The bytes of tensors in the peak phase."""
        return sum(self.phases[self.peak_phase].values())

    @property
    def usable_bytes(self) -> int | None:
        """The bytes of the device that tensors can use, or None if unknown."""
        total = self.device.total_bytes
        return None if total is None else max(0, total - CONTEXT_BYTES)

    @property
    def fits(self) -> bool:
        """True if the device has enough memory for the planned peak, or if the size of its memory is unknown."""
        return self.usable_bytes is None or self.peak_bytes <= self.usable_bytes

    @property
    def cannot_fit(self) -> bool:
        """True if the run needs more memory than the device has, even with the smallest micro-batches."""
        return self.usable_bytes is not None and self.floor_bytes > self.usable_bytes


def max_sequence_tokens(config: RunConfig) -> int:
    """Return the largest number of tokens of a prompt and its response together."""
    return config.filter.max_prompt_tokens + config.rollout.max_response_tokens


def micro_batch_tokens(config: RunConfig) -> int:
    """Return the largest number of tokens in a micro-batch. It is the token budget or the length of the longest
    sequence, whichever is larger, but at most this rank's share of a mini-batch."""
    sequences = config.trainer.mini_batch_size * config.rollout.samples_per_prompt
    per_rank = -(-sequences // config.runtime.num_workers) * max_sequence_tokens(config)
    return min(max(config.trainer.max_tokens_per_micro_batch, max_sequence_tokens(config)), per_rank)


def layer_activation_bytes(shape: ModelShape, itemsize: int, *, compiled: bool = False) -> int:
    """Return the bytes per token that autograd keeps for one layer, not multiplied by `ACTIVATION_FACTOR`. A plain
    layer keeps the float32 input and the output of both norms, the inputs and outputs of attention and feed-forward
    parts, and one float32 softmax normalizer for each attention head. A compiled layer keeps no activation of the gate,
    and one float32 scale instead of each norm's input."""
    hidden, query, kv, inner = shape.hidden, shape.query_width, shape.kv_width, shape.intermediate
    norms = 2 * (itemsize * hidden + FULL) if compiled else 2 * (FULL * hidden + itemsize * hidden)
    inputs = 2 * itemsize * hidden
    attention = itemsize * (2 * query + 2 * kv) + FULL * shape.heads
    return norms + inputs + attention + (3 if compiled else 4) * itemsize * inner


def update_activation_bytes(
    shape: ModelShape, itemsize: int, *, recompute: bool, offload: bool = False, compiled: bool = False
) -> int:
    """Return the bytes per token that a forward pass keeps for the backward pass. With `recompute`, it keeps the inputs
    of all layers, and the activations and feed-forward gradients of one layer. If `offload` is also set, it keeps the
    inputs of only one layer. With `recompute`, 131,040 tokens of a 1.5B model took 50.2 GB on an H200. The plan says
    49.2 GB."""
    layer = layer_activation_bytes(shape, itemsize, compiled=compiled)
    ends = (FULL + 2 * itemsize) * shape.hidden  # embedding's output, last norm
    inputs = (1 if offload else shape.layers) * itemsize * shape.hidden
    gradients = 3 * itemsize * shape.intermediate  # otherwise they replace activations of later layers
    kept = inputs + layer + gradients if recompute else shape.layers * layer
    return round(ACTIVATION_FACTOR * (kept + ends))


def forward_activation_bytes(shape: ModelShape, itemsize: int) -> int:
    """Return the peak bytes per token of a forward pass without gradient. The peak is in a feed-forward layer."""
    return round(ACTIVATION_FACTOR * ((FULL + 2 * itemsize) * shape.hidden + 3 * itemsize * shape.intermediate))


def head_bytes(
    shape: ModelShape, itemsize: int, chunk_tokens: int, tokens: int, *, gradient: Literal["none", "hidden", "all"]
) -> int:
    """Return the bytes of the output head, which computes one chunk of float32 logits at a time. `gradient`: `none`
    counts logits and hidden states. `hidden` adds the gradients of both. `all` also adds two float32 matrices: the
    accumulated gradient of the head's weight, and the current chunk's part of this gradient."""
    rows = min(chunk_tokens, tokens)
    logits = rows * shape.vocab * FULL
    hidden = tokens * shape.hidden * itemsize
    if gradient == "none":
        return logits + hidden
    own = rows * shape.vocab * itemsize
    return logits + own + 2 * hidden + (2 * FULL * shape.embedding if gradient == "all" else 0)


def engine_bytes(config: RunConfig, shape: ModelShape, device: Device) -> int:
    """Return the bytes of the engine while it is awake, as in generation. vLLM holds weights and cache within its share
    of the device's memory. The engine hf holds weights, cache, and the temporary tensors of sampling or of one pass
    over all prompts, whichever is larger."""
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


def cache_bytes(config: RunConfig, shape: ModelShape, itemsize: int, responses: int) -> int:
    """Return the bytes of one rank's KV cache for `responses` responses of maximum length."""
    heads = -(-shape.kv_heads // config.rollout.tensor_parallel_size)
    per_token = shape.kv_bytes_per_token(itemsize) * heads // shape.kv_heads
    return responses * max_sequence_tokens(config) * per_token


def full_engine_bytes(config: RunConfig, shape: ModelShape, itemsize: int, responses: int) -> int:
    """Return the bytes that vLLM needs on one rank for `responses` concurrent responses of maximum length."""
    weights = shape.policy_parameters * itemsize // config.rollout.tensor_parallel_size
    return weights + cache_bytes(config, shape, itemsize, responses) + ENGINE_FIXED_BYTES


def plan_memory(config: RunConfig, shape: ModelShape, device: Device, *, tokens: int | None = None) -> MemoryPlan:
    """Return the memory plan for all phases of a step on one rank. `tokens`: the number of tokens in the largest
    micro-batch, by default from the settings."""
    tokens = tokens or micro_batch_tokens(config)
    phases = _phases(config, shape, device, tokens)
    finest = _phases(config, shape, device, min(tokens, max_sequence_tokens(config)))
    return MemoryPlan(device, phases, max(sum(parts.values()) for parts in finest.values()))


@dataclass(frozen=True, slots=True)
class _TrainedModel:
    """The policy or critic on one rank. `parameters`: the number of trained parameters. `gathered`: the bytes of the
    weights that FSDP2 gathers at a time, in the compute type. `whole`: the bytes of all weights."""

    name: str
    shape: ModelShape
    parameters: int
    offloads: bool
    gathered: int
    whole: int


def _trained_models(config: RunConfig, shape: ModelShape, itemsize: int) -> list[_TrainedModel]:
    lora, in_4_bits = config.model.lora, _layer_weights_in_4_bits(config, shape)
    gathered = itemsize * (shape.root_parameters + PREFETCHED_LAYERS * (shape.layer_parameters - in_4_bits))
    whole = itemsize * (shape.policy_parameters - shape.layers * in_4_bits)
    parameters = shape.policy_parameters if lora is None else shape.adapter_parameters(lora)
    policy = _TrainedModel("policy", shape, parameters, config.optim.offload, gathered, whole)
    if config.critic is None:
        return [policy]
    critic = critic_shape(config, shape)
    gathered = itemsize * (critic.embedding + PREFETCHED_LAYERS * critic.layer_parameters)
    parameters, offloads = critic.critic_parameters, config.critic.optim.offload
    return [policy, _TrainedModel("critic", critic, parameters, offloads, gathered, itemsize * parameters)]


def resident_bytes(config: RunConfig, shape: ModelShape, itemsize: int) -> dict[str, int]:
    """Return the bytes of the tensors that are on the device in every phase."""
    ranks, held = config.runtime.num_workers, {}
    for model in _trained_models(config, shape, itemsize):
        held[f"{model.name}: float32 weights"] = FULL * model.parameters // ranks
        if not model.offloads:
            held[f"{model.name}: moments"] = MOMENTS * model.parameters // ranks
    if config.model.lora is not None:
        held[FROZEN_BASE] = frozen_bytes(shape, itemsize, config.model.lora.base, ranks)
    if _has_reference(config) and not config.algo.kl.offload:
        held["reference"] = itemsize * shape.policy_parameters
    if (teacher := config.algo.teacher) is not None and not teacher.offload:
        held["teacher"] = sum(frozen_bytes(each, itemsize, teacher.base) for each in teacher_shapes(config, shape))
    return held


def frozen_bytes(shape: ModelShape, itemsize: int, base: Literal["native", "nf4"], ranks: int = 1) -> int:
    """Return the bytes of a frozen model's weights on one of `ranks` ranks. With `base="nf4"`, each rank has the 4-bit
    weights of all layers."""
    in_4_bits = shape.layers * shape.layer_weights if base == "nf4" else 0
    return round(NF4 * in_4_bits) + itemsize * (shape.policy_parameters - in_4_bits) // ranks


def _phases(config: RunConfig, shape: ModelShape, device: Device, tokens: int) -> dict[str, dict[str, int]]:
    model, itemsize, ranks = config.model, device.itemsize, config.runtime.num_workers
    lora, compiled = model.lora, model.compile and model.attention != "sdpa" and itemsize < FULL  # needs a flash kernel
    models, held = _trained_models(config, shape, itemsize), resident_bytes(config, shape, itemsize)
    awake = {"engine": engine_bytes(config, shape, device)}
    asleep = {"engine asleep": asleep_bytes(config, shape, device)}
    offloads_base = lora is not None and lora.offload
    with_engine = {name: size for name, size in held.items() if not (offloads_base and name == FROZEN_BASE)}
    head = partial(head_bytes, shape, itemsize, model.head_chunk_tokens, tokens)
    teacher, teachers = config.algo.teacher, teacher_shapes(config, shape)
    reloaded = {}
    if _has_reference(config) and config.algo.kl.offload:
        reloaded["reference, brought back"] = itemsize * shape.policy_parameters
    if teacher is not None and teacher.offload:
        reloaded["teacher, brought back"] = max(frozen_bytes(each, itemsize, teacher.base) for each in teachers)
    layer = tokens * max(forward_activation_bytes(each, itemsize) for each in [shape, *teachers])
    whole = FULL * shape.embedding
    if lora is not None:  # or a merged matrix, its float32 sum and its terms
        whole = max(itemsize * shape.embedding, 2 * (FULL + itemsize) * shape.hidden * shape.intermediate)
    phases = {
        GENERATION: {**with_engine, **awake},
        PASSES: {
            **held,
            **asleep,
            **reloaded,
            "gathered weights": models[0].gathered,
            # Without gradients the layers' tensors are freed before the head.
            "the head, or a layer": max(layer, head(gradient="none")),
        },
    }
    for each in models:
        kept = update_activation_bytes(
            each.shape,
            itemsize,
            recompute=model.gradient_checkpointing,
            offload=model.offload_activations,
            compiled=compiled,
        )
        gradients = FULL * each.parameters // ranks
        update = {**held, f"{each.name}: gradients": gradients, **asleep, "gathered weights": each.gathered}
        if model.zero_stage == 1 and ranks > 1:
            update["gathered weights"] = max(each.gathered, each.whole)
            update["whole gradients"] = ranks * gradients
        update["activations"] = tokens * kept
        phases[f"{each.name} update"] = update
    phases[POLICY_UPDATE]["head"] = head(gradient="all" if lora is None else "hidden")
    engine = awake if config.rollout.engine == "vllm" else asleep
    phases[WEIGHT_SYNC] = {**with_engine, **engine, "one whole tensor": whole}
    return phases


def _layer_weights_in_4_bits(config: RunConfig, shape: ModelShape) -> int:
    return shape.layer_weights if config.model.lora is not None and config.model.lora.base == "nf4" else 0


def asleep_bytes(config: RunConfig, shape: ModelShape, device: Device) -> int:
    """Return the bytes that the engine occupies during training."""
    if config.rollout.engine == "none":
        return 0
    if config.rollout.engine == "hf":
        return shape.policy_parameters * device.itemsize
    awake = engine_bytes(config, shape, device)
    return awake if config.rollout.sleep_level == 0 else min(awake, ENGINE_ASLEEP_BYTES)


def _has_reference(config: RunConfig) -> bool:
    return config.algo.kl.where != "off" and config.model.lora is None


def detect_device(config: RunConfig) -> Device:
    """Return this host's GPU, or a GPU of unknown size if the host has none or `runtime.device` is `cpu`."""
    itemsize = 4 if config.model.dtype == "float32" else 2
    gpu = None if config.runtime.device == "cpu" else first_gpu()
    return Device("a GPU (none here)", itemsize, None) if gpu is None else Device(gpu[0], itemsize, gpu[1])


def fit_settings(config: RunConfig, shape: ModelShape, device: Device) -> tuple[RunConfig, MemoryPlan]:
    """Return the settings to run with, and their memory plan. `runtime.fit_memory=auto` chooses the token budget,
    offloading, recomputation, and three settings of the engine: memory share, maximum tokens per pass and sleep level.
    Otherwise, or for a device of unknown size, the settings stay unchanged."""
    if config.runtime.fit_memory != "auto" or device.total_bytes is None:
        return config, plan_memory(config, shape, device)
    for variant, least in variants(config):
        found = with_token_budget(with_memory_share(variant, shape, device), shape, device, least=least)
        if found is not None:
            return found, plan_memory(found, shape, device)
    longest = max_sequence_tokens(config)  # none fits several sequences per micro-batch
    last = with_values(with_memory_share(variant, shape, device), {"trainer.max_tokens_per_micro_batch": longest})
    return last, plan_memory(last, shape, device)


def require_fit(config: RunConfig, plan: MemoryPlan) -> None:
    """Raise ConfigError if the GPU has too little memory even with one sequence per micro-batch, unless
    `runtime.fit_memory` is off."""
    if not plan.cannot_fit or config.runtime.fit_memory == "off":
        return
    assert plan.usable_bytes is not None, "without a device nothing is refused"
    missing = plan.floor_bytes - plan.usable_bytes
    parts = sorted(plan.phases[plan.peak_phase].items(), key=lambda entry: -entry[1])[:3]
    largest = ", ".join([plan.peak_phase, *(f"{name} {size / GB:.1f} GB" for name, size in parts)])
    chosen = "" if config.runtime.fit_memory == "auto" else "runtime.fit_memory=auto, which chooses by the plan, "
    lora = config.model.lora
    fewer = "" if lora and lora.base == "nf4" else "LoRA over 4 bits (model.lora.rank=32 model.lora.base=nf4) "
    raise ConfigError(
        f"runtime.fit_memory: the run cannot fit {plan.device.name}: {plan.floor_bytes / GB:.1f} GB are needed with "
        f"one longest sequence in each micro-batch, {plan.usable_bytes / GB:.1f} GB are there ({missing / GB:.1f} GB "
        f"missing, most of it in: {largest}). Set {chosen}more workers (runtime.num_workers), {fewer}or a "
        "smaller model. runtime.fit_memory=off tries it anyway."
    )


def fit_run(config: RunConfig, report: Callable[[Mapping[str, object]], None]) -> RunConfig:
    """Fit a run's settings to the GPU, if the size of the GPU is known, and report the memory plan. Return the
    settings. Raises ConfigError if the run cannot fit."""
    shape, device = shape_of(config.model), detect_device(config)
    if shape is None or device.total_bytes is None:
        return config
    new, plan = fit_settings(config, shape, device)
    require_fit(new, plan)
    text = f"memory plan: {plan.peak_phase} holds most, {plan.peak_bytes / GB:.1f} GB"
    if not plan.fits:
        assert plan.usable_bytes is not None, "without a device everything fits"
        text += (
            f", of which {plan.usable_bytes / GB:.1f} GB are there: a pass that runs out of memory is repeated "
            "with smaller micro-batches; lower trainer.max_tokens_per_micro_batch, or set runtime.fit_memory=auto"
        )
    if chosen := chosen_settings(config, new):
        text += f"; chosen: {chosen}"
    report({"event": "note", "text": text})
    return new


def chosen_settings(before: RunConfig, after: RunConfig) -> str:
    """Return the settings that `fit_settings` changed, as command-line overrides such as `name=value`."""
    old, new = (leaves(config.model_dump(mode="json")) for config in (before, after))
    return " ".join(f"{name}={format_value(value)}" for name, value in new.items() if old.get(name) != value)


def variants(config: RunConfig) -> Iterator[tuple[RunConfig, int]]:
    """Yield variants of the settings, each with its smallest acceptable token budget. In the first and fastest variant,
    nothing is offloaded or recomputed, and vLLM stays awake. Each later variant adds one saving: vLLM sleeps, frozen
    models are offloaded, moments are offloaded, layers are recomputed, inputs of layers are offloaded."""
    several = max(4 * max_sequence_tokens(config), TOKENS_STEP)
    has_lora, has_vllm = config.model.lora is not None, config.rollout.engine == "vllm"
    moments = ["optim.offload", *(["critic.optim.offload"] if config.critic is not None else [])]
    offloads = [*moments, "algo.kl.offload", *(["model.lora.offload"] if has_lora else [])]
    teacher = ["algo.teacher.offload"] if config.algo.teacher and config.algo.teacher.base == "native" else []
    recompute, offload = "model.gradient_checkpointing", "model.offload_activations"
    variant = with_values(config, dict.fromkeys([*offloads, *teacher, recompute, offload], False))
    if has_vllm:
        yield with_values(variant, {"rollout.sleep_level": 0}), max(several, ENOUGH_TOKENS)
        variant = with_values(variant, {"rollout.sleep_level": 2})
    yield variant, several
    variant = with_values(variant, {"algo.kl.offload": _has_reference(config), **dict.fromkeys(teacher, True)})
    if has_lora and has_vllm:
        variant = with_values(variant, {"model.lora.offload": True, "rollout.sleep_level": 1})
    yield variant, several
    variant = with_values(variant, dict.fromkeys(moments, True))
    yield variant, several
    yield with_values(variant, {recompute: True}), several
    yield with_values(variant, {recompute: True, offload: True}), several


def with_memory_share(config: RunConfig, shape: ModelShape, device: Device) -> RunConfig:
    """Return the settings with a memory share that lets vLLM hold all responses at maximum length. If there is not
    enough free memory for this, vLLM gets all free memory. In this case, `rollout.max_batched_tokens` is also reduced,
    unless it is None."""
    if config.rollout.engine != "vllm":
        return config
    assert device.total_bytes is not None
    parts = plan_memory(config, shape, device).phases[WEIGHT_SYNC]
    others = sum(size for name, size in parts.items() if name != "engine")
    free = available_bytes(device) - others
    wanted = full_engine_bytes(config, shape, device.itemsize, config.concurrent_responses)
    share = min(wanted, free) / device.total_bytes
    down = math.floor(1_000 * share) / 1_000  # rounded up, no token budget would fit
    max_batched = config.rollout.max_batched_tokens
    if free < wanted and max_batched is not None:  # vLLM's default is no larger
        short = max(SHORT_PASS_TOKENS, config.rollout.max_num_seqs)
        config = with_values(config, {"rollout.max_batched_tokens": min(max_batched, short)})
    return with_values(config, {"rollout.memory_share": min(max(down, 0.05), 0.95)})


def with_token_budget(config: RunConfig, shape: ModelShape, device: Device, *, least: int) -> RunConfig | None:
    """Return the settings with the largest token budget whose plan fits. Budgets below `least` are not tried. Return
    None if no plan fits."""
    for budget in range(max(MAX_MICRO_BATCH_TOKENS, least), least - 1, -TOKENS_STEP):
        found = with_values(config, {"trainer.max_tokens_per_micro_batch": budget})
        if plan_memory(found, shape, device).peak_bytes <= available_bytes(device):
            return found
    return None


def available_bytes(device: Device) -> int:
    """Return the bytes of the device that automatically chosen settings can use: all but the CUDA context and the share
    `FREE_SHARE`."""
    assert device.total_bytes is not None
    return device.total_bytes - CONTEXT_BYTES - round(FREE_SHARE * device.total_bytes)


def with_values(section: S, values: Mapping[str, object]) -> S:
    """Return a copy of the settings with the new `values`, which have dotted keys. The values are not validated."""
    for key, value in values.items():
        name, _, rest = key.partition(".")
        section = section.model_copy(
            update={name: with_values(getattr(section, name), {rest: value}) if rest else value}
        )
    return section
