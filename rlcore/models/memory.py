"""A device's memory: work that runs out of it, memory that torch caches, and copies to it that do not wait."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Refused:
    """Result of work that ran out of memory. `words`: the allocator's message."""

    words: str


def attempted(work: Callable[[], R]) -> R | Refused:
    """Result of `work`, or `Refused` if a GPU or the host refuses torch memory; then nothing that it held is kept."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # The error holds the frames of the work, and they its tensors: keep its text alone.
        return Refused(str(error).strip().split("\n")[0] or type(error).__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation of torch was refused, on a GPU or by the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch has no class of its own for the host's allocator.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def release_cached_memory() -> None:
    """Release torch's cached CUDA memory; without a GPU in use nothing happens.

    The device ends its work first. Where segments grow (`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`) torch waits
    for the stream alone on which a block was taken; gradients, taken on FSDP's, are read by the optimizer on another.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on the device, in `dtype` where one is given.

    A copy from ordinary memory waits until the device has done everything ordered before; one from page-locked memory
    takes its place in the device's order of things, and the host goes on.
    """
    found = tensor if dtype is None else tensor.to(dtype)
    if device.type != "cuda" or found.is_cuda:
        return found.to(device)
    return found.pin_memory().to(device, non_blocking=True)
