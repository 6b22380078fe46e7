"""What a torch wheel can run, from what GPU and wheel say of themselves."""

import os
import socket
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from rlcore.config import ModelConfig, RuntimeConfig
from rlcore.errors import ConfigError
from rlcore.workers.device import choose_placement, free_address, holds_on_all_ranks, join_ranks, unsupported_gpu

CUDA_11 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_110", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "held"),
    [
        ((9, 0), CUDA_11),
        ((8, 9), CUDA_11),  # sm_86 code runs on 8.9
        ((12, 0), CUDA_13),
        ((10, 3), CUDA_13),
        ((13, 0), CUDA_13),  # compiled from compute_120 when first used
        ((9, 0), ["sm_90a"]),
        ((9, 0), []),  # a build that does not say
    ],
)
def test_a_wheel_with_code_for_the_gpu_is_taken(capability, held):
    assert unsupported_gpu("GPU", capability, held, "2.13.0") is None


@pytest.mark.parametrize(
    ("capability", "held"),
    [
        ((12, 0), CUDA_11),
        ((10, 0), CUDA_11),
        ((8, 0), ["sm_86"]),
        ((9, 0), ["sm_100", "compute_100"]),
        ((10, 3), ["sm_100a"]),
        ((1, 0), ["sm_100"]),
    ],
)
def test_another_is_refused(capability, held):
    assert unsupported_gpu("GPU", capability, held, "2.13.0")


def test_an_older_wheel_is_advised_for_a_dropped_gpu():
    message = unsupported_gpu("Tesla V100", (7, 0), CUDA_13, "2.13.0")
    assert message is not None
    assert "Install an older torch, or one built for an older CUDA" in message
    assert "names sm_70" in message
    assert "newer" not in message


def test_the_message_names_gpu_capability_wheel_and_what_to_install():
    message = unsupported_gpu("NVIDIA GeForce RTX 5090", (12, 0), CUDA_11, "2.5.1+cu118")
    assert message is not None
    for part in ("RTX 5090", "12.0", "sm_120", "2.5.1+cu118", ", ".join(CUDA_11), "torch 2.7", "CUDA 12.8"):
        assert part in message


@pytest.mark.parametrize(
    ("major", "wheel"),
    [
        (8, "torch 1.8 or newer built for CUDA 11.1 or newer"),
        (9, "torch 2.1 or newer built for CUDA 11.8 or newer"),
        (10, "torch 2.7 or newer built for CUDA 12.8 or newer"),
        (12, "torch 2.7 or newer built for CUDA 12.8 or newer"),
        (13, "torch 2.7 or newer built for CUDA 12.8 or newer"),
        (7, "an older torch, or one built for an older CUDA"),
    ],
)
def test_the_first_wheel_with_code_for_a_gpu_is_advised(major: int, wheel: str) -> None:
    assert unsupported_gpu("A GPU", (major, 1), ["sm_60", "sm_61"], "2.0.0") == (
        f"A GPU has compute capability {major}.1 (sm_{major}1), but torch 2.0.0 holds code for sm_60, sm_61 only. "
        f"Install {wheel}, whose torch.cuda.get_arch_list() names sm_{major}1."
    )


def test_a_rank_computes_on_the_cpu_where_it_is_told_to() -> None:
    for dtype in ("float32", "bfloat16"):
        place = choose_placement(RuntimeConfig(device="cpu"), ModelConfig(dtype=dtype))
        assert (place.device, place.dtype) == (torch.device("cpu"), getattr(torch, dtype))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused() -> None:
    assert choose_placement(RuntimeConfig(device="auto"), ModelConfig()).device == torch.device("cpu")
    with pytest.raises(
        ConfigError, match=r"runtime\.device is cuda, but torch sees no GPU here; use runtime\.device=cpu"
    ):
        choose_placement(RuntimeConfig(device="cuda"), ModelConfig())


def test_a_free_address_is_one_that_can_be_listened_at() -> None:
    scheme, host, port = free_address().replace("//", "").split(":")
    assert (scheme, host) == ("tcp", "127.0.0.1")
    assert int(port) > 1_023, "one that anybody may have"
    with socket.create_server((host, int(port))):
        pass
    assert free_address("127.0.0.2").startswith("tcp://127.0.0.2:")


def test_ranks_that_meet_on_loopback_listen_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "given")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    cpu, address = torch.device("cpu"), free_address()
    join_ranks(address, rank=0, world_size=1, device=cpu)
    try:
        assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("gloo", 0, 1)
        assert [os.environ[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL")] == ["lo", "given"]
        listening = psutil.Process().net_connections()
        own = {one.laddr.ip for one in listening if one.status == psutil.CONN_LISTEN}
        assert own == {"127.0.0.1"}
        for holds in (True, False):
            assert holds_on_all_ranks(holds, world_size=2, device=cpu) is holds  # asked of all, who are this one
    finally:
        dist.destroy_process_group()
    join_ranks(f"file://{tmp_path / 'meeting'}", rank=0, world_size=1, device=cpu)
    try:
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    join_ranks(free_address(), rank=0, world_size=1, device=cpu)
    dist.destroy_process_group()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    join_ranks(free_address().replace("127.0.0.1", "localhost"), rank=0, world_size=1, device=cpu)
    dist.destroy_process_group()
    assert "NCCL_SOCKET_IFNAME" not in os.environ, "by its name it may be another machine"
    assert holds_on_all_ranks(True, world_size=1, device=cpu)
    assert not holds_on_all_ranks(False, world_size=1, device=cpu)
