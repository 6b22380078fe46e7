"""Passes over a batch in micro-batches, repeated with smaller ones when memory runs out.

The numbers do not depend on how the batch was cut, but for `model.lora.dropout`, whose masks are drawn in the order of
the micro-batches.
"""

import functools
import gc
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from rlcore.algos.objective import Statistics
from rlcore.batching.balance import micro_batches
from rlcore.batching.pack import scatter_tokens, select, select_train
from rlcore.errors import DeviceMemoryError, RankMemoryError
from rlcore.models import memory
from rlcore.models.memory import OutOfMemory, catch_out_of_memory, release_cached_memory
from rlcore.models.shape import ModelShape
from rlcore.types import PackedBatch, TrainBatch

Batch = TypeVar("Batch", PackedBatch, TrainBatch)
S = TypeVar("S", bound=Statistics)
Parts: TypeAlias = Sequence[Sequence[int]]
"""The sequences of each micro-batch, by their indices in the rank's batch."""


@dataclass(frozen=True, slots=True)
class MicroBatch(Generic[Batch]):
    """Some sequences of a batch. What the host must know of them (where they begin, which tokens have a loss) is read
    from `host`: asked of the device, it would wait for all the work that is ordered there. Models take it as numpy
    arrays, since FSDP sends every tensor among a model's arguments to the device."""

    host: Batch
    device: Batch


def to_device(batch: Batch, sequences: Sequence[int], device: torch.device) -> MicroBatch[Batch]:
    """Some sequences of a batch, on their way to the device; neither waits for the other."""
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
    """Per-token values of the micro-batches in the order of the rank's batch, on the CPU: one wait for the device."""
    values = torch.cat([part.detach().float() for part in parts]).cpu()
    return scatter_tokens(values.split([len(part) for part in parts]), cu_seqlens, sequences)


def sum_statistics(statistics: Sequence[S]) -> S:
    """Sum over micro-batches, on the CPU: the only wait for the device in an update."""
    summed = functools.reduce(operator.add, statistics)
    return type(summed).unstack(summed.stack().cpu())


R = TypeVar("R")
GROW_AFTER = 100
"""Passes in a row that went well, after which the cut may get coarser again; doubled each time that this fails."""
REMEDY = (
    "Lower trainer.max_tokens_per_micro_batch, model.head_chunk_tokens or rollout.memory_share, set "
    "model.gradient_checkpointing=true, or shorten filter.max_prompt_tokens and rollout.max_response_tokens."
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OomRetry:
    """A pass that ran out of memory in `num_micro` micro-batches and was done again in `num_again`. `factor`: how many
    times the micro-batches of the token budget it gets from then on. `refusal`: the allocator's words."""

    name: str
    num_micro: int
    num_again: int
    factor: int
    refusal: str

    def __str__(self) -> str:
        return (
            f"{self.name} ran out of memory in {self.num_micro} micro-batches and is done again in {self.num_again}: "
            f"{self.refusal}"
        )


class MicroBatchRunner:
    """Runs one kind of pass in as many micro-batches as memory asks for.

    The pass is cut into `factor` times as many micro-batches as the token budget says; the factor is 1 until memory
    runs out, doubles each time that it does, and halves again after many good passes.

    Where several ranks make the pass together, one that runs out of memory has left the others in the middle of their
    collectives: the pass ends with an error, and a retry begins with twice the factor, which then stays (see
    `Worker.split_micro_batches`).

    Args:
        name: of the pass, for messages.
        recover: brings the model back to where a pass may begin; called after a failed one.
        num_ranks: ranks that make the pass together.
        shape: of the model, by which micro-batches cost the same on all of these ranks; None: they are cut by tokens.
        share_prompts: `model.share_prompts`.
    """

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
        self._good = 0
        self._grow_after = GROW_AFTER
        self.factor = 1
        self.num_failures = 0
        self._shortages: list[OomRetry] = []

    def pop_retries(self) -> list[OomRetry]:
        """Shortages since the last call."""
        taken, self._shortages = self._shortages, []
        return taken

    def run(self, work: Callable[[Parts], R], batch: PackedBatch, num_micro: int) -> R:
        """`work(sequences of each micro-batch)`, again with more micro-batches while memory runs out.

        Raises:
            DeviceMemoryError: it ran out with a single sequence in each micro-batch.
            RankMemoryError: it ran out on this one of several ranks.
        """
        while True:
            number = min(num_micro * self.factor, batch.num_sequences)
            parts = micro_batches(batch, number, self._shape, share_prompts=self._share_prompts)
            outcome = catch_out_of_memory(partial(work, parts))
            if not isinstance(outcome, OutOfMemory):
                self._record_success()
                return outcome
            self._record_failure(outcome.message, len(parts), batch.num_sequences)
            gc.collect()
            self._recover()
            release_cached_memory()

    def _record_success(self) -> None:
        self._good += 1
        if self.num_ranks == 1 and self.factor > 1 and self._good >= self._grow_after:
            self.factor //= 2
            self._good = 0
            self._grow_after *= 2
            log.info("%s: tries %d times the micro-batches that the token budget asks for", self._name, self.factor)

    def _record_failure(self, words: str, number: int, num_sequences: int) -> None:
        self._good = 0
        self.num_failures += 1
        if number >= num_sequences:
            raise DeviceMemoryError(
                f"{self._name} ran out of memory with one sequence in each micro-batch ({words}). {REMEDY}"
            )
        if self.num_ranks > 1:
            raise RankMemoryError(
                f"{self._name} ran out of memory in {number} micro-batches on one of {self.num_ranks} ranks ({words}). "
                "The steps since the last checkpoint are repeated with twice as many, with the same numbers. To "
                "save that time, lower trainer.max_tokens_per_micro_batch or set runtime.fit_memory=auto."
            )
        self.factor *= 2
        shortage = OomRetry(self._name, number, min(number * 2, num_sequences), self.factor, words)
        self._shortages.append(shortage)
        log.warning("%s", shortage)
