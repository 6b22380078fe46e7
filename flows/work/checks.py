"""The checks that precede any expensive work: settings, folders, machine, and then each unfinished stage."""

import errno
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from data.tasks import build_function
from flows.chain import stages_of
from flows.parameters import RunSettings
from flows.stages.stage import Stage, Trial
from flows.work.open_run import OpenRun
from flows.work.plan import RunPlan, make_plan
from flows.work.slots import Slots
from rlcore import sandbox
from rlcore.config import CustomData, RunConfig
from rlcore.config.check import suite_settings
from rlcore.config.data import PROGRAMS, has_default_scorer, parts_of, scorers_of
from rlcore.config.model import SMOLLM2
from rlcore.errors import ConfigError, DiskSpaceError
from rlcore.models.hub import require_reachable
from rlcore.models.shape import require_base, require_embeddings, require_same_tokens, require_trainable, vocabulary_of
from rlcore.rollout.scoring import require_environment, require_scorer
from rlcore.rollout.tools import tool_schemas
from rlcore.rollout.vllm import require_vllm
from rlcore.run.initial_policy import model_paths, require_smollm2, require_whole_model, stage_settings
from rlcore.run.layout import RunLayout, configured_model
from rlcore.runtime.cluster import folder_problem, unreachable
from rlcore.runtime.interpreter import trainer_environment
from rlcore.storage.disk import is_out_of_room, nearest_existing
from rlcore.tracking.lineage import first_gpu
from rlcore.tracking.sinks import require_trackers
from rlcore.workers.memory_plan import require_fit

GPU_FILES = ("nvidia[0-9]*", "dxg", "kfd")  # in /dev: NVIDIA, WSL, AMD, even without the management library


def plan_run(settings: RunSettings) -> RunPlan:
    """Check the settings, plan the run, and check its unfinished stages. Return the plan."""
    config = settings.config
    check_before_plan(config)
    plan = make_plan(config, planning_config=settings.planning_config)
    left = [stage for stage, status in zip(stages_of(config), plan.stages, strict=True) if not status.cached]
    return replace(plan, warning=run_stage_checks(OpenRun(config, planning_config=settings.planning_config), left))


def check_run(settings: RunSettings) -> None:
    """Plan a run, and raise MillraceError if it cannot start."""
    check_before_start(settings.config, plan_run(settings))


def check_before_plan(config: RunConfig) -> None:
    """Check that custom functions can be imported, local models can be trained, and the workspace can be written."""
    _require_functions(config)
    tokens = _tokens(config)
    for key, path in model_paths(config).items():
        if path is not None:
            require_trainable(key, path)
            (require_embeddings if key == "model.path" else require_same_tokens)(key, path, tokens)
    RunLayout.of(config).require_kinds()
    require_root(Path(config.paths.root))


def _tokens(config: RunConfig) -> dict[str, int]:
    if config.model.path is not None:
        return vocabulary_of(str(configured_model(config)))
    if not any(model_paths(config).values()):
        return {}  # it will be built with the model
    from rlcore.models.tokenizer import scratch_vocabulary

    return scratch_vocabulary(config.model.scratch)


def require_root(root: Path) -> None:
    """Check that files can be created in a workspace, which may not exist yet. Raises ConfigError with the reason."""
    there = nearest_existing(root)
    try:
        with TemporaryFile(dir=there):  # permissions are not enough: no user can create a file in /proc
            pass
    except OSError as reason:
        if is_out_of_room(reason):  # the plan reports the missing space
            return
        why = "" if reason.errno == errno.ENOENT else f": {reason.strerror}"  # the error of /proc
        raise ConfigError(
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
    trainer = trainer_environment(config.runtime.python)
    has = find_spec if config.runtime.python is None else trainer.has
    if config.rollout.engine == "vllm":
        require_vllm(has)
    require_base(config.model.lora, has)
    require_trackers(config.tracking)
    require_device(config)
    if SMOLLM2 in model_paths(config).values():
        require_smollm2(configured_model(config), has)


def require_machine(config: RunConfig) -> None:
    """Check the engine, device, cluster and models early, so that a run does not fail after its data is built."""
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
    """Raise ConfigError if `runtime.device` is `cuda` and this machine has no GPU. A Ray cluster is not checked."""
    runtime = config.runtime
    if runtime.device != "cuda" or runtime.ray_address is not None or first_gpu() is not None:
        return
    if not any(next(Path("/dev").glob(name), None) for name in GPU_FILES):
        raise ConfigError(
            "runtime.device: must be auto or cpu without a GPU; got cuda, and this machine has none. Set "
            "runtime.device=auto, or check that the driver is loaded (nvidia-smi)"
        )


def check_dry_run(config: RunConfig, plan: RunPlan) -> None:
    """Make the checks of a dry run: the packages and the device exist, and the run fits into the device's memory.

    If the run is done, nothing is checked.
    """
    if not plan.is_done:
        _require_packages(config)
        _require_memory(config, plan)


def check_before_start(config: RunConfig, plan: RunPlan) -> None:
    """Check that this machine can start the run: slots, engine, device, cluster, models, memory and disk space."""
    if plan.is_done:
        return
    Slots(RunLayout.of(config).root).require(config.runtime.num_workers)
    require_machine(config)
    _require_memory(config, plan)
    if short := [report.problem for report in plan.disk.file_systems if not report.enough]:
        raise DiskSpaceError(
            f"{'; '.join(short)}. The run needs space for {plan.disk.num_checkpoints} checkpoints and other files "
            "(see --dry-run). Free some space, lower checkpoint.keep_last, or set paths.root to a larger disk."
        )


def _require_memory(config: RunConfig, plan: RunPlan) -> None:
    main = stage_settings(config) if config.is_supervised else config
    for settings, memory in ((main, plan.memory), (stage_settings(config), plan.warm_start_memory)):
        if memory is not None:
            require_fit(settings, memory)


def check_evaluation(config: RunConfig) -> None:
    """Check the requirements of an evaluation: folder, functions, engine, device, cluster and model."""
    for suite in config.validation.suites:
        check_before_plan(suite_settings(config, suite))
    require_machine(config)


def run_stage_checks(run: OpenRun, stages: Sequence[Stage[Any]]) -> str:
    """Check the requirements of the given stages of a run, and return the warnings, one per line."""
    trial = Trial(run)
    for stage in stages:
        stage.check(trial)
    return "\n".join(filter(None, trial.warnings))
