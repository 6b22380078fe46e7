"""Micro-batched passes and optimizer steps of one model on one rank. The model is the policy or the critic."""

import functools
import gc
import logging
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlcore.algos.aggregation import Denominator
from rlcore.algos.objective import Statistics
from rlcore.batching.balance import micro_batches
from rlcore.batching.pack import scatter_tokens, select, select_train
from rlcore.config import OptimConfig, RunConfig
from rlcore.errors import DeviceMemoryError, NonFiniteError, RankMemoryError
from rlcore.models import memory
from rlcore.models.memory import (
    OutOfMemory,
    build_optimizer,
    catch_out_of_memory,
    clip_grad_norm,
    release_cached_memory,
)
from rlcore.models.parallel import gather, reset_after_failed_pass, shard
from rlcore.models.policy import PackedTrunk
from rlcore.models.shape import ModelShape, shape_from_config
from rlcore.types import PackedBatch, TrainBatch
from rlcore.workers.device import OomRetry

Batch = TypeVar("Batch", PackedBatch, TrainBatch)
Model = TypeVar("Model", bound=PackedTrunk)
S = TypeVar("S", bound=Statistics)
R = TypeVar("R")
Parts: TypeAlias = Sequence[Sequence[int]]  # sequences of each micro-batch, as indices in the rank's batch

