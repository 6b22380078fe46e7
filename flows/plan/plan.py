"""What a run would do: its stages, what of them is done, its chunks, its room on disk, its tokens. Writes nothing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from flows.chain import stages_of
from flows.stages.stage import StageStatus
from flows.stages.warm_start import WarmStart
from flows.work.open_run import OpenRun
from flows.work.origin import require_same_inputs
from rlcore.checkpoint.catalog import scan
from rlcore.config import RunConfig
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.config.model import PUBLISHED, SMOLLM2, smollm2_file
from rlcore.models.shape import config_file, critic_shape, shape_of
from rlcore.run.disk import disk_needs
from rlcore.run.initial_policy import stage_settings
from rlcore.run.layout import RunLayout
from rlcore.storage.disk import (
    RoomReport,
    check_needs,
    checkpoint_bytes,
    free_bytes,
    num_checkpoints_at_once,
    reserve_bytes,
)
from rlcore.user_code import code_for_run
from rlcore.workers.memory_plan import MemoryPlan, detect_device, fit_settings


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Most tokens that one step, and the steps that are left, can have."""

    prompts_per_step: int
    sequences_per_step: int
    max_tokens_per_sequence: int
    max_tokens_per_step: int
    max_tokens_left: int


@dataclass(frozen=True, slots=True)
class DiskBudget:
    """Bytes. `checkpoint_bytes` None: not known before the first one. `needed_bytes`: of checkpoints beyond those there
    are, and the reserve. `file_systems`: all that the run writes, by file system."""

    checkpoint_bytes: int | None
    num_checkpoints: int
    reserve_bytes: int
    needed_bytes: int
    free_bytes: int
    file_systems: tuple[RoomReport, ...]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run will do, stage by stage, and what it needs."""

    run_id: str
    run_dir: Path
    settings_fingerprint: str
    code_fingerprint: str
    stages: tuple[StageStatus, ...]
    committed_step: int
    total_steps: int
    tokens: TokenBudget
    disk: DiskBudget
    memory: MemoryPlan | None
    """Of one rank's GPU; None where the model's shape is not known here."""
    warm_start_memory: MemoryPlan | None
    """The same of the supervised steps, where there will be some."""
    published_model: str | None
    """`model.path` of a model that is not on this machine, whose published shape the sizes are planned by."""
    warning: str = ""
    """What does not hinder the run and should be known."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return all(stage.cached for stage in self.stages)

    def stage(self, name: str) -> StageStatus:
        """The first stage of that name."""
        return next(stage for stage in self.stages if stage.name == name)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        plain: dict[str, Any] = TypeAdapter(RunPlan).dump_python(self, mode="json")
        return plain


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """`trained`: what a checkpoint holds; each comes with two moments of the optimizer. `policy`: all of the policy."""

    trained: int
    policy: int


def count_parameters(config: RunConfig) -> ParameterCount | None:
    """Parameters of policy and critic; None where the model's shape is not known."""
    lora, shape = config.model.lora, shape_of(config.model)
    if shape is None:
        return None
    whole = shape.policy_parameters
    policy = whole if lora is None else shape.adapter_parameters(lora)
    critic = 0 if config.critic is None else critic_shape(config, shape).critic_parameters
    return ParameterCount(policy + critic, whole)


def make_plan(config: RunConfig, *, planning_config: RunConfig | None = None) -> RunPlan:
    """The plan of a run as things stand on disk.

    Args:
        config: of the run.
        seen: the same with a model of the same shape and tokenizer, to look at while that of `config` is not there yet.

    Raises:
        DataError: source files of the dataset are missing.
        CheckpointError: the run's checkpoints are broken, of other settings, code, data or models, or past its last
            step.
    """
    run = OpenRun(config, seen=planning_config)
    committed, planning_config = run.committed, run.planning_config
    require_same_inputs(config, run.layout)
    stages = tuple(stage.status(run) for stage in stages_of(config))
    has_start_model = next(stage.cached for stage in stages if stage.name == WarmStart.name)
    return RunPlan(
        run_id=run.run_id,
        run_dir=run.layout.run_dir,
        settings_fingerprint=settings_fingerprint(config),
        code_fingerprint=code_for_run(config).fingerprint,
        stages=stages,
        committed_step=committed,
        total_steps=config.trainer.total_steps,
        tokens=_tokens(config, committed),
        disk=_disk(config, run.layout, count_parameters(planning_config), has_start_model=has_start_model),
        memory=plan_memory_here(planning_config),
        warm_start_memory=None
        if has_start_model or not planning_config.warm_start.enabled
        else plan_memory_here(stage_settings(planning_config)),
        published_model=published_model_path(planning_config),
    )


def plan_memory_here(config: RunConfig) -> MemoryPlan | None:
    """What a rank will hold on this host's GPU; on one of unknown size where there is none."""
    shape = shape_of(config.model)
    return None if shape is None else fit_settings(config, shape, detect_device(config))[1]


def published_model_path(config: RunConfig) -> str | None:
    """`model.path` of a model with a known published shape that is not on this machine."""
    path = config.model.path
    if path is None or path not in PUBLISHED:
        return None
    file = smollm2_file() if path == SMOLLM2 else config_file(path)
    return path if file is None else None


def _tokens(config: RunConfig, committed: int) -> TokenBudget:
    prompts = config.trainer.batch_size
    sequences = prompts * config.rollout.samples_per_prompt
    longest = config.filter.max_prompt_tokens + config.rollout.max_response_tokens
    left = max(0, config.trainer.total_steps - committed)
    return TokenBudget(prompts, sequences, longest, sequences * longest, sequences * longest * left)


def _disk(config: RunConfig, layout: RunLayout, count: ParameterCount | None, *, has_start_model: bool) -> DiskBudget:
    known = scan(layout.checkpoints).checkpoints
    size: int | None = None
    if known:
        size = known[-1].size_bytes
    elif count is not None:
        size = checkpoint_bytes(count.trained)
    trainer = config.trainer
    number = num_checkpoints_at_once(
        config.checkpoint, total_steps=trainer.total_steps, steps_per_chunk=trainer.steps_per_chunk
    )
    reserve = reserve_bytes(config.checkpoint)
    committed = known[-1].step if known else 0
    is_done = committed >= trainer.total_steps
    more = 0 if is_done else max(0, number * (size or 0) - sum(info.size_bytes for info in known))
    needs = disk_needs(
        config,
        layout,
        checkpoints_bytes=more,
        num_weights=0 if count is None else count.policy,
        steps_left=max(0, trainer.total_steps - committed),
        has_initial_policy=has_start_model,
    )
    reports = check_needs(needs, reserve)
    return DiskBudget(size, number, reserve, more + reserve, free_bytes(layout.checkpoints), reports)
