"""Placement, rendezvous, allocators and peak memory of a rank."""

import os
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from rlcore.config import RuntimeConfig
from rlcore.errors import ConfigError
from rlcore.workers import device as module
from rlcore.workers.device import MemoryMeter, choose_device, free_address, gpu_peak, join_ranks, unsupported_gpu
from tests.helpers.forked import run_module

CUDA_11 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_110", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "held", "runs"),
    [
        ((9, 0), CUDA_11, True),
        ((8, 9), CUDA_11, True),  # sm_86 code runs on 8.9
        ((12, 0), CUDA_13, True),
        ((10, 3), CUDA_13, True),
        ((13, 0), CUDA_13, True),  # compiled from compute_120 when first used
        ((9, 0), ["sm_90a"], True),
        ((9, 0), [], True),  # an unknown build
        ((12, 0), CUDA_11, False),
        ((10, 0), CUDA_11, False),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_100", "compute_100"], False),
        ((10, 3), ["sm_100a"], False),
        ((1, 0), ["sm_100"], False),
    ],
)
def test_wheel_must_have_code_for_gpu(capability: tuple[int, int], held: list[str], runs: bool) -> None:
    problem = unsupported_gpu("a GPU", capability, held, "2.13")
    assert (problem is None) == runs
    major, minor = capability
    rule = (
        f"a GPU has compute capability {major}.{minor} (sm_{major}{minor}), but torch 2.13 supports {', '.join(held)}"
    )
    assert problem is None or (problem.startswith(rule) and problem.endswith(f"names sm_{major}{minor}."))


def test_placement_on_cpu() -> None:
    assert choose_device(RuntimeConfig(device="cpu")) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_placement_without_gpu() -> None:
    assert choose_device(RuntimeConfig(device="auto")) == torch.device("cpu")
    with pytest.raises(
        ConfigError, match=r"runtime\.device is cuda, but torch sees no GPU here; use runtime\.device=cpu"
    ):
        choose_device(RuntimeConfig(device="cuda"))


def test_loopback_rendezvous_listens_on_loopback_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "NCCL_SOCKET_IFNAME" not in os.environ, "a host name may be another machine"


def printed_by(what: str, environment: dict[str, str], folder: Path) -> list[str]:
    """Run `tests.workers.allocators` in a fork made before torch read the environment; return its lines."""
    output = folder / "printed"
    code = run_module(
        "tests.workers.allocators", [what], output=output, errors=folder / "e", environment=environment, timeout_s=120
    )
    assert code == 0, (folder / "e").read_text()
    return output.read_text().splitlines()


@pytest.mark.parametrize("given", [{}, {"MALLOC_MMAP_THRESHOLD_": "65536"}])
def test_malloc_thresholds(given: dict[str, str], tmp_path: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    (faults,) = printed_by("of_the_host", plain | given, tmp_path)
    # Ten blocks of 40 MB; a page may be as large as 2 MB.
    assert int(faults) >= 200 if given else int(faults) < 100


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, ""),
    ],
)
def test_expandable_segments(given: dict[str, str], expected: str, tmp_path: Path) -> None:
    """Check the variable for torch and vLLM. `benchmarks.device_checks` checks its effect on a GPU."""
    plain = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    assert printed_by("of_a_gpu", plain | given, tmp_path) == [expected]


def test_unmapped_bytes_of_sleeping_engine_are_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([(5, 9), (11, 12), (8, 20), (1, 1), (30, 30)])
    monkeypatch.setattr(module, "gpu_peak", lambda: next(peaks))
    monkeypatch.setattr(module, "engine_pool_bytes", lambda: 6)
    meter = MemoryMeter()
    meter.set_engine_asleep(False)  # it was awake
    assert meter.peak() == (5, 9)
    meter.set_engine_asleep(True)
    meter.set_engine_asleep(True)  # before each pass
    assert meter.peak() == (11, 14)
    meter.set_engine_asleep(False)
    assert meter.peak() == (30, 30)


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="there is a GPU in use")
def test_gpu_peak_without_gpu_is_zero() -> None:
    assert gpu_peak() == (0, 0)
