"""Code, packages, GPUs and load of the machine."""

import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rlcore.config import RunConfig
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.tracking.catalog import describe
from rlcore.tracking.connection import mlflow_name
from rlcore.tracking.lineage import (
    SystemSampler,
    code_diff,
    code_revision,
    environment_facts,
    first_gpu,
    gpu_facts,
    lineage_tags,
)


def test_lineage_tags(config: RunConfig):
    prefect = {"flow_run_id": "abc", "deployment": ""}
    tags = lineage_tags(config, stage="train", run_id="run-1", prefect=prefect)
    assert tags["millrace.run_id"] == "run-1"
    shape = config.model.scratch
    assert (tags["model"], tags["host"]) == (f"scratch-{shape.num_layers}x{shape.hidden_size}", socket.gethostname())
    commit, dirty = code_revision()
    of_git = {"git_commit": commit, "git_dirty": "true" if dirty else "false", "mlflow.source.git.commit": commit}
    assert {key: value for key, value in tags.items() if "git" in key} == (of_git if commit else {})
    assert (tags["stage"], tags["task"], tags["algorithm"], tags["seed"]) == ("train", "countdown", "grpo", "1")
    assert (tags["settings_fingerprint"], tags["prefect.flow_run_id"]) == (settings_fingerprint(config), "abc")
    assert "prefect.deployment" not in tags
    mine = RunConfig(tags={"stage": "mine"})
    assert lineage_tags(mine, stage="train", run_id="run-1")["stage"] == "mine"


def test_code_revision_matches_git(tmp_path: Path):
    assert code_revision(tmp_path) == ("", False)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    source = tmp_path / "rlcore" / "a.py"
    source.parent.mkdir()
    source.write_text("one\n")
    for command in (["init", "-q"], ["add", "rlcore"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    commit, dirty = code_revision(tmp_path)
    assert (len(commit), dirty, code_diff(tmp_path)) == (40, False, "")
    source.write_text("two\n")
    assert code_revision(tmp_path) == (commit, True)
    assert "+two" in code_diff(tmp_path)
    # an edit of the same length in the second of the commit: git compares files as new as its index
    second = (1_700_000_000, 1_700_000_000)
    source.write_text("one\n")
    os.utime(source, second)
    for command in (["config", "core.trustctime", "false"], ["add", "rlcore"]):
        subprocess.run([*git, *command], check=True)
    source.write_text("six\n")
    for file in (source, tmp_path / ".git" / "index"):
        os.utime(file, second)
    assert "+six" in code_diff(tmp_path)
    installed = tmp_path / ".venv" / "site-packages"
    (installed / "rlcore").mkdir(parents=True)
    (installed / "rlcore" / "a.py").write_text("one\n")
    assert (code_revision(installed), code_diff(installed)) == (("", False), ""), "another project's repository"


def test_first_sample_has_cpu_percentages(tmp_path: Path):
    sampler = SystemSampler(tmp_path)
    before = time.process_time()
    while time.process_time() - before < 0.03:  # a tick of the kernel's clock is 0.01 s
        pass
    assert sampler.sample()["system/process_cpu_percent"] > 0


def test_gpus_are_named_and_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Simulate NVML for two GPUs, the first with the host's memory, which NVML cannot measure."""

    class NVMLError(Exception):
        pass

    def memory(gpu: int) -> SimpleNamespace:
        if gpu == 0:
            raise NVMLError("Not Supported")
        return SimpleNamespace(total=85_520_809_984, used=3_000_000_000)

    def power(gpu: int) -> int:
        if gpu == 2:
            raise NVMLError("Not Supported")
        return 312_500  # milliwatts

    answers: dict[str, object] = {
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda gpu: ("NVIDIA GB10", *["NVIDIA H100 80GB HBM3"] * 2)[gpu],
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=40 + gpu),
        "nvmlDeviceGetPowerUsage": power,
    }
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, **answers))  # type: ignore[arg-type]
    large = "NVIDIA H100 80GB HBM3, 85.5 GB"
    described = {"nvidia_driver": "580.1", "gpu_0": "NVIDIA GB10", "gpu_1": large, "gpu_2": large}
    assert gpu_facts() == described
    facts = environment_facts({"python": "3.11.7"})
    assert {"python": "3.11.7", **described}.items() <= facts.items()
    assert {"platform", "host"} <= facts.keys()
    assert first_gpu() == ("NVIDIA GB10", None)
    sample = SystemSampler(tmp_path).sample()
    assert {name: value for name, value in sample.items() if name.startswith("system/gpu_")} == {
        "system/gpu_1_memory_used_gb": 3.0,
        "system/gpu_1_utilization_percent": 41,
        "system/gpu_1_power_watts": 312.5,
        "system/gpu_2_memory_used_gb": 3.0,
        "system/gpu_2_utilization_percent": 42,
    }
    answers["nvmlDeviceGetHandleByIndex"] = lambda index: index + 1
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, **answers))  # type: ignore[arg-type]
    assert first_gpu() == ("NVIDIA H100 80GB HBM3", 85_520_809_984)


def test_system_metrics_are_documented(tmp_path: Path):
    sample = SystemSampler(tmp_path).sample()
    assert {"system/cpu_percent", "system/memory_used_gb", "system/disk_free_gb"} <= sample.keys()
    assert all(math.isfinite(value) and value >= 0 for value in sample.values())
    assert sample["system/process_memory_gb"] < sample["system/memory_used_gb"]
    memory = psutil.virtual_memory()
    assert sample["system/memory_used_gb"] == pytest.approx(memory.used / 1e9, rel=0.5)
    assert sample["system/memory_percent"] == pytest.approx(memory.percent, rel=0.5)
    assert sample["system/disk_free_gb"] == pytest.approx(psutil.disk_usage(str(tmp_path)).free / 1e9, rel=0.1)
    for name in sample:
        assert describe(name) is not None
        assert mlflow_name(name) == name
