"""A worker with a real engine and a reference policy. It can repeat the first training step on the same responses."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import GROUND_TRUTH, PROMPT_TOKENS, FixedLengths, Loop, compose, draw_lengths, training_loop
from rlcore.config import RunConfig
from rlcore.models.load import compute_dtype
from rlcore.models.tokenizer import load_tokenizer
from rlcore.rollout.engine import engine_dtype
from rlcore.score import Score
from rlcore.trainer.step import StepResult
from rlcore.types import Prompt, Rollout
from rlcore.workers.device import choose_device
from rlcore.workers.group import Pending
from rlcore.workers.worker import Worker

SAMPLES = 4


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """Score a response by its length. Random weights solve no problem, so a score by correctness would always be 0."""
    return Score(len(response) / 1_000, {})


@dataclass(frozen=True, slots=True)
class Verdict:
    ok: bool
    values: Mapping[str, Any]


class RecordedGroup(FixedLengths):
    """A worker group that generates responses in its first step and returns the same responses in every later step.

    A check can set `around` to a function that returns a context manager for a worker method. Every call of the method
    then starts inside this context manager."""

    kept: list[Rollout] | None = None
    around: Callable[[Any], contextlib.AbstractContextManager[None]] = staticmethod(
        lambda verb: contextlib.nullcontext()
    )

    def each(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        with self.around(verb):
            return super().each(verb, *args, **kwargs)

    def begin(self, verb: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Pending[Any]:
        with self.around(verb):
            return super().begin(verb, arguments)

    def stream(
        self, verb: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], take: Callable[[int, Any], None]
    ) -> None:
        if self.kept is None:
            found: dict[int, Rollout] = {}
            with self.around(verb):
                super().stream(verb, arguments, lambda rank, some: found.update(some))
            self.kept = [found[index] for index in range(len(found))]
        take(0, list(enumerate(self.kept)))


class Rig:
    def __init__(self, arguments: argparse.Namespace, directory: Path) -> None:
        self.directory = directory
        self.shape: str = arguments.shape
        self._arguments = arguments
        self.config = self.settings()
        self.device = choose_device(self.config.runtime)
        dtype = compute_dtype(self.config.model, self.device)
        self.bfloat16 = engine_dtype(self.config, dtype) == torch.bfloat16
        lengths = draw_lengths(arguments.prompts * SAMPLES, arguments.mean, arguments.longest)
        self.group = RecordedGroup(self.config, directory, lengths)

    def settings(self, *overrides: str) -> RunConfig:
        arguments = self._arguments
        base = [
            f"model.path={self.directory}", "runtime=local", "runtime.num_workers=1", "runtime.threads_per_worker=4",
            "tracking.enabled=false", f"trainer.batch_size={arguments.prompts}",
            f"trainer.mini_batch_size={arguments.prompts}", f"rollout.samples_per_prompt={SAMPLES}",
            f"rollout.max_response_tokens={arguments.longest}", f"filter.max_prompt_tokens={PROMPT_TOKENS}",
            "rollout=vllm", "rollout.tensor_parallel_size=1", "rollout.memory_share=0.25",
            f"rollout.max_num_seqs={arguments.prompts * SAMPLES}", "algo.kl.offload=false",
            "model.gradient_checkpointing=false", "rollout.sleep_level=2",
            "trainer.max_tokens_per_micro_batch=16384", "reward.num_processes=0",
            "data.scorer=benchmarks.checks.rig:score",
        ]  # fmt: skip
        if torch.cuda.is_available():
            base.append("model.compile=true")  # as in training on a GPU, since uncompiled layers round more often
        return compose(base, [*arguments.overrides, *overrides])

    def step(self, *overrides: str, reset: bool = True) -> StepResult:
        """Run training step 1 on the recorded responses, with the settings changed by `overrides`. If `reset`, restore
        the initial policy first."""
        if reset:
            self.group.each(Worker.reset)
        with self.loop(*overrides) as loop:
            return loop.step()

    def loop(self, *overrides: str, real_prompts: Sequence[Prompt] = ()) -> contextlib.AbstractContextManager[Loop]:
        return training_loop(self.settings(*overrides), self.directory, self.group, real_prompts=real_prompts)

    def real_prompts(self) -> list[Prompt]:
        tokenizer = load_tokenizer(self.directory)
        if tokenizer.chat_template is None:
            return []
        found = []
        for index in range(self.config.trainer.batch_size):
            messages = [{"role": "user", "content": f"What is {17 + index} + {3 * index + 5}? Explain each step."}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            found.append(Prompt(index, tuple(ids), self.config.data.task, GROUND_TRUTH))
        return found

    @contextlib.contextmanager
    def watched(self, around: Callable[[Any], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
        before, self.group.around = self.group.around, around  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.group.around = before  # type: ignore[method-assign]

    def close(self) -> None:
        self.group.close()
