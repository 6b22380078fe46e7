"""Where a rank computes, and how the ranks find each other."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlparse

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from rlcore.config import ModelConfig, RuntimeConfig
from rlcore.errors import ConfigError, ModelError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Place:
    """Device and compute type of a rank."""

    device: torch.device
    dtype: torch.dtype


def choose_place(runtime: RuntimeConfig, model: ModelConfig) -> Place:
    """Device and compute type by the settings and what is here.

    Raises:
        ConfigError: CUDA asked for and absent.
        ModelError: the GPU's architecture is not in this torch build.
    """
    wanted = runtime.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("runtime.device is cuda, but torch sees no GPU here; use runtime.device=cpu or auto")
        _require_supported_gpu()
    default = torch.bfloat16 if wanted == "cuda" else torch.float32
    dtype = {"auto": default, "float32": torch.float32, "bfloat16": torch.bfloat16}[model.dtype]
    return Place(torch.device(wanted), dtype)


def _require_supported_gpu() -> None:
    """A wheel without code for this GPU fails at the first kernel, after minutes of loading: say it now."""
    problem = unsupported_gpu(
        torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.cuda.get_arch_list(), torch.__version__
    )
    if problem is not None:
        raise ModelError(problem)


# First torch release, and its CUDA, whose wheels hold code for GPUs of this major capability.
_FIRST_WHEEL = {12: ("2.7", "12.8"), 10: ("2.7", "12.8"), 9: ("2.1", "11.8"), 8: ("1.8", "11.1")}


def unsupported_gpu(name: str, capability: tuple[int, int], held: Sequence[str], version: str) -> str | None:
    """Why a torch wheel with code for the architectures `held` cannot run a GPU; None where it can.

    Code for `sm_90` runs on 9.x GPUs from 9.0 on, that for `sm_90a` on 9.0 alone; `compute_90` is compiled for any GPU
    from 9.0 on when it is first used.

    >>> unsupported_gpu("NVIDIA H200", (9, 0), ["sm_80", "sm_90"], "2.13.0") is None
    True
    """
    major, minor = capability
    if not held or any(_runs_on(arch, major, minor) for arch in held):
        return None
    torch_version, cuda = _FIRST_WHEEL.get(major, _FIRST_WHEEL[max(_FIRST_WHEEL)])
    return (
        f"{name} has compute capability {major}.{minor} (sm_{major}{minor}), but torch {version} holds code for "
        f"{', '.join(held)} only. Install torch {torch_version} or newer built for CUDA {cuda} or newer, whose "
        f"torch.cuda.get_arch_list() names sm_{major}{minor}."
    )


def _runs_on(arch: str, major: int, minor: int) -> bool:
    kind, _, number = arch.partition("_")
    digits = number.rstrip("af")
    if not digits.isdigit():
        return False
    own_major, own_minor = int(digits[:-1]), int(digits[-1])
    if kind == "compute":
        return (own_major, own_minor) <= (major, minor)
    exact = number.endswith("a")
    return own_major == major and (own_minor == minor if exact else own_minor <= minor)


def free_address(*, loopback: bool) -> str:
    """`tcp://` address on this host for the ranks' rendezvous; on the loopback interface where all ranks are here."""
    host = LOOPBACK if loopback else socket.gethostbyname(socket.gethostname())
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"tcp://{host}:{probe.getsockname()[1]}"


def on_all_ranks(holds: bool, *, world_size: int, device: torch.device) -> bool:
    """Whether something holds on every rank: the same answer on each. A collective where there are several."""
    if world_size == 1:
        return holds
    flag = torch.tensor(float(holds), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def join_ranks(rendezvous: str, *, rank: int, world_size: int, device: torch.device) -> None:
    """Form the process group: gloo on CPU, NCCL on GPU. Ranks that meet on loopback listen nowhere else."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    address = urlparse(rendezvous)
    if address.hostname != LOOPBACK or address.port is None:
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world_size)
        return
    if interface := _loopback_interface():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    listener = None
    if rank == 0:  # else the store listens on all addresses
        bound = socket.create_server((LOOPBACK, address.port))
        listener = bound.detach()
    store = TCPStore(LOOPBACK, address.port, world_size, is_master=rank == 0, master_listen_fd=listener)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def _loopback_interface() -> str | None:
    """Name of the network interface that has the loopback address: lo on Linux."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(one.address == LOOPBACK for one in addresses)), None)
