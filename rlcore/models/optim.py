"""AdamW with decay groups, also with its moments on the host, and the global gradient norm.

`OffloadedAdamW` holds on the device only the moments of the piece that is being stepped.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcore.config.algo import OFFLOAD_PIECE_BYTES, OptimConfig


def build_optimizer(model: nn.Module, optim: OptimConfig, *, device: torch.device) -> torch.optim.AdamW:
    """AdamW over the parameters that want a gradient: matrices decay, norms and biases do not.

    Decoupled weight decay (Loshchilov and Hutter, 2019). Fused: one pass over each parameter, element by element, so
    the result does not depend on threads. With `optim.offload` its moments wait in the host's memory.
    """
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
    """Scale gradients so that their global 2-norm is at most `max_norm`; the norm before, over all ranks.

    Works on plain and on FSDP2-sharded parameters. A norm that is not finite leaves NaN gradients behind: check the
    norm before the optimizer steps.
    """
    norm = nn.utils.clip_grad_norm_(list(parameters), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


log = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW with the same numbers to the last bit: it works element by element, so parameters may go piece by piece.

    Between steps every moment lies on the host, page-locked beside a GPU. Beside a CPU it lies in a buffer of its own
    and is copied to and fro just the same. Laid out as its parameter: a DTensor's shard is a DTensor's shard.
    """

    piece_bytes = OFFLOAD_PIECE_BYTES

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of all parameters that have a gradient; gradients are left as they were."""
        assert closure is None, "the gradient is there already"
        gradients = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        try:
            for parameter in gradients:
                parameter.grad = None  # torch's step passes over it
            for piece in split_by_moments(gradients, self.piece_bytes):
                self._step_piece(piece, gradients)
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
        if any(parameter.device.type == "cuda" for parameter in gradients):
            torch.cuda.current_stream().synchronize()  # a save reads the host's copy without waiting for the device

    def _step_piece(self, piece: list[nn.Parameter], gradients: Mapping[nn.Parameter, Tensor]) -> None:
        home: dict[tuple[nn.Parameter, str], Tensor] = {}
        for parameter in piece:
            parameter.grad = gradients[parameter]
            state = self.state[parameter]
            for key in MOMENTS:
                if key in state:  # not before the first step
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
        """Memory of the host for one moment of a parameter, or of this rank's shard of it."""
        return host_memory(parameter, dtype, pinned=local_tensor(parameter).device.type == "cuda")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but the moments stay where they are instead of going to the device together."""
        states: Mapping[int, Mapping[str, Any]] = state_dict["state"]
        rest = {number: {k: v for k, v in state.items() if k not in MOMENTS} for number, state in states.items()}
        super().load_state_dict({**state_dict, "state": rest})
        for number, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            for key in MOMENTS:
                if number in states and key in states[number]:
                    self.state[parameter][key] = self._on_host(parameter, states[number][key])

    def _on_host(self, parameter: nn.Parameter, moment: Tensor) -> Tensor:
        if local_tensor(moment).device.type == "cpu":
            return moment
        home = self.new_moment(parameter, moment.dtype)
        local_tensor(home).copy_(local_tensor(moment))
        return home


def split_by_moments(parameters: Iterable[nn.Parameter], limit_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Parameters in their order, cut where the moments of a piece would take more than the limit.

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
    """What of a tensor lies on this rank: the memory itself."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def copy_like(parameter: Tensor, local: Tensor) -> Tensor:
    """A copy of `local`, this rank's shard of a tensor, on the parameter's device and laid out as the parameter is."""
    copy = torch.empty_like(parameter, dtype=local.dtype, requires_grad=False)
    local_tensor(copy).copy_(local, non_blocking=True)
    return copy


def pinned_copy(tensor: Tensor) -> Tensor:
    """A copy of a host's tensor in memory that a GPU reads by itself; the tensor where there is none of it."""
    moved = host_memory(tensor, tensor.dtype, pinned=True)
    return moved.copy_(tensor) if moved.is_pinned() else tensor


def host_memory(like: Tensor, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Memory of the host for a tensor of that shape and layout (of a DTensor for this rank's shard), page-locked if
    that is asked for and the host gives it (a container may have a limit); ordinary memory is slower and as good."""
    if pinned:
        try:
            return torch.empty_like(like, dtype=dtype, device="cpu", pin_memory=True, requires_grad=False)
        except RuntimeError as reason:
            log.warning(
                "no page-locked memory for what waits on the host (%s); the way to the GPU takes longer", reason
            )
    return torch.empty_like(like, dtype=dtype, device="cpu", requires_grad=False)
