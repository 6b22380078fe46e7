"""Settings that make a run fit the GPU it finds, by its memory plan: what `runtime.fit_memory` says to do with it."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore.config import RunConfig
from rlcore.config.base import Section
from rlcore.config.keys import leaves
from rlcore.config.problems import shown
from rlcore.errors import ConfigError
from rlcore.models.shape import ModelShape, shape_of
from rlcore.report.memory import MemoryPlan as Reported
from rlcore.run.memory_plan import (
    HAND_OVER,
    Device,
    MemoryPlan,
    longest_tokens,
    plan_memory,
    wanted_engine_bytes,
)
from rlcore.tracking.system import first_gpu

TOKENS_STEP = 1_024
"""Token budgets are multiples of it."""
MAX_MICRO_BATCH_TOKENS = 65_536
"""Larger micro-batches gain nothing."""
ENOUGH_TOKENS = 16_384
"""A token budget that is not worth more memory: the engine stays awake where this much is left beside it."""
KEPT_FREE = 0.08
"""Share of the device that the chosen settings leave: fragments of the allocator (it had reserved 7 to 9% more than its
tensors on an H200 with room to spare), and what the plan gets wrong."""
GB = 1e9


def device_of(config: RunConfig) -> Device:
    """The GPU that a rank of this host computes on; without one, a GPU of unknown size in the type it would use."""
    itemsize = 4 if config.model.dtype == "float32" else 2
    gpu = None if config.runtime.device == "cpu" else first_gpu()
    return Device("a GPU (none here)", itemsize, None) if gpu is None else Device(gpu[0], itemsize, gpu[1])


def fitted(config: RunConfig, shape: ModelShape, device: Device) -> tuple[RunConfig, MemoryPlan]:
    """The settings to run with and their plan. With `runtime.fit_memory=auto` and a known device the engine's share and
    sleep level, the token budget, the places of the reference and of the optimizers' moments, and recomputation are
    chosen.
    """
    if config.runtime.fit_memory == "auto" and device.total_bytes is not None:
        config = _chosen(config, shape, device)
    return config, plan_memory(config, shape, device)


def require_fit(config: RunConfig, plan: MemoryPlan) -> None:
    """Refuse a run that cannot fit, unless `runtime.fit_memory` is off.

    Raises:
        ConfigError: not even one longest answer in a micro-batch fits; says how many bytes are missing and what to set.
    """
    if plan.cannot_fit and config.runtime.fit_memory != "off":
        raise ConfigError(refusal(config, plan))


def fit_run(config: RunConfig, run_dir: Path, report: Callable[[Mapping[str, object]], None]) -> RunConfig:
    """The settings to start a run's workers with. On a GPU the plan is told, and kept in `run_dir` for the report.

    Raises:
        ConfigError: the run cannot fit.
    """
    shape, device = shape_of(config.model), device_of(config)
    if shape is None or device.total_bytes is None:
        return config
    new, plan = fitted(config, shape, device)
    require_fit(new, plan)
    chosen = chosen_settings(config, new)
    notes = (f"The phase that holds most is {plan.peak_phase}.", *([f"Chosen: {chosen}"] if chosen else []))
    Reported(plan.phases[plan.peak_phase], device.total_bytes, device.name, notes).write(run_dir)
    told = f"memory plan: {plan.peak_phase} holds most, {plan.peak_bytes / GB:.1f} GB{too_much(plan)}"
    report({"event": "note", "text": f"{told}; chosen: {chosen}" if chosen else told})
    return new


def too_much(plan: MemoryPlan) -> str:
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
    return " ".join(f"{name}={shown(value)}" for name, value in new.items() if old.get(name) != value)


def refusal(config: RunConfig, plan: MemoryPlan) -> str:
    """What to say of a plan that cannot fit."""
    assert plan.usable_bytes is not None, "without a device nothing is refused"
    missing = plan.floor_bytes - plan.usable_bytes
    return (
        f"runtime.fit_memory: the run cannot fit {plan.device.name}: {plan.floor_bytes / GB:.1f} GB are needed with "
        f"one longest answer in each micro-batch, {plan.usable_bytes / GB:.1f} GB are there ({missing / GB:.1f} GB "
        f"missing, most of it in: {_largest(plan)}). {suggestion(config)} "
        + ("runtime.fit_memory=auto chooses by the plan. " if config.runtime.fit_memory == "check" else "")
        + "runtime.fit_memory=off tries it anyway."
    )


def suggestion(config: RunConfig) -> str:
    """What would lower the peak, of what is not set yet."""
    found = []
    if config.rollout.engine == "vllm" and config.rollout.sleep_level == 0:
        found.append("rollout.sleep_level=2")
    if config.algo.kl.where != "off" and not config.algo.kl.offload:
        found.append("algo.kl.offload=true")
    if not offloads_optimizers(config):
        found.append("optim.offload=true" + ("" if config.critic is None else " critic.optim.offload=true"))
    if not config.model.gradient_checkpointing:
        found.append("model.gradient_checkpointing=true")
    if config.rollout.engine == "vllm":
        found.append(f"a rollout.memory_share below {config.rollout.memory_share:g}")
    else:
        found.append(f"a rollout.max_num_seqs below {config.rollout.max_num_seqs}")
    found.append("more workers (runtime.num_workers), LoRA (model.lora.rank=32) or a smaller model")
    return f"Set {', '.join(found)}."


def _largest(plan: MemoryPlan) -> str:
    parts = sorted(plan.phases[plan.peak_phase].items(), key=lambda entry: -entry[1])[:3]
    return f"{plan.peak_phase}, " + ", ".join(f"{name} {size / GB:.1f} GB" for name, size in parts)


def _chosen(config: RunConfig, shape: ModelShape, device: Device) -> RunConfig:
    """The first variant in which a budget of several answers fits; the last one with a budget of one."""
    for variant, least in _variants(config):
        found = _with_budget(_with_share(variant, shape, device), shape, device, least=least)
        if found is not None:
            return found
    return _with(_with_share(variant, shape, device), "trainer", max_tokens_per_micro_batch=longest_tokens(config))


def _variants(config: RunConfig) -> Iterator[tuple[RunConfig, int]]:
    """From the fastest to the one that needs least memory, with the token budget below which the next one is better:
    nothing waits on the host and no layer is recomputed while the engine stays awake, then while it sleeps; the
    reference offloaded; the optimizers' moments as well; layers recomputed as well."""
    several = max(4 * longest_tokens(config), TOKENS_STEP)
    plain = _with(config, "algo", kl=config.algo.kl.model_copy(update={"offload": False}))
    plain = _with(_with_optimizers(plain, offload=False), "model", gradient_checkpointing=False)
    if config.rollout.engine == "vllm":
        yield _with(plain, "rollout", sleep_level=0), max(several, ENOUGH_TOKENS)
        plain = _with(plain, "rollout", sleep_level=2)
    yield plain, several
    reference = _with(plain, "algo", kl=plain.algo.kl.model_copy(update={"offload": plain.algo.kl.where != "off"}))
    yield reference, several
    moments = _with_optimizers(reference, offload=True)
    yield moments, several
    yield _with(moments, "model", gradient_checkpointing=True), several


