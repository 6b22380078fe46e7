"""Origin of a run: stages from manifests, run.json, tags, code, GPUs and load of the machine."""

import getpass
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rlcore.config import RunConfig
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.errors import DataError
from rlcore.tracking import lineage
from rlcore.tracking.catalog import describe
from rlcore.tracking.connection import mlflow_name
from rlcore.tracking.lineage import (
    Origin,
    Stage,
    SystemSampler,
    code_diff,
    code_revision,
    environment_facts,
    first_gpu,
    gpu_facts,
    lineage_tags,
    read_origin,
    stage_of,
)
from tests.helpers.published import publish


def test_stage_facts_come_from_manifest(tmp_path: Path) -> None:
    folder = publish(tmp_path / "0a1b", kind="dataset", seed=3, share=0.5, ok=True, none=None, names=["a"],
                     counts={"train": 9, "validation": 2})  # fmt: skip
    facts = {"kind": "dataset", "seed": 3, "share": 0.5, "ok": True}
    counts = {"train rows": 9, "validation rows": 2}
    stage = stage_of("dataset", folder)
    assert (stage.name, stage.fingerprint, stage.path) == ("dataset", "0a1b", str(folder))
    assert {name: value for name, value in stage.facts.items() if name in facts | counts} == facts | counts
    assert stage.facts["size_bytes"] == 3 + 256
    assert not {"none", "names", "counts"} & stage.facts.keys()
    assert "train rows" not in stage_of("model", publish(tmp_path / "2c", counts=5)).facts


@pytest.mark.parametrize("manifest", [None, "{"])
def test_stage_without_manifest_has_no_facts(tmp_path: Path, manifest: str | None) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if manifest is not None:
        (folder / "manifest.json").write_text(manifest)
    assert stage_of("start_model", folder) == Stage("start_model", "model", str(folder), {})


def test_origin_round_trip_masks_command(tmp_path: Path) -> None:
    assert read_origin(tmp_path) is None
    whole = Origin(
        RunConfig(seed=3), {"model.path": {"a": "0"}}, (Stage("code", "c0", "/c", {"rows": 3}),), ("millrace", "run"),
        "c0ffee", True, {"torch": "2"},
    )  # fmt: skip
    whole.write(tmp_path)
    assert read_origin(tmp_path) == whole
    Origin(RunConfig(), command=("run", "tracking.uri=http://me:SECRET@host")).write(tmp_path)
    found = read_origin(tmp_path)
    assert (found.command, found.git_dirty) == (("run", "tracking.uri=http://me:***@host"), False)


@pytest.mark.parametrize("change", [{"version": 2}, {"settings": {"from_tomorrow": 1}}, {"stages": 3}])
def test_other_versions_are_rejected(tmp_path: Path, change: dict[str, object]) -> None:
    Origin(RunConfig()).write(tmp_path)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DataError, match=r"run\.json: cannot be read \(.*\); use the version of Millrace that wrote it"):
        read_origin(tmp_path)


def test_slow_repository_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, timeout: float, **__: object) -> None:
        assert timeout == 10.0
        raise subprocess.TimeoutExpired("git", timeout)

    monkeypatch.setattr(subprocess, "run", late)
    assert (code_revision(tmp_path), code_diff(tmp_path)) == (("", False), "")


def repository(folder: Path) -> tuple[Path, Callable[..., object]]:
    """Create a git repository with one added file. Return the file, and a function that runs git there."""

    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(folder), *who, *words], check=True)

    (file := folder / "rlcore" / "a.py").parent.mkdir()
    file.write_text("one\n")
    git("init", "-q")
    git("add", "rlcore")
    return file, git


def test_git_index_is_never_locked(tmp_path: Path) -> None:
    """A git that is killed while it rewrites the index would leave `index.lock`."""
    file, git = repository(tmp_path)
    git("commit", "-qm", "a")
    index = tmp_path / ".git" / "index"
    before = index.read_bytes()
    os.utime(file, (1, 1))  # git compares the file, and would record its new time
    commit, is_dirty = code_revision(tmp_path)
    assert (len(commit), is_dirty) == (40, False)
    assert "\n@@" not in code_diff(tmp_path)
    assert index.read_bytes() == before


def test_code_revision_matches_git(tmp_path: Path):
    assert code_revision(tmp_path) == ("", False)
    source, git = repository(tmp_path)
    git("commit", "-qm", "first")
    commit, dirty = code_revision(tmp_path)
    assert (len(commit), dirty, code_diff(tmp_path)) == (40, False, "")
    source.write_text("two\n")
    assert code_revision(tmp_path) == (commit, True)
    assert "+two" in code_diff(tmp_path)
    # an edit of the same length in the second of the commit: git compares files as new as its index
    second = (1_700_000_000, 1_700_000_000)
    source.write_text("one\n")
    os.utime(source, second)
    git("config", "core.trustctime", "false")
    git("add", "rlcore")
    source.write_text("six\n")
    for file in (source, tmp_path / ".git" / "index"):
        os.utime(file, second)
    assert "+six" in code_diff(tmp_path)
    installed = tmp_path / ".venv" / "site-packages"
    (installed / "rlcore").mkdir(parents=True)
    (installed / "rlcore" / "a.py").write_text("one\n")
    assert (code_revision(installed), code_diff(installed)) == (("", False), ""), "another project's repository"


def test_lineage_tags(config: RunConfig):
    tags = lineage_tags(config, "run-1")
    assert tags["millrace.run_id"] == "run-1"
    shape = config.model.scratch
    assert (tags["model"], tags["host"]) == (f"scratch-{shape.num_layers}x{shape.hidden_size}", socket.gethostname())
    commit, dirty = code_revision()
    of_git = {"git_commit": commit, "git_dirty": "true" if dirty else "false", "mlflow.source.git.commit": commit}
    assert {key: value for key, value in tags.items() if "git" in key} == (of_git if commit else {})
    assert (tags["stage"], tags["task"], tags["algorithm"], tags["seed"]) == ("train", "countdown", "grpo", "1")
    assert tags["settings_fingerprint"] == settings_fingerprint(config)
    assert lineage_tags(RunConfig(tags={"stage": "mine"}), "run-1")["stage"] == "mine"


def test_user_without_name_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 77")

    monkeypatch.setattr(lineage, "code_revision", lambda: ("", False))
    config = RunConfig()
    assert lineage_tags(config, "r")["mlflow.user"] == getpass.getuser()
    monkeypatch.setattr(getpass, "getuser", nameless)
    tags = lineage_tags(config, "r")
    assert tags["mlflow.user"] == "unknown"
    assert not [name for name in tags if "git" in name]


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
