"""Each part of a memory plan by an independent count, for a model with distinct dimensions, and the settings chosen by
the plan."""

import functools
from dataclasses import replace

import pytest

from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.config.model import PUBLISHED
from rlcore.errors import ConfigError
from rlcore.models.shape import ModelShape, shape_from_config
from rlcore.workers import memory_plan as planning
from rlcore.workers.memory_plan import (
    CONTEXT_BYTES,
    CRITIC_UPDATE,
    ENGINE_FIXED_BYTES,
    FROZEN_BASE,
    GENERATION,
    PASSES,
    POLICY_UPDATE,
    WEIGHT_SYNC,
    Device,
    MemoryPlan,
    plan_memory,
    require_fit,
)

H, LAYERS, HEADS, QUERY, KV, INNER, VOCAB = 10, 3, 6, 24, 8, 50, 1_000
SHAPE = ModelShape(
    hidden=H, layers=LAYERS, heads=HEADS, kv_heads=2, head_dim=4, intermediate=INNER, vocab=VOCAB, tied=False,
    qkv_bias=True, qk_norm=False,
)  # fmt: skip
LAYER, ROOT, POLICY, CRITIC = 2_200, 2 * VOCAB * H + H, 26_610, 16_621
MATRICES = 2 * H * QUERY + 2 * H * KV + 3 * H * INNER
TOKENS, LONGEST, CHUNK = 30, 10, 7
BASE = (
    "model.path=of/no-model", "trainer.batch_size=8", "trainer.mini_batch_size=4", "rollout.samples_per_prompt=2",
    "filter.max_prompt_tokens=6", "rollout.max_response_tokens=4", f"model.head_chunk_tokens={CHUNK}",
    f"trainer.max_tokens_per_micro_batch={TOKENS}", "rollout.max_num_seqs=64", "model.gradient_checkpointing=false",
)  # fmt: skip
HF, NO_CRITIC = "rollout=hf", ("critic=none", "algo=grpo")
UNKNOWN, CARD = Device("a GPU", 2, None), Device("a card", 2, 50_000_000_000)


@functools.cache
def settings(*overrides: str) -> RunConfig:
    own = {text.partition("=")[0] for text in overrides}
    base = [text for text in BASE if text.partition("=")[0] not in own]
    return load_config(["experiment=tinyzero_ppo", *base, *overrides])


CACHED = 2 * LAYERS * 2 * KV  # bytes of keys and values of a token


def saved_bytes(*, recompute: bool = False, offload: bool = False, compiled: bool = False) -> int:
    """Return bytes per token kept for backward, tensor by tensor."""
    norms = 2 * (2 * H + 4) if compiled else 2 * (4 * H + 2 * H)
    attention = 2 * H + 2 * 2 * KV + 2 * 2 * QUERY + 4 * HEADS  # input; key, value; query, output; normalizer
    feed_forward = 2 * H + (3 if compiled else 4) * 2 * INNER
    layer = norms + attention + feed_forward
    of_layers = 2 * H if offload else LAYERS * 2 * H
    inputs = of_layers + layer + 3 * 2 * INNER if recompute else LAYERS * layer
    return round(planning.ACTIVATION_FACTOR * (inputs + 4 * H + 2 * 2 * H))


def layer_bytes() -> int:
    """Return bytes per token of one layer's feed-forward part, without gradient."""
    return round(planning.ACTIVATION_FACTOR * (4 * H + 2 * 2 * H + 3 * 2 * INNER))


GATHERED = 2 * (ROOT + 2 * LAYER)
LOGITS = 4 * CHUNK * VOCAB
HEAD_WEIGHT = 2 * 4 * VOCAB * H  # the gradient so far, and the current product
ENGINE = 2 * POLICY + 64 * LONGEST * CACHED + ENGINE_FIXED_BYTES
ASLEEP = {"engine asleep": planning.ENGINE_ASLEEP_BYTES}


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


def test_plan_bounds_exclude_context() -> None:
    for peak, floor, fits, cannot_fit in ((4, 4, True, False), (5, 4, False, False), (5, 5, False, True)):
        phases = {"small": {"x": 1}, "large": {"y": peak - 1, "z": 1}}
        plan = MemoryPlan(Device("a card", 2, CONTEXT_BYTES + 4), phases, floor)
        assert (plan.usable_bytes, plan.peak_phase, plan.peak_bytes) == (4, "large", peak)
        assert (plan.fits, plan.cannot_fit) == (fits, cannot_fit)
    assert MemoryPlan(Device("a card", 2, CONTEXT_BYTES - 1), phases, 1).usable_bytes == 0


