"""AdamW with weight decay groups and optional moments in host memory, and gradient clipping by the global norm."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcore.config.algo import OFFLOAD_PIECE_BYTES, OptimConfig


def build_optimizer(model: nn.Module, optim: OptimConfig, *, device: torch.device) -> torch.optim.AdamW:
    """Build AdamW over the trainable parameters, with decoupled weight decay (Loshchilov and Hutter, 2019) of matrices
    only. The fused kernel is elementwise, so results do not depend on the number of threads."""
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
    """Scale gradients to a global 2-norm of at most `max_norm`. Return the norm over all ranks before scaling."""
    norm = nn.utils.clip_grad_norm_(list(parameters), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


log = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW with moments in host memory, which is pinned for a GPU. Results are bit-identical to AdamW's. Parameters
    are updated in pieces whose moments take at most `piece_bytes` of device memory. The moments of a DTensor are
    DTensors."""

    piece_bytes = OFFLOAD_PIECE_BYTES

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. The gradients stay unchanged."""
        assert closure is None, "gradients are already computed"
        gradients = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        try:
            for parameter in gradients:
                parameter.grad = None  # skipped by torch's step
            for piece in split_by_moments(gradients, self.piece_bytes):
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
        """Load the optimizer state, and keep the moments in host memory."""
        states: Mapping[int, Mapping[str, Any]] = state_dict["state"]
        rest = {number: {k: v for k, v in state.items() if k not in MOMENTS} for number, state in states.items()}
        super().load_state_dict({**state_dict, "state": rest})
        for number, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            for key in MOMENTS:
                moment = states.get(number, {}).get(key)
                if moment is not None and local_tensor(moment).device.type != "cpu":
                    home = self.new_moment(parameter, moment.dtype)
                    local_tensor(home).copy_(local_tensor(moment))
                    moment = home
                if moment is not None:
                    self.state[parameter][key] = moment


def split_by_moments(parameters: Iterable[nn.Parameter], limit_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Split the parameters, in order, into pieces whose moments take at most `limit_bytes`.

    >>> [len(piece) for piece in split_by_moments([nn.Parameter(torch.zeros(n)) for n in (4, 4, 9, 1, 1)], 64)]
    [2, 1, 2]
    """
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
    """Return this rank's shard of a DTensor, or any other tensor itself, detached."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def copy_like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a copy of `local` as a tensor like `parameter`. If that is a DTensor, `local` is this rank's shard."""
    copy = torch.empty_like(parameter, dtype=local.dtype, requires_grad=False)
    local_tensor(copy).copy_(local, non_blocking=True)
    return copy


def pinned_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a host tensor in pinned memory, or the tensor itself if memory cannot be pinned."""
    moved = host_memory(tensor, tensor.dtype, pinned=True)
    return moved.copy_(tensor) if moved.is_pinned() else tensor


def host_memory(like: Tensor, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Allocate host memory with the shape and layout of `like`, in pinned memory if requested and available."""
    if pinned:
        try:
            return torch.empty_like(like, dtype=dtype, device="cpu", pin_memory=True, requires_grad=False)
        except RuntimeError as reason:
            log.warning("no pinned memory for offloaded tensors (%s): transfers to the GPU are slower", reason)
    return torch.empty_like(like, dtype=dtype, device="cpu", requires_grad=False)
