"""The loading of a checkpoint's tensors, and the export of weights as a transformers directory."""

import json
import math
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from huggingface_hub import save_torch_state_dict
from pydantic import JsonValue, TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig

from rlcore.checkpoint.catalog import CheckpointInfo, find_checkpoint
from rlcore.checkpoint.shards import (
    DTYPES,
    FORMAT,
    FORMAT_VERSION,
    OPTIMIZER,
    OPTIMIZER_FORMAT_VERSION,
    BaseRecord,
    Box,
    LocalPart,
    OptimizerRecord,
    local_part,
    local_parts,
    named_parameters,
    state_name,
)
from rlcore.config import LoraConfig, RunConfig
from rlcore.errors import CheckpointError
from rlcore.models.load import load_policy
from rlcore.models.lora import add_adapters, write_peft
from rlcore.models.memory import OffloadedAdamW
from rlcore.models.parallel import adapter_state, full_state
from rlcore.models.tokenizer import load_tokenizer
from rlcore.storage.manifest import MANIFEST, verify_directory
from rlcore.storage.publish import published_directory

SHOWN_NAMES = 5

MAX_FILE_SIZE = "5GB"  # hubs and file systems handle such files well
POLICY = "policy"
ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor, whose pieces are stored in the files of all ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[Path, Box]]


class ShardReader:
    """A reader of the shard files of a folder, which are memory-mapped inside the `with` block. The files must already
    be verified, because a truncated file crashes Python."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = ExitStack()
        self._open: dict[Path, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}

    def __enter__(self) -> Self:
        """Read all headers. Raises CheckpointError if files are missing, damaged or of another format."""
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
        """Fill `part.local` with the stored values. Raises CheckpointError if values are missing or do not fit."""
        stored = self.tensors.get(part.name)
        if stored is None:
            raise CheckpointError(f"{self._directory}: has no tensor {part.name}. Was it saved from another model?")
        if stored.shape != part.global_shape or stored.dtype != part.local.dtype:
            raise CheckpointError(
                f"{self._directory}: {part.name} is {stored.dtype} {list(stored.shape)} there and {part.local.dtype} "
                f"{list(part.global_shape)} here. Use the model that was trained."
            )
        num_filled = 0
        for path, box in stored.pieces:
            common = part.box.overlap(box)
            if common is not None:
                file, index = self._open[path], common.relative_to(box)
                values = file.get_tensor(part.name) if common == box else file.get_slice(part.name)[index]
                part.local[common.relative_to(part.box)].copy_(values)
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
            known.pieces.append((path, Box(tuple(piece["offset"]), tuple(piece["shape"]))))


_RECORD = TypeAdapter(OptimizerRecord)


@torch.no_grad()
def load_shards(directory: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Load saved tensors into `model`, and into `optimizer` unless it is None. The number of ranks that
    saved them may differ from the current number. Raises CheckpointError if files are missing, damaged or of another
    model. After an error, `model` is unusable."""
    with ShardReader(directory) as reader:
        parts = list(local_parts(model, None))
        if (base := BaseRecord.of(model)) is not None:
            base.require(directory)
        _require_same_names(directory, parts, reader.tensors)
        for part in parts:
            reader.fill(part)
        if optimizer is not None:
            load_optimizer(directory, reader, model, optimizer)


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


def load_optimizer(directory: Path, reader: ShardReader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the saved state into the optimizer, in place if possible. Raises CheckpointError if the state does not fit
    the optimizer."""
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
            tensors = {key: _state_tensor(reader, optimizer, named[name], name, key) for key in keys}
            packed["state"][number] = {**tensors, **numbers}
    optimizer.load_state_dict(packed)


def _state_tensor(
    reader: ShardReader, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, key: str
) -> Tensor:
    """Read one tensor of the optimizer state. A tensor with the shape of its parameter is sharded like the
    parameter."""
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
    reader.fill(local_part(full_name, target))
    return target


def export_checkpoint(info: CheckpointInfo, config: RunConfig, initial_policy: str | Path, target: Path) -> Path:
    """Load a checkpoint's weights on the CPU, and write them to `target` with `export_transformers`. Return `target`.
    Raises CheckpointError if the checkpoint is damaged."""
    verify_directory(info.path, error=CheckpointError)
    model, lora = config.model, config.model.lora
    if lora is not None:
        model = model.model_copy(update={"dtype": BaseRecord.read(info.path / POLICY).dtype})
    policy = load_policy(initial_policy, model=model, device=torch.device("cpu"))
    if lora is not None:
        policy = add_adapters(policy, lora, seed=config.seed)  # any seed: they are overwritten below
    load_shards(info.path / POLICY, model=policy, optimizer=None)
    state, adapters = dict(full_state(policy)), dict(adapter_state(policy))
    return export_transformers(state, initial_policy, target, facts={"step": info.step}, lora=lora, adapters=adapters)


def export_transformers(
    policy_state: Mapping[str, Tensor],
    model_dir_for_config: str | Path,
    target: Path,
    *,
    facts: Mapping[str, JsonValue] = MappingProxyType({}),
    lora: LoraConfig | None = None,
    adapters: Mapping[str, Tensor] = MappingProxyType({}),
) -> Path:
    """Write the weights `policy_state` as a transformers directory. Add the configuration and the tokenizer of the
    initial policy. An earlier export is replaced in a single rename. `facts`: entries for the manifest. If `lora` is
    set, `policy_state` must contain the merged weights. The subfolder `adapter` then gets `adapters` in PEFT's format.
    Raises DiskSpaceError if the disk is full, and ModelError if the tokenizer cannot be read. Raises CheckpointError if
    `target` cannot be written or is not an export."""
    source = str(model_dir_for_config)
    earlier = (target / MANIFEST).is_file()
    with published_directory(target, {"kind": "model", **facts}, replace=earlier, error=CheckpointError) as folder:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in policy_state.items()}
        save_torch_state_dict(plain, str(folder), max_shard_size=MAX_FILE_SIZE, metadata={"format": "pt"})
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        config.dtype = next(iter(plain.values())).dtype
        config.save_pretrained(folder)
        with suppress(OSError):  # some models have no generation config
            # `save_pretrained` refuses what loading only warns of, such as a temperature without sampling.
            generation = GenerationConfig.from_pretrained(source)
            generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
        load_tokenizer(source).save_pretrained(folder)
        if lora is not None:
            write_peft(adapters, lora, source, folder / ADAPTER)
    return target


if __name__ == "__main__":  # for a command whose environment has no torch
    folder, name, settings, start, place = sys.argv[1:]
    run = RunConfig.model_validate_json(settings)
    export_checkpoint(find_checkpoint(Path(folder), name), run, start, Path(place))
