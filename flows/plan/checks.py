"""What is checked before anything expensive: each mistake ends the run in a second, not after the model has loaded.

First settings, folders and machine, then each stage that is not done checks what it will need (`Stage.check`).
"""

import errno
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from data.sources import build_function
from flows.chain import stages_of
from flows.parameters import RunSettings
from flows.plan.plan import RunPlan, make_plan
from flows.stages.stage import Stage
from flows.stages.trials import Trial
from flows.work.open_run import OpenRun
from flows.work.slots import Slots
from rlcore import sandbox
from rlcore.config import CustomData, RunConfig
from rlcore.config.data import PROGRAMS, has_default_scorer, parts_of, scorers_of
from rlcore.config.model import SMOLLM2
from rlcore.config.suite import suite_settings
from rlcore.errors import ConfigError, DataError, DiskSpaceError
from rlcore.models.hub import require_reachable
from rlcore.models.shape import require_base, require_embeddings, require_same_tokens, require_trainable, token_counts
from rlcore.rollout.scoring import require_environment, require_scorer
from rlcore.rollout.tools import tool_schemas
from rlcore.rollout.vllm import require_vllm
from rlcore.run.inputs import configured_model, require_smollm2, require_whole_model, stage_settings
from rlcore.run.layout import RunLayout
from rlcore.run.model_digests import model_paths
from rlcore.runtime.cluster import folder_problem, unreachable
from rlcore.storage.disk import is_out_of_room, nearest_existing
from rlcore.tracking.lineage import first_gpu
from rlcore.workers.memory_plan import require_fit

GPU_FILES = ("nvidia[0-9]*", "dxg", "kfd")
"""Files in /dev of a GPU: NVIDIA's, one under WSL, AMD's. Its management library may be missing."""


def plan_run(settings: RunSettings) -> RunPlan:
    """Check the settings, plan, and try what the run will need.

    Raises:
        ConfigError, DataError, CheckpointError: key, rule, value got, what to do.
    """
    config = settings.config
    check_before_plan(config)
    plan = make_plan(config, planning_config=settings.planning_config)
    left = [stage for stage, status in zip(stages_of(config), plan.stages, strict=True) if not status.cached]
    return replace(plan, warning=run_stage_checks(OpenRun(config, seen=settings.planning_config), left))


def check_run(settings: RunSettings) -> None:
    """The same, and what a run needs beyond a plan; see `check_before_start`."""
    check_before_start(settings.config, plan_run(settings))


def check_before_plan(config: RunConfig) -> None:
    """The user's own functions, architecture and tokens of a model whose files are here, the run's folder, the root.

    Raises:
        ConfigError, DataError, ModelError: key, rule, value got, what to do.
    """
    _require_functions(config)
    tokens = _tokens(config)
    for key, path in model_paths(config).items():
        if path is not None:
            require_trainable(key, path)
            (require_same_tokens if key == "critic.path" else require_embeddings)(key, path, tokens)
    RunLayout.of(config).require_kinds()
    require_root(Path(config.paths.root))


def _tokens(config: RunConfig) -> dict[str, int]:
    """Id of each token of the run's tokenizer; empty where its file is not on this machine."""
    if config.model.path is not None:
        return token_counts(str(configured_model(config)))
    if config.critic is None or config.critic.path is None:
        return {}  # it is made with the model
    from rlcore.models.tokenizer import scratch_vocabulary

    return scratch_vocabulary(config.model.scratch)


def require_root(root: Path) -> None:
    """Require that files can be made under a root, or where it will be made. The trial leaves nothing behind.

    Raises:
        DataError: they cannot; says why.
    """
    there = nearest_existing(root)
    try:
        with TemporaryFile(dir=there):  # permissions alone do not tell: nobody can make a file in /proc
            pass
    except OSError as reason:
        if is_out_of_room(reason):  # the plan says how much is missing
            return
        why = "" if reason.errno == errno.ENOENT else f": {reason.strerror}"  # what /proc says of a new file
        raise DataError(
            f"paths.root: must be writable, and {there} is not (for {root}){why}. Make it writable, or choose another "
            "paths.root."
        ) from reason


