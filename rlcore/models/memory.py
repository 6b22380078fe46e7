"""A device's memory: work that runs out of it, memory that torch caches, copies to it that do not wait, weights that
wait on the host, and a digest of what a tensor holds."""

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

# Elements that a digest reads at a time: their int64 words take 32 MB.
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """Result of work that ran out of memory. `words`: the allocator's message."""

    message: str


def catch_out_of_memory(work: Callable[[], R]) -> R | OutOfMemory:
    """Result of `work`, or `Refused` if a GPU or the host refuses torch memory; then nothing that it held is kept."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # The error holds the frames of the work, and they its tensors: keep its text alone.
        return OutOfMemory(str(error).strip().split("\n")[0] or type(error).__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation of torch was refused, on a GPU or by the host."""
    if isinstance(error, UserCodeError) and error.__cause__ is not None:
        error = error.__cause__
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


class OffloadedWeights:
    """Frozen parameters that wait in the host's memory, page-locked beside a GPU, while others need the device's.

    The host keeps its copy, so only the way to the device is paid for. The device's memory is given up in place:
    whoever holds the tensor, FSDP too, holds the same one when it is back. Beside a CPU they are copied just the same.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._host: dict[Tensor, Tensor] = {}
        self._storage_bytes: dict[Tensor, int] = {}  # FSDP pads a shard
        self._is_away = False
        for parameter in parameters:
            local = local_tensor(parameter)
            if not local.untyped_storage().resizable():  # of the model's file itself, on a CPU
                parameter.data = local = local.clone()
            self._host[parameter] = pinned_copy(local.cpu()) if local.is_cuda else local.clone()
            self._storage_bytes[parameter] = local.untyped_storage().nbytes()

    @torch.no_grad()
    def offload(self) -> None:
        """Release the weights' memory on the device."""
        if self._is_away:
            return
        self._is_away = True
        for parameter in self._host:
            local_tensor(parameter).untyped_storage().resize_(0)

    @torch.no_grad()
    def reload(self) -> None:
        """Copy the weights to the device again."""
        if not self._is_away:
            return
        for parameter, host in self._host.items():
            local = local_tensor(parameter)
            local.untyped_storage().resize_(self._storage_bytes[parameter])
            local.copy_(host, non_blocking=True)
        self._is_away = False

    def value(self, parameter: Tensor) -> Tensor:
        """A parameter, laid out as it is; a copy for the moment where it is away."""
        host = self._host.get(parameter) if self._is_away else None
        if host is None:
            return parameter
        return copy_like(parameter, host)


def compact(tensors: Iterable[Tensor]) -> None:
    """Take the tensors' memory anew, one beside the other, and release what lies free; they stay the same tensors.

    An allocator returns whole pages of 2 or 20 MB: one adapter, taken between two layers, holds its page when these are
    gone.
    """
    waiting = OffloadedWeights(tensors)
    waiting.offload()
    release_cached_memory()
    waiting.reload()


def digest(tensor: Tensor) -> Int[Tensor, ""]:
    """A number that depends on every bit of a tensor and on where it stands.

    The sum over all elements of (the element's bits as an integer) x (an odd number of its position), modulo 2^64: one
    changed element always shows, several cancel only by chance. Waits for nothing. On a CPU 0 and -0 count as one: a
    packed matrix is read by multiplying it, which loses the sign.
    """
    flat = tensor.detach().reshape(-1)
    if flat.device.type == "cpu":
        flat = flat + 0
    words = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    factors = _digest_factors(tensor.device)
    # Two kernels a chunk: a small model's time is that of their launches.
    sums: list[Tensor] = [(part * factors[: len(part)]).sum() for part in words.split(_CHUNK)]
    if len(sums) == 1:
        return sums[0]
    return sum((part * (2 * number + 1) for number, part in enumerate(sums[1:], start=1)), sums[0])


@functools.cache
def _digest_factors(device: torch.device) -> Int[Tensor, "C"]:
    """An odd random number for each place in a chunk."""
    drawn = torch.randint(2**62, (_CHUNK,), generator=torch.Generator().manual_seed(0))
    return (2 * drawn + 1).to(device)
