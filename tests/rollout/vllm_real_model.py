"""Weight syncs of a real model to the real vLLM: `python -m tests.rollout.vllm_real_model FOLDER MODEL`.

The process writes JSON for the tests, as `vllm_session` does. MODEL: SmolLM2-135M-Instruct.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    """Return a question in the model's chat template."""
    tokenizer = load_tokenizer(model)
    messages = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Prompt(0, tuple(tokenizer(text)["input_ids"]), "x", "{}")


class Trained:
    """Worker's weights after training steps, and the tensors of the previous weight sync."""

    def __init__(self, worker: Worker) -> None:
        self._parameters = dict(worker.actor.model.model.named_parameters())
        self._drawn = torch.Generator().manual_seed(1)
        self.before: dict[str, Tensor] = {}

    def step(self) -> None:
        """Simulate an AdamW step at this learning rate: each weight moves by about that amount."""
        self.before = {name: tensor.detach().clone() for name, tensor in self._parameters.items()}
        with torch.no_grad():
            for tensor in self._parameters.values():
                tensor.add_(RATE * torch.empty_like(tensor).uniform_(-1, 1, generator=self._drawn).sign())


def facts_of(model: Path) -> dict[str, Any]:
    """Return the results of correct weight syncs, and of each fault after a training step."""
    config = load_config(
        ["experiment=debug", f"model.path={model}", "warm_start.enabled=false", "rollout.engine=vllm",
         "rollout.dtype=bfloat16", "rollout.max_num_seqs=8", "rollout.memory_share=0.1", "filter.max_prompt_tokens=256",
         "rollout.max_response_tokens=16", "tracking.enabled=false"]
    )  # fmt: skip
    group = LocalGroup(config, str(model))
    worker = group.each(_itself)[0]
    group.each(Worker.set_probe, [prompt(model)])
    facts: dict[str, Any] = {"right": [_right(worker, 0)]}
    trained = Trained(worker)
    load = sync.load_weights

    def with_stale(stale: Callable[[str, Tensor], Tensor]) -> Any:
        def wrapped(inside: nn.Module, settings: Any, sent: Any, *more: Any) -> None:
            load(inside, settings, _replaced(sent, stale), *more)

        return wrapped

    heads: list[tuple[Any, Tensor]] = []

    def with_stale_head(inside: Any, settings: Any, sent: Any, *more: Any) -> None:
        load(inside, settings, sent, *more)
        heads.append((inside.lm_head, inside.lm_head.weight))
        old = inside.lm_head.weight.detach().clone()
        old.copy_(trained.before["model.embed_tokens.weight"])
        inside.lm_head.weight = nn.Parameter(old, requires_grad=False)

    def half(name: str, tensor: Tensor) -> Tensor:
        """Return the second half of one matrix: the shard of the second of two ranks."""
        if name != MATRIX:
            return tensor
        rows = len(tensor) // 2
        return torch.cat([tensor[:rows], trained.before[name][rows:].to(tensor)])

    faults: dict[str, tuple[Any, str, Any]] = {
        "layer": (
            sync,
            "load_weights",
            with_stale(lambda n, t: trained.before[n] if n.startswith(LAYER) else t),
        ),
        "shard": (sync, "load_weights", with_stale(half)),
        "head": (sync, "load_weights", with_stale_head),
        "prefix cache": (worker.engine._engine, "reset_prefix_cache", lambda: True),
    }
    for version, (name, (owner, function, wrong)) in enumerate(faults.items(), start=1):
        trained.step()
        original = getattr(owner, function)
        setattr(owner, function, wrong)
        try:
            worker.sync_weights(version)
            facts[name] = ""
        except EngineError as error:
            facts[name] = str(error)
        finally:
            setattr(owner, function, original)
            for head, tied in heads:
                head.weight = tied
    facts["right"].append(_right(worker, len(faults) + 1))
    group.close()
    return facts


def _itself(worker: Worker) -> Worker:
    return worker


def _right(worker: Worker, version: int) -> list[Any]:
    synced = worker.sync_weights(version)
    return [synced.difference, synced.warning]


def _replaced(sent: Any, stale: Callable[[str, Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    return ((name, stale(name, tensor)) for name, tensor in sent)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(facts_of(Path(sys.argv[2]))), encoding="utf-8")
