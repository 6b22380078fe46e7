"""Which tensors a checkpoint holds, by name, and which part of each lies on this rank: a box of global indices."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlcore.errors import CheckpointError

# Wrappers that put a segment of their own into parameter names; a checkpoint must not depend on them.
WRAPPER_SEGMENTS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, slots=True)
class Box:
    """Indices `offset[d] <= i < offset[d] + shape[d]` in each dimension d of a whole tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """1 for the box of a scalar."""
        return math.prod(self.shape)

    def overlap(self, other: "Box") -> "Box | None":
        """What both hold; None where that is nothing.

        >>> Box((0, 0), (4, 2)).overlap(Box((3, 0), (4, 2)))
        Box(offset=(3, 0), shape=(1, 2))
        >>> Box((0,), (4,)).overlap(Box((4,), (4,))) is None
        True
        """
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(end <= start for start, end in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(end - start for start, end in zip(low, high, strict=True)))

    def inside(self, outer: "Box") -> tuple[slice, ...]:
        """This box as slices of a tensor that holds `outer`.

        >>> Box((3, 0), (1, 2)).inside(Box((2, 0), (4, 2)))
        (slice(1, 2, None), slice(0, 2, None))
        """
        return tuple(
            slice(mine - theirs, mine - theirs + length)
            for mine, theirs, length in zip(self.offset, outer.offset, self.shape, strict=True)
        )


@dataclass(frozen=True, slots=True)
class LocalPart:
    """This rank's part of one tensor. `local` is the memory itself, not a copy."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    local: Tensor
    is_written_here: bool


def local_part(name: str, tensor: Tensor, *, rank: int) -> LocalPart:
    """The part of a plain tensor (all of it) or of a DTensor (its shard) on this rank.

    Of several equal copies one is written: that of rank 0, or along a replicated mesh dimension that of coordinate 0.

    Raises:
        CheckpointError: a placement other than Shard and Replicate.
    """
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return LocalPart(name, shape, Box((0,) * len(shape), shape), tensor.detach(), rank == 0)
    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):
            raise CheckpointError(
                f"{name}: is laid out as {placement}; checkpoints know Shard and Replicate. Shard the model over a "
                "plain mesh (rlcore.models.parallel)."
            )
    coordinate = tensor.device_mesh.get_coordinate() or ()
    first_copy = all(
        place == 0
        for place, placement in zip(coordinate, tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    )
    local = cast(DTensor, tensor.detach()).to_local()
    chunks = tensor.__create_chunk_list__()  # torch's own arithmetic of uneven shards
    box = (
        Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes)) if chunks else Box((0,) * local.ndim, tuple(local.shape))
    )
    return LocalPart(name, tuple(tensor.shape), box, local, first_copy)


def rank_and_world_size() -> tuple[int, int]:
    """(0, 1) where no process group has been formed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def local_parts(model: nn.Module, optimizer: torch.optim.Optimizer | None, *, rank: int) -> Iterator[LocalPart]:
    """Everything that belongs to a checkpoint of this model and optimizer, as this rank holds it."""
    for name, tensor in model_tensors(model):
        yield local_part(f"model.{name}", tensor, rank=rank)
    if optimizer is None:
        return
    for name, parameter in named_parameters(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield local_part(state_name(name, key), value, rank=rank)


def expected_parts(
    model: nn.Module, *, moments: Iterable[str], rank: int
) -> Iterator[tuple[str, torch.Size, torch.dtype]]:
    """Names, shapes and types of what this rank writes of a model, and of an optimizer that has taken no step yet."""
    trained = dict(named_parameters(model))
    for name, tensor in model_tensors(model):
        part = local_part(f"model.{name}", tensor, rank=rank)
        if part.is_written_here:
            names = [part.name, *(state_name(name, key) for key in moments if name in trained)]
            yield from ((one, part.local.shape, part.local.dtype) for one in names)


def model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Trained parameters and lasting buffers, each once: a tied weight under the first of its names."""
    for name, parameter in named_parameters(model):
        if parameter.requires_grad:
            yield name, parameter
    for prefix, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                yield _clean(f"{prefix}.{key}".lstrip(".")), buffer


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters as they lie on this rank, each once."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a pass without backward the root still has its whole, gathered parameters
    for name, parameter in model.named_parameters():
        yield _clean(name), parameter


def _clean(name: str) -> str:
    for segment in WRAPPER_SEGMENTS:
        name = name.replace(segment, "")
    return name


def state_name(name: str, key: str) -> str:
    """Name of one tensor of a parameter's optimizer state."""
    return f"optimizer.{name}.{key}"
