"""Storage of a model's and its optimizer's tensors, written by each rank and read by any number of ranks.

Each rank writes its shards into separate safetensors files. A reading rank copies its parts from all files.
The layout follows torch.distributed.checkpoint, which is not used for these reasons:
- its `.metadata` and its byte items are pickles, which can run code when they are read;
- its `get_optimizer_state_dict` steps an optimizer that has taken no step (torch 2.13), which changes Adam's bias
  correction after a resume from the first checkpoint;
- its writer reports a full disk as `unexpected pos 576 vs 534`; Millrace raises DiskSpaceError;
- it is collective, so a rank that fails leaves the others waiting.

`CheckpointStore` verifies hashes by the manifest before a rank opens the files. An attacker who can write the folder
can write its manifest too, so no byte in the folder may be executable.

Frozen parameters (the base under LoRA adapters) are not saved. `base.json` has the digest, dtype and quantization of
the base. Weights for another base are refused. `optimizer.json` has the parameter groups and the numeric values of an
optimizer.
"""

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from rlcore.checkpoint.shard_files import (
    LocalPart,
    ShardReader,
    StoredTensor,
    local_part,
    local_parts,
    model_tensors,
    named_parameters,
    num_bytes,
    rank_and_world_size,
    state_name,
    write_parts,
)
from rlcore.errors import CheckpointError
from rlcore.models.lora import is_in_4_bits
from rlcore.models.memory import OffloadedAdamW, host_memory
from rlcore.models.policy import PackedTrunk
from rlcore.storage.publish import write_json_atomically

SPARE_SHARE = 0.25  # host memory that must stay free next to a copy, as a share of the copy
SavedModels = Mapping[str, tuple[nn.Module, torch.optim.Optimizer]]  # by their folder in the checkpoint
SHOWN_NAMES = 5
BASE = "base.json"
BASE_FORMAT_VERSION = 2
OPTIMIZER = "optimizer.json"
OPTIMIZER_FORMAT_VERSION = 1
Number = int | float


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A parameter group: the names of its parameters and its numbers (learning rate, betas, ...)."""

    names: tuple[str, ...]
    numbers: Mapping[str, Number | tuple[Number, ...]]


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """The state of an optimizer: its groups, its numeric values, and the names of its tensors by parameter."""

    groups: tuple[GroupRecord, ...]
    state_tensors: Mapping[str, tuple[str, ...]]
    state_numbers: Mapping[str, Mapping[str, Number | tuple[Number, ...]]]


_RECORD = TypeAdapter(OptimizerRecord)


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
        """Write the shards into `directory`. Raises DiskSpaceError, and CheckpointError if the disk refuses a write."""
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
    """The frozen weights under adapters: the digest (`rlcore.models.lora`), the compute dtype and `model.lora.base`."""

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
        """Raise CheckpointError if a checkpoint's adapters were trained over another base."""
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
    """Return the current state of the optimizer except for its tensors."""
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
    """Return the numeric options of a parameter group. Switches such as `fused` are left out."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    return {
        key: value
        for key, value in values.items()
        if is_number(value) or (isinstance(value, tuple) and all(map(is_number, value)))
    }


@torch.no_grad()
def rank_shards(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> RankShards:
    """Return the shards that this rank writes, not yet copied. Raises CheckpointError for an unknown placement."""
    rank, world_size = rank_and_world_size()
    parts = tuple(part for part in local_parts(model, optimizer, rank=rank) if part.is_written_here)
    record = None if optimizer is None else optimizer_record(model, optimizer)
    return RankShards(parts, record, rank, world_size, BaseRecord.of(model))


@dataclass(frozen=True, slots=True)
class CopySize:
    """The bytes of a rank's shards. If they are not copied, training waits until they are written."""

    num_bytes: int
    is_copied: bool


