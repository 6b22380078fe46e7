"""AdamW and device memory: moments and weights in host memory, asynchronous copies, memory errors, tensor digests."""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcore.config.algo import OFFLOAD_PIECE_BYTES, OptimConfig
from rlcore.errors import UserCodeError

R = TypeVar("R")

log = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
# Elements per digest chunk: their int64 words take 32 MB.
_CHUNK = 1 << 22


def build_optimizer(model: nn.Module, optim: OptimConfig, *, device: torch.device) -> torch.optim.AdamW:
    """Build AdamW over the trainable parameters. Weight decay is decoupled (Loshchilov and Hutter, 2019) and applies
    only to matrices. The fused kernel is elementwise, so results do not depend on the number of threads."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    kind = OffloadedAdamW if optim.offload else torch.optim.AdamW
    return kind(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=device.type in ("cpu", "cuda"),
    )


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Float[Tensor, ""]:
    """Scale gradients to a global 2-norm of at most `max_norm`. Return the 2-norm before scaling, computed over the
    gradients of all ranks."""
    norm = nn.utils.clip_grad_norm_(list(parameters), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW with moments in host memory, which is pinned for a GPU. Results are bit-identical to AdamW's. Parameters
    are updated in pieces whose moments take at most `piece_bytes` of device memory. The moments of a DTensor are
    DTensors."""

    piece_bytes = OFFLOAD_PIECE_BYTES

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply one AdamW update to each parameter that has a gradient. The gradients are kept."""
        assert closure is None, "gradients are already computed"
        gradients = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        try:
            for parameter in gradients:
                parameter.grad = None  # skipped by torch's step
            for piece in _split_by_moments(gradients, self.piece_bytes):
                self._step_piece(piece, gradients)
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
        if any(parameter.device.type == "cuda" for parameter in gradients):
            torch.cuda.current_stream().synchronize()  # a save reads host memory without synchronization

    def _step_piece(self, piece: list[nn.Parameter], gradients: Mapping[nn.Parameter, Tensor]) -> None:
        home: dict[tuple[nn.Parameter, str], Tensor] = {}
        for parameter in piece:
            parameter.grad = gradients[parameter]
            state = self.state[parameter]
            for key in MOMENTS:
                if key in state:  # absent before the first step
                    home[parameter, key] = state[key]
                    state[key] = copy_like(parameter, local_tensor(state[key]))
        super().step()
        for parameter in piece:
            state = self.state[parameter]
            for key in MOMENTS:
                moved, host = state[key], home.get((parameter, key))
                state[key] = self.new_moment(parameter, moved.dtype) if host is None else host
                local_tensor(state[key]).copy_(local_tensor(moved), non_blocking=True)
            parameter.grad = None

    def new_moment(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Allocate host memory for one moment of a parameter, or of this rank's shard."""
        return host_memory(parameter, dtype, pinned=local_tensor(parameter).device.type == "cuda")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer state. The moments in `state_dict` must be in host memory, and they stay there."""
        states: Mapping[int, Mapping[str, Any]] = state_dict["state"]
        rest = {number: {k: v for k, v in state.items() if k not in MOMENTS} for number, state in states.items()}
        super().load_state_dict({**state_dict, "state": rest})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, state in states.items():
            self.state[parameters[number]].update((key, state[key]) for key in MOMENTS if key in state)


def _split_by_moments(parameters: Iterable[nn.Parameter], limit_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Split the parameters, in order, into pieces whose moments take at most `limit_bytes`."""
    piece: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        own = len(MOMENTS) * local_tensor(parameter).nbytes
        if piece and size + own > limit_bytes:
            yield piece
            piece, size = [], 0
        piece.append(parameter)
        size += own
    if piece:
        yield piece


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard if the tensor is a DTensor, otherwise the tensor. The result is detached."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def copy_like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a copy of `local` on the device of `parameter`. For a DTensor, `local` is this rank's shard, and the copy
    is a DTensor."""
    copy = torch.empty_like(parameter, dtype=local.dtype, requires_grad=False)
    local_tensor(copy).copy_(local, non_blocking=True)
    return copy


def host_memory(like: Tensor, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Allocate host memory with the shape and layout of `like`, in pinned memory if requested and available."""
    if pinned:
        try:
            return torch.empty_like(like, dtype=dtype, device="cpu", pin_memory=True, requires_grad=False)
        except RuntimeError as reason:
            log.warning("no pinned memory for offloaded tensors (%s): transfers to the GPU are slower", reason)
    return torch.empty_like(like, dtype=dtype, device="cpu", requires_grad=False)


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The result of a call that ran out of memory, with the allocator's message."""

    message: str


def catch_out_of_memory(work: Callable[[], R]) -> R | OutOfMemory:
    """Return the result of `work`, or `OutOfMemory` if memory ran out. `OutOfMemory` keeps no tensors of `work`
    alive."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        cause = error.__cause__ if isinstance(error, UserCodeError) and error.__cause__ is not None else error
        # torch has no exception class for the host allocator.
        is_of_host = isinstance(cause, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(cause)
        if not is_of_host and not isinstance(cause, torch.OutOfMemoryError | MemoryError):
            raise
        # The error's frames reference the tensors, so keep only its text.
        return OutOfMemory(str(error).strip().split("\n")[0] or type(error).__name__)


def release_cached_memory() -> None:
    """Wait for the GPU, then release torch's cached CUDA memory, if CUDA is in use. The wait is needed because
    torch's release of expandable segments waits only for the stream that allocated a block. FSDP reads gradients on
    another stream."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensor on the device in `dtype`. A copy to a GPU is asynchronous and uses pinned memory."""
    found = tensor if dtype is None else tensor.to(dtype)
    if device.type != "cuda" or found.is_cuda:
        return found.to(device)
    return found.pin_memory().to(device, non_blocking=True)


class OffloadedWeights:
    """Frozen parameters whose device memory can be released and refilled from a host copy, which is pinned for a GPU.
    Storage is resized in place, so FSDP's references to the parameters stay valid."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._host: dict[Tensor, Tensor] = {}
        self._storage_bytes: dict[Tensor, int] = {}  # FSDP pads a shard
        self._is_away = False
        for parameter in parameters:
            local = local_tensor(parameter)
            if not local.untyped_storage().resizable():  # a mapped model file, on a CPU
                parameter.data = local = local.clone()
            self._host[parameter] = host_memory(local, local.dtype, pinned=local.is_cuda).copy_(local)
            self._storage_bytes[parameter] = local.untyped_storage().nbytes()

    @torch.no_grad()
    def offload(self) -> None:
        """Release the device memory of the weights."""
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
        return parameter if host is None else copy_like(parameter, host)


def compact(tensors: Iterable[Tensor]) -> None:
    """Move the tensors next to each other in device memory, in place, and release the freed pages (2 or 20 MB each)."""
    waiting = OffloadedWeights(tensors)
    waiting.offload()
    release_cached_memory()
    waiting.reload()


def digest(tensor: Tensor) -> Int[Tensor, ""]:
    """Return a 64-bit checksum of a tensor, without synchronization.

    Each element's bits are multiplied by an odd random number for its position and added modulo 2^64. One changed
    element always changes the sum. On a CPU, 0 and -0 count as equal, because vLLM's packed weights are
    read back by a matrix product, which loses the sign of 0."""
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
