"""Bytes of GPU memory that each phase of a step holds on one rank, from the settings alone. Pure functions, no torch.

Weights, gradients and moments are exact; activations follow the tensors that autograd keeps in a Llama layer, plain or
compiled, times one measured factor. All measured constants stand here, at the top:
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rlcore.config import RunConfig
from rlcore.config.algo import OFFLOAD_PIECE_BYTES
from rlcore.models.shape import ModelShape

CONTEXT_BYTES = 1_000_000_000
"""What a CUDA context, its libraries and NCCL take beside all tensors."""
ENGINE_FIXED_BYTES = 1_500_000_000
"""vLLM's CUDA graphs, buffers and the activations of its largest pass."""
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

GENERATION, PASSES, POLICY_UPDATE, CRITIC_UPDATE, OPTIMIZER_STEP, HAND_OVER = (
    "generation",
    "log-probabilities",
    "policy update",
    "critic update",
    "optimizer step",
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
    notes: tuple[str, ...] = ()

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
        """What the device has for tensors."""
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


def longest_tokens(config: RunConfig) -> int:
    """Tokens of the longest prompt and answer together."""
    return config.filter.max_prompt_tokens + config.rollout.max_response_tokens


def micro_batch_tokens(config: RunConfig) -> int:
    """Most tokens of one forward and backward: the budget, one longest answer at least, and no more than there are."""
    sequences = config.trainer.mini_batch_size * config.rollout.samples_per_prompt
    per_rank = -(-sequences // config.runtime.num_workers) * longest_tokens(config)
    return min(max(config.trainer.max_tokens_per_micro_batch, longest_tokens(config)), per_rank)


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


def pass_activation_bytes(shape: ModelShape, itemsize: int) -> int:
    """Most that a forward without gradient holds, bytes a token: one layer's feed-forward part beside its input."""
    return round(ACTIVATION_FACTOR * ((FULL + 2 * itemsize) * shape.hidden + 3 * itemsize * shape.intermediate))


def head_bytes(
    shape: ModelShape, itemsize: int, chunk_tokens: int, tokens: int, *, gradient: bool, compiled: bool = False
) -> int:
    """The chunked head: one chunk of float32 logits; with a gradient its own chunk of the logits' gradient, and two
    float32 matrices as large as its weight, the sum over chunks and the product that is added to it."""
    rows = min(chunk_tokens, tokens)
    logits = rows * shape.vocab * FULL
    beside = 0 if compiled else min(HEAD_TEMPORARIES_BYTES, logits)
    hidden = tokens * shape.hidden * itemsize
    if not gradient:
        return logits + beside + hidden
    own = rows * shape.vocab * itemsize if compiled else 0  # uncompiled it takes the logits' memory
    return logits + beside + own + 2 * FULL * shape.embedding + 2 * hidden


def gathered_bytes(layer_parameters: int, root_parameters: int, itemsize: int) -> int:
    """Whole weights in the compute type that FSDP2 holds during a pass: the root's, and a few layers'."""
    return itemsize * (root_parameters + PREFETCHED_LAYERS * layer_parameters)


def engine_bytes(config: RunConfig, shape: ModelShape, device: Device) -> int:
    """The awake engine: vLLM's share of the device (without a device: what it would want); the hf engine's weights and
    cache, and what is larger, all prompts in one pass or a token drawn for each answer (`rlcore.rollout.hf`)."""
    if config.rollout.engine == "vllm":
        if device.total_bytes is not None:
            return round(config.rollout.memory_share * device.total_bytes)
        return wanted_engine_bytes(config, shape, device.itemsize)
    return (
        shape.policy_parameters * device.itemsize
        + cache_bytes(config, shape, device.itemsize)
        + max(
            _together(config) * shape.vocab * SAMPLING_BYTES,
            -(-_together(config) // config.rollout.samples_per_prompt)
            * config.filter.max_prompt_tokens
            * pass_activation_bytes(shape, device.itemsize),
        )
    )


def cache_bytes(config: RunConfig, shape: ModelShape, itemsize: int) -> int:
    """Keys and values of all answers that are written together, each at its longest; of the heads of one rank."""
    heads = -(-shape.kv_heads // config.rollout.tensor_parallel_size)
    per_token = shape.kv_bytes_per_token(itemsize) * heads // shape.kv_heads
    return _together(config) * longest_tokens(config) * per_token


def _together(config: RunConfig) -> int:
    """Answers that an engine writes at one time: those of all ranks that share it."""
    num_engines = config.runtime.num_workers // config.rollout.tensor_parallel_size
    answers = -(-config.trainer.batch_size * config.rollout.samples_per_prompt // num_engines)
    return min(config.rollout.max_num_seqs, answers)


def wanted_engine_bytes(config: RunConfig, shape: ModelShape, itemsize: int) -> int:
    """vLLM with room for every answer at its longest: one rank's part of its engine."""
    weights = shape.policy_parameters * itemsize // config.rollout.tensor_parallel_size
    return weights + cache_bytes(config, shape, itemsize) + ENGINE_FIXED_BYTES


def plan_memory(config: RunConfig, shape: ModelShape, device: Device, *, tokens: int | None = None) -> MemoryPlan:
    """Every phase of a step on one rank; `tokens` of the largest micro-batch, where they are known."""
    tokens = tokens or micro_batch_tokens(config)
    phases = _phases(config, shape, device, tokens)
    finest = _phases(config, shape, device, min(tokens, longest_tokens(config)))
    return MemoryPlan(device, phases, max(sum(parts.values()) for parts in finest.values()))


def _phases(config: RunConfig, shape: ModelShape, device: Device, tokens: int) -> dict[str, dict[str, int]]:
    held = held_bytes(config, shape, device.itemsize)
    policy_gradients, critic_gradients = gradient_bytes(config, shape)
    policy_gathered = gathered_bytes(shape.layer_parameters, shape.root_parameters, device.itemsize)
    awake = {"engine": engine_bytes(config, shape, device)}
    asleep = {"engine asleep": asleep_bytes(config, shape, device)}
    model, compiled = config.model, is_compiled(config, device.itemsize)

    def head(*, gradient: bool) -> int:
        chunk = model.head_chunk_tokens
        return head_bytes(shape, device.itemsize, chunk, tokens, gradient=gradient, compiled=compiled)

    reference = {"reference, brought back": device.itemsize * shape.policy_parameters} if _offloads(config) else {}
    layer = tokens * pass_activation_bytes(shape, device.itemsize)
    passes = {
        "gathered weights": policy_gathered,
        "the head, or a layer": max(layer, head(gradient=False)),  # no gradient: the layers' are gone when it begins
    }
    recompute = model.gradient_checkpointing
    kept = update_activation_bytes(shape, device.itemsize, recompute=recompute, compiled=compiled)
    update = {
        "gathered weights": policy_gathered,
        "activations": tokens * kept,
        "head": head(gradient=model.lora is None),
    }
    phases = {
        GENERATION: {**held, **awake},
        PASSES: {**held, **asleep, **reference, **passes},
        POLICY_UPDATE: {**held, **policy_gradients, **asleep, **update},
        HAND_OVER: {
            **held,
            **(awake if config.rollout.engine == "vllm" else asleep),
            "one whole tensor": FULL * shape.embedding,
        },
    }
    if config.critic is not None:
        phases[CRITIC_UPDATE] = {
            **held,
            **critic_gradients,
            **asleep,
            "gathered weights": gathered_bytes(shape.layer_parameters, shape.embedding, device.itemsize),
            "activations": update["activations"],
        }
    steps = [
        {**held, **gradients, **asleep, "moments, a piece brought back": piece}
        for gradients, piece in zip(
            (policy_gradients, critic_gradients), _brought_back_bytes(config, shape), strict=True
        )
        if piece
    ]
    if steps:
        phases[OPTIMIZER_STEP] = max(steps, key=lambda parts: sum(parts.values()))
    return phases


def held_bytes(config: RunConfig, shape: ModelShape, itemsize: int) -> dict[str, int]:
    """What lies on the device in every phase."""
    ranks, trained = config.runtime.num_workers, _trained(config, shape)
    frozen = 0 if config.model.lora is None else shape.policy_parameters
    held = {
        "policy: float32 weights": FULL * (trained + frozen) // ranks,
    }
    if not config.optim.offload:
        held["policy: moments"] = MOMENTS * trained // ranks
    if config.algo.kl.where != "off" and not config.algo.kl.offload:
        held["reference"] = itemsize * shape.policy_parameters
    if config.critic is not None:
        held["critic: float32 weights"] = FULL * shape.critic_parameters // ranks
        if not config.critic.optim.offload:
            held["critic: moments"] = MOMENTS * shape.critic_parameters // ranks
    if config.rollout.asks_for_short_steps:
        # of the graphs around vLLM's own, which are not in its share and do not sleep
        held["engine: logits of short steps"] = FULL * config.rollout.max_num_seqs * shape.vocab
    return held


def gradient_bytes(config: RunConfig, shape: ModelShape) -> tuple[dict[str, int], dict[str, int]]:
    """Float32 gradients of the policy and of the critic; each goes with its optimizer's step."""
    ranks = config.runtime.num_workers
    critic = {} if config.critic is None else {"critic: gradients": FULL * shape.critic_parameters // ranks}
    return {"policy: gradients": FULL * _trained(config, shape) // ranks}, critic


def _brought_back_bytes(config: RunConfig, shape: ModelShape) -> tuple[int, int]:
    """Most moments of the policy's and of the critic's offloaded optimizer that are on the device at one time: a piece,
    or one larger tensor; 0 where they are not offloaded."""
    ranks = config.runtime.num_workers
    policy = critic = 0
    if config.optim.offload:
        largest = 0 if config.model.lora is not None else MOMENTS * shape.embedding // ranks
        policy = min(max(largest, OFFLOAD_PIECE_BYTES), MOMENTS * _trained(config, shape) // ranks)
    if config.critic is not None and config.critic.optim.offload:
        whole = MOMENTS * shape.critic_parameters // ranks
        critic = min(max(MOMENTS * shape.embedding // ranks, OFFLOAD_PIECE_BYTES), whole)
    return policy, critic


def _trained(config: RunConfig, shape: ModelShape) -> int:
    return shape.policy_parameters if config.model.lora is None else shape.adapter_parameters(config.model.lora)


def asleep_bytes(config: RunConfig, shape: ModelShape, device: Device) -> int:
    """What the engine keeps while training runs."""
    if config.rollout.engine == "hf":
        return shape.policy_parameters * device.itemsize
    awake = engine_bytes(config, shape, device)
    return awake if config.rollout.sleep_level == 0 else min(awake, ENGINE_ASLEEP_BYTES)


def _offloads(config: RunConfig) -> bool:
    return config.algo.kl.where != "off" and config.algo.kl.offload
