"""Measurements on a rank: peak GPU memory and out-of-memory retries."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlcore.rollout.vllm import engine_pool_bytes
from rlcore.workers.trained_model import OomRetry


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The peak GPU memory since the process started, in GB of 1e9 bytes, without memory that a sleeping engine has
    released. `num_retries`: the passes repeated for lack of memory. `shortages`: such passes since the last report."""

    allocated_gb: float
    reserved_gb: float
    num_retries: int
    shortages: tuple[OomRetry, ...] = ()


@dataclass(frozen=True, slots=True)
class Bytes:
    """The bytes that torch's tensors occupy, and the bytes that torch has reserved."""

    allocated: int
    reserved: int


def gpu_peak() -> Bytes:
    """Return the peak memory on torch's current GPU since the previous call, or 0 on a CPU."""
    if not torch.cuda.is_initialized():
        return Bytes(0, 0)
    found = Bytes(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    torch.cuda.reset_peak_memory_stats()
    return found


class MemoryMeter:
    """A meter of peak GPU memory. Bytes that a sleeping vLLM has unmapped are excluded, though torch counts them.
    `peak`: returns the peak since its last call. `unmapped`: returns the unmapped bytes."""

    def __init__(self, peak: Callable[[], Bytes] = gpu_peak, unmapped: Callable[[], int] = engine_pool_bytes) -> None:
        self._peak = peak
        self._unmapped = unmapped
        self._is_asleep = False
        self._max = Bytes(0, 0)

    def set_engine_asleep(self, is_asleep: bool) -> None:
        """Record that the engine sleeps now, or that it is about to wake."""
        if is_asleep != self._is_asleep:
            self.peak()
            self._is_asleep = is_asleep

    def peak(self) -> Bytes:
        """Return the peak since the meter was created."""
        found, unmapped = self._peak(), self._unmapped() if self._is_asleep else 0
        self._max = Bytes(
            max(self._max.allocated, found.allocated - unmapped), max(self._max.reserved, found.reserved - unmapped)
        )
        return self._max
