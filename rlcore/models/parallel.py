"""FSDP2: parameters, gradients and optimizer state split over ranks, and put together again for hand-over."""

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlcore.models.lora import merged_parameters
from rlcore.models.policy import CausalPolicy
from rlcore.models.trunk import PackedTrunk
from rlcore.models.value import ValueModel

Model = TypeVar("Model", bound=PackedTrunk)


def shard(model: Model, *, mesh: DeviceMesh, dtype: torch.dtype, offload: bool = False) -> Model:
    """Shard each decoder layer, then the rest, over a one-dimensional mesh; changes `model` and returns it.

    Weights stay float32 in their shards; layers compute in `dtype`, gradients are reduced in float32 and averaged
    over ranks. `offload` keeps the shards in the host's memory between uses.
    """
    offload_policy: OffloadPolicy = CPUOffloadPolicy() if offload else OffloadPolicy()
    computing = _precision(dtype)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=computing, offload_policy=offload_policy)
    if isinstance(model, ValueModel):
        # Values are regressed on returns: a bfloat16 head would round them to three digits.
        fully_shard(model.value_head, mesh=mesh, mp_policy=_precision(torch.float32), offload_policy=offload_policy)
    fully_shard(model, mesh=mesh, mp_policy=computing, offload_policy=offload_policy)
    model.mark_sharded(dtype)
    return model


def _precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    if dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def full_state(model: CausalPolicy | ValueModel) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters one by one, under transformers' names; a tied head is given once, as the embedding.

    Gathering is a collective: every rank must iterate to the end, in step. One gathered tensor lives at a time
    unless the caller keeps it. LoRA adapters come merged into their matrices, so names and shapes are the base model's.
    """
    yield from merged_parameters(model.model if isinstance(model, CausalPolicy) else model, gathered)


def forget_failed_pass(model: PackedTrunk) -> None:
    """Bring a sharded model back to where a pass may begin, after one that ended in the middle by an exception.

    Its gradients are dropped, the reduced and those that FSDP would still reduce with the other ranks.
    Nothing to do for a model that is not sharded.
    """
    if not isinstance(model, FSDPModule):
        return
    state = model._get_fsdp_state()
    if not state._state_ctx.all_states:  # no pass has begun yet
        return
    model.zero_grad(set_to_none=True)
    # What FSDP does itself at the end of a backward: shard every parameter again, forget what is under way.
    state._root_post_backward_final_callback()
    state._state_ctx.iter_forward_root = None


def gathered(parameter: Tensor) -> Tensor:
    """A parameter whole, detached, on its own device; a collective where it is sharded."""
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value
