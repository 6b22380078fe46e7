"""Hand-overs after real optimizer steps: none that is right is refused or told, each that is wrong on purpose is found.

Between two hand-overs the weights move by one step, which in bfloat16 no log-probability shows beside the rounding.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.checks.rig import Rig, Verdict
from benchmarks.harness import Loop
from rlcore.errors import EngineError
from rlcore.rollout.vllm import weights as handover
from rlcore.workers.worker import Worker

RIGHT_HANDOVERS = 30
RATE = "optim.lr=1e-5"
EMBEDDING = "model.embed_tokens.weight"

Stale = Callable[[str, Tensor], Tensor]
"""What arrives in place of a tensor that was sent."""


@dataclass(frozen=True, slots=True)
class _Fault:
    """`plant(what the engine had before)` for the time of a step; `told`: what its error must say."""

    plant: Callable[[Mapping[str, Tensor]], contextlib.AbstractContextManager[None]]
    told: tuple[str, ...]


def check(rig: Rig) -> Verdict:
    """Thirty right hand-overs, then each fault in a step of its own with a right hand-over after it."""
    rig.group.each(Worker.reset)
    with rig.loop(RATE, real_prompts=rig.real_prompts()) as loop:
        steps = [_step(rig, loop) for _ in range(RIGHT_HANDOVERS)]
        differences = [result.metrics["training/canary_logprob_diff"] for result in steps]
        alarms = [alarm.text for result in steps for alarm in result.alarms if alarm.name == "canary"]
        (parts,) = rig.group.each(_seconds_of_parts)
        found, moved, after = {}, {}, []
        for name, fault in _faults(rig).items():
            (before,) = rig.group.each(_weights)
            with fault.plant(before):
                told = _error_of(rig, loop)
            (now,) = rig.group.each(_weights)
            moved[name] = sum(int((now[key] != tensor).sum()) for key, tensor in before.items())
            found[name] = (all(word in told for word in fault.told) and moved[name] > 0, told)
            (handed_over,) = rig.group.each(Worker.hand_over, loop.version)
            after.append(handed_over.difference)
            alarms += [handed_over.warning] if handed_over.warning else []
    rig.group.each(Worker.reset)
    rig.group.kept = None
    return Verdict(
        not alarms and all(ok for ok, _ in found.values()),
        {
            "right_handovers": len(differences) + len(after),
            "alarms": alarms,
            "difference": _spread(differences + after),
            "largest_by_first": max(differences + after) / differences[0],
            "differences": [round(one, 5) for one in differences + after],
            "seconds_a_hand_over": statistics.median(result.metrics["timing_s/update_weights"] for result in steps),
            "seconds_of_parts": parts,
            "weights_moved": moved,
            "found": {name: told or "not found" for name, (_, told) in found.items()},
        },
    )


def _seconds_of_parts(worker: Worker) -> dict[str, float]:
    """Of a hand-over: the digests of all tensors, sent and held, and the probe with the trainer's pass over it; the
    weights are gathered for the former, which a hand-over does anyway."""
    model: Any = worker._engine.model  # type: ignore[attr-defined]

    def gathered() -> None:
        for _ in worker._actor.weights():
            pass

    def compared() -> None:
        sent = handover.SentWeights(model)
        for _ in sent.noted(worker._actor.weights()):
            pass
        sent.compare()

    with torch.no_grad():
        alone = _median_seconds(gathered)
        return {"digests": _median_seconds(compared) - alone, "probe": _median_seconds(worker._probed_difference)}


def _median_seconds(work: Callable[[], Any], times: int = 5) -> float:
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def _step(rig: Rig, loop: Loop) -> Any:
    rig.group.kept = None  # new answers
    return loop.step()


def _error_of(rig: Rig, loop: Loop) -> str:
    """What a step ends with; empty where it goes through."""
    try:
        _step(rig, loop)
    except EngineError as error:
        return str(error)
    return ""


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "first": values[0],
        "mean": statistics.mean(values),
        "deviation": statistics.pstdev(values),
        "least": min(values),
        "most": max(values),
    }


def _weights(worker: Worker) -> dict[str, Tensor]:
    """All weights in the engine's type."""
    dtype = next(worker._engine.model.parameters()).dtype  # type: ignore[attr-defined]
    return {name: tensor.to(dtype, copy=True) for name, tensor in worker._actor.weights()}


