"""Memory that is refused, and memory that torch keeps of a GPU for what comes next."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Refused:
    """In place of what some work would have given: memory was refused to it. `words`: the allocator's."""

    words: str


def attempted(work: Callable[[], R]) -> R | Refused:
    """What `work` gives, unless a GPU or the host refuses torch memory; of what it held nothing is kept then."""
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


def give_back_reserve() -> None:
    """Give it back to the device; without a GPU in use nothing happens.

    The device ends its work first. Where segments grow (`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`) torch waits
    for the stream alone on which a block was taken; gradients, taken on FSDP's, are read by the optimizer on another.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