class RankSaver:
    """The work of one rank in a save: it copies its shards, writes the copy in a thread and frees it. `num_ranks`: the
    number of ranks that may share this host's memory."""

    def __init__(self, models: Callable[[], SavedModels], *, num_ranks: int) -> None:
        self._models = models
        self._num_ranks = num_ranks
        self._buffers: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        self._copies: Mapping[str, RankShards] = {}
        self._writing: Future[None] | None = None

    def _shards(self) -> dict[str, RankShards]:
        return {name: rank_shards(model, optimizer) for name, (model, optimizer) in self._models().items()}

    def copy(self) -> CopySize:
        """Copy this rank's shards to the host if there is memory for the copy."""
        shards = self._shards()
        size = sum(num_bytes(one.parts) for one in shards.values())
        more = size - sum(buffer.nbytes for buffers in self._buffers.values() for buffer in buffers.values())
        needed = more * self._num_ranks * (1 + SPARE_SHARE)
        is_copied = psutil.virtual_memory().available > needed
        self._copies = {name: one.copied(self._buffers[name]) for name, one in shards.items()} if is_copied else {}
        return CopySize(size, is_copied)

    def write(self, directory: str) -> None:
        """Start a thread that writes the copy below `directory`. Without a copy, write the shards before returning.
        Wait for the thread of an earlier call, and ignore its result."""
        self.abandon()
        copies = self._copies

        def write(shards: Mapping[str, RankShards]) -> None:
            for name, one in shards.items():
                one.write(Path(directory) / name)

        if copies:
            self._writing = start_thread(lambda: write(copies), "checkpoint-shards")
        else:
            write(self._shards())

    def is_written(self, *, wait: bool) -> bool:
        """Return whether the shards are written. If `wait` is true, wait for the thread first. The first call after a
        failed write raises its DiskSpaceError or CheckpointError."""
        if self._writing is None:
            return True
        if not wait and not self._writing.done():
            return False
        writing, self._writing = self._writing, None
        writing.result()
        return True

    def abandon(self) -> None:
        """Wait for the end of the writing thread, and ignore its result. The folder can then be removed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.exception()

    def drop(self) -> None:
        """Free the memory of the copy. The buffers of GPU tensors are kept."""
        self._copies = {}


def start_thread(do: Callable[[], None], name: str) -> "Future[None]":
    """Call `do` in a daemon thread, which does not delay the exit of the process, and return a future of the call."""
    result: Future[None] = Future()

    def run() -> None:
        try:
            do()
        except BaseException as reason:
            result.set_exception(reason)
        else:
            result.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


def _copy_part(part: LocalPart, buffers: dict[str, Tensor]) -> Tensor:
    """Begin to copy a part to the host. The copy is complete after the device's `synchronize`."""
    source = part.local
    if source.device.type != "cuda":
        return source.to("cpu", copy=True)
    buffer = buffers.get(part.name)
    if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
        buffer = buffers[part.name] = host_memory(source, source.dtype, pinned=True)
    return buffer.copy_(source, non_blocking=True)


@torch.no_grad()
def load_shards(directory: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Load the saved tensors of any number of ranks into `model`, and into `optimizer` unless it is None. Raises
    CheckpointError if files are missing, damaged or of another model. After this error, the model is unusable."""
    rank, _ = rank_and_world_size()
    with ShardReader(directory) as reader:
        parts = [local_part(f"model.{name}", tensor, rank=rank) for name, tensor in model_tensors(model)]
        if (base := BaseRecord.of(model)) is not None:
            base.require(directory)
        _require_same_names(directory, parts, reader.tensors)
        for part in parts:
            reader.fill(part)
        if optimizer is not None:
            load_optimizer(directory, reader, model, optimizer, rank)


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


def _read_record(directory: Path) -> OptimizerRecord:
    path = directory / OPTIMIZER
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version = document.pop("format_version")
        if version != OPTIMIZER_FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version must be {OPTIMIZER_FORMAT_VERSION}, got {version!r}. Read it with the version "
                "of Millrace that wrote it."
            )
        return _RECORD.validate_python(document)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing: the weights were saved without an optimizer. Use another.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as reason:
        raise CheckpointError(f"{path}: is damaged ({reason!r}). Delete the checkpoint and use another.") from reason


def load_optimizer(
    directory: Path, reader: ShardReader, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int
) -> None:
    """Load the saved state into the optimizer, in place where possible. Raises CheckpointError if it does not fit."""
    record = _read_record(directory)
    named = dict(named_parameters(model))
    names = {parameter: name for name, parameter in named.items()}
    here = tuple(tuple(names[p] for p in group["params"]) for group in optimizer.param_groups)
    if here != tuple(group.names for group in record.groups):
        raise CheckpointError(
            f"{directory / OPTIMIZER}: its groups of parameters are not those of the optimizer here. Use the model and "
            "the settings that were trained."
        )
    packed = optimizer.state_dict()
    for group, saved in zip(packed["param_groups"], record.groups, strict=True):
        group.update(saved.numbers)
    packed["state"] = {}
    for number, name in enumerate(name for group in here for name in group):
        keys, numbers = record.state_tensors[name], record.state_numbers[name]
        if keys or numbers:
            tensors = {key: _state_tensor(reader, optimizer, named[name], name, key, rank) for key in keys}
            packed["state"][number] = {**tensors, **numbers}
    optimizer.load_state_dict(packed)


def _state_tensor(
    reader: ShardReader, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, key: str, rank: int
) -> Tensor:
    """Read one tensor of the optimizer state, which is sharded like its parameter if both have the same shape."""
    full_name = state_name(name, key)
    stored = reader.tensors.get(full_name)
    if stored is None:
        raise CheckpointError(f"a checkpoint's optimizer.json names {full_name}, but no shard file holds it")
    known = optimizer.state.get(parameter, {}).get(key)
    if isinstance(known, Tensor) and tuple(known.shape) == stored.shape and known.dtype == stored.dtype:
        target = known  # filled in place, since two optimizer states may not fit into memory
    elif stored.shape == tuple(parameter.shape) and stored.shape:
        if isinstance(optimizer, OffloadedAdamW):
            target = optimizer.new_moment(parameter, stored.dtype)
        else:
            target = torch.empty_like(parameter, dtype=stored.dtype)
    else:
        target = torch.empty(stored.shape, dtype=stored.dtype)
    reader.fill(local_part(full_name, target, rank=rank))
    return target
