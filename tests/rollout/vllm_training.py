"""Training with the real vLLM as its engine, run by `vllm_session` in its process.

Weight syncs of a real model: `python -m tests.rollout.vllm_training FILE MODEL`, which writes JSON to FILE.
MODEL: SmolLM2-135M-Instruct.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from rlcore.config.compose import load_config
from rlcore.models.tokenizer import load_tokenizer
from rlcore.rollout.vllm import weights as weight_sync
from rlcore.trainer.metrics import Metrics
from rlcore.types import Prompt
from rlcore.workers.actor import Actor
from rlcore.workers.canary import WeightSync
from rlcore.workers.group import LocalGroup
from rlcore.workers.worker import Worker
from tests.helpers.carrying import CARRYING, step_facts
from tests.helpers.small_run import SmallRun, prepare, train
from tests.rollout.vllm_session import differing, message

STALE = "model.layers.0.mlp.gate_proj.weight"
LAYER, MATRIX = "model.layers.17.", "model.layers.12.mlp.gate_proj.weight"
# Longer than a block of vLLM's prefix cache on a CPU (128 tokens), so that there is something to keep.
QUESTION = "Which of these numbers is the largest one? " + ", ".join(map(str, range(10, 60))) + "."
RATE = 1e-5
VLLM = ("rollout.engine=vllm", "rollout.max_num_seqs=64", "rollout.memory_share=0.3")


def _run(folder: Path, *overrides: str, experiment: str = "debug") -> SmallRun:
    return prepare(folder / "artifacts", *VLLM, *overrides, experiment=experiment)


def _group(run: SmallRun) -> LocalGroup:
    return LocalGroup(run.config, str(run.model_directory))


def training_facts(folder: Path) -> dict[str, Any]:
    run = _run(folder)
    with closing(_group(run)) as group:
        first = train(run, group, 3)
    with closing(_group(run)) as group:
        return {"first": first, "second": train(run, group, 3), "canary": canary_facts(run, group)}


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
    with closing(_group(run)) as group:
        return {"steps": train(run, group, 2), "difference": group.each(Worker.sync_weights, 9)[0].difference}


def carrying_facts(folder: Path) -> dict[str, Any]:
    run = _run(folder, *CARRYING)
    with closing(_group(run)) as group:
        steps = train(run, group, 3)
        group.each(Worker.reset)
        return {"steps": steps, "responses": [step_facts(run, group, 2) for _ in range(2)]}


def episode_facts(folder: Path) -> list[Metrics]:
    run = _run(folder, experiment="number_guessing")
    with closing(_group(run)) as group:
        return train(run, group, 2)


def bfloat16_facts(folder: Path) -> dict[str, Any]:
    """Observe a bfloat16 engine with a float32 trainer: its logits and its weight syncs."""
    run = _run(folder, "rollout.dtype=bfloat16")
    with closing(_group(run)) as group:
        train(run, group, 1)
        return {"logits": group.each(_logits_facts)[0], "rounded": _rounded_facts(group)}


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
    with fault:
        return message(action)


def prompt(model: Path) -> Prompt:
    tokenizer = load_tokenizer(model)
    messages = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Prompt(0, tuple(tokenizer(text)["input_ids"]), "x", "{}")


def real_model_facts(model: Path) -> dict[str, Any]:
    config = load_config(
        ["experiment=debug", f"model.path={model}", "warm_start.enabled=false", "rollout.engine=vllm",
         "rollout.dtype=bfloat16", "rollout.max_num_seqs=8", "rollout.memory_share=0.1", "filter.max_prompt_tokens=256",
         "rollout.max_response_tokens=16", "tracking.enabled=false"]
    )  # fmt: skip
    group = LocalGroup(config, str(model))
    (worker,) = group.each(lambda worker: worker)
    worker.set_probe([prompt(model)])
    facts: dict[str, Any] = {"right": [_correct_sync(worker, 0)]}
    parameters, drawn = dict(worker.actor.model.model.named_parameters()), torch.Generator().manual_seed(1)
    before: dict[str, Tensor] = {}
    load, heads = weight_sync.load_weights, list[tuple[Any, Tensor]]()

    def with_stale_head(inside: Any, settings: Any, sent: Any, *more: Any) -> None:
        load(inside, settings, sent, *more)
        heads.append((inside.lm_head, inside.lm_head.weight))
        old = before["model.embed_tokens.weight"].to(inside.lm_head.weight)
        inside.lm_head.weight = nn.Parameter(old, requires_grad=False)

    def half(name: str, tensor: Tensor) -> Tensor:
        """Return the second half of one matrix: the shard of the second of two ranks."""
        rows = len(tensor) // 2
        return torch.cat([tensor[:rows], before[name][rows:].to(tensor)]) if name == MATRIX else tensor

    faults = {
        "layer": sending(lambda name, tensor: before[name] if name.startswith(LAYER) else tensor),
        "shard": sending(half),
        "head": patch.object(weight_sync, "load_weights", with_stale_head),
        "prefix cache": patch.object(worker.engine._engine, "reset_prefix_cache", lambda: True),
    }
    for version, (name, fault) in enumerate(faults.items(), start=1):
        before |= {name: tensor.detach().clone() for name, tensor in parameters.items()}
        with torch.no_grad():  # as an AdamW step at this learning rate: each weight moves by about that amount
            for tensor in parameters.values():
                tensor.add_(RATE * torch.empty_like(tensor).uniform_(-1, 1, generator=drawn).sign())
        facts[name] = raised(fault, partial(worker.sync_weights, version))
        for head, tied in heads:
            head.weight = tied
    facts["right"].append(_correct_sync(worker, len(faults) + 1))
    group.close()
    return facts


def _correct_sync(worker: Worker, version: int) -> list[Any]:
    synced = worker.sync_weights(version)
    return [synced.difference, synced.warning]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(real_model_facts(Path(sys.argv[2]))), encoding="utf-8")
