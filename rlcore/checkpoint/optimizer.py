"""An optimizer's state: its tensors with the shards, its groups and numbers in `optimizer.json`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from rlcore.checkpoint.shard_files import ShardReader, local_part, named_parameters, state_name
from rlcore.errors import CheckpointError
from rlcore.models.optim import OffloadedAdamW
from rlcore.storage.publish import write_json_atomically

OPTIMIZER = "optimizer.json"
FORMAT_VERSION = 1
Number = int | float


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One parameter group: its parameters by name and its numbers (learning rate, betas, ...)."""

    names: tuple[str, ...]
    numbers: Mapping[str, Number | tuple[Number, ...]]


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """An optimizer's state besides tensors: groups, and for each parameter the keys and numbers of its state."""

    groups: tuple[GroupRecord, ...]
    state_tensors: Mapping[str, tuple[str, ...]]
    state_numbers: Mapping[str, Mapping[str, Number | tuple[Number, ...]]]


_RECORD = TypeAdapter(OptimizerRecord)


def write_optimizer_record(directory: Path, record: OptimizerRecord) -> None:
    """Write `optimizer.json`; on rank 0, since it is the same everywhere."""
    write_json_atomically(directory / OPTIMIZER, {"format_version": FORMAT_VERSION, **asdict(record)})


def optimizer_record(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
    """The optimizer's state as it is now, besides its tensors."""
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
    """Numbers are state; switches (fused, foreach, capturable) belong to the code that runs now."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    return {
        key: value
        for key, value in values.items()
        if is_number(value) or (isinstance(value, tuple) and all(map(is_number, value)))
    }


def _read_record(directory: Path) -> OptimizerRecord:
    path = directory / OPTIMIZER
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version = document.pop("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version must be {FORMAT_VERSION}, got {version!r}. Read it with the version "
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
    """Fill the optimizer's state, in place where it has one.

    Raises:
        CheckpointError: nothing was saved, it is damaged, or the groups of parameters are others.
    """
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
    order = [name for group in here for name in group]
    packed["state"] = {
        number: {
            **{
                key: _state_tensor(reader, optimizer, named[name], name, key, rank)
                for key in record.state_tensors[name]
            },
            **record.state_numbers[name],
        }
        for number, name in enumerate(order)
        if record.state_tensors[name] or record.state_numbers[name]
    }
    optimizer.load_state_dict(packed)


def _state_tensor(
    reader: ShardReader, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, key: str, rank: int
) -> Tensor:
    """One tensor of the state, laid out as its parameter where it has the same shape; else whole on every rank."""
    full_name = state_name(name, key)
    stored = reader.tensors.get(full_name)
    if stored is None:
        raise CheckpointError(f"a checkpoint's optimizer.json names {full_name}, but no shard file holds it")
    known = optimizer.state.get(parameter, {}).get(key)
    if isinstance(known, Tensor) and tuple(known.shape) == stored.shape and known.dtype == stored.dtype:
        target = known  # filled in place: two optimizer states at one time may not fit
    elif stored.shape == tuple(parameter.shape) and stored.shape:
        if isinstance(optimizer, OffloadedAdamW):
            target = optimizer.new_moment(parameter, stored.dtype)
        else:
            target = torch.empty_like(parameter, dtype=stored.dtype)
    else:
        target = torch.empty(stored.shape, dtype=stored.dtype)
    reader.fill(local_part(full_name, target, rank=rank))
    return target
