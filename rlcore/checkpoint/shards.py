"""Storage of a model's and its optimizer's tensors, written by each rank and read by any number of ranks.

Each rank writes its shards into separate safetensors files. A reading rank copies its parts from all files.
The layout follows torch.distributed.checkpoint, which is not used for these reasons:
- its `.metadata` and its byte items are pickles, which can run code when they are read;
- its `get_optimizer_state_dict` calls `step` on an optimizer that has made no step yet (torch 2.13). If this state is
  saved, Adam's bias correction is wrong after a resume;
- its writer reports a full disk as `unexpected pos 576 vs 534`; Millrace raises DiskSpaceError;
- it is collective, so all other ranks wait if one rank fails.

`CheckpointStore` verifies the hashes in the manifest before a rank opens the files. An attacker who can write the
folder can also write the manifest, so no file in the folder may contain code.

Frozen parameters (the base under LoRA adapters) are not saved. `base.json` has the digest, dtype and quantization of
the base. Adapters of another base are refused. `optimizer.json` has the parameter groups and the numeric state.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from operator import add
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlcore.errors import CheckpointError
from rlcore.models.lora import is_in_4_bits
from rlcore.models.memory import host_memory
from rlcore.models.policy import PackedTrunk
from rlcore.storage.disk import is_out_of_room, out_of_room
from rlcore.storage.publish import write_json_atomically

FORMAT = "millrace-shards"
FORMAT_VERSION = 1
MAX_FILE_BYTES = 2**30  # Host memory that a save from a GPU uses at one time. One thread hashes it in a second.

DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
COMPILED = "_orig_mod."  # prefix of torch.compile in names, which a checkpoint leaves out
BASE = "base.json"
BASE_FORMAT_VERSION = 2
OPTIMIZER = "optimizer.json"
OPTIMIZER_FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of a whole tensor. In each dimension d, it has the indices from `offset[d]` to `offset[d] +
    shape[d] - 1`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: "Box") -> "Box | None":
        """Return the intersection of two boxes, or None if it is empty."""
        low = tuple(map(max, self.offset, other.offset))
        high = map(min, self._ends, other._ends)
        shape = tuple(end - start for start, end in zip(low, high, strict=True))
        return Box(low, shape) if all(length > 0 for length in shape) else None

    @property
    def _ends(self) -> tuple[int, ...]:
        return tuple(map(add, self.offset, self.shape))

    def relative_to(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that stores exactly the box `outer`.

        >>> Box((3, 0), (1, 2)).relative_to(Box((2, 0), (4, 2)))
        (slice(1, 2, None), slice(0, 2, None))
        """
        return tuple(
            slice(mine - theirs, mine - theirs + length)
            for mine, theirs, length in zip(self.offset, outer.offset, self.shape, strict=True)
        )


