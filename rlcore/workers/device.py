"""The device of a rank, its peak memory, the process group of the ranks, and the configuration of memory allocators. By
default, glibc returns large freed blocks to the system. Mapping and clearing such blocks again took a fifth of the step
time of a small model. torch's GPU segments have fixed sizes by default, so micro-batches of different lengths fragment
them."""

import ctypes
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlparse

import psutil
import torch
import torch.distributed as dist

from rlcore.config import RuntimeConfig
from rlcore.errors import ConfigError, ModelError
from rlcore.models.shape import has_code_for
from rlcore.rollout.vllm import engine_pool_bytes

LOOPBACK = "127.0.0.1"


def choose_device(runtime: RuntimeConfig) -> torch.device:
    """Return the device that the settings and the hardware require. Raises ConfigError if CUDA is requested but not
    available, and ModelError if this torch build does not support the GPU."""
    wanted = runtime.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("runtime.device is cuda, but torch sees no GPU here; use runtime.device=cpu or auto")
        # A wheel without code for this GPU fails at the first kernel, after minutes of loading, so report it now.
        gpu = (torch.cuda.get_device_name(), torch.cuda.get_device_capability())
        if problem := unsupported_gpu(*gpu, torch.cuda.get_arch_list(), torch.__version__):
            raise ModelError(problem)
    return torch.device(wanted)


def unsupported_gpu(name: str, capability: tuple[int, int], architectures: Sequence[str], version: str) -> str | None:
    """Return the reason why a torch build with code for `architectures` cannot run on a GPU, or None if it can."""
    if not architectures or has_code_for(capability, architectures):
        return None
    major, minor = capability
    return (
        f"{name} has compute capability {major}.{minor} (sm_{major}{minor}), but torch {version} supports "
        f"{', '.join(architectures)} only. Install a torch build for another CUDA version, whose "
        f"torch.cuda.get_arch_list() names sm_{major}{minor}."
    )


def free_address(host: str = LOOPBACK) -> str:
    """Return a `tcp://` address with a free port of `host`."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"tcp://{host}:{probe.getsockname()[1]}"


def join_ranks(rendezvous: str, *, rank: int, world_size: int, device: torch.device) -> None:
    """Create the process group (gloo or NCCL). A loopback rendezvous accepts connections from this host only."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    address = urlparse(rendezvous)
    if address.hostname != LOOPBACK or address.port is None:
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world_size)
        return
    interfaces = psutil.net_if_addrs().items()
    loopback = (name for name, addresses in interfaces if any(one.address == LOOPBACK for one in addresses))
    if interface := next(loopback, None):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    # A store without a given listener listens on all addresses.
    listener = socket.create_server((LOOPBACK, address.port)).detach() if rank == 0 else None
    store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but torch lists no names
        LOOPBACK, address.port, world_size, is_master=rank == 0, master_listen_fd=listener
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


MALLOC_THRESHOLD_BYTES = 1 << 30
"""The value of two thresholds of glibc, in bytes. glibc returns free memory at the end of the heap to the system only
if this memory is larger than the value. An allocation larger than the value is mapped separately from the heap."""

_TORCH_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


def raise_malloc_thresholds() -> None:
    """Raise glibc's malloc thresholds to `MALLOC_THRESHOLD_BYTES`, unless environment variables configure malloc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    is_configured = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    if mallopt is not None and not is_configured:
        for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            mallopt(option, MALLOC_THRESHOLD_BYTES)


def enable_expandable_segments() -> None:
    """Enable torch's expandable GPU segments with an environment variable. Do nothing if CUDA is in use or the
    environment already configures torch's allocator. vLLM also reads the variable, and disables the segments for memory
    that it maps itself."""
    if not torch.cuda.is_initialized() and not any(name in os.environ for name in _TORCH_VARIABLES):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


@dataclass(frozen=True, slots=True)
class OomRetry:
    """A pass that ran out of memory with `num_micro` micro-batches and was repeated with `num_again` micro-batches.
    `factor`: the `MicroBatchRunner`'s factor after the retry. `refusal`: the allocator's error message."""

    name: str
    num_micro: int
    num_again: int
    factor: int
    refusal: str

    def __str__(self) -> str:
        return (
            f"{self.name} ran out of memory in {self.num_micro} micro-batches and is repeated in {self.num_again}: "
            f"{self.refusal}"
        )


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The peak GPU memory since the process started, in GB of 1e9 bytes. Memory that a sleeping engine has released is
    excluded. `num_retries`: the number of passes that ran out of memory since the start. `shortages`: the passes that
    ran out of memory since the last report."""

    allocated_gb: float
    reserved_gb: float
    num_retries: int
    shortages: tuple[OomRetry, ...] = ()


class MemoryMeter:
    """A meter of peak GPU memory. Bytes that a sleeping vLLM has unmapped are excluded, though torch counts them."""

    def __init__(self) -> None:
        self._is_asleep = False
        self._max = (0, 0)

    def set_engine_asleep(self, is_asleep: bool) -> None:
        """Record whether the engine is asleep. Call this after the engine has fallen asleep, and before it wakes up."""
        if is_asleep != self._is_asleep:
            self.peak()
            self._is_asleep = is_asleep

    def peak(self) -> tuple[int, int]:
        """Return the peak bytes that torch has allocated and reserved since the meter was created, or 0 on a CPU."""
        if torch.cuda.is_initialized():
            unmapped = engine_pool_bytes() if self._is_asleep else 0
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            torch.cuda.reset_peak_memory_stats()
            self._max = max(self._max[0], allocated - unmapped), max(self._max[1], reserved - unmapped)
        return self._max
