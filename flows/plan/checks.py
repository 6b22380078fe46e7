"""What is looked at before anything expensive: each mistake is told in a second, not after the model has loaded."""

import os
from pathlib import Path

from data.custom import build_function
from flows.plan.plan import RunPlan
from rlcore.config import CustomData, RunConfig
from rlcore.config.data import parts_of
from rlcore.errors import ConfigError, DataError, DiskSpaceError
from rlcore.models.hub import require_reachable
from rlcore.rollout.requirements import require_vllm
from rlcore.rollout.scoring import require_scorer
from rlcore.run.inputs import require_whole_model
from rlcore.run.layout import RunLayout
from rlcore.run.memory import require_fit
from rlcore.runtime.cluster import folder_problem, unreachable
from rlcore.storage.disk import nearest_existing
from rlcore.tracking.lineage import first_gpu

GPU_FILES = ("nvidia[0-9]*", "dxg", "kfd")
"""In /dev where there is a GPU: NVIDIA's, one under WSL, AMD's. Its management library may be missing."""


def check_before_plan(config: RunConfig) -> None:
    """The folder to write to, the kinds of files in the run's folder, and functions of the user's own.

    (The model's folder is a rule of the settings.)

    Raises:
        ConfigError, DataError: key, rule, value got, what to do.
    """
    _require_functions(config)
    RunLayout.of(config).require_kinds()
    root = Path(config.paths.root)
    there = nearest_existing(root)
    if not there.is_dir():
        raise DataError(f"paths.root: must be a folder, and {there} is a file. Choose another paths.root.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise DataError(
            f"paths.root: must be writable, and {there} is not (for {root}). Make it writable, or choose another "
            "paths.root."
        )


def _require_functions(config: RunConfig) -> None:
    """What `data.build` and a scorer of one's own name: a run asks for the scorer after all of its data is made."""
    for part in parts_of(config.data):
        if isinstance(part.data, CustomData):
            build_function(part.data)
        if part.data.scorer != type(part.data).model_fields["scorer"].default:
            require_scorer(part.data.scorer)


def _require_device(config: RunConfig) -> None:
    """A GPU that the settings ask for is on this host, unless the workers live elsewhere."""
    runtime = config.runtime
    if runtime.device != "cuda" or runtime.ray_address is not None or first_gpu() is not None:
        return
    if not any(next(Path("/dev").glob(name), None) for name in GPU_FILES):
        raise ConfigError(
            "runtime.device: must be auto or cpu where there is no GPU; got cuda, and this machine shows none. Set "
            "runtime.device=auto, or look whether the driver is loaded (nvidia-smi)"
        )


def _require_cluster(config: RunConfig) -> None:
    """The Ray cluster that the settings name is there, or the folder of a private one is nobody else's: a run would
    find out after its data and warm start."""
    runtime = config.runtime
    if runtime.backend != "ray":
        return
    problem = folder_problem() if runtime.ray_address is None else unreachable(runtime.ray_address)
    if problem is not None:
        raise ConfigError(problem)


def _require_models(config: RunConfig) -> None:
    """Models of the hub can be had, those that Millrace has written are whole: a run would find out after its data."""
    paths = {"model.path": config.model.path, "critic.path": config.critic.path if config.critic else None}
    for key, path in paths.items():
        if path is not None:
            require_reachable(key, path)
            require_whole_model(key, path)


def check_before_start(config: RunConfig, plan: RunPlan) -> None:
    """What a run needs and a plan does not: the engine, and room for what the run still has to write.

    Raises:
        EngineError: vLLM is not installed.
        ConfigError: the run cannot fit the GPU that is here, or asks for one, and there is none; or no Ray cluster
            listens at the address given.
        ModelError: a model of the hub is not in the cache, and the hub does not answer; or an exported one is damaged.
        DiskSpaceError: says how many bytes are missing, and where.
    """
    if config.rollout.engine == "vllm" and not plan.is_done:
        require_vllm()
    if not plan.is_done:
        _require_device(config)
        _require_cluster(config)
        _require_models(config)
    if plan.memory is not None and not plan.is_done:
        require_fit(config, plan.memory)
    disk = plan.disk
    if not plan.is_done and not all(report.enough for report in disk.file_systems):
        short = "; ".join(report.problem for report in disk.file_systems if not report.enough)
        raise DiskSpaceError(
            f"{short}. The run needs room for {disk.num_checkpoints} checkpoints, among others (--dry-run shows it). "
            "Free some room, lower checkpoint.keep_last, or set paths.root to a larger disk."
        )
