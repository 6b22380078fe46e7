"""Moments and reference that wait on the host: the numbers of those that stay on the device, in less memory of it."""

from typing import Any

import torch

from benchmarks.checks.rig import Rig, Verdict
from benchmarks.checks.short_memory import COMPARED, weights_norm
from rlcore.batching.pack import pack
from rlcore.config.algo import OptimConfig
from rlcore.models.optim import MOMENTS, build_optimizer
from rlcore.types import Score
from rlcore.workers.worker import Worker

NUM_UPDATES = 4
"""Mini-batches of the step: moments go to and fro several times, and come from the host from the second on."""
PLACES = {
    "device": ("optim.offload=false", "algo.kl.offload=false"),
    "host": ("optim.offload=true", "algo.kl.offload=true"),
}


def check(rig: Rig) -> Verdict:
    """The same step twice by workers made for it, which share the rig's answers."""
    try:
        found = {place: _step(rig, overrides) for place, overrides in PLACES.items()}
    finally:
        rig.group.each(_take_settings, rig.config)
    device, host = found["device"], found["host"]
    apart = {name: host["numbers"][name] - value for name, value in device["numbers"].items()}
    # Backward passes of a GPU add in an order of their own, so two steps differ there without any offload. What is no
    # chance, the reference's pass and the optimizer's steps, is compared bit by bit.
    relative = 1e-3 if rig.device.type == "cuda" else 0.0
    near = all(abs(apart[name]) <= relative * (abs(value) + 1e-2) for name, value in device["numbers"].items())
    less = rig.device.type != "cuda" or host["held_gb"] < device["held_gb"]
    same = {
        "optimizer_bits_equal": _same_bits(rig.device),
        "reference_bits_equal": torch.equal(device.pop("reference"), host.pop("reference")),
    }
    return Verdict(near and less and all(same.values()), {**found, "apart": apart, "relative": relative, **same})


def _same_bits(device: torch.device) -> bool:
    """The optimizer alone, both ways, on the same gradients: weights and moments bit for bit after a few steps."""
    kept = []
    for offload in (False, True):
        rng = torch.Generator().manual_seed(5)
        layers = torch.nn.Sequential(*(torch.nn.Linear(1_024, width) for width in (4_096, 32, 1)))
        for parameter in layers.parameters():
            parameter.data = torch.randn(parameter.shape, generator=rng).to(device)
        optimizer = build_optimizer(layers, OptimConfig(lr=1e-3, offload=offload), device=device)
        for _ in range(3):
            for parameter in layers.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=rng).to(device)
            optimizer.step()
        states = [optimizer.state[parameter] for parameter in layers.parameters()]
        moments = [state[key].cpu() for state in states for key in MOMENTS]
        kept.append([*(parameter.detach().cpu() for parameter in layers.parameters()), *moments])
    return all(torch.equal(one, other) for one, other in zip(*kept, strict=True))


def _step(rig: Rig, overrides: tuple[str, ...]) -> dict[str, Any]:
    config = rig.settings(*overrides, f"trainer.mini_batch_size={max(1, rig.config.trainer.batch_size // NUM_UPDATES)}")
    rig.group.each(_take_settings, config)
    result = rig.step(*overrides, f"trainer.mini_batch_size={config.trainer.mini_batch_size}")
    on_gpu = rig.device.type == "cuda"
    rig.group.each(_put_to_sleep)
    held = torch.cuda.memory_allocated() / 1e9 if on_gpu else 0.0
    rollouts = result.experience.rollouts
    answers = pack(rollouts, [Score(0.0, {})] * len(rollouts), range(len(rollouts)))
    return {
        "reference": rig.group.each(Worker.ref_logprobs, answers, NUM_UPDATES)[0],
        "numbers": {name: result.metrics[name] for name in COMPARED if name in result.metrics}
        | {"weights": rig.group.each(weights_norm)[0]},
        "held_gb": held,
        "update_s": result.metrics["timing_s/update_actor"],
    }


def _take_settings(worker: Worker, config: Any) -> None:
    """Settings and reference as in a worker that starts with them; the actor is made anew by `reset`, which follows."""
    from rlcore.workers.actor import Reference

    assert worker._place is not None
    worker._config = config
    worker._reference = Reference(config, worker._model_directory, worker._place)


def _put_to_sleep(worker: Worker) -> None:
    """As before the first training pass."""
    worker._engine.sleep()
