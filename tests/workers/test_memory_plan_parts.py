"""Each part of a memory plan by an independent count, for a model with distinct dimensions."""

from dataclasses import replace

import pytest

from rlcore.config.model import PUBLISHED
from rlcore.models.shape import shape_from_config
from rlcore.workers import memory_plan as planning
from rlcore.workers.memory_plan import (
    ACTIVATION_FACTOR,
    CRITIC_UPDATE,
    ENGINE_ASLEEP_BYTES,
    ENGINE_FIXED_BYTES,
    FROZEN_BASE,
    GENERATION,
    PASSES,
    POLICY_UPDATE,
    WEIGHT_SYNC,
    Device,
    plan_memory,
)
from tests.helpers.memory_plans import (
    CACHED,
    CARD,
    CHUNK,
    CRITIC,
    HEADS,
    HF,
    INNER,
    KV,
    LAYER,
    LAYERS,
    LONGEST,
    MATRICES,
    NO_CRITIC,
    POLICY,
    QUERY,
    ROOT,
    SHAPE,
    TOKENS,
    UNKNOWN,
    VOCAB,
    H,
    settings,
)


def saved_bytes(*, recompute: bool = False, offload: bool = False, compiled: bool = False) -> int:
    """Return bytes per token kept for backward, tensor by tensor."""
    norms = 2 * (2 * H + 4) if compiled else 2 * (4 * H + 2 * H)
    attention = 2 * H + 2 * 2 * KV + 2 * 2 * QUERY + 4 * HEADS  # input; key, value; query, output; normalizer
    feed_forward = 2 * H + (3 if compiled else 4) * 2 * INNER
    layer = norms + attention + feed_forward
    of_layers = 2 * H if offload else LAYERS * 2 * H
    inputs = of_layers + layer + 3 * 2 * INNER if recompute else LAYERS * layer
    return round(ACTIVATION_FACTOR * (inputs + 4 * H + 2 * 2 * H))


def layer_bytes() -> int:
    """Return bytes per token of one layer's feed-forward part, without gradient."""
    return round(ACTIVATION_FACTOR * (4 * H + 2 * 2 * H + 3 * 2 * INNER))


GATHERED = 2 * (ROOT + 2 * LAYER)
LOGITS = 4 * CHUNK * VOCAB
HEAD_WEIGHT = 2 * 4 * VOCAB * H  # the gradient so far, and the current product
ENGINE = 2 * POLICY + 64 * LONGEST * CACHED + ENGINE_FIXED_BYTES
ASLEEP = {"engine asleep": ENGINE_ASLEEP_BYTES}


def passes(gathered: int = GATHERED) -> dict[str, int]:
    return {"gathered weights": gathered, "the head, or a layer": LOGITS + TOKENS * H * 2}


