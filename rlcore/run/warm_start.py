"""The model of step 0: made from nothing, then taught the form of an answer by supervised steps.

Solver-made equations are shown until the sampled reward on training problems reaches `stop_at_reward`. A share of the
demonstrations reaches another target than the one asked (the row's distractor), so the model learns to write valid
equations over the right numbers but only half learns to aim: that is left to the reinforcement learning.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlcore.batching.balance import num_micro_batches
from rlcore.batching.pack import pack
from rlcore.batching.prompts import Demonstration, read_demonstrations
from rlcore.config import OptimConfig, RunConfig
from rlcore.errors import DataError
from rlcore.models.library import no_progress_bars
from rlcore.models.load import load_policy, load_tokenizer
from rlcore.models.memory import release_cached_memory
from rlcore.models.optim import build_optimizer, clip_grad_norm
from rlcore.models.scratch import build_scratch_model, build_scratch_tokenizer
from rlcore.rollout.engine import WARM_START_STREAM, build_engine, requests_for
from rlcore.rollout.scoring import ScoringPool
from rlcore.run.inputs import (
    RunInputs,
    ensure_given_model,
    find_start_model,
    given_model,
    is_given,
    planned_start_model,
)
from rlcore.run.problems import read_parts, spread
from rlcore.storage.finished import FINGERPRINT
from rlcore.storage.publish import published_directory
from rlcore.types import PackedBatch, Prompt, Rollout, Score
from rlcore.workers.device import Place, choose_place
from rlcore.workers.passes import Parts, PassBudget, to_device

MIN_CHECK_PROBLEMS = 16
"""Fewer sampled answers say nothing about a reward."""


@dataclass(frozen=True, slots=True)
class WarmStartResult:
    """`reward`: last sampled reward on training problems; `steps`: supervised steps taken."""

    directory: Path
    cached: bool
    reward: float
    steps: int


@dataclass(frozen=True, slots=True)
class WarmStartProgress:
    """One measurement on the way."""

    step: int
    max_steps: int
    loss: float
    reward: float


def ensure_start_model(
    config: RunConfig, inputs: RunInputs, on_progress: Callable[[WarmStartProgress], None]
) -> WarmStartResult:
    """Build and warm-start the model of step 0 unless it is there, on the device of the workers."""
    if config.model.path is not None:
        ensure_given_model(config)
    directory = planned_start_model(config, inputs.filtered_directory)
    manifest = find_start_model(config, inputs.filtered_directory)
    if is_given(config):
        return WarmStartResult(directory, cached=True, reward=0.0, steps=0)
    if manifest is not None:
        return WarmStartResult(
            directory, cached=True, reward=float(manifest.values["reward"]), steps=int(manifest.values["steps"])
        )
    # The figures go into the manifest, which is read when the folder is published: after the block has run.
    figures: dict[str, Any] = {FINGERPRINT: directory.name, "reward": 0.0, "steps": 0}
    with published_directory(directory, figures) as folder:
        source = folder if config.model.path is None else given_model(config)
        if config.model.path is None:
            _build_from_nothing(config, folder)
        if config.warm_start.enabled:
            for progress in _taught(config, inputs, source, folder):
                on_progress(progress)
                figures |= {"reward": progress.reward, "steps": progress.step}
            gc.collect()
            release_cached_memory()  # the workers may be other processes
    return WarmStartResult(directory, cached=False, reward=figures["reward"], steps=int(figures["steps"]))


def _build_from_nothing(config: RunConfig, folder: Path) -> None:
    build_scratch_tokenizer(config.model.scratch, folder)
    tokenizer = load_tokenizer(folder)
    build_scratch_model(
        config.model.scratch,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=config.seed,
        directory=folder,
    )


def _taught(config: RunConfig, inputs: RunInputs, source: Path, folder: Path) -> Iterator[WarmStartProgress]:
    """Teach the model in `source`, and write it into `folder`."""
    teacher = _Teacher(config, inputs, source)
    yield from teacher.lessons()
    teacher.save(folder)


def _choose_place(config: RunConfig) -> Place:
    """Device and type of the workers; the CPU where this is the head of a cluster and has no GPU."""
    runtime = config.runtime
    if runtime.ray_address is not None and not torch.cuda.is_available():
        runtime = runtime.model_copy(update={"device": "cpu"})
    return choose_place(runtime, config.model)


class _Teacher:
    """The supervised loop. Its gradient does not depend on the cut into micro-batches: the denominator counts the
    answer tokens of the whole batch."""

    def __init__(self, config: RunConfig, inputs: RunInputs, model_directory: Path) -> None:
        self._config = config
        torch.set_num_threads(config.runtime.threads_per_worker)
        place = _choose_place(config)
        self._device = place.device
        self._tokenizer = load_tokenizer(model_directory)
        self._policy = load_policy(model_directory, model=config.model, device=place.device)
        self._demonstrations = [one for file in inputs.train_parquets for one in read_demonstrations(file)]
        if not self._demonstrations:
            raise DataError(
                f"{inputs.filtered_directory}: warm_start.enabled needs rows with a solution, and there is none. "
                "Set warm_start.enabled=false, or use a task that writes extra_info.solution"
            )
        check = max(MIN_CHECK_PROBLEMS, config.warm_start.check_problems)
        self._check_prompts = spread(read_parts(config, inputs.train_parquets))[:check]
        rollout = config.rollout.model_copy(update={"engine": "hf"})
        sampling = config.model_copy(update={"rollout": rollout})
        self._engine = build_engine(sampling, str(model_directory), device=place.device, dtype=place.dtype)
        self._optim = OptimConfig(lr=config.warm_start.lr, weight_decay=0.0)
        self._optimizer = build_optimizer(self._policy, self._optim, device=place.device)
        self._budget = PassBudget("the warm start's update", recover=self._recover, ranks=None)

    def lessons(self) -> Iterator[WarmStartProgress]:
        """Supervised steps; a measurement every `check_every`, until the reward or the step limit is reached."""
        warm = self._config.warm_start
        rng = np.random.default_rng((self._config.seed, WARM_START_STREAM))
        with ScoringPool(self._config.data.scorer, self._config.reward) as scoring:
            for step in range(1, warm.max_steps + 1):
                loss = self._learn(self._draw(rng))
                if step % warm.check_every and step != warm.max_steps:
                    continue
                reward = self._sampled_reward(step, scoring)
                yield WarmStartProgress(step, warm.max_steps, loss, reward)
                if reward >= warm.stop_at_reward:
                    return

    def _draw(self, rng: np.random.Generator) -> list[Rollout]:
        """A batch of demonstrations in the shape of rollouts; some of them misdirected."""
        warm = self._config.warm_start
        chosen = rng.integers(len(self._demonstrations), size=warm.batch_size)
        misdirected = rng.random(warm.batch_size) < warm.misdirected_share
        return [
            _as_rollout(self._demonstrations[index], misdirected=bool(wrong))
            for index, wrong in zip(chosen.tolist(), misdirected.tolist(), strict=True)
        ]

    def _learn(self, lessons: Sequence[Rollout]) -> float:
        """One optimizer step; the mean negative log-likelihood of the answer tokens before it."""
        batch = pack(lessons, [Score(0.0, {})] * len(lessons), range(len(lessons)))
        num_micro = num_micro_batches(
            batch.sequence_lengths().tolist(), self._config.trainer.max_tokens_per_micro_batch
        )
        loss = self._budget.run(partial(self._accumulate, batch), batch, num_micro)
        clip_grad_norm(self._policy.parameters(), self._optim.grad_clip)
        self._optimizer.step()
        return loss

    def _accumulate(self, batch: PackedBatch, parts: Parts) -> float:
        """The gradient of a batch, from zero, and its loss."""
        self._optimizer.zero_grad(set_to_none=True)
        losses = []
        for part in parts:
            micro = to_device(batch, part, self._device)
            output = self._policy(
                micro.device.token_ids,
                micro.device.position_ids,
                micro.host.cu_seqlens.numpy(),
                micro.device.target_ids,
                micro.host.loss_mask.numpy(),
                temperature=1.0,
                entropy="none",
            )
            loss = -output.logprobs.sum() / batch.num_loss_tokens
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum().item()

    def _recover(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _sampled_reward(self, step: int, scoring: ScoringPool) -> float:
        """Mean score of one sampled answer to each check problem, over those that the scorer did not fail on."""
        weights = ((name, tensor.detach()) for name, tensor in self._policy.model.named_parameters())
        self._engine.update_weights(weights, version=step)
        requests = requests_for(self._check_prompts, 1, run_seed=self._config.seed, stream=WARM_START_STREAM, step=step)
        rollout = self._config.rollout
        rollouts = self._engine.generate(requests, rollout.sampling, rollout.max_response_tokens)
        texts = self._tokenizer.batch_decode([list(r.response_ids) for r in rollouts], skip_special_tokens=True)
        scores = scoring.score(texts, [r.prompt.ground_truth_json for r in rollouts])
        totals = [score.total for score in scores if score.failure is None]
        if not totals:
            raise DataError(
                f"data.scorer: {self._config.data.scorer} failed on all {len(scores)} answers of the warm start, the "
                f"last time: {scores[-1].failure}. Repair it, or set warm_start.enabled=false"
            )
        return sum(totals) / len(totals)

    def save(self, folder: Path) -> None:
        """Write the model and its tokenizer as a transformers directory."""
        with no_progress_bars():
            self._policy.model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)


def _as_rollout(demonstration: Demonstration, *, misdirected: bool) -> Rollout:
    wrong = misdirected and demonstration.distractor_ids
    answer = demonstration.distractor_ids if wrong else demonstration.solution_ids
    prompt = Prompt(0, demonstration.prompt_ids, "demonstration", "{}")
    return Rollout(prompt, 0, answer, np.zeros(len(answer), dtype=np.float32), "stop", 0)
