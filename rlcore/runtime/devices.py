"""Queries of this machine's GPUs in other processes, so that the caller neither imports torch nor holds a GPU.

python -m rlcore.runtime.devices # JSON: torch, CUDA, architectures, GPUs python -m rlcore.runtime.devices RANK
NUM_RANKS FILE BACKEND # one rank of an all-reduce with rendezvous FILE
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from pathlib import Path

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from rlcore.runtime.interpreter import trainer_process

PROBE_S = 120.0
"""The deadline of one process in seconds. The process may import torch from a slow disk."""
RENDEZVOUS_S = 60.0
"""The timeout for the rendezvous of the ranks, in seconds."""


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
    """Return the devices that torch finds in the environment of `runtime.python`.

    Raises OSError with the last line of the error output if torch cannot be imported or CUDA cannot be used.
    """
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


def all_reduce(num_ranks: int, backend: str, python: str | None = None) -> None:
    """Test an all-reduce of several ranks. The backend nccl has one rank per GPU, and gloo runs on the CPU.

    Raises OSError after a timeout, or with the last line of a rank's error output if that rank fails.
    """
    program, environment = trainer_process(python)
    with tempfile.TemporaryDirectory() as folder:
        words = [str(num_ranks), str(Path(folder) / "rendezvous"), backend]
        ranks = [
            subprocess.Popen(
                [program, "-P", "-m", __name__, str(rank), *words],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        with ThreadPoolExecutor(num_ranks) as threads:
            ends = {threads.submit(rank.communicate): number for number, rank in enumerate(ranks)}
            try:
                for end in as_completed(ends, timeout=PROBE_S):
                    number, lines = ends[end], end.result()[1].strip().splitlines()
                    if code := ranks[number].returncode:
                        raise OSError(f"rank {number}: {lines[-1] if lines else f'exit code {code}'}")
            except TimeoutError:
                raise OSError(f"the ranks have not ended in {PROBE_S:g} s") from None
            finally:
                for rank in ranks:
                    rank.kill()


def _run_rank(rank: int, num_ranks: int, rendezvous: str, backend: str) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=RENDEZVOUS_S)
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks, timeout=timeout
    )
    found = torch.full((1 << 20,), float(rank + 1), device=device)
    dist.all_reduce(found)
    wanted = num_ranks * (num_ranks + 1) / 2
    if not bool((found == wanted).all()):
        sys.exit(f"the sum over {num_ranks} ranks must be {wanted}, got {found.min().item()} to {found.max().item()}")
    dist.destroy_process_group()


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
    """Run the command line of `python -m rlcore.runtime.devices`."""
    if len(sys.argv) > 1:
        rank, num_ranks, rendezvous, backend = sys.argv[1:]
        _run_rank(int(rank), int(num_ranks), rendezvous, backend)
    else:
        print(json.dumps(TypeAdapter(Devices).dump_python(_describe(), mode="json")))


if __name__ == "__main__":
    main()