@pytest.mark.parametrize(
    ("fit", "remedy"), [("check", "runtime.fit_memory=auto, .*more workers"), ("auto", "more wor")]
)
def test_require_fit_message(fit: str, remedy: str) -> None:
    parts = {"a": 1_000_000_000, "b": 5_250_000_000, "c": 4_000_000_000, "d": 2_000_000_000}
    phases = {"policy update": parts, "weight sync": {"a": 1}}
    over = MemoryPlan(Device("a card", 2, 9_000_000_000), phases, 9_500_000_000)
    message = (
        r"runtime\.fit_memory: the run cannot fit a card: 9\.5 GB are needed.* 8\.0 GB are there \(1\.5 GB missing, "
        rf"most of it in: policy update, b 5\.2 GB, c 4\.0 GB, d 2\.0 GB\)\. Set {remedy}.*model\.lora\.base=nf4"
    )
    with pytest.raises(ConfigError, match=message):
        require_fit(settings(f"runtime.fit_memory={fit}"), over)
    require_fit(settings("runtime.fit_memory=off"), over)
    require_fit(settings(), plan_memory(settings(), SHAPE, UNKNOWN))


REFERENCE, RECOMPUTE = "algo.kl.offload=true", "model.gradient_checkpointing=true"
INPUTS = "model.offload_activations=true"
SAVED_LAYERS, LAST = (RECOMPUTE, INPUTS), (RECOMPUTE, f"{RECOMPUTE} {INPUTS}")
MOMENTS, BOTH = "optim.offload=true", "optim.offload=true critic.optim.offload=true"
ADAPTERS = ("model.lora.rank=4", *NO_CRITIC, "algo.kl.where=loss", "algo.kl.estimator=auto")
SLEEPS, AWAKE = "rollout.sleep_level=2", "rollout.sleep_level=0"


@pytest.mark.parametrize(
    ("overrides", "chosen"),
    [
        ((SLEEPS,), [AWAKE, "", REFERENCE, f"{REFERENCE} {BOTH}", *(f"{more} {REFERENCE} {BOTH}" for more in LAST)]),
        (
            (HF, *NO_CRITIC),
            ["", REFERENCE, f"{REFERENCE} {MOMENTS}", *(f"{more} {REFERENCE} {MOMENTS}" for more in LAST)],
        ),
        (
            ADAPTERS,
            [AWAKE, "", *(f"{more}model.lora.offload=true{last} rollout.sleep_level=1" for more, last in (
                ("", ""), ("", f" {MOMENTS}"), *((f"{more} ", f" {MOMENTS}") for more in LAST)))],
        ),
        ((HF, *ADAPTERS), ["", "", MOMENTS, *(f"{more} {MOMENTS}" for more in LAST)]),
    ],
)  # fmt: skip
def test_variants_by_decreasing_memory(overrides: tuple[str, ...], chosen: list[str]) -> None:
    config = settings(*overrides)
    variants = [*planning.variants(config)]
    words = [set(planning.chosen_settings(config, variant).split()) for variant, _ in variants]
    assert words == [set(text.split()) for text in chosen]
    has_vllm = config.rollout.engine == "vllm"
    assert [least for _, least in variants] == [16_384] * has_vllm + [1_024] * (len(variants) - has_vllm)
    offloaded = settings(REFERENCE, *SAVED_LAYERS, *BOTH.split())
    first = next(planning.variants(offloaded))[0]
    on_the_device = {f"{word.partition('=')[0]}=false" for word in (REFERENCE, *SAVED_LAYERS, *BOTH.split())}
    assert set(planning.chosen_settings(offloaded, first).split()) == {AWAKE, *on_the_device}


def test_variant_budget_holds_several_sequences() -> None:
    config = settings("rollout.max_response_tokens=4994", "trainer.max_tokens_per_micro_batch=5000")
    assert [least for _, least in planning.variants(config)] == [20_000] * 6


