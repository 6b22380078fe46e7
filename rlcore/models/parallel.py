"""FSDP2: parameters, gradients and optimizer state split over ranks, and put together again for hand-over."""

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
from rlcore.models.optim import local_tensor
from rlcore.models.policy import CausalPolicy, PackedTrunk, ValueModel

Model = TypeVar("Model", bound=PackedTrunk)


def shard(model: Model, *, mesh: DeviceMesh, dtype: torch.dtype) -> Model:
    """Shard each decoder layer, then the rest, over a one-dimensional mesh; changes `model` and returns it.

    Weights stay float32 in their shards; layers compute in `dtype`, gradients are reduced in float32 and averaged
    over ranks.
    """
    computing = _precision(dtype)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=computing)
    if isinstance(model, ValueModel):
        # Values are regressed on returns: a bfloat16 head would round them to three digits.
        fully_shard(model.value_head, mesh=mesh, mp_policy=_precision(torch.float32))
    fully_shard(model, mesh=mesh, mp_policy=computing)
    model.mark_sharded(dtype)
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
    """Whole parameters one by one, under transformers' names; a tied head is given once, as the embedding.

    Gathering is a collective: every rank must iterate to the end, in step. One bucket of gathered tensors lives at a
    time unless the caller keeps them. LoRA adapters come merged into their matrices, so names and shapes are the base
    model's. `value` gives a parameter where it is not on the device. `dtype`: of sharded matrices, for a receiver that
    holds them in it: half of the bytes are sent in bfloat16; None: as they are.
    """
    root = model.model if isinstance(model, CausalPolicy) else model
    yield from merged_parameters(root, _Buckets(root, value, dtype))


def adapter_state(model: CausalPolicy) -> Iterator[tuple[str, Tensor]]:
    """The LoRA adapters alone, whole, under PEFT's names; a collective, as `full_state` is."""
    for name, parameter in model.model.named_parameters():
        if any(part in name for part in ADAPTERS):
            yield f"base_model.model.{name}", gather_parameter(parameter)


def reshard(model: nn.Module) -> None:
    """Give up the whole weights that FSDP2 leaves together after a pass without gradients: those outside the layers."""
    if isinstance(model, FSDPModule):
        model.reshard()


def gather(model: nn.Module, *, once: bool, is_last: bool = True) -> None:
    """Before a micro-batch of an update, `once`: weights stay whole after forward and, unless it is the last, after
    backward, and gradients are added up whole until the last. Else, and at first, each pass gathers weights anew, and
    gradients are reduced after each."""
    assert isinstance(model, FSDPModule), "only a sharded model gathers"
    model.set_reshard_after_forward(not once)
    model.set_reshard_after_backward(is_last)
    model.set_requires_gradient_sync(is_last)


def reset_after_failed_pass(model: PackedTrunk) -> None:
    """Bring a model that is sharded on one rank back to where a pass may begin, after one that ended in the middle by
    an exception; its gradients are dropped. Nothing to do for a model that is not sharded.

    Private parts of FSDP2: what it does itself at the end of a backward. Without them the next pass fails in its
    state machine, which has no public way back.
    """
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
    """A parameter whole, detached, on its own device; a collective where it is sharded."""
    value = parameter.detach()
    if not isinstance(value, DTensor):
        return value
    # Of one rank it is whole as it is: hundreds of redistributions of nothing are a fifth of a small model's hand-over.
    return value.to_local() if value.device_mesh.size() == 1 else value.full_tensor()


BUCKET_BYTES = 1 << 28
"""Of whole tensors that one collective gathers; a larger tensor is gathered alone."""


class _Buckets:
    """Gathers a model's sharded parameters, asked for in any order that is the same on all ranks: the first that is
    asked of a bucket brings the others. A collective for each of hundreds of tensors would cost more than its bytes.

    Args:
        value: a parameter where it is not on the device.
        dtype: of matrices; None: their own.
    """

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
        """The whole parameter; each may be asked for once."""
        if parameter not in self._bucket_of:
            return gather_parameter(self._value(parameter))
        if parameter not in self._whole:
            bucket = self._bucket_of[parameter]
            shards = [local_tensor(self._value(each)) for each in bucket]
            self._whole.update(zip(bucket, _gather_bucket(bucket, shards, self._send_dtype(parameter)), strict=True))
        return self._whole.pop(parameter)


def _gather_bucket(parameters: list[DTensor], shards: list[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """Parameters whole, in one type, by one collective, from this rank's shards of them. Ranks hold as many rows of
    each, but the last ones fewer or none."""
    mesh, shapes = parameters[0].device_mesh, [parameter.shape for parameter in parameters]
    sizes = [-(-shape[0] // mesh.size()) * math.prod(shape[1:]) for shape in shapes]
    mine = shards[0].new_zeros(sum(sizes), dtype=dtype)
    for part, shard in zip(mine.split(sizes), shards, strict=True):
        part[: shard.numel()].copy_(shard.reshape(-1))
    everyones = mine.new_empty(mesh.size(), len(mine))
    dist.all_gather([*everyones], mine, group=mesh.get_group())
    for part, shape in zip(everyones.split(sizes, dim=1), shapes, strict=True):
        yield part.reshape(-1)[: shape.numel()].view(shape)
