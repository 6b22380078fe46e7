"""Weight syncs of a real model to the real vLLM: `python -m tests.rollout.vllm_real_model FILE MODEL`.

The process writes JSON to FILE, as `vllm_session` does. MODEL: SmolLM2-135M-Instruct.
"""

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from rlcore.config.compose import load_config
from rlcore.errors import EngineError
from rlcore.models.tokenizer import load_tokenizer
from rlcore.rollout.vllm import weights as sync
from rlcore.types import Prompt
from rlcore.workers.group import LocalGroup
from rlcore.workers.worker import Worker

LAYER, MATRIX = "model.layers.17.", "model.layers.12.mlp.gate_proj.weight"
# Longer than a block of vLLM's prefix cache on a CPU (128 tokens), so that there is something to keep.
QUESTION = "Which of these numbers is the largest one? " + ", ".join(map(str, range(10, 60))) + "."
RATE = 1e-5


def prompt(model: Path) -> Prompt:
    tokenizer = load_tokenizer(model)
    messages = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Prompt(0, tuple(tokenizer(text)["input_ids"]), "x", "{}")


def facts_of(model: Path) -> dict[str, Any]:
    config = load_config(
        ["experiment=debug", f"model.path={model}", "warm_start.enabled=false", "rollout.engine=vllm",
         "rollout.dtype=bfloat16", "rollout.max_num_seqs=8", "rollout.memory_share=0.1", "filter.max_prompt_tokens=256",
         "rollout.max_response_tokens=16", "tracking.enabled=false"]
    )  # fmt: skip
    group = LocalGroup(config, str(model))
    (worker,) = group.each(lambda worker: worker)
    worker.set_probe([prompt(model)])
    facts: dict[str, Any] = {"right": [_right(worker, 0)]}
    parameters, drawn = dict(worker.actor.model.model.named_parameters()), torch.Generator().manual_seed(1)
    before: dict[str, Tensor] = {}
    load, heads = sync.load_weights, list[tuple[Any, Tensor]]()

    def stale(choose: Callable[[str, Tensor], Tensor]) -> AbstractContextManager[object]:
        def wrapped(inside: nn.Module, settings: Any, sent: Any, *more: Any) -> None:
            load(inside, settings, ((name, choose(name, tensor)) for name, tensor in sent), *more)

        return patch.object(sync, "load_weights", wrapped)

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
        "layer": stale(lambda name, tensor: before[name] if name.startswith(LAYER) else tensor),
        "shard": stale(half),
        "head": patch.object(sync, "load_weights", with_stale_head),
        "prefix cache": patch.object(worker.engine._engine, "reset_prefix_cache", lambda: True),
    }
    for version, (name, fault) in enumerate(faults.items(), start=1):
        before |= {name: tensor.detach().clone() for name, tensor in parameters.items()}
        with torch.no_grad():  # as an AdamW step at this learning rate: each weight moves by about that amount
            for tensor in parameters.values():
                tensor.add_(RATE * torch.empty_like(tensor).uniform_(-1, 1, generator=drawn).sign())
        try:
            with fault:
                worker.sync_weights(version)
            facts[name] = ""
        except EngineError as error:
            facts[name] = str(error)
        for head, tied in heads:
            head.weight = tied
    facts["right"].append(_right(worker, len(faults) + 1))
    group.close()
    return facts


def _right(worker: Worker, version: int) -> list[Any]:
    synced = worker.sync_weights(version)
    return [synced.difference, synced.warning]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(facts_of(Path(sys.argv[2]))), encoding="utf-8")
