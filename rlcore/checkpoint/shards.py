"""The tensors of one model and its optimizer on disk, by every rank for itself, for any number of ranks to read.

Each rank writes the shards that it holds into safetensors files of its own; a reading rank copies from all files the
parts that fall into its shards. Not torch.distributed.checkpoint, though the layout follows it:
- its `.metadata` and its byte items are pickles, and a pickle runs code when it is read; nothing here can;
- its `get_optimizer_state_dict` takes a step of an optimizer that has taken none (torch 2.13), so that a run resumed
  from its first checkpoint would have bias corrections of its own;
- a full disk comes out of torch's writer as `unexpected pos 576 vs 534`; here it is a DiskSpaceError;
- nothing is collective here, so a rank that fails leaves no other rank waiting.

The files' hashes are in the manifest of the published checkpoint and are verified by `CheckpointStore` before a rank
opens them. That protects from disks, copies and crashes; whoever can write the folder can write a matching manifest
too, which is why no byte in it may be able to run.

Parameters that want no gradient (the base under LoRA adapters) are not saved: they are those of the start model, which
the settings' fingerprint pins.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from rlcore.checkpoint.boxes import LocalPart, local_part, rank_and_world_size
from rlcore.checkpoint.host import HostBuffers
from rlcore.checkpoint.names import model_tensors, named_parameters, state_name
from rlcore.checkpoint.optimizer import OptimizerRecord, load_optimizer, optimizer_record, write_optimizer_record
from rlcore.checkpoint.shard_files import ShardReader, StoredTensor, write_parts
from rlcore.errors import CheckpointError

SHOWN_NAMES = 5


@dataclass(frozen=True, slots=True)
class HostCopy:
    """This rank's shards at one moment, copied to the host, and the folder that they go to."""

    directory: Path
    parts: tuple[LocalPart, ...]
    optimizer: OptimizerRecord | None
    rank: int
    world_size: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors: what it takes in memory, and nearly what it will take on disk."""
        return sum(part.local.numel() * part.local.element_size() for part in self.parts)

    def write(self) -> None:
        """Write them; training may have gone on meanwhile. Raises what `save_shards` raises."""
        _make_folder(self.directory)
        write_parts(self.directory, self.parts, rank=self.rank, world_size=self.world_size)
        if self.optimizer is not None and self.rank == 0:
            write_optimizer_record(self.directory, self.optimizer)


@torch.no_grad()
def copy_shards(
    directory: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer | None, buffers: HostBuffers | None = None
) -> HostCopy:
    """Copy this rank's shards to the host: as many bytes of memory as it is going to write.

    With `buffers` the next copy to them overwrites this one.
    """
    rank, world_size = rank_and_world_size()
    buffers = buffers or HostBuffers()
    buffers.wait()
    parts = tuple(
        replace(part, local=buffers.copy(part))
        for part in local_parts(model, optimizer, rank=rank)
        if part.is_written_here
    )
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    record = None if optimizer is None else optimizer_record(model, optimizer)
    return HostCopy(directory, parts, record, rank, world_size)


@torch.no_grad()
def num_shard_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of this rank's shards."""
    rank, _ = rank_and_world_size()
    parts = local_parts(model, optimizer, rank=rank)
    return sum(part.local.numel() * part.local.element_size() for part in parts if part.is_written_here)


@torch.no_grad()
def prepare_buffers(buffers: HostBuffers, model: nn.Module, *, moments: tuple[str, ...]) -> None:
    """Get host memory for a model and the optimizer's moments on its device, in a thread, before the first save."""
    rank, _ = rank_and_world_size()
    parts = [local_part(f"model.{name}", tensor, rank=rank) for name, tensor in model_tensors(model)]
    wanted = [(part.name, part.local.shape, part.local.dtype) for part in parts if part.is_written_here]
    trained = dict(named_parameters(model))
    for part in parts:
        name = part.name.removeprefix("model.")
        if part.is_written_here and name in trained:
            wanted += [(state_name(name, key), part.local.shape, part.local.dtype) for key in moments]
    buffers.prepare(wanted)


@torch.no_grad()
def save_shards(directory: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Write this rank's shards into `directory`, whose parent exists. Every rank calls it; none waits for another.

    Raises:
        DiskSpaceError: no room.
        CheckpointError: the folder is gone, or a tensor is laid out in a way that is not known.
    """
    rank, world_size = rank_and_world_size()
    _make_folder(directory)
    write_parts(directory, local_parts(model, optimizer, rank=rank), rank=rank, world_size=world_size)
    if optimizer is not None and rank == 0:
        write_optimizer_record(directory, optimizer_record(model, optimizer))


@torch.no_grad()
def load_shards(directory: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Read what any number of ranks saved, in place. Without an optimizer only the weights are read.

    After an error the model may hold a mixture: do not go on with it.

    Raises:
        CheckpointError: files are missing or damaged, or are those of another model or optimizer.
    """
    rank, _ = rank_and_world_size()
    with ShardReader(directory) as reader:
        parts = [local_part(f"model.{name}", tensor, rank=rank) for name, tensor in model_tensors(model)]
        _require_same_names(directory, parts, reader.tensors)
        for part in parts:
            reader.fill(part)
        if optimizer is not None:
            load_optimizer(directory, reader, model, optimizer, rank)


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


def _make_folder(directory: Path) -> None:
    try:
        directory.mkdir(exist_ok=True)
    except OSError as reason:
        raise CheckpointError(
            f"{directory}: cannot be made ({reason}). Is the run's folder writable, and the same on every node?"
        ) from reason


def _require_same_names(directory: Path, parts: list[LocalPart], stored: Mapping[str, StoredTensor]) -> None:
    here = {part.name for part in parts}
    there = {name for name in stored if name.startswith("model.")}
    for names, what in ((here - there, "are not in it"), (there - here, "are not in the model")):
        if names:
            shown = ", ".join(sorted(names)[:SHOWN_NAMES])
            raise CheckpointError(
                f"{directory}: was saved from another model: {len(names)} tensors {what}, first {shown}. Use the model "
                "and the settings that were trained."
            )
