"""Training with the real vLLM as its engine, run by `vllm_session` in its process."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from rlcore.errors import EngineError
from rlcore.rollout.vllm import weights as weight_sync
from rlcore.trainer.metrics import Metrics
from rlcore.workers.actor import Actor
from rlcore.workers.canary import WeightSync
from rlcore.workers.group import LocalGroup
from rlcore.workers.worker import Worker
from tests.helpers.carrying import CARRYING, step_facts
from tests.helpers.small_run import SmallRun, prepare, train
from tests.rollout.vllm_session import differing

STALE = "model.layers.0.mlp.gate_proj.weight"
VLLM = ("rollout.engine=vllm", "rollout.max_num_seqs=64", "rollout.memory_share=0.3")


def _run(folder: Path, *overrides: str, experiment: str = "debug") -> SmallRun:
    return prepare(folder / "artifacts", *VLLM, *overrides, experiment=experiment)


def _group(run: SmallRun) -> LocalGroup:
    return LocalGroup(run.config, str(run.model_directory))


def training_facts(folder: Path) -> dict[str, Any]:
    run = _run(folder)
    group = _group(run)
    first = train(run, group, 3)
    group.close()
    group = _group(run)
    second = train(run, group, 3)
    canary = canary_facts(run, group)
    group.close()
    return {"first": first, "second": second, "canary": canary}


def canary_facts(run: SmallRun, group: LocalGroup) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    sync, weights = Worker.sync_weights, Actor.weights
    without_head = patch.object(weight_sync, "tied_head", lambda model: (None, None))  # as in all stock paths on a CPU

    def stale_later(worker: Worker, version: int) -> WeightSync:
        """Lose the tied head at every weight sync but the first."""
        if version == 0:
            return sync(worker, version)
        with torch.no_grad(), without_head:
            worker.actor.model.head.weight.mul_(1.5)
            return sync(worker, version)

    def left_out(self: Actor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        return (pair for pair in weights(self, dtype) if pair[0] != "model.norm.weight")

    group.each(Worker.reset)
    facts["stale_head"] = raised(without_head, lambda: group.each(Worker.sync_weights, 0))
    facts["right_difference"] = group.each(Worker.sync_weights, 1)[0].difference
    one_tensor_old = sending(lambda name, tensor: tensor * (name != "model.layers.0.mlp.up_proj.weight"))
    facts["wrong_tensor"] = raised(one_tensor_old, lambda: group.each(Worker.sync_weights, 2))
    stale_later.__name__ = "sync_weights"
    facts["training_stopped"] = raised(patch.object(Worker, "sync_weights", stale_later), lambda: train(run, group, 1))
    without_norm = patch.object(Actor, "weights", left_out)
    facts["left_out"] = raised(without_norm, lambda: group.each(Worker.sync_weights, 3))
    facts["right_again"] = group.each(Worker.sync_weights, 4)[0].difference
    return facts


def sending(choose: Callable[[str, Tensor], Tensor]) -> AbstractContextManager[object]:
    load = weight_sync.load_weights

    def wrapped(model: nn.Module, config: Any, weights: Any, *more: Any) -> None:
        load(model, config, ((name, choose(name, tensor)) for name, tensor in weights), *more)

    return patch.object(weight_sync, "load_weights", wrapped)


def adapter_facts(folder: Path) -> dict[str, Any]:
    """Run steps with adapters on a 4-bit base that alternates with the engine on the device."""
    run = _run(
        folder, "model.lora.rank=4", "model.lora.base=nf4", "model.lora.offload=true", "rollout.sleep_level=1",
        "optim.lr=0.05", "algo.kl.where=loss",
    )  # fmt: skip
    group = _group(run)
    steps = train(run, group, 2)
    difference = group.each(Worker.sync_weights, 9)[0].difference
    group.close()
    return {"steps": steps, "difference": difference}


def carrying_facts(folder: Path) -> dict[str, Any]:
    run = _run(folder, *CARRYING)
    group = _group(run)
    steps = train(run, group, 3)
    group.each(Worker.reset)
    facts = {"steps": steps, "responses": [step_facts(run, group, 2) for _ in range(2)]}
    group.close()
    return facts


def episode_facts(folder: Path) -> list[Metrics]:
    run = _run(folder, experiment="number_guessing")
    group = _group(run)
    try:
        return train(run, group, 2)
    finally:
        group.close()


def bfloat16_facts(folder: Path) -> dict[str, Any]:
    """Observe a bfloat16 engine with a float32 trainer: its logits and its weight syncs."""
    run = _run(folder, "rollout.dtype=bfloat16")
    group = _group(run)
    train(run, group, 1)
    facts = {"logits": group.each(_logits_facts)[0], "rounded": _rounded_facts(group)}
    group.close()
    return facts


def _rounded_facts(group: LocalGroup) -> dict[str, Any]:
    """Sync correctly to a bfloat16 engine, then with a tensor that is a training step old."""
    right = group.each(Worker.sync_weights, 10)[0]
    one_step_old = sending(lambda name, tensor: tensor - 1e-4 if name == STALE else tensor)
    stale = raised(one_step_old, lambda: group.each(Worker.sync_weights, 11))
    return {"difference": right.difference, "warning": right.warning, "stale": stale}


def _logits_facts(worker: Worker) -> dict[str, Any]:
    """Compare vLLM's bfloat16 logits, ten times as large as the model's, with exact ones."""
    engine = worker.engine
    weight = worker.actor.model.head.weight.detach().bfloat16().float()
    hidden = 10 * torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = hidden.float() @ weight.t()
    with torch.no_grad():
        found = engine.model.compute_logits(hidden)
    return {
        "dtype": str(found.dtype),
        "off": (found[:, : len(weight)] - exact).abs().max().item(),
        "off_when_rounded": (exact.bfloat16().float() - exact).abs().max().item(),
        "differing": differing(engine, worker.actor.weights()),
    }


def raised(fault: AbstractContextManager[object], action: Callable[[], Any]) -> str:
    try:
        with fault:
            action()
    except EngineError as error:
        return str(error)
    return ""