GROW_AFTER = 100  # number of consecutive successful passes before the micro-batches grow again. It doubles each time
REMEDY = (
    "Lower trainer.max_tokens_per_micro_batch, model.head_chunk_tokens or rollout.memory_share, set "
    "model.gradient_checkpointing=true, or shorten filter.max_prompt_tokens and rollout.max_response_tokens."
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MicroBatch(Generic[Batch]):
    """Some sequences of a batch, with one copy on the host and one on the device. Sequence bounds and masks are read
    from `host`, because a read from the device would block. Models get these bounds and masks as numpy arrays, because
    FSDP would move tensors to the device."""

    host: Batch
    device: Batch


Objective: TypeAlias = Callable[[MicroBatch[Batch]], tuple[Tensor, S, Tensor | None]]
"""A function of a micro-batch. It returns the loss, the statistics, and log-probabilities or None."""
TokenFunction: TypeAlias = Callable[[MicroBatch[PackedBatch]], Tensor]


def to_device(batch: Batch, sequences: Sequence[int], device: torch.device) -> MicroBatch[Batch]:
    """Select sequences of a batch and copy them asynchronously to the device."""
    host = select_train(batch, sequences) if isinstance(batch, TrainBatch) else select(batch, sequences)
    return MicroBatch(host, _send(host, device))


def _send(batch: Batch, device: torch.device) -> Batch:
    changes: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = memory.to_device(value, device)
        elif value is not None:
            changes[field.name] = _send(value, device)
    return replace(batch, **changes)


def restore_order(parts: Sequence[Float[Tensor, "..."]], cu_seqlens: Tensor, sequences: Parts) -> Tensor:
    """Combine the micro-batches' token values (`parts`) into one tensor on the CPU, in the order of the batch.
    `sequences`: the sequence indices of each micro-batch."""
    values = torch.cat([part.detach().float() for part in parts]).cpu()
    return scatter_tokens(values.split([len(part) for part in parts]), cu_seqlens, sequences)


def sum_statistics(statistics: Sequence[S]) -> S:
    """Return the sum of the micro-batches' statistics on the CPU."""
    summed = functools.reduce(operator.add, statistics)
    return type(summed).unstack(summed.stack().cpu())


class MicroBatchRunner:
    """An object that runs one kind of pass in micro-batches. The token budget gives a number of micro-batches, which is
    multiplied by `factor`. On a single rank, the factor doubles when memory runs out, and halves after many successful
    passes. With several ranks, an error is raised instead, because the ranks wait for each other in collectives. Their
    factor is changed only by `Worker.split_micro_batches`. `recover`: a function that resets the model after a failed
    pass. `shape`: the model's shape. It gives the computing cost, which is balanced over ranks. If `shape` is None, the
    number of tokens is balanced."""

    def __init__(
        self,
        name: str,
        *,
        recover: Callable[[], None],
        num_ranks: int = 1,
        shape: ModelShape | None = None,
        share_prompts: bool = False,
    ) -> None:
        self._name = name
        self._recover = recover
        self.num_ranks, self._shape = num_ranks, shape
        self._share_prompts = share_prompts
        self._num_successes = 0
        self._grow_after = GROW_AFTER
        self.factor = 1
        self.num_failures = 0
        self._retries: list[OomRetry] = []

    def pop_retries(self) -> list[OomRetry]:
        """Return the retries of passes that ran out of memory since the previous call."""
        retries, self._retries = self._retries, []
        return retries

    def run(self, work: Callable[[Parts], R], batch: PackedBatch, num_micro: int) -> R:
        """Call `work` with the sequence indices of all micro-batches.

        If memory runs out in a run with one rank, the call is repeated with more micro-batches. In a run with several
        ranks, RankMemoryError is raised. Raises DeviceMemoryError if memory runs out with one sequence per
        micro-batch."""
        while True:
            number = min(num_micro * self.factor, batch.num_sequences)
            parts = micro_batches(batch, number, self._shape, share_prompts=self._share_prompts)
            outcome = catch_out_of_memory(partial(work, parts))
            if not isinstance(outcome, OutOfMemory):
                break
            self._record_failure(outcome.message, len(parts), batch.num_sequences)
            gc.collect()
            self._recover()
            release_cached_memory()

        self._num_successes += 1
        if self.num_ranks == 1 and self.factor > 1 and self._num_successes >= self._grow_after:
            self.factor //= 2
            self._num_successes = 0
            self._grow_after *= 2
            log.info("%s: tries %d times the micro-batches of the token budget", self._name, self.factor)
        return outcome

    @torch.no_grad()
    def token_values(
        self, compute: TokenFunction, batch: PackedBatch, num_micro: int, device: torch.device
    ) -> Float[Tensor, "T ..."]:
        """Return the values of all tokens in batch order, on the CPU. `compute` returns the values of one
        micro-batch."""

        def work(parts: Parts) -> Tensor:
            values = [compute(to_device(batch, part, device)) for part in parts]
            return restore_order(values, batch.cu_seqlens, parts)

        return self.run(work, batch, num_micro)

    def _record_failure(self, message: str, number: int, num_sequences: int) -> None:
        self._num_successes = 0
        self.num_failures += 1
        if number >= num_sequences:
            raise DeviceMemoryError(
                f"{self._name} ran out of memory with one sequence in each micro-batch ({message}). {REMEDY}"
            )
        if self.num_ranks > 1:
            raise RankMemoryError(
                f"{self._name} ran out of memory in {number} micro-batches on one of {self.num_ranks} ranks "
                f"({message}). The steps since the last checkpoint are repeated with twice as many, with the same "
                "numbers. To save that time, lower trainer.max_tokens_per_micro_batch or set runtime.fit_memory=auto."
            )
        self.factor *= 2
        retry = OomRetry(self._name, number, min(number * 2, num_sequences), self.factor, message)
        self._retries.append(retry)
        log.warning("%s", retry)


@dataclass(frozen=True, slots=True)
class ModelUpdate(Generic[S]):
    """The result of one optimizer step on one rank. `applied`: False if the gradient norm was above
    `alarms.grad_norm_above`. `logprobs` Float[T]: the log-probabilities before the step, in batch order, or None if
    they were not requested."""

    stats: S
    grad_norm: float
    applied: bool = True
    logprobs: Float[Tensor, "T"] | None = None


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One rank's share of the batch for an optimizer step. `denominator`: the divisors of the loss, counted over all
    ranks."""

    sequences: range
    num_micro: int
    denominator: Denominator


@dataclass(frozen=True, slots=True)
class ModelUpdates(Generic[S]):
    """The results of several optimizer steps. If a step was not finite, `steps` has only the results before this step,
    and `failure` is the error of this step. All ranks have the same number of results."""

    steps: tuple[ModelUpdate[S], ...]
    failure: NonFiniteError | None = None


def run_mini_batches(
    step: Callable[[TrainBatch, int, Denominator], ModelUpdate[S]], batch: TrainBatch, mini_batches: Sequence[MiniBatch]
) -> ModelUpdates[S]:
    """Call `step` on each mini-batch in order, until a call raises NonFiniteError, and return the results."""
    steps: list[ModelUpdate[S]] = []
    for each in mini_batches:
        try:
            steps.append(step(select_train(batch, each.sequences), each.num_micro, each.denominator))
        except NonFiniteError as error:
            return ModelUpdates(tuple(steps), error.with_traceback(None))  # its frames hold tensors
    return ModelUpdates(tuple(steps))


class TrainedModel(Generic[Model]):
    """A model with its optimizer and a `MicroBatchRunner` for each kind of pass. The master weights are float32, and
    are sharded if there is a mesh. `passes`: the names of the update pass and the forward pass in log and error
    messages."""

    def __init__(
        self,
        config: RunConfig,
        model: Model,
        optim: OptimConfig,
        device: torch.device,
        mesh: DeviceMesh | None,
        passes: tuple[str, str],
    ) -> None:
        world_size = 1 if mesh is None else mesh.size()
        self._gathers_once = config.model.zero_stage == 1 and world_size > 1
        self._config, self._optim, self._device, self._world_size = config, optim, device, world_size
        self.model = model if mesh is None else shard(model, mesh=mesh, dtype=model.compute_dtype)
        self.optimizer = build_optimizer(self.model, optim, device=device)
        shape = shape_from_config(self.model.decoder.config.to_dict()) if world_size > 1 else None
        self.update_pass, self.forward_pass = (
            MicroBatchRunner(
                name, recover=self._recover, num_ranks=world_size, shape=shape, share_prompts=model.share_prompts
            )
            for name in passes
        )

    def _recover(self) -> None:
        reset_after_failed_pass(self.model)
        self.optimizer.zero_grad(set_to_none=True)

    def take_step(
        self,
        batch: Batch,
        num_micro: int,
        objective: Objective[Batch, S],
        *,
        lr: float,
        loss: Callable[[S], str],
        why: Callable[[], str],
        max_norm: float = math.inf,
    ) -> ModelUpdate[S]:
        """Take one optimizer step, unless the gradient norm is above `max_norm`. Raises NonFiniteError without a step
        if the norm or a statistic is not finite on some rank. The error's message begins with the result of `loss` and
        ends with the result of `why`."""
        packed = batch.packed if isinstance(batch, TrainBatch) else batch
        statistics, logprobs = self.update_pass.run(
            lambda parts: self._accumulate(batch, packed, parts, objective), packed, num_micro
        )
        norm = clip_grad_norm(self.model.parameters(), self._optim.grad_clip).item()
        is_finite = math.isfinite(norm) and bool(torch.isfinite(statistics.stack()).all())
        if self._world_size > 1:
            flag = torch.tensor(float(is_finite), device=self._device)
            dist.all_reduce(flag, op=dist.ReduceOp.MIN)
            is_finite = bool(flag.item())
        if not is_finite:
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(f"{loss(statistics)} and its gradient norm {norm}: no step was taken{why()}")
        if is_applied := norm <= max_norm:  # the same on all ranks
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return ModelUpdate(statistics, norm, is_applied, logprobs)

    def _accumulate(
        self, batch: Batch, packed: PackedBatch, parts: Parts, objective: Objective[Batch, S]
    ) -> tuple[S, Tensor | None]:
        """Compute the gradient of a mini-batch, starting from zero. Return the summed statistics and the
        log-probabilities in batch order, both on the CPU."""
        self.optimizer.zero_grad(set_to_none=True)
        statistics: list[S] = []
        logprobs: list[Tensor] = []
        try:
            for number, part in enumerate(parts, start=1):
                if self._gathers_once:
                    gather(self.model, once=True, is_last=number == len(parts))
                loss, part_statistics, part_logprobs = objective(to_device(batch, part, self._device))
                # FSDP averages gradients over ranks, but the denominator counts all ranks: undo the average.
                (loss * self._world_size).backward()
                statistics.append(part_statistics)
                logprobs += [] if part_logprobs is None else [part_logprobs]
        finally:
            if self._gathers_once:
                gather(self.model, once=False)
        return sum_statistics(statistics), restore_order(logprobs, packed.cu_seqlens, parts) if logprobs else None
