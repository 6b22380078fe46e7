"""Hand-written batches, responses and updates."""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from rlcore.algos.objective import PolicyStatistics, Statistics, ValueStatistics
from rlcore.batching.pack import pack
from rlcore.batching.prompts import PromptStream
from rlcore.config import RunConfig
from rlcore.errors import NonFiniteError
from rlcore.rollout.engine import SamplingRequest
from rlcore.trainer.experience import Experience, ResponseSampler, ScoredResponse
from rlcore.trainer.update import Estimate, OptimizerSteps, Update
from rlcore.types import PackedBatch, Prompt, Rollout, Score, TrainBatch
from rlcore.workers.group import Pending, WorkerGroup
from rlcore.workers.trained_model import ModelUpdate, ModelUpdates
from rlcore.workers.worker import Worker

PROMPTS = [Prompt(index, (5,) * (1 + index), "countdown", "{}") for index in range(12)]


class Written(ResponseSampler):
    """Returns responses of `1 + i` tokens to prompt i with scores `totals[i]` (None: the scorer failed)."""

    def __init__(self, config: RunConfig, totals: dict[int, Sequence[float | None]]) -> None:
        self.config, self.totals = config, totals
        self.decode = lambda ids: [" ".join(map(str, each)) for each in ids]
        self.asked: list[list[SamplingRequest]] = []
        self.temperatures: list[float] = []

    def sample(self, requests: Any, sampling: Any, *, policy_version: int, clock: Any = None) -> list[ScoredResponse]:
        assert policy_version == 4
        self.asked.append(list(requests))
        self.temperatures.append(sampling.temperature)
        return [self._written(request) for request in requests]

    def _written(self, request: SamplingRequest) -> ScoredResponse:
        prompt, length = request.prompt, 1 + request.prompt.prompt_id
        total = self.totals[prompt.prompt_id][request.sample_index]
        rollout = Rollout(prompt, request.sample_index, np.full(length, 7), np.zeros(length, np.float32), "stop", 4)
        score = Score(total or 0.0, {"correct": total or 0.0}, failure="no scorer" if total is None else None)
        return rollout, score, f"{prompt.prompt_id}.{request.sample_index}"


class InOrder(PromptStream[Prompt]):
    """Yields the prompts in order."""

    def _epoch_order(self, epoch: int) -> np.ndarray:
        return np.arange(len(self))


LENGTHS = ((2, 3), (2, 1), (3, 3), (3, 2))
"""Tokens of prompt and response."""
SCORES = (
    Score(1.0, {"correct": 1.0, "format": 0.5}), Score(0.0, {"correct": 0.0}), Score(9.0, {}, failure="lost"),
    Score(0.5, {"correct": 0.5}),
)  # fmt: skip
HALF, QUARTER = math.log(0.5), math.log(0.25)


def make_experience() -> Experience:
    rollouts = []
    for index, ((prompt, answer), end) in enumerate(zip(LENGTHS, ("length", "length", "stop", "length"), strict=True)):
        of = Prompt(index // 2, (5,) * prompt, "countdown", "{}")
        behavior = np.full(answer, HALF, np.float32)
        rollouts.append(Rollout(of, index % 2, np.full(answer, 7), behavior, end, 0))  # type: ignore[arg-type]
    return Experience(
        tuple(rollouts), SCORES, (0, 0, 1, 1), ("",) * 4, num_prompts_drawn=5, num_groups_dropped=3, greedy_scores=None,
        num_tokens_dropped=3, pass_metrics={"pass_rates/mean": 0.25},
    )  # fmt: skip


def pack_experience(found: Experience) -> PackedBatch:
    return pack(found.rollouts, found.scores, found.group_ids)


def make_estimate(packed: PackedBatch) -> Estimate:
    """Return an estimate with advantages 0, 1, 2 ..."""
    places = torch.arange(packed.num_tokens, dtype=torch.float32)
    batch = TrainBatch(packed, None, None, None, places, None, places / 2)
    return Estimate(batch, packed.scores - 0.5, 2 * places, None, None, packed.loss_mask)


def make_statistics(kind: type[Statistics], **given: float) -> Any:
    return kind(*(torch.tensor(given.get(field.name, 0.0), dtype=torch.float64) for field in fields(kind)))


POLICY = make_statistics(
    PolicyStatistics, num_tokens=4, pg_loss=3, entropy=6, kl_loss=9, ppo_kl=2, ref_kl=1, entropy_sum=10, num_clipped=3,
    num_clipped_lower=1,
)  # fmt: skip
VALUE = make_statistics(ValueStatistics, num_tokens=4, vf_loss=6, vpred=2, num_clipped=1)
UPDATE = Update(
    OptimizerSteps(POLICY, num_steps=3, grad_norm=0.5, largest_grad_norm=0.75, lr=1e-3),
    OptimizerSteps(VALUE, num_steps=2, grad_norm=0.25, largest_grad_norm=0.3, lr=1e-4),
    kl_coef=0.125, entropy_coef=0.01,
)  # fmt: skip


def rank_updates(kind: type[Statistics], applied: list[bool], failed: bool = False, **more: Any) -> ModelUpdates[Any]:
    """Return one rank's steps of 1 token each, with norms 1, 2 ..."""
    stats = make_statistics(kind, num_tokens=1)
    steps = [ModelUpdate(stats, float(number), applies, **more) for number, applies in enumerate(applied, start=1)]
    return ModelUpdates(tuple(steps), NonFiniteError("no number") if failed else None)


class Ranks(WorkerGroup):
    """Two ranks with fixed results of updates; records the calls."""

    world_size = 2

    def __init__(self, policy: list[ModelUpdates[Any]] | None = None, critic: Any = None) -> None:
        self._answers = {Worker.update_policy: policy, Worker.update_critic: critic}
        self.asked: list[tuple[Any, list[tuple[Any, ...]]]] = []

    def begin(self, verb: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Pending[Any]:
        self.asked.append((verb, list(arguments)))
        assert self._answers[verb] is not None, "these ranks have no results"
        return Pending(lambda: self._answers[verb])
