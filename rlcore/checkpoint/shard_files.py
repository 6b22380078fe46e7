"""Storage of tensor parts in self-describing safetensors files. The header has the shape of each whole tensor and the
offset of the part. Any number of ranks can therefore read what any other number of ranks wrote, without an index."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlcore.errors import CheckpointError
from rlcore.storage.disk import is_out_of_room, out_of_room

FORMAT = "millrace-shards"
FORMAT_VERSION = 1
MAX_FILE_BYTES = 2**30  # Host memory that a save from a GPU uses at one time. One thread hashes it in a second.

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
COMPILED = "_orig_mod."  # prefix of torch.compile in names, which a checkpoint leaves out


@dataclass(frozen=True, slots=True)
class Box:
    """The indices `offset[d] <= i < offset[d] + shape[d]` in each dimension d of a whole tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: "Box") -> "Box | None":
        """Return the intersection of two boxes, or None if it is empty."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(end <= start for start, end in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(end - start for start, end in zip(low, high, strict=True)))

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


def local_part(name: str, tensor: Tensor, *, rank: int) -> LocalPart:
    """Return this rank's part of a tensor. Of equal copies, only the copy of rank 0, or of coordinate 0 in a replicated
    mesh dimension, is written. Raises CheckpointError if a placement is neither Shard nor Replicate."""
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
    places = zip(coordinate, tensor.placements, strict=True)
    first_copy = all(place == 0 for place, placement in places if isinstance(placement, Replicate))
    local = cast(DTensor, tensor.detach()).to_local()
    box = Box((0,) * local.ndim, tuple(local.shape))
    for chunk in tensor.__create_chunk_list__():  # torch's arithmetic of uneven shards; at most one
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    return LocalPart(name, tuple(tensor.shape), box, local, first_copy)


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, or (0, 1) if no process group exists."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def local_parts(model: nn.Module, optimizer: torch.optim.Optimizer | None, *, rank: int) -> Iterator[LocalPart]:
    """Yield the parts of all tensors of the model and its optimizer that this rank stores."""
    for name, tensor in model_tensors(model):
        yield local_part(f"model.{name}", tensor, rank=rank)
    if optimizer is None:
        return
    for name, parameter in named_parameters(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield local_part(state_name(name, key), value, rank=rank)


def model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield trained parameters and persistent buffers with their names. A tied weight is yielded once."""
    for name, parameter in named_parameters(model):
        if parameter.requires_grad:
            yield name, parameter
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name.replace(COMPILED, ""), buffer


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
    """Write this rank's parts to files of about `MAX_FILE_BYTES`. Raises DiskSpaceError or CheckpointError."""
    for number, group in enumerate(_groups(parts)):
        path = directory / f"rank-{rank:05d}-of-{world_size:05d}-{number:04d}.safetensors"
        # safetensors refuses tensors that share memory, and training may continue during the write.
        tensors = {part.name: part.local.to("cpu", copy=True).contiguous() for part in group}
        try:
            save_file(tensors, path, metadata=_header(group))
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
        is_elsewhere = part.local.numel() == 0 and math.prod(part.global_shape) > 0
        if is_elsewhere or not part.is_written_here:
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


def _header(group: Iterable[LocalPart]) -> dict[str, str]:
    pieces = {
        part.name: {
            "global_shape": part.global_shape,
            "offset": part.box.offset,
            "shape": part.box.shape,
            "dtype": str(part.local.dtype).removeprefix("torch."),
        }
        for part in group
    }
    return {"format": FORMAT, "format_version": str(FORMAT_VERSION), "pieces": json.dumps(pieces)}


@dataclass(frozen=True, slots=True)
class _Piece:
    file: Path
    box: Box


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor as the files of all ranks describe it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[_Piece]


class ShardReader:
    """The verified shard files of a folder, memory-mapped in a `with` block. A truncated file would crash Python."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = ExitStack()
        self._open: dict[Path, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}

    def __enter__(self) -> Self:
        """Read all headers. Raises CheckpointError if no shard file exists, or one is damaged or of another format."""
        with ExitStack() as files:
            try:
                for path in sorted(self._directory.glob("*.safetensors")):
                    self._open[path] = files.enter_context(safe_open(path, framework="pt"))
                    self._add(path, self._open[path].metadata() or {})
            except (SafetensorError, OSError, ValueError, KeyError, TypeError) as reason:
                raise CheckpointError(
                    f"{self._directory}: a shard file is damaged ({reason!r}). Delete the checkpoint; the one before "
                    "it will be used."
                ) from reason
            self._files = files.pop_all()
        if not self._open:
            raise CheckpointError(f"{self._directory}: holds no shard files. Delete the checkpoint and use another.")
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def fill(self, part: LocalPart) -> None:
        """Copy the stored values of a part into its memory. Raises CheckpointError if some are missing or unfit."""
        stored = self.tensors.get(part.name)
        if stored is None:
            raise CheckpointError(f"{self._directory}: has no tensor {part.name}. Was it saved from another model?")
        if stored.shape != part.global_shape or stored.dtype != part.local.dtype:
            raise CheckpointError(
                f"{self._directory}: {part.name} is {stored.dtype} {list(stored.shape)} there and {part.local.dtype} "
                f"{list(part.global_shape)} here. Use the model that was trained."
            )
        num_filled = 0
        for piece in stored.pieces:
            common = part.box.overlap(piece.box)
            if common is not None:
                target = part.local[common.relative_to(part.box)]
                target.copy_(self._read(piece, part.name, common))
                num_filled += math.prod(common.shape)  # 1 for a scalar
        if num_filled != part.local.numel():
            why = "a rank's file is missing. Delete the checkpoint and use another"
            if num_filled > part.local.numel():
                why = "some are there twice. Remove the files that the checkpoint's manifest.json does not list"
            raise CheckpointError(
                f"{self._directory}: {num_filled} of {part.local.numel()} elements of {part.name} are in the files: "
                f"{why}."
            )

    def _add(self, path: Path, header: Mapping[str, str]) -> None:
        if header.get("format") != FORMAT:
            raise ValueError(f"{path.name} is no shard file of a checkpoint")
        if int(header["format_version"]) != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version must be {FORMAT_VERSION}, got {header['format_version']}. Read it with the "
                "version of Millrace that wrote it."
            )
        for name, piece in json.loads(header["pieces"]).items():
            whole = tuple(piece["global_shape"]), DTYPES[piece["dtype"]]
            known = self.tensors.setdefault(name, StoredTensor(*whole, []))
            if (known.shape, known.dtype) != whole:
                raise ValueError(f"{path.name} gives {name} another shape or type than the files before it")
            known.pieces.append(_Piece(path, Box(tuple(piece["offset"]), tuple(piece["shape"]))))

    def _read(self, piece: _Piece, name: str, box: Box) -> Tensor:
        file = self._open[piece.file]
        is_whole = box == piece.box
        values: Tensor = file.get_tensor(name) if is_whole else file.get_slice(name)[box.relative_to(piece.box)]
        return values
