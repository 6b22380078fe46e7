"""Measurements on a rank: peak GPU memory, out-of-memory retries, and profiles by torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from rlcore.rollout.vllm import engine_pool_bytes
from rlcore.workers.trained_model import OomRetry

BYTES_PER_GB = 1e9


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The peak GPU memory since the process started, in GB of 1e9 bytes, or 0 on a CPU. Memory that a sleeping engine
    has released is not counted. `num_retries`: the number of passes repeated for lack of memory since the process
    started. `shortages`: the passes repeated for lack of memory since the last report."""

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
    """A meter of peak GPU memory. torch counts vLLM's weights and cache as allocated even while the sleeping engine has
    unmapped them. The meter subtracts these bytes.

    Args:
        peak: a function that returns the peak since its last call.
        unmapped: a function that returns the bytes that torch counts although the sleeping engine has unmapped them.
    """

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


class RankProfiler:
    """A recorder of the operators that this process runs and of the kernels on its GPU, from `start` to `stop`."""

    def __init__(self) -> None:
        self._profile: profile | None = None

    def start(self) -> None:
        """Start to record. An unfinished recording is discarded."""
        if self._profile is not None:
            self._profile.stop()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self, file: Path) -> None:
        """Write the recording to `file` (`*.json.gz`)."""
        assert self._profile is not None, "start comes first"
        running, self._profile = self._profile, None
        running.stop()
        file.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(file))  # torch compresses by the suffix
