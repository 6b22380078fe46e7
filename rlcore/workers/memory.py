"""Most memory that a rank has used of its GPU, and what it says of passes that ran out of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlcore.rollout.vllm.pool import engine_pool_bytes

BYTES_PER_GB = 1e9


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Largest use of the GPU's memory since the start, GB of 1e9 bytes; 0 on a CPU. What a sleeping engine has given
    back does not count. `num_redone`: passes that ran out of memory and were done again in finer micro-batches."""

    allocated_gb: float
    reserved_gb: float
    num_redone: int


@dataclass(frozen=True, slots=True)
class Bytes:
    """Of torch's tensors, and of what torch has taken from the device for them."""

    allocated: int
    reserved: int


class MemoryMeter:
    """The peak over spans of time, in some of which a part of what the counter says is not there.

    torch goes on to count vLLM's weights and cache as allocated while vLLM sleeps and their memory is unmapped: the
    peak of an update would hold them too, though activations lie in their place.

    Args:
        peak: the largest counts since it was last called.
        away: bytes that are counted and not there while the engine sleeps.
    """

    def __init__(self, peak: Callable[[], Bytes], away: Callable[[], int]) -> None:
        self._peak = peak
        self._away = away
        self._is_asleep = False
        self._most = Bytes(0, 0)

    def sleeps(self) -> None:
        """The engine has gone to sleep, or sleeps already."""
        if not self._is_asleep:
            self.most()
            self._is_asleep = True

    def wakes(self) -> None:
        """The engine is about to wake, or is awake already."""
        if self._is_asleep:
            self.most()
            self._is_asleep = False

    def most(self) -> Bytes:
        """The largest counts so far."""
        found, away = self._peak(), self._away() if self._is_asleep else 0
        self._most = Bytes(
            max(self._most.allocated, found.allocated - away), max(self._most.reserved, found.reserved - away)
        )
        return self._most


def gpu_meter() -> MemoryMeter:
    """Of torch's current GPU; nothing on a CPU."""

    def peak() -> Bytes:
        if not torch.cuda.is_initialized():
            return Bytes(0, 0)
        found = Bytes(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()
        return found

    return MemoryMeter(peak, engine_pool_bytes)
