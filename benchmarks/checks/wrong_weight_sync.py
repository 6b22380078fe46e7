"""A check that correct weight syncs raise no alarm, and that a sync with an outdated layer is detected."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from benchmarks.checks.rig import Rig, Verdict
from rlcore.errors import EngineError
from rlcore.rollout.vllm import weights as weight_sync
from rlcore.workers.worker import Worker

NUM_SYNCS = 30
RATE = "optim.lr=1e-5"


def check(rig: Rig) -> Verdict:
    rig.group.each(Worker.reset)
    with rig.loop(RATE, real_prompts=rig.real_prompts()) as loop:
        steps = []
        for _ in range(NUM_SYNCS):
            rig.group.kept = None  # generate new responses
            steps.append(loop.step())
        (before,) = rig.group.each(_weights)
        layer = f"model.layers.{sum('input_layernorm' in name for name in before) // 2}."
        rig.group.kept = None
        message = ""
        with _skip_sync({name: tensor for name, tensor in before.items() if name.startswith(layer)}):
            try:
                loop.step()
            except EngineError as error:
                message = str(error)
    rig.group.each(Worker.reset)
    rig.group.kept = None
    differences = [step.metrics["training/canary_logprob_diff"] for step in steps]
    alarms = [alarm.text for step in steps for alarm in step.alarms if alarm.name == "canary"]
    return Verdict(
        not alarms and "Tensors that differ (" in message and layer in message,
        {
            "alarms": alarms,
            "largest_difference": max(differences),
            "mean_difference": statistics.mean(differences),
            "seconds_a_sync": statistics.median(step.metrics["timing_s/update_weights"] for step in steps),
            "stale_layer": message or "not found",
        },
    )


def _weights(worker: Worker) -> dict[str, Tensor]:
    dtype = next(worker.engine.model.parameters()).dtype  # type: ignore[attr-defined]
    return {name: tensor.to(dtype, copy=True) for name, tensor in worker.actor.weights()}


@contextmanager
def _skip_sync(old: dict[str, Tensor]) -> Iterator[None]:
    """Inside the `with` block, let weight syncs send the outdated tensors `old` to vLLM instead of the current tensors
    with the same names."""
    load = weight_sync.load_weights

    def wrapped(model: nn.Module, config: Any, weights: Any, *more: Any) -> None:
        load(model, config, ((name, old.get(name, tensor)) for name, tensor in weights), *more)

    weight_sync.load_weights = wrapped
    try:
        yield
    finally:
        weight_sync.load_weights = load