def _faults(rig: Rig) -> dict[str, _Fault]:
    """One layer, a head that is tied to the embedding, half of the rows of one matrix, the prefix cache: each as it was
    before the step."""
    (names,) = rig.group.each(_names)
    num_layers = 1 + max(int(name.split(".")[2]) for name in names if name.startswith("model.layers."))
    layer, matrix = f"model.layers.{num_layers // 2}.", f"model.layers.{num_layers // 3}.mlp.up_proj.weight"

    def one_layer(before: Mapping[str, Tensor]) -> Stale:
        return lambda name, tensor: before[name] if name.startswith(layer) else tensor

    def shard(before: Mapping[str, Tensor]) -> Stale:
        def stale(name: str, tensor: Tensor) -> Tensor:
            rows = len(tensor) // 2
            return torch.cat([tensor[:rows], before[name][rows:].to(tensor)]) if name == matrix else tensor

        return stale

    faults = {
        "one layer": _Fault(lambda before: _arriving(one_layer(before)), ("Tensors that differ (", layer)),
        "tied head": _Fault(lambda before: _stale_head(rig, before), ("Tensors that differ (1): the head, tied to",)),
        "shard": _Fault(lambda before: _arriving(shard(before)), (f"Tensors that differ (1): {matrix}.",)),
    }
    if rig.device.type == "cuda":  # a block of the CPU's cache is longer than these prompts: it keeps none
        faults["prefix cache"] = _Fault(lambda before: _keeping_prefixes(rig), ("vLLM kept its prefix cache",))
    return faults


def _names(worker: Worker) -> list[str]:
    return [name for name, _ in worker._actor.weights()]


@contextlib.contextmanager
def _arriving(stale: Stale) -> Iterator[None]:
    """Between trainer and vLLM some tensors are replaced."""
    load = handover.load

    def wrapped(model: nn.Module, config: Any, weights: Any, *more: Any) -> None:
        load(model, config, ((name, stale(name, tensor)) for name, tensor in weights), *more)

    handover.load = wrapped
    try:
        yield
    finally:
        handover.load = load


@contextlib.contextmanager
def _stale_head(rig: Rig, before: Mapping[str, Tensor]) -> Iterator[None]:
    """The head becomes a copy of the embedding as it was; where a CPU keeps it packed, vLLM itself forgets it."""
    load, tied_head = handover.load, handover.tied_head
    is_packed = rig.device.type == "cpu" and not rig.bfloat16
    restored: list[Callable[[], None]] = []

    def wrapped(model: nn.Module, config: Any, weights: Any, *more: Any) -> None:
        load(model, config, weights, *more)
        head: Any = model.lm_head
        tied = head.weight
        if is_packed:
            return
        old = tied.detach().clone()
        old[: len(before[EMBEDDING])] = before[EMBEDDING]
        head.weight = nn.Parameter(old, requires_grad=False)
        restored.append(lambda: setattr(head, "weight", tied))

    handover.load = wrapped
    if is_packed:
        handover.tied_head = lambda model: (None, None)
    try:
        yield
    finally:
        handover.load, handover.tied_head = load, tied_head
        for restore in restored:
            restore()


@contextlib.contextmanager
def _keeping_prefixes(rig: Rig) -> Iterator[None]:
    """vLLM says that it has dropped its prefix cache, and has not; falling asleep drops it too, by the same call."""
    (engine,) = rig.group.each(lambda worker: worker._engine._engine)
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    reset = pool.reset_prefix_cache
    pool.reset_prefix_cache = lambda: True
    try:
        yield
    finally:
        pool.reset_prefix_cache = reset
