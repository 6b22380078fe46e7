"""The origin of a run (`run.json`), its tags in MLflow, and the system load of its machine. The origin is written when
the run is opened, and completed by the stages before training."""

import getpass
import importlib
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import TypeAdapter

from rlcore import SOURCE_FOLDER
from rlcore.config import RunConfig
from rlcore.config.fingerprint import RUN_FILE, settings_fingerprint
from rlcore.config.problems import mask_secrets
from rlcore.errors import MillraceError
from rlcore.storage.disk import BYTES_PER_GB
from rlcore.storage.documents import read_document
from rlcore.storage.manifest import read_manifest
from rlcore.storage.publish import write_json_atomically

RUN_ID_TAG = "millrace.run_id"  # name of the run's folder
KEY_TAG = "millrace.key"  # random key, since names may repeat in a store
TRAINED_FOR_TAG = "millrace.trained_for"  # tag of a warm start with the id of the run that trained it
PASS_RATES_STAGE = "pass rates"  # its fact `rows_by_passes` is the histogram
Fact = str | int | float | bool | None
GIT_TIMEOUT_S = 10.0  # a repository may be on a slow network disk


@dataclass(frozen=True, slots=True)
class Stage:
    """The result of a stage of a run, such as `dataset` or `model`. `facts`: counts and other values that describe the
    result."""

    name: str
    fingerprint: str
    path: str
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Origin:
    """The settings, models, stages, command, code and machine of a run. `models`: the SHA-256 digests of model files by
    settings key and file name. `command`: empty if unknown. `version`: the version of the file format."""

    settings: RunConfig
    models: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    command: tuple[str, ...] = ()
    git_commit: str = ""
    git_dirty: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    version: Literal[1] = 1

    def write(self, run_dir: Path) -> None:
        """Write the origin to `run.json` in the run's folder."""
        shown = replace(self, command=tuple(map(mask_secrets, self.command)))  # the file is uploaded to MLflow
        write_json_atomically(run_dir / RUN_FILE, _ORIGIN.dump_python(shown, mode="json"))


_ORIGIN = TypeAdapter(Origin)
VERSION_REMEDY = "use the version of Millrace that wrote it, or restore it and make it readable"


def read_origin(run_dir: Path) -> Origin | None:
    """Read `run.json`, or return None if it is missing. Raises DataError if it is damaged or of another version."""
    return read_document(run_dir / RUN_FILE, _ORIGIN, VERSION_REMEDY)


def stage_of(name: str, folder: Path) -> Stage:
    """Return the result of the stage `name`. `folder`: the folder that contains the result. The facts of the result are
    the strings, numbers and booleans in the folder's manifest."""
    manifest = None
    with suppress(MillraceError):
        manifest = read_manifest(folder)
    if manifest is None:
        return Stage(name, folder.name, str(folder))
    counts = manifest.values.get("counts")  # nested, such as rows by split
    below = {f"{key} rows": value for key, value in counts.items()} if isinstance(counts, Mapping) else {}
    values = {**manifest.values, **below, "size_bytes": manifest.size_bytes}
    facts = {key: value for key, value in values.items() if isinstance(value, str | int | float | bool)}
    return Stage(name, folder.name, str(folder), facts)


def code_revision(folder: Path = SOURCE_FOLDER) -> tuple[str, bool]:
    """Return the git commit of the source, and whether files differ from the commit. The commit is '' if git is missing
    or the source is not in a repository."""
    commit = _git(folder, "rev-parse", "HEAD") if _is_tracked(folder) else None
    return (commit.strip(), bool((_git(folder, "status", "--porcelain") or "").strip())) if commit else ("", False)


def code_diff(folder: Path = SOURCE_FOLDER) -> str:
    """Return the uncommitted changes of tracked files as a patch, or '' if there are none or git fails."""
    # Without a refresh, git writes no index. A kill during a write would leave the repository locked.
    diff = ("-c", "diff.autoRefreshIndex=false", "diff", "HEAD")
    return (_git(folder, *diff) if _is_tracked(folder) else None) or ""


def environment_facts(versions: Mapping[str, str]) -> dict[str, str]:
    """Return `versions` together with the operating system, the host, the GPUs and the driver."""
    return {"platform": platform.platform(), "host": socket.gethostname(), **versions, **gpu_facts()}