@dataclass(frozen=True, slots=True)
class LocalPart:
    """This rank's part of one tensor. `local` is the memory of the part itself, not a copy."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    local: Tensor
    is_written_here: bool


def local_part(name: str, tensor: Tensor) -> LocalPart:
    """Return this rank's part of a tensor. If several ranks have equal copies, `is_written_here` is true on only one of
    them. For a DTensor, this is the copy at coordinate 0 of each replicated mesh dimension. For any other tensor, it is
    the copy of rank 0. Raises CheckpointError if a placement is not Shard or Replicate."""
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return LocalPart(name, shape, Box((0,) * len(shape), shape), tensor.detach(), rank_and_world_size()[0] == 0)
    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):
            raise CheckpointError(
                f"{name}: is laid out as {placement}; checkpoints know Shard and Replicate. Shard the model over a "
                "plain mesh (rlcore.models.parallel)."
            )
    coordinate = tensor.device_mesh.get_coordinate() or ()
    places = zip(coordinate, tensor.placements, strict=True)
    first_copy = all(place == 0 for place, placement in places if isinstance(placement, Replicate))
    local = cast(DTensor, tensor.detach()).to_local()
    box = Box((0,) * local.ndim, tuple(local.shape))
    for chunk in tensor.__create_chunk_list__():  # torch's arithmetic of uneven shards; at most one
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    return LocalPart(name, tuple(tensor.shape), box, local, first_copy)


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, or (0, 1) if no process group exists."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def local_parts(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[LocalPart]:
    """Yield this rank's part of each tensor: trained parameters and persistent buffers of the model, and the state of
    its optimizer. A tied weight is yielded once."""
    for name, parameter in named_parameters(model):
        if parameter.requires_grad:
            yield local_part(f"model.{name}", parameter)
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield local_part(f"model.{name.replace(COMPILED, '')}", buffer)
    if optimizer is None:
        return
    for name, parameter in named_parameters(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield local_part(state_name(name, key), value)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter once with its name. Parameters that FSDP2 has gathered are sharded again first."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass without backward the root still has gathered parameters
    for name, parameter in model.named_parameters():
        yield name.replace(COMPILED, ""), parameter


def state_name(name: str, key: str) -> str:
    """Return the name of one tensor in the optimizer state of a parameter."""
    return f"optimizer.{name}.{key}"


def write_parts(directory: Path, parts: Iterable[LocalPart], *, rank: int, world_size: int) -> None:
    """Write this rank's parts to files of about `MAX_FILE_BYTES`. Raises DiskSpaceError if the disk is full, and
    CheckpointError if a file cannot be written."""
    for number, group in enumerate(_groups(parts)):
        path = directory / f"rank-{rank:05d}-of-{world_size:05d}-{number:04d}.safetensors"
        # safetensors refuses tensors that share memory, and training may continue during the write.
        tensors = {part.name: part.local.to("cpu", copy=True).contiguous() for part in group}
        pieces = {
            part.name: {
                "global_shape": part.global_shape,
                "offset": part.box.offset,
                "shape": part.box.shape,
                "dtype": str(part.local.dtype).removeprefix("torch."),
            }
            for part in group
        }
        header = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "pieces": json.dumps(pieces)}
        try:
            save_file(tensors, path, metadata=header)
        except (SafetensorError, OSError) as reason:
            if is_out_of_room(reason):
                raise out_of_room(path, reason, needed_bytes=num_bytes(group)) from reason
            raise CheckpointError(
                f"{path}: cannot be written ({reason}). Is the folder writable, and the same on every node?"
            ) from reason


def _groups(parts: Iterable[LocalPart]) -> Iterator[list[LocalPart]]:
    group: list[LocalPart] = []
    size = 0
    for part in parts:
        if part.local.numel() == 0 and math.prod(part.global_shape) > 0:  # other ranks have all of it
            continue
        size += num_bytes([part])
        if group and size > MAX_FILE_BYTES:
            yield group
            group, size = [], num_bytes([part])
        group.append(part)
    if group:
        yield group


def num_bytes(parts: Iterable[LocalPart]) -> int:
    """Return the total bytes of the parts' local tensors."""
    return sum(part.local.nbytes for part in parts)


