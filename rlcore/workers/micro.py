"""A rank's batch cut into micro-batches and put together again."""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from rlcore.algos.objective import Statistics
from rlcore.batching.balance import partition
from rlcore.batching.pack import scatter_tokens, select, select_train
from rlcore.models import memory
from rlcore.types import PackedBatch, TrainBatch

Batch = TypeVar("Batch", PackedBatch, TrainBatch)
S = TypeVar("S", bound=Statistics)
Parts: TypeAlias = Sequence[Sequence[int]]
"""The sequences of each micro-batch, by their indices in the rank's batch."""


def micro_batches(batch: PackedBatch, num_micro: int) -> list[list[int]]:
    """Sequences of each micro-batch, nearly equal in tokens."""
    return partition(batch.sequence_lengths().tolist(), num_micro)


@dataclass(frozen=True, slots=True)
class Micro(Generic[Batch]):
    """Some sequences of a batch. What the host must know of them (where they begin, which tokens have a loss) is read
    from `host`: asked of the device, it would wait for all the work that is ordered there. Models take it as numpy
    arrays, since FSDP sends every tensor among a model's arguments to the device."""

    host: Batch
    device: Batch


def to_device(batch: Batch, sequences: Sequence[int], device: torch.device) -> Micro[Batch]:
    """Some sequences of a batch, on their way to the device; neither waits for the other."""
    host = select_train(batch, sequences) if isinstance(batch, TrainBatch) else select(batch, sequences)
    return Micro(host, _sent(host, device))


def _sent(batch: Batch, device: torch.device) -> Batch:
    changes: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        changes[field.name] = memory.to_device(value, device) if isinstance(value, Tensor) else _sent(value, device)
    return replace(batch, **changes)


def restore_order(parts: Sequence[Float[Tensor, "..."]], cu_seqlens: Tensor, sequences: Parts) -> Float[Tensor, "T"]:
    """Per-token values of the micro-batches in the order of the rank's batch, on the CPU: one wait for the device."""
    values = torch.cat([part.detach().float() for part in parts]).cpu()
    return scatter_tokens(values.split([len(part) for part in parts]), cu_seqlens, sequences)


def total(statistics: Sequence[S]) -> S:
    """Sum over micro-batches, on the CPU: the only wait for the device in an update."""
    summed = functools.reduce(operator.add, statistics)
    return type(summed).unstack(summed.stack().cpu())