def lineage_tags(config: RunConfig, run_id: str) -> dict[str, str]:
    """Return the tags of a run in MLflow. The setting `tags` overrides tags of the same name."""
    model = config.model.path or f"scratch-{config.model.scratch.num_layers}x{config.model.scratch.hidden_size}"
    tags = {
        RUN_ID_TAG: run_id,
        "stage": "train",
        "task": config.data.task,
        "algorithm": "sft" if config.is_supervised else config.algo.advantage,
        "policy_loss": config.algo.policy_loss,
        "model": model,
        "seed": str(config.seed),
        "settings_fingerprint": settings_fingerprint(config),
        "host": socket.gethostname(),
        "mlflow.source.name": "millrace",
        "mlflow.user": _user(),
    }
    commit, dirty = code_revision()
    if commit:
        tags |= {"git_commit": commit, "git_dirty": str(dirty).lower(), "mlflow.source.git.commit": commit}
    return tags | config.tags


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _is_tracked(folder: Path) -> bool:
    return _git(folder, "ls-files", "--error-unmatch", "rlcore") is not None


def _user() -> str:
    with suppress(KeyError, OSError):
        return getpass.getuser()
    return "unknown"  # the user id of a container may have no name


class SystemSampler:
    """A sampler of the machine's load since the previous sample. GPUs are read with NVML if a driver is present."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._process = psutil.Process()
        self._nvml: Any = _start_nvml()
        # the first call starts the interval
        psutil.cpu_percent()
        self._process.cpu_percent()

    def sample(self) -> dict[str, float]:
        """Return metrics under `system/` in percent, GB of 1e9 bytes and watts. Unreadable values are omitted."""
        memory, disk = psutil.virtual_memory(), shutil.disk_usage(self._disk)
        return {
            "system/cpu_percent": psutil.cpu_percent(),
            "system/memory_used_gb": memory.used / BYTES_PER_GB,
            "system/memory_percent": memory.percent,
            "system/disk_free_gb": disk.free / BYTES_PER_GB,
            "system/process_cpu_percent": self._process.cpu_percent(),
            "system/process_memory_gb": self._process.memory_info().rss / BYTES_PER_GB,
            **self._gpus(),
        }

    def _gpus(self) -> dict[str, float]:
        nvml = self._nvml
        metrics: dict[str, float] = {}
        for index in range(0 if nvml is None else nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):  # some values may be unsupported
                gpu = nvml.nvmlDeviceGetHandleByIndex(index)
                metrics[f"system/gpu_{index}_memory_used_gb"] = nvml.nvmlDeviceGetMemoryInfo(gpu).used / BYTES_PER_GB
                metrics[f"system/gpu_{index}_utilization_percent"] = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu
                metrics[f"system/gpu_{index}_power_watts"] = nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3
        return metrics


def gpu_facts() -> dict[str, str]:
    """Return the names and memory sizes of the GPUs and the driver's version from NVML, or an empty mapping."""
    if (nvml := _start_nvml()) is None:
        return {}
    facts = {"nvidia_driver": str(nvml.nvmlSystemGetDriverVersion())}
    return facts | {
        f"gpu_{index}": name if size is None else f"{name}, {size / BYTES_PER_GB:.1f} GB"
        for index, (name, size) in enumerate(_gpus(nvml))
    }


def _gpus(nvml: Any) -> Iterator[tuple[str, int | None]]:
    for index in range(0 if nvml is None else nvml.nvmlDeviceGetCount()):
        gpu, size = nvml.nvmlDeviceGetHandleByIndex(index), None
        with suppress(nvml.NVMLError):  # a GPU with shared host memory has none
            size = int(nvml.nvmlDeviceGetMemoryInfo(gpu).total)
        yield str(nvml.nvmlDeviceGetName(gpu)), size


def first_gpu() -> tuple[str, int | None] | None:
    """Return the first GPU's name and memory in bytes, or None if there is no GPU. Nothing is allocated on the GPU."""
    return next(_gpus(_start_nvml()), None)


def _start_nvml() -> Any:
    pynvml = importlib.import_module("pynvml")  # has no types
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