Number = int | float


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A parameter group: the names of its parameters and its numeric settings (learning rate, betas, ...)."""

    names: tuple[str, ...]
    numbers: Mapping[str, Number | tuple[Number, ...]]


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """The state of an optimizer: its groups, its numeric values, and the names of its tensors by parameter."""

    groups: tuple[GroupRecord, ...]
    state_tensors: Mapping[str, tuple[str, ...]]
    state_numbers: Mapping[str, Mapping[str, Number | tuple[Number, ...]]]


@dataclass(frozen=True, slots=True)
class RankShards:
    """This rank's shards of one model and its optimizer. `parts` are the tensors themselves, or a copy of them."""

    parts: tuple[LocalPart, ...]
    optimizer: OptimizerRecord | None
    rank: int
    world_size: int
    base: "BaseRecord | None" = None

    @torch.no_grad()
    def copied(self, buffers: dict[str, Tensor]) -> "RankShards":
        """Return a copy on the host. GPU tensors go to page-locked `buffers`, which the next copy overwrites."""
        copy = replace(self, parts=tuple(replace(part, local=_copy_part(part, buffers)) for part in self.parts))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copy

    def write(self, directory: Path) -> None:
        """Write the shards into `directory`. See `write_parts` for the errors."""
        try:
            directory.mkdir(exist_ok=True)
        except OSError as reason:
            raise CheckpointError(
                f"{directory}: cannot be made ({reason}). Is the run's folder writable, and the same on every node?"
            ) from reason
        write_parts(directory, self.parts, rank=self.rank, world_size=self.world_size)
        if self.optimizer is not None and self.rank == 0:
            document = {"format_version": OPTIMIZER_FORMAT_VERSION, **asdict(self.optimizer)}
            write_json_atomically(directory / OPTIMIZER, document)
        if self.base is not None and self.rank == 0:
            write_json_atomically(directory / BASE, {"format_version": BASE_FORMAT_VERSION, **asdict(self.base)})


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """The frozen base of LoRA adapters: its digest, its compute dtype and its setting `model.lora.base`."""

    digest: str
    dtype: str
    base: str

    @classmethod
    def of(cls, model: nn.Module) -> "BaseRecord | None":
        """Return the record of a model in memory, or None if the model has no adapters."""
        if not (isinstance(model, PackedTrunk) and model.base_digest):
            return None
        base = "nf4" if is_in_4_bits(model) else "native"
        return cls(model.base_digest, str(model.compute_dtype).removeprefix("torch."), base)

    @classmethod
    def read(cls, directory: Path) -> "BaseRecord":
        """Read the record of a checkpoint. Raises CheckpointError if it is missing, damaged, or of another format."""
        file = directory / BASE
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            if document["format_version"] != BASE_FORMAT_VERSION:
                raise ValueError(f"format_version {document['format_version']!r}, known is {BASE_FORMAT_VERSION}")
            return cls(str(document["digest"]), str(document["dtype"]), str(document["base"]))
        except (OSError, ValueError, KeyError, TypeError) as reason:
            raise CheckpointError(
                f"{file}: must name the base over which adapters were trained ({reason!r}). Use another checkpoint."
            ) from reason

    def require(self, directory: Path) -> None:
        """Raise CheckpointError if the adapters of the checkpoint in `directory` were trained over a base other than
        this one."""
        saved = self.read(directory)
        remedies = {
            "base": f"Set model.lora.base={saved.base}",
            "dtype": f"Set model.dtype={saved.dtype}",
            "digest": "The model at model.path has changed: restore it, or start a new run",
        }
        for key, remedy in remedies.items():
            there, here = getattr(saved, key), getattr(self, key)
            if there != here:
                raise CheckpointError(
                    f"{directory}: its adapters were trained over a base with {key} {there}, and here it has {here}. "
                    f"{remedy}."
                )


def optimizer_record(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
    """Return a record of the optimizer's current state. It has the names of the state's tensors, but not their
    values."""
    names = {parameter: name for name, parameter in named_parameters(model)}
    groups = []
    state_tensors: dict[str, tuple[str, ...]] = {}
    state_numbers: dict[str, Mapping[str, Any]] = {}
    for group in optimizer.param_groups:
        groups.append(GroupRecord(tuple(names[p] for p in group["params"]), _numbers(group)))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            state_tensors[names[parameter]] = tuple(key for key, value in state.items() if isinstance(value, Tensor))
            state_numbers[names[parameter]] = _numbers(state)
    return OptimizerRecord(tuple(groups), state_tensors, state_numbers)


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numeric values of a parameter group or state. Switches such as `fused` are left out."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    return {
        key: value
        for key, value in values.items()
        if is_number(value) or (isinstance(value, tuple) and all(map(is_number, value)))
    }


@torch.no_grad()
def rank_shards(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> RankShards:
    """Return this rank's shards without copying them. Raises CheckpointError if a DTensor has a placement other than
    Shard or Replicate."""
    parts = tuple(part for part in local_parts(model, optimizer) if part.is_written_here)
    record = None if optimizer is None else optimizer_record(model, optimizer)
    return RankShards(parts, record, *rank_and_world_size(), BaseRecord.of(model))


def _copy_part(part: LocalPart, buffers: dict[str, Tensor]) -> Tensor:
    """Begin to copy a part to the host. The copy is complete after the device's `synchronize`."""
    source = part.local
    if source.device.type != "cuda":
        return source.to("cpu", copy=True)
    buffer = buffers.get(part.name)
    if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
        buffer = buffers[part.name] = host_memory(source, source.dtype, pinned=True)
    return buffer.copy_(source, non_blocking=True)
