"""How many parameters a model has, without loading it: from its weight files' headers, or else from its shape."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from rlcore.config import LoraConfig, RunConfig
from rlcore.models.shape import shape_of

HEADER_BYTES = 8
"""A safetensors file begins with the length of its JSON header, little endian."""
MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """`trained`: what a checkpoint holds; each comes with two moments of the optimizer. `policy`: all of the policy."""

    trained: int
    policy: int


def count_parameters(config: RunConfig) -> ParameterCount | None:
    """Parameters of policy and critic; None where neither the model's files nor its shape are known."""
    lora = config.model.lora
    tensors = {} if config.model.path is None else _file_shapes(config.model.path)
    if tensors:
        whole = sum(prod(tensor) for tensor in tensors.values())
        policy = whole if lora is None else _adapters(tensors, lora)
        return ParameterCount(policy if config.critic is None else policy + whole, whole)
    shape = shape_of(config.model)
    if shape is None:
        return None
    policy = shape.policy_parameters if lora is None else shape.adapter_parameters(lora)
    critic = 0 if config.critic is None else shape.critic_parameters
    return ParameterCount(policy + critic, shape.policy_parameters)


def _file_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in the safetensors files of a model's folder."""
    folder = Path(path).expanduser()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    return {name: shape for file in files for name, shape in _header_shapes(file)}


def _header_shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    with file.open("rb") as content:
        length = int.from_bytes(content.read(HEADER_BYTES), "little")
        if length > MAX_HEADER_BYTES:
            return
        try:
            header = json.loads(content.read(length))
            yield from ((name, tuple(entry["shape"])) for name, entry in header.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError):
            return  # whoever loads it will say what is wrong with it


def _adapters(shapes: dict[str, tuple[int, ...]], lora: LoraConfig) -> int:
    """Two matrices beside each target layer, of rank x in and out x rank."""
    targets = tuple(f"{name}.weight" for name in lora.target_modules)
    return sum(lora.rank * sum(shape) for name, shape in shapes.items() if name.endswith(targets) and len(shape) == 2)