def _require_functions(config: RunConfig) -> None:
    if config.data.environment:
        require_environment(config.data.environment)
    if config.episode.tools:
        tool_schemas(config.episode.tools)
    tasks = (config.data, *(suite.data for suite in config.validation.suites))
    named = {*config.episode.tools, *(scorer for task in tasks for scorer in scorers_of(task))}
    if {"data.code:run_python", PROGRAMS} & named:
        sandbox.require_sandbox(config.sandbox)
    for part in parts_of(config.data):
        if isinstance(part.data, CustomData):
            build_function(part.data)
        if not has_default_scorer(part.data):
            require_scorer(part.data.scorer)


def _require_packages(config: RunConfig) -> None:
    """Packages of the engine and of the model, and the device."""
    if config.rollout.engine == "vllm":
        require_vllm()
    require_base(config.model.lora)
    require_device(config)
    if SMOLLM2 in model_paths(config).values():
        require_smollm2(configured_model(config))


def require_machine(config: RunConfig) -> None:
    """Require engine, device, cluster and models, which a run would miss only after its data is made.

    Raises:
        EngineError, ConfigError, ModelError: what is missing, and what to do.
    """
    _require_packages(config)
    if config.runtime.backend == "ray":
        address = config.runtime.ray_address
        problem = folder_problem() if address is None else unreachable(address)
        if problem is not None:
            raise ConfigError(problem)
    for key, path in model_paths(config).items():
        if path not in (None, SMOLLM2):
            require_reachable(key, path)
            require_whole_model(key, path)


def require_device(config: RunConfig) -> None:
    """Require the GPU that `runtime.device=cuda` names.

    Raises:
        ConfigError: this machine shows none.
    """
    runtime = config.runtime
    if runtime.device != "cuda" or runtime.ray_address is not None or first_gpu() is not None:
        return
    if not any(next(Path("/dev").glob(name), None) for name in GPU_FILES):
        raise ConfigError(
            "runtime.device: must be auto or cpu where there is no GPU; got cuda, and this machine shows none. Set "
            "runtime.device=auto, or look whether the driver is loaded (nvidia-smi)"
        )


def check_dry_run(config: RunConfig, plan: RunPlan) -> None:
    """What a start would be refused for and the plan does not show: packages, device, memory of the device.

    Raises:
        EngineError, ConfigError, ModelError: what is missing, and what to do.
    """
    if not plan.is_done:
        _require_packages(config)
        _require_memory(config, plan)


def check_before_start(config: RunConfig, plan: RunPlan) -> None:
    """What a run needs and a plan does not: slots, engine, device, cluster, models, memory, and room on the disk.

    Raises:
        EngineError, ConfigError, ModelError, DiskSpaceError: what is missing, and what to do.
    """
    if plan.is_done:
        return
    Slots(RunLayout.of(config).root).require(config.runtime.num_workers)
    require_machine(config)
    _require_memory(config, plan)
    if short := [report.problem for report in plan.disk.file_systems if not report.enough]:
        raise DiskSpaceError(
            f"{'; '.join(short)}. The run needs room for {plan.disk.num_checkpoints} checkpoints, among others "
            "(--dry-run shows it). Free some room, lower checkpoint.keep_last, or set paths.root to a larger disk."
        )


def _require_memory(config: RunConfig, plan: RunPlan) -> None:
    for settings, memory in ((config, plan.memory), (stage_settings(config), plan.warm_start_memory)):
        if memory is not None:
            require_fit(settings, memory)


def check_evaluation(config: RunConfig) -> None:
    """What an evaluation needs: a folder, functions, the engine, a device, a cluster, the model.

    Raises:
        ConfigError, DataError, EngineError, ModelError: what is missing, and what to do.
    """
    for suite in config.validation.suites:
        check_before_plan(suite_settings(config, suite))
    require_machine(config)


def run_stage_checks(run: OpenRun, stages: Sequence[Stage[Any]]) -> str:
    """Check stages that are to be done. Returns warnings, a line each.

    Raises:
        ConfigError, DataError: key, rule, value got, what to do.
    """
    trial = Trial(run)
    return "\n".join(line for stage in stages for line in stage.check(trial) if line)
