"""Queries of this machine's GPUs in a separate process, so that the caller neither imports torch nor holds a GPU.

python -m rlcore.runtime.devices    # JSON: torch, CUDA, architectures, GPUs
"""

import json
import subprocess
from collections.abc import Mapping, Sequence

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from rlcore.runtime.interpreter import trainer_process

PROBE_S = 120.0
"""The deadline of one process in seconds. The process may import torch from a slow disk."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `capability`: the compute capability, such as (9, 0)."""

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Devices:
    """The GPUs and the build of torch. `cuda`: torch's CUDA version, or '' for a CPU build. `architectures`: the GPU
    architectures that torch supports."""

    torch: str
    cuda: str
    architectures: tuple[str, ...]
    gpus: tuple[Gpu, ...]


def find_devices(python: str | None = None) -> Devices:
    """Return the devices that torch detects in the environment of `runtime.python`.

    Raises OSError with the last line of the error output if torch cannot be imported or CUDA cannot be used."""
    program, environment = trainer_process(python)
    return TypeAdapter(Devices).validate_json(output_of([program, "-P", "-m", __name__], environment))


def output_of(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Return the standard output of a process with these environment variables, by default those of this process.

    Raises OSError after a timeout, or with the last line of the error output if the process fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, env=environment)
    except subprocess.TimeoutExpired:
        raise OSError(f"no end in {PROBE_S:g} s") from None
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout


def _describe() -> Devices:
    import torch

    if not torch.cuda.is_available():
        return Devices(torch.__version__, torch.version.cuda or "", (), ())
    gpus = []
    for at in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(at)
        free, total = torch.cuda.mem_get_info(at)
        gpus.append(Gpu(properties.name, (properties.major, properties.minor), free, total))
    return Devices(torch.__version__, torch.version.cuda or "", tuple(torch.cuda.get_arch_list()), tuple(gpus))


def main() -> None:
    """Print the devices as JSON."""
    print(json.dumps(TypeAdapter(Devices).dump_python(_describe(), mode="json")))


if __name__ == "__main__":
    main()
