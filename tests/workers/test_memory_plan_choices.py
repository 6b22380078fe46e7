"""Settings chosen by memory plans, and messages."""

import pytest

from rlcore.errors import ConfigError
from rlcore.workers import memory_plan as planning
from rlcore.workers.memory_plan import (
    CONTEXT_BYTES,
    ENGINE_FIXED_BYTES,
    Device,
    MemoryPlan,
    plan_memory,
    require_fit,
)
from tests.helpers.memory_plans import CACHED, CARD, HF, LONGEST, NO_CRITIC, POLICY, SHAPE, UNKNOWN, settings


def test_plan_bounds_exclude_context() -> None:
    def of(total: int | None, peak: int, floor: int) -> MemoryPlan:
        return MemoryPlan(Device("a card", 2, total), {"small": {"x": 1}, "large": {"y": peak - 1, "z": 1}}, floor)

    total = 5 * CONTEXT_BYTES
    exact = of(total, 4 * CONTEXT_BYTES, 4 * CONTEXT_BYTES)
    assert (exact.usable_bytes, exact.fits, exact.cannot_fit) == (4 * CONTEXT_BYTES, True, False)
    over = of(total, 4 * CONTEXT_BYTES + 1, 4 * CONTEXT_BYTES + 1)
    assert (over.fits, over.cannot_fit, over.peak_phase) == (False, True, "large")
    assert of(CONTEXT_BYTES - 1, 2, 1).usable_bytes == 0


def plan_over_card() -> MemoryPlan:
    parts = {"a": 1_000_000_000, "b": 5_250_000_000, "c": 4_000_000_000, "d": 2_000_000_000}
    return MemoryPlan(
        Device("a card", 2, 9_000_000_000), {"policy update": parts, "weight sync": {"a": 1}}, 9_500_000_000
    )


@pytest.mark.parametrize("fit", ["check", "auto"])
def test_require_fit_message(fit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_fit(settings(f"runtime.fit_memory={fit}"), plan_over_card())
    auto = "runtime.fit_memory=auto, which chooses by the plan, " if fit == "check" else ""
    assert str(caught.value) == (
        "runtime.fit_memory: the run cannot fit a card: 9.5 GB are needed with one longest sequence in each "
        "micro-batch, 8.0 GB are there (1.5 GB missing, most of it in: policy update, b 5.2 GB, c 4.0 GB, d 2.0 GB). "
        f"Set {auto}more workers (runtime.num_workers), LoRA over 4 bits (model.lora.rank=32 model.lora.base=nf4) or a "
        "smaller model. runtime.fit_memory=off tries it anyway."
    )
    require_fit(settings("runtime.fit_memory=off"), plan_over_card())
    require_fit(settings(), plan_memory(settings(), SHAPE, UNKNOWN))


REFERENCE, RECOMPUTE = "algo.kl.offload=true", "model.gradient_checkpointing=true"
INPUTS = "model.offload_activations=true"
LAYERS = (RECOMPUTE, INPUTS)
BOTH = "optim.offload=true critic.optim.offload=true"
ADAPTERS = ("model.lora.rank=4", *NO_CRITIC, "algo.kl.where=loss", "algo.kl.estimator=auto")


SLEEPS, AWAKE = "rollout.sleep_level=2", "rollout.sleep_level=0"
MOMENTS = "optim.offload=true"
LAST = (RECOMPUTE, f"{RECOMPUTE} {INPUTS}")


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
    offloaded = settings(REFERENCE, *LAYERS, *BOTH.split())
    first = next(planning.variants(offloaded))[0]
    on_the_device = {f"{word.partition('=')[0]}=false" for word in (REFERENCE, *LAYERS, *BOTH.split())}
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


def device_with(size: int) -> Device:
    total = round((size + CONTEXT_BYTES) / (1 - planning.FREE_SHARE))
    return next(
        Device("a card", 2, near)
        for near in range(total - 2, total + 3)
        if planning.available_bytes(Device("a card", 2, near)) == size
    )


def test_largest_fitting_token_budget() -> None:
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
        found = planning.with_token_budget(config, SHAPE, device_with(size), least=least)
        assert (found and found.trainer.max_tokens_per_micro_batch) == expected


def test_last_variant_if_none_fits() -> None:
    config = settings(HF, *LARGE, "runtime.fit_memory=auto")
    chosen, plan = planning.fit_settings(config, SHAPE, Device("a card", 2, 1_050_000_000))
    assert chosen.trainer.max_tokens_per_micro_batch == LONGEST
    assert plan == plan_memory(chosen, SHAPE, plan.device)
    words = planning.chosen_settings(config, chosen).split()
    assert {*words} == {REFERENCE, *LAYERS, *BOTH.split(), f"trainer.max_tokens_per_micro_batch={LONGEST}"}
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
