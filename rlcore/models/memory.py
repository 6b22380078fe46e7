"""Device memory: out-of-memory errors, cached memory, asynchronous copies, offloaded weights and tensor digests."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from rlcore.errors import UserCodeError
from rlcore.models.optim import copy_like, local_tensor, pinned_copy

R = TypeVar("R")

# Elements per digest chunk: their int64 words take 32 MB.
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The result of a call that ran out of memory, with the allocator's message."""

    message: str


def catch_out_of_memory(work: Callable[[], R]) -> R | OutOfMemory:
    """Return the result of `work`, or `OutOfMemory`, which keeps no tensors of `work` alive."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # The error's frames reference the tensors, so keep only its text.
        return OutOfMemory(str(error).strip().split("\n")[0] or type(error).__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that torch could not allocate memory on a GPU or the host."""
    if isinstance(error, UserCodeError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch has no exception class for the host allocator.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def release_cached_memory() -> None:
    """Wait for the GPU, then release torch's cached CUDA memory, if CUDA is in use. With expandable segments, torch
    waits only for the stream that allocated a block, but FSDP reads gradients on another stream."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensor on the device in `dtype`. Pinned memory avoids waiting for the device."""
    found = tensor if dtype is None else tensor.to(dtype)
    if device.type != "cuda" or found.is_cuda:
        return found.to(device)
    return found.pin_memory().to(device, non_blocking=True)


class OffloadedWeights:
    """Frozen parameters that leave the device while other tensors need its memory. The host keeps a copy, pinned for a
    GPU. Storage is resized in place, so references of other holders, such as FSDP, stay valid."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._host: dict[Tensor, Tensor] = {}
        self._storage_bytes: dict[Tensor, int] = {}  # FSDP pads a shard
        self._is_away = False
        for parameter in parameters:
            local = local_tensor(parameter)
            if not local.untyped_storage().resizable():  # a mapped model file, on a CPU
                parameter.data = local = local.clone()
            self._host[parameter] = pinned_copy(local.cpu()) if local.is_cuda else local.clone()
            self._storage_bytes[parameter] = local.untyped_storage().nbytes()

    @torch.no_grad()
    def offload(self) -> None:
        """Release the device memory of the weights."""
        if self._is_away:
            return
        self._is_away = True
        for parameter in self._host:
            local_tensor(parameter).untyped_storage().resize_(0)

    @torch.no_grad()
    def reload(self) -> None:
        """Copy the weights back to the device."""
        if not self._is_away:
            return
        for parameter, host in self._host.items():
            local = local_tensor(parameter)
            local.untyped_storage().resize_(self._storage_bytes[parameter])
            local.copy_(host, non_blocking=True)
        self._is_away = False

    def value(self, parameter: Tensor) -> Tensor:
        """Return a parameter, or a copy on the device while the parameter is offloaded."""
        host = self._host.get(parameter) if self._is_away else None
        if host is None:
            return parameter
        return copy_like(parameter, host)


def compact(tensors: Iterable[Tensor]) -> None:
    """Move the tensors next to each other in device memory in place, and release the freed pages of 2 or 20 MB."""
    waiting = OffloadedWeights(tensors)
    waiting.offload()
    release_cached_memory()
    waiting.reload()


def digest(tensor: Tensor) -> Int[Tensor, ""]:
    """Return a 64-bit checksum of a tensor, without synchronization.

    Each element's bits are multiplied by an odd random number for its position and added modulo 2^64. One changed
    element always changes the sum. On a CPU, 0 and -0 count as equal, because vLLM's unpacking of matrices loses the
    sign of 0."""
    flat = tensor.detach().reshape(-1)
    if flat.device.type == "cpu":
        flat = flat + 0
    words = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    factors = _digest_factors(tensor.device)
    # Two kernels per chunk, since launches dominate for small models.
    sums: list[Tensor] = [(part * factors[: len(part)]).sum() for part in words.split(_CHUNK)]
    if len(sums) == 1:
        return sums[0]
    return sum((part * (2 * number + 1) for number, part in enumerate(sums[1:], start=1)), sums[0])


@functools.cache
def _digest_factors(device: torch.device) -> Int[Tensor, "C"]:
    drawn = torch.randint(2**62, (_CHUNK,), generator=torch.Generator().manual_seed(0))
    return (2 * drawn + 1).to(device)
