"""A check of the memory plan against the measured memory of each phase."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.checks.rig import Rig, Verdict
from benchmarks.harness import watched_memory
from rlcore.models.shape import shape_of
from rlcore.rollout.vllm import engine_pool_bytes
from rlcore.workers import memory_plan as planning
from rlcore.workers.memory_plan import detect_device
from rlcore.workers.worker import Worker

PHASES = {
    Worker.generate: planning.GENERATION,
    Worker.old_logprobs: planning.PASSES,
    Worker.ref_logprobs: planning.PASSES,
    Worker.update_policy: planning.POLICY_UPDATE,
    Worker.sync_weights: planning.WEIGHT_SYNC,
}
GB = 1e9
TOLERANCE = 0.15  # largest relative difference of planned and measured bytes


def check(rig: Rig) -> Verdict:
    shape = shape_of(rig.config.model)
    assert shape is not None, "the rig's model has a config.json"
    rollouts = rig.step().experience.rollouts
    num_tokens = sum(len(one.prompt.token_ids) + len(one.response_ids) for one in rollouts)
    tokens = -(-num_tokens // -(-num_tokens // rig.config.trainer.max_tokens_per_micro_batch))
    plan = planning.plan_memory(rig.config, shape, detect_device(rig.config), tokens=tokens)
    values: dict[str, Any] = {"device": plan.device.name, "micro_batch_tokens": tokens, "phases": {}}
    measured = _measured(rig) if rig.device.type == "cuda" else {}
    for phase, parts in plan.phases.items():
        planned = sum(parts.values()) / GB
        found = measured.get(phase)
        values["phases"][phase] = {
            "planned_gb": round(planned, 2),
            "parts_gb": {name: round(size / GB, 2) for name, size in parts.items()},
            **(found or {}),
            "plan_over_measured": None if found is None else round(planned / found["tensors_gb"], 3),
        }
    ratios = [one["plan_over_measured"] for one in values["phases"].values() if one["plan_over_measured"]]
    values["context_planned_gb"] = planning.CONTEXT_BYTES / GB
    near = all(abs(1 - 1 / ratio) <= TOLERANCE for ratio in ratios)
    if measured:
        # The report compares this with the plan, so the pool of a sleeping engine must be excluded.
        values["reported_peak_gb"] = rig.step(reset=False).metrics["perf/max_memory_allocated_gb"]
        most = max(one["tensors_gb"] for one in measured.values())
        near = near and abs(values["reported_peak_gb"] / most - 1) <= TOLERANCE
    return Verdict(near, values)


def _measured(rig: Rig) -> dict[str, dict[str, float]]:
    """Return four memory values in GB for each phase. The first three are peaks: the memory of torch's tensors, the
    memory that torch has reserved, and the memory that all processes use. The fourth is the size of the engine's pool.
    The first two peaks exclude the memory of a sleeping engine."""
    found: dict[str, dict[str, float]] = {}
    engine = engine_pool_bytes()

    @contextlib.contextmanager
    def around(verb: Any) -> Iterator[None]:
        phase = PHASES.get(verb)
        if phase is None:
            yield
            return
        asleep = verb not in (Worker.generate, Worker.sync_weights)
        if asleep:
            rig.group.each(_put_to_sleep)
        torch.cuda.reset_peak_memory_stats()
        with watched_memory() as most:
            yield
        away = engine if asleep else 0
        now = {
            "tensors_gb": (torch.cuda.max_memory_allocated() - away) / GB,
            "reserved_gb": (torch.cuda.max_memory_reserved() - away) / GB,
            "in_use_gb": most(),
            "engine_pool_gb": engine / GB,
        }
        before = found.setdefault(phase, now)
        found[phase] = {name: round(max(before[name], now[name]), 3) for name in now}

    rig.group.kept = None
    with rig.watched(around):
        rig.step(reset=False)
    return found


def _put_to_sleep(worker: Worker) -> None:
    """Put the engine to sleep, so that a phase does not begin with the memory of an awake engine."""
    worker.engine.sleep()