def test_memory_share_follows_responses() -> None:
    wanted = 2 * POLICY + 16 * LONGEST * CACHED + ENGINE_FIXED_BYTES
    for total, share, passes in (
        (10_000_000_000, 0.15, 32_768),
        (2_500_000_000, 0.519, 8_192),  # of 1.3 GB that are left
        (60_000_000_000, 0.05, 32_768),
    ):
        device = Device("a card", 2, total)
        config = settings("rollout.max_batched_tokens=32768")
        found = planning.with_memory_share(config, SHAPE, device).rollout
        assert (found.memory_share, found.max_batched_tokens) == (share, passes)
        assert wanted == planning.full_engine_bytes(config, SHAPE, 2, config.concurrent_responses)
        for given, seqs, expected in (("32768", 10_000, max(passes, 10_000)), ("4096", 64, 4_096), ("null", 64, None)):
            many = settings(f"rollout.max_batched_tokens={given}", f"rollout.max_num_seqs={seqs}")
            assert planning.with_memory_share(many, SHAPE, device).rollout.max_batched_tokens == expected
    without = settings(HF)
    assert planning.with_memory_share(without, SHAPE, CARD) is without


LARGE = ("trainer.batch_size=8192", "trainer.mini_batch_size=8192")


def test_largest_fitting_token_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    config = planning.with_values(settings(HF, *LARGE), {"rollout.max_num_seqs": 1})
    budget = planning.MAX_MICRO_BATCH_TOKENS - 20 * 1_024
    peak = plan_memory(config, SHAPE, UNKNOWN, tokens=budget).peak_bytes
    for size, least, expected in (
        (peak, budget, budget),
        (peak - 1, budget, None),
        (peak - 1, budget - 1_024, budget - 1_024),
        (10 * peak, 10, planning.MAX_MICRO_BATCH_TOKENS),
        (10 * peak, 70_000, 70_000),
    ):
        monkeypatch.setattr(planning, "available_bytes", lambda device, size=size: size)
        found = planning.with_token_budget(config, SHAPE, CARD, least=least)
        assert (found and found.trainer.max_tokens_per_micro_batch) == expected


def test_last_variant_if_none_fits() -> None:
    config = settings(HF, *LARGE, "runtime.fit_memory=auto")
    chosen, plan = planning.fit_settings(config, SHAPE, Device("a card", 2, 1_050_000_000))
    assert chosen.trainer.max_tokens_per_micro_batch == LONGEST
    assert plan == plan_memory(chosen, SHAPE, plan.device)
    words = planning.chosen_settings(config, chosen).split()
    assert {*words} == {REFERENCE, *SAVED_LAYERS, *BOTH.split(), f"trainer.max_tokens_per_micro_batch={LONGEST}"}
    roomy, _ = planning.fit_settings(config, SHAPE, CARD)
    assert planning.chosen_settings(config, roomy) == "trainer.max_tokens_per_micro_batch=65536"
    assert planning.fit_settings(config, SHAPE, UNKNOWN)[0] is config
    assert planning.fit_settings(checked := settings(HF), SHAPE, CARD)[0] is checked


def test_fit_run_reports_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings("model.path=Qwen/Qwen2.5-0.5B", "runtime.fit_memory=off")
    expected: list[dict[str, object]] = []
    for gpu in (None, ("a card", None)):
        monkeypatch.setattr(planning, "first_gpu", lambda gpu=gpu: gpu)
        assert planning.fit_run(config, expected.append) is config
    assert not expected
    monkeypatch.setattr(planning, "first_gpu", lambda: ("a card", 6_000_000_000))
    assert planning.fit_run(config, expected.append) == config
    shape = planning.shape_of(config.model)
    assert shape is not None
    plan = plan_memory(config, shape, Device("a card", 2, 6_000_000_000))
    most = f"memory plan: policy update holds most, {plan.peak_bytes / 1e9:.1f} GB, of which 5.0 GB are there: a pass"
    assert [str(event["text"]).startswith(most) for event in expected] == [True]
    with pytest.raises(ConfigError, match="the run cannot fit a card"):
        planning.fit_run(settings("model.path=Qwen/Qwen2.5-0.5B"), expected.append)
    auto = settings("model.path=Qwen/Qwen2.5-0.5B", "runtime.fit_memory=auto")
    monkeypatch.setattr(planning, "first_gpu", lambda: ("a card", 85_000_000_000))
    chosen = planning.chosen_settings(auto, planning.fit_run(auto, expected.append))
    assert "rollout.sleep_level=0" in chosen.split()
    assert str(expected[1]["text"]).endswith(f" GB; chosen: {chosen}")
