"""AdamW with decay groups, and the global gradient norm."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcore.config.algo import OptimConfig
from rlcore.models.offload import OffloadedAdamW


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

    Works on plain and on FSDP2-sharded parameters. A norm that is not finite leaves NaN gradients behind: look at the
    norm before the optimizer steps.
    """
    norm = nn.utils.clip_grad_norm_(list(parameters), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