def offloads_optimizers(config: RunConfig) -> bool:
    """Whether the moments of every optimizer wait in the host's memory."""
    return config.optim.offload and (config.critic is None or config.critic.optim.offload)


def _with_optimizers(config: RunConfig, *, offload: bool) -> RunConfig:
    config = _with(config, "optim", offload=offload)
    if config.critic is None:
        return config
    return _with(config, "critic", optim=config.critic.optim.model_copy(update={"offload": offload}))


def _with_share(config: RunConfig, shape: ModelShape, device: Device) -> RunConfig:
    """The engine gets what every answer at its longest would take, as far as it is free beside what is always held."""
    if config.rollout.engine != "vllm":
        return config
    assert device.total_bytes is not None
    parts = plan_memory(config, shape, device).phases[HAND_OVER]
    others = sum(size for name, size in parts.items() if name != "engine")
    free = _room(device) - others
    share = min(wanted_engine_bytes(config, shape, device.itemsize), free) / device.total_bytes
    down = math.floor(1_000 * share) / 1_000  # rounded up, no budget would fit beside it
    return _with(config, "rollout", memory_share=min(max(down, 0.05), 0.95))


def _with_budget(config: RunConfig, shape: ModelShape, device: Device, *, least: int) -> RunConfig | None:
    """The largest token budget whose plan fits; None where `least` tokens do not."""
    budget = max(MAX_MICRO_BATCH_TOKENS, least)
    while budget >= least:
        found = _with(config, "trainer", max_tokens_per_micro_batch=budget)
        if plan_memory(found, shape, device).peak_bytes <= _room(device):
            return found
        budget -= TOKENS_STEP
    return None


def _room(device: Device) -> int:
    plan = MemoryPlan(device, {}, 0)
    assert plan.usable_bytes is not None
    assert device.total_bytes is not None
    return plan.usable_bytes - round(KEPT_FREE * device.total_bytes)


def _with(config: RunConfig, section: str, **changes: Any) -> RunConfig:
    inner: Section = getattr(config, section)
    return config.model_copy(update={section: inner.model_copy(update=changes)})
