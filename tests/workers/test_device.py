"""Placement, rendezvous, allocators and peak memory of a rank."""

import os
import resource
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from rlcore.config import RuntimeConfig
from rlcore.errors import ConfigError
from rlcore.workers import device as module
from rlcore.workers.device import (
    MemoryMeter,
    choose_device,
    enable_expandable_segments,
    free_address,
    join_ranks,
    raise_malloc_thresholds,
    unsupported_gpu,
)
from tests.helpers.forked import SERVER

CPU = torch.device("cpu")
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_placement_without_gpu() -> None:
    assert choose_device(RuntimeConfig(device="auto")) == choose_device(RuntimeConfig(device="cpu")) == CPU
    with pytest.raises(
        ConfigError, match=r"runtime\.device is cuda, but torch sees no GPU here; use runtime\.device=cpu"
    ):
        choose_device(RuntimeConfig(device="cuda"))


def test_loopback_rendezvous_listens_on_loopback_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "given")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    join_ranks(free_address(), rank=0, world_size=1, device=CPU)
    try:
        assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("gloo", 0, 1)
        assert [os.environ[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL")] == ["lo", "given"]
        listening = psutil.Process().net_connections()
        own = {one.laddr.ip for one in listening if one.status == psutil.CONN_LISTEN}
        assert own == {"127.0.0.1"}
    finally:
        dist.destroy_process_group()
    join_ranks(f"file://{tmp_path / 'meeting'}", rank=0, world_size=1, device=CPU)
    try:
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    join_ranks(free_address(), rank=0, world_size=1, device=CPU)
    dist.destroy_process_group()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    join_ranks(free_address().replace("127.0.0.1", "localhost"), rank=0, world_size=1, device=CPU)
    dist.destroy_process_group()
    assert "NCCL_SOCKET_IFNAME" not in os.environ, "a host name may be another machine"


def page_faults(variables: Sequence[str]) -> int:
    """Return the page faults of ten large blocks after a first one. By default glibc keeps blocks up to 32 MiB."""
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        del os.environ[name]
    os.environ.update(dict.fromkeys(variables, "65536"))
    raise_malloc_thresholds()
    found = []
    for _ in range(11):
        np.ones(5_000_000)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return found[-1] - found[0]


@pytest.mark.parametrize("variables", [(), ("MALLOC_MMAP_THRESHOLD_",)])
def test_malloc_thresholds(variables: Sequence[str]) -> None:
    with ProcessPoolExecutor(1, mp_context=SERVER) as pool:
        faults = pool.submit(page_faults, variables).result()
    # Ten blocks of 40 MB; a page may be as large as 2 MB.
    assert faults >= 200 if variables else faults < 100


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="there is a GPU in use")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, None),
    ],
)
def test_expandable_segments(given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the variable for torch and vLLM. `benchmarks.device_checks` checks its effect on a GPU."""
    monkeypatch.setattr(os, "environ", given)
    enable_expandable_segments()
    assert given.get("PYTORCH_CUDA_ALLOC_CONF") == expected


def test_unmapped_bytes_of_sleeping_engine_are_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", iter([5, 11, 8, 1, 30]).__next__)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", iter([9, 12, 20, 1, 30]).__next__)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(module, "engine_pool_bytes", lambda: 6)
    meter = MemoryMeter()
    meter.set_engine_asleep(False)  # it was awake
    assert meter.peak() == (5, 9)
    meter.set_engine_asleep(True)
    meter.set_engine_asleep(True)  # before each pass
    assert meter.peak() == (11, 14)
    meter.set_engine_asleep(False)
    assert meter.peak() == (30, 30)
