"""FSDP2 sharding of parameters, gradients and optimizer state over ranks, and gathering for weight sync."""

import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlcore.models.lora import ADAPTERS, merged_parameters
from rlcore.models.memory import local_tensor
from rlcore.models.policy import CausalPolicy, PackedTrunk, ValueModel

Model = TypeVar("Model", bound=PackedTrunk)


def shard(model: Model, *, mesh: DeviceMesh, dtype: torch.dtype) -> Model:
    """Shard each decoder layer, and then the other parameters, over a one-dimensional mesh. Return the changed model.
    Shards are float32, layers compute in `dtype`, and gradients are reduced in float32 and averaged over ranks."""
    computing = _precision(dtype)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=computing)
    if isinstance(model, ValueModel):
        # Values are regressed on returns: a bfloat16 head would round them to three digits.
        fully_shard(model.value_head, mesh=mesh, mp_policy=_precision(torch.float32))
    fully_shard(model, mesh=mesh, mp_policy=computing)
    model.sharded, model.wanted_dtype = True, dtype
    return model


def _precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    if dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def full_state(
    model: CausalPolicy | ValueModel,
    value: Callable[[Tensor], Tensor] = Tensor.detach,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters unsharded under the names of transformers, with adapters merged. This is a collective, so
    all ranks must iterate to the end. One bucket of gathered tensors exists at a time. `value` returns a
    parameter's value on the device, even if the parameter is offloaded. `dtype`: the type in which matrices are sent,
    or None to keep their type."""
    root = model.model if isinstance(model, CausalPolicy) else model
    yield from merged_parameters(root, _Buckets(root, value, dtype))


def adapter_state(model: CausalPolicy) -> Iterator[tuple[str, Tensor]]:
    """Yield the LoRA adapters unsharded, under PEFT's names. This is a collective of all ranks."""
    for name, parameter in model.model.named_parameters():
        if any(part in name for part in ADAPTERS):
            yield f"base_model.model.{name}", gather_parameter(parameter)


def gather(model: nn.Module, *, once: bool, is_last: bool = True) -> None:
    """Choose when FSDP2 gathers weights in the next micro-batch of an update. With `once` (ZeRO-1), weights stay
    gathered until the last micro-batch (`is_last`), which reduces the accumulated gradients. Without `once`, each pass
    gathers weights and reduces gradients."""
    assert isinstance(model, FSDPModule), "only a sharded model gathers"
    model.set_reshard_after_forward(not once)
    model.set_reshard_after_backward(is_last)
    model.set_requires_gradient_sync(is_last)


def reset_after_failed_pass(model: PackedTrunk) -> None:
    """Reset FSDP2 on one rank after an error in a forward or backward pass, and drop the gradients. FSDP2 has no public
    function for this. The private functions called here are those that FSDP2 calls at the end of a backward pass."""
    if not isinstance(model, FSDPModule):
        return
    state = model._get_fsdp_state()
    if not state._state_ctx.all_states:  # no pass has begun yet
        return
    model.zero_grad(set_to_none=True)
    state._root_post_backward_final_callback()
    state._state_ctx.iter_forward_root = None
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_parameter(parameter: Tensor) -> Tensor:
    """Return the whole tensor of a parameter, detached and on the parameter's device. If the parameter is sharded, this
    is a collective of all ranks."""
    value = parameter.detach()
    if not isinstance(value, DTensor):
        return value
    # On one rank it is whole: hundreds of no-op redistributions took a fifth of a small model's weight sync.
    return value.to_local() if value.device_mesh.size() == 1 else value.full_tensor()


BUCKET_BYTES = 1 << 28
"""The maximum number of bytes that one collective gathers, counted for the unsharded tensors. A larger tensor is
gathered alone."""


class _Buckets:
    """A callable that returns a parameter unsharded. Parameters are grouped in buckets (`BUCKET_BYTES`). The first
    request for a parameter of a bucket gathers the whole bucket in one collective. The order of requests must
    be the same on all ranks."""

    def __init__(self, model: nn.Module, value: Callable[[Tensor], Tensor], dtype: torch.dtype | None) -> None:
        self._value = value
        self._dtype = dtype
        self._bucket_of: dict[Tensor, list[DTensor]] = {}
        self._whole: dict[Tensor, Tensor] = {}
        filling: dict[torch.dtype, list[DTensor]] = {}
        for parameter in model.parameters():
            if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
                continue
            sent_as = self._send_dtype(parameter)
            bucket = filling.get(sent_as, [])
            if not bucket or sum(one.nbytes for one in [*bucket, parameter]) > BUCKET_BYTES:
                bucket = filling[sent_as] = []
            bucket.append(parameter)
            self._bucket_of[parameter] = bucket

    def _send_dtype(self, parameter: Tensor) -> torch.dtype:
        if self._dtype is None or parameter.ndim == 1 or not parameter.is_floating_point():
            return parameter.dtype
        return self._dtype

    def __call__(self, parameter: Tensor) -> Tensor:
        """Return the unsharded parameter. Each parameter can be requested only once, because this object then drops its
        gathered copy."""
        if parameter not in self._bucket_of:
            return gather_parameter(self._value(parameter))
        if parameter not in self._whole:
            bucket = self._bucket_of[parameter]
            shards = [local_tensor(self._value(each)) for each in bucket]
            self._whole.update(zip(bucket, _gather_bucket(bucket, shards, self._send_dtype(parameter)), strict=True))
        return self._whole.pop(parameter)


def _gather_bucket(parameters: list[DTensor], shards: list[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the parameters unsharded, gathered in one collective from each rank's `shards` after casting to `dtype`.
    Shards of the last ranks can be shorter or empty."""
    mesh, shapes = parameters[0].device_mesh, [parameter.shape for parameter in parameters]
    sizes = [-(-shape[0] // mesh.size()) * math.prod(shape[1:]) for shape in shapes]
    mine = shards[0].new_zeros(sum(sizes), dtype=dtype)
    for part, shard in zip(mine.split(sizes), shards, strict=True):
        part[: shard.numel()].copy_(shard.reshape(-1))
    everyones = mine.new_empty(mesh.size(), len(mine))
    dist.all_gather([*everyones], mine, group=mesh.get_group())
    for part, shape in zip(everyones.split(sizes, dim=1), shapes, strict=True):
        yield part.reshape(-1)[: shape.numel()].view(shape)