def update(
    name: str, trained: int, kept: int, *, tokens: int = TOKENS, gathered: int = GATHERED, weight: int = HEAD_WEIGHT
) -> dict[str, int]:
    """Return the parts of an update: gradients of `trained` weights, and `kept` bytes per token."""
    head = {"head": LOGITS + LOGITS // 2 + 2 * tokens * H * 2 + weight} if name == "policy" else {}
    return {f"{name}: gradients": 4 * trained, "gathered weights": gathered, "activations": tokens * kept, **head}


def test_parts_on_one_rank() -> None:
    plan = plan_memory(settings(HF), SHAPE, UNKNOWN)
    held = {
        "policy: float32 weights": 4 * POLICY,
        "policy: moments": 8 * POLICY,
        "reference": 2 * POLICY,
        "critic: float32 weights": 4 * CRITIC,
        "critic: moments": 8 * CRITIC,
    }
    asleep = {"engine asleep": 2 * POLICY}
    drawn = 16 * VOCAB * 24  # float32 logits and log-probabilities, float64 probabilities and their sum
    assert plan.phases == {
        GENERATION: {**held, "engine": 2 * POLICY + 16 * LONGEST * CACHED + drawn},
        PASSES: {**held, **asleep, **passes()},
        POLICY_UPDATE: {**held, **asleep, **update("policy", POLICY, saved_bytes())},
        CRITIC_UPDATE: {
            **held, **asleep, **update("critic", CRITIC, saved_bytes(), gathered=2 * (VOCAB * H + 2 * LAYER)),
        },
        WEIGHT_SYNC: {**held, **asleep, "one whole tensor": 4 * VOCAB * H},
    }  # fmt: skip
    assert (plan.peak_phase, plan.peak_bytes) == (GENERATION, sum(plan.phases[GENERATION].values()))
    assert (plan.usable_bytes, plan.fits, plan.cannot_fit) == (None, True, False)
    assert plan.floor_bytes == plan.peak_bytes
    smaller = plan_memory(settings(HF, "rollout.max_num_seqs=1"), SHAPE, UNKNOWN)
    assert smaller.peak_phase == POLICY_UPDATE
    finest = {**held, **asleep, **update("policy", POLICY, saved_bytes(), tokens=LONGEST)}
    assert smaller.floor_bytes == sum(finest.values())
    fewer = plan_memory(settings(HF), SHAPE, UNKNOWN, tokens=4).phases[POLICY_UPDATE]
    assert (fewer["activations"], fewer["head"]) == (4 * saved_bytes(), 6 * 4 * VOCAB + 2 * 4 * H * 2 + HEAD_WEIGHT)


def test_parts_of_hf_engine() -> None:
    """A pass over long prompts needs more memory than sampling, and runs once per prompt."""
    config = settings(
        HF, "filter.max_prompt_tokens=300", "rollout.max_num_seqs=5", "trainer.max_tokens_per_micro_batch=304"
    )
    engine = planning.engine_bytes(config, SHAPE, UNKNOWN)
    assert engine == 2 * POLICY + 5 * 304 * CACHED + 3 * 300 * layer_bytes()
    assert planning.forward_activation_bytes(SHAPE, 2) == layer_bytes()
    layer = plan_memory(settings(HF, "trainer.max_tokens_per_micro_batch=1000"), SHAPE, UNKNOWN, tokens=1_000)
    assert layer.phases[PASSES]["the head, or a layer"] == 1_000 * layer_bytes()


def test_parts_with_offloaded_inputs_of_layers() -> None:
    plan = plan_memory(settings("model.gradient_checkpointing=true", "model.offload_activations=true"), SHAPE, UNKNOWN)
    assert plan.phases[POLICY_UPDATE]["activations"] == TOKENS * saved_bytes(recompute=True, offload=True)


def test_parts_of_teacher() -> None:
    """The published 1B shape is wider than the policy, so that its layers set the peak of a forward pass."""
    name = "meta-llama/Llama-3.2-1B-Instruct"
    teacher, shape = f"algo.teacher.path={name}", shape_from_config(PUBLISHED[name])
    assert shape is not None
    weights, layer = 2 * shape.policy_parameters, planning.forward_activation_bytes(shape, 2)
    resident = plan_memory(settings(teacher), SHAPE, UNKNOWN).phases
    assert all(parts["teacher"] == weights for parts in resident.values())
    assert resident[PASSES]["the head, or a layer"] == TOKENS * layer
    offloaded = plan_memory(settings(teacher, "algo.teacher.offload=true"), SHAPE, UNKNOWN).phases
    assert [name for name, parts in offloaded.items() if "teacher, brought back" in parts] == [PASSES]
    assert offloaded[PASSES]["teacher, brought back"] == weights
    in_4_bits = shape.layers * shape.layer_weights
    quantized = plan_memory(settings(teacher, "algo.teacher.base=nf4"), SHAPE, UNKNOWN).phases
    assert quantized[PASSES]["teacher"] == round(planning.NF4 * in_4_bits) + weights - 2 * in_4_bits


def test_parts_on_two_ranks_with_offloading() -> None:
    config = settings(
        "runtime.num_workers=2", "optim.offload=true", "critic.optim.offload=true", "algo.kl.offload=true",
        "model.gradient_checkpointing=true", "model.compile=true", "rollout.enforce_eager=false",
    )  # fmt: skip
    held = {"policy: float32 weights": 4 * POLICY // 2, "critic: float32 weights": 4 * CRITIC // 2}
    kept = saved_bytes(recompute=True, compiled=True)
    assert plan_memory(config, SHAPE, CARD).phases == {
        GENERATION: {**held, "engine": ENGINE},
        PASSES: {**held, **ASLEEP, **passes(), "reference, brought back": 2 * POLICY},
        POLICY_UPDATE: {**held, **ASLEEP, **update("policy", POLICY // 2, kept)},
        CRITIC_UPDATE: {
            **held, **ASLEEP, **update("critic", CRITIC / 2, kept, gathered=2 * (VOCAB * H + 2 * LAYER)),
        },
        WEIGHT_SYNC: {**held, "engine": ENGINE, "one whole tensor": 4 * VOCAB * H},
    }  # fmt: skip
    assert planning.engine_bytes(config, SHAPE, UNKNOWN) == ENGINE - (64 - 8) * LONGEST * CACHED
    share = settings("rollout.memory_share=0.011")
    assert planning.engine_bytes(share, SHAPE, CARD) == 550_000_000 == planning.asleep_bytes(share, SHAPE, CARD)
    awake = settings("rollout.memory_share=0.03", "rollout.sleep_level=0")
    assert planning.asleep_bytes(awake, SHAPE, CARD) == 1_500_000_000


def test_parts_with_zero_stage_1() -> None:
    config = settings("runtime.num_workers=2", "model.zero_stage=1", "algo.kl.where=off", "algo.kl.estimator=auto",
                      "rollout.sleep_level=0", *NO_CRITIC)  # fmt: skip
    held = {"policy: float32 weights": 2 * POLICY, "policy: moments": 4 * POLICY}
    phases = plan_memory(config, SHAPE, CARD).phases
    assert [*phases] == [GENERATION, PASSES, POLICY_UPDATE, WEIGHT_SYNC]
    whole = {"engine asleep": ENGINE, "whole gradients": 4 * POLICY}
    expected = update("policy", POLICY // 2, saved_bytes(), gathered=2 * POLICY)
    assert phases[POLICY_UPDATE] == {**held, **whole, **expected}
    assert phases[WEIGHT_SYNC] == {**held, "engine": ENGINE, "one whole tensor": 4 * VOCAB * H}
    without_engine = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": "none"})})
    assert planning.engine_bytes(without_engine, SHAPE, CARD) == 0
    assert planning.asleep_bytes(without_engine, SHAPE, CARD) == 0


@pytest.mark.parametrize("base", ["native", "nf4"])
def test_parts_with_adapters(base: str) -> None:
    config = settings("model.lora.rank=4", f"model.lora.base={base}", "model.lora.offload=true",
                      "rollout.sleep_level=1", "optim.offload=true", "algo.kl.where=loss", *NO_CRITIC)  # fmt: skip
    assert config.model.lora is not None
    adapters = SHAPE.adapter_parameters(config.model.lora)
    in_4_bits = LAYERS * MATRICES if base == "nf4" else 0
    trained = {"policy: float32 weights": 4 * adapters}
    held = {**trained, FROZEN_BASE: round(in_4_bits * (1 / 2 + 4 / 64)) + 2 * (POLICY - in_4_bits)}
    gathered = 2 * (ROOT + 2 * (LAYER - MATRICES)) if base == "nf4" else GATHERED
    expected = update("policy", adapters, saved_bytes(), gathered=gathered, weight=0)
    merged = max(2 * VOCAB * H, 2 * (4 + 2) * H * INNER)
    assert plan_memory(config, SHAPE, CARD).phases == {
        GENERATION: {**trained, "engine": ENGINE},
        PASSES: {**held, **ASLEEP, **passes(gathered)},
        POLICY_UPDATE: {**held, **ASLEEP, **expected},
        WEIGHT_SYNC: {**trained, "engine": ENGINE, "one whole tensor": merged},
    }
    wide = plan_memory(config, replace(SHAPE, intermediate=500), CARD).phases[WEIGHT_SYNC]
    assert wide["one whole tensor"] == 2 * (4 + 2) * H * 500  # merged matrix and sum, in both types
    once = settings("model.lora.rank=4", f"model.lora.base={base}", "model.zero_stage=1", "runtime.num_workers=2",
                    *NO_CRITIC)  # fmt: skip
    whole = plan_memory(once, SHAPE, CARD).phases[POLICY_UPDATE]
    assert whole["gathered weights"] == max(gathered, 2 * (POLICY - in_4_bits))
    assert whole[FROZEN_BASE] == round(in_4_bits * (1 / 2 + 4 / 64)) + POLICY - in_4_bits  # half of two bytes each
    again = settings("model.lora.rank=4", "model.gradient_checkpointing=true", *NO_CRITIC)
    assert plan_memory(again, SHAPE, CARD).phases[POLICY_UPDATE]["activations"] == TOKENS * saved_bytes(recompute=True)


def test_micro_batch_tokens() -> None:
    for overrides, tokens in (
        (("trainer.max_tokens_per_micro_batch=79",), 79),
        (("trainer.max_tokens_per_micro_batch=81",), 80),
        (("trainer.max_tokens_per_micro_batch=81", "runtime.num_workers=8", "trainer.mini_batch_size=8"), 20),
        (("trainer.max_tokens_per_micro_batch=10",), 10),
    ):
        assert planning.micro_batch_tokens(settings(*overrides)) == tokens
    below = planning.with_values(settings(), {"trainer.max_tokens_per_micro_batch": 9})
    assert planning.micro_batch_tokens(below) == 10


def test_detect_device_without_gpu() -> None:
    for dtype, itemsize in (("auto", 2), ("bfloat16", 2), ("float32", 4)):
        config = settings(HF, "runtime.device=cpu", f"model.dtype={dtype}")
        assert planning.detect_device(config) == Device("a GPU (none here)", itemsize, None)
