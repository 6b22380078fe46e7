"""The plan of a run: its stages with their status, disk space and memory. Planning writes no files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from pydantic import TypeAdapter

from flows.chain import stages_of
from flows.progress import console_for_tables
from flows.stages.stage import StageStatus
from flows.stages.train import Train, WarmStart
from flows.work.open_run import OpenRun, require_same_inputs
from rlcore.checkpoint.catalog import scan
from rlcore.config import RunConfig
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.config.model import INSTALL_SMOLLM2, PUBLISHED, SMOLLM2, smollm2_file
from rlcore.models.hub import config_file
from rlcore.models.shape import critic_shape, shape_of
from rlcore.run.initial_policy import stage_settings
from rlcore.run.layout import RunLayout, disk_needs
from rlcore.runtime.interpreter import run_versions
from rlcore.storage.disk import (
    RoomReport,
    check_needs,
    checkpoint_bytes,
    free_bytes,
    max_num_checkpoints,
    reserve_bytes,
    size,
    unit_for,
)
from rlcore.user_code import code_for_run
from rlcore.workers.memory_plan import MemoryPlan, detect_device, fit_settings


@dataclass(frozen=True, slots=True)
class DiskBudget:
    """The disk space of a run in bytes. `reserve_bytes` is the space that must stay free.

    `needed_bytes` is the space for the checkpoints that are not written yet, plus `reserve_bytes`. `checkpoint_bytes`
    is None if the size of a checkpoint is unknown.
    """

    checkpoint_bytes: int | None
    num_checkpoints: int
    reserve_bytes: int
    needed_bytes: int
    free_bytes: int
    file_systems: tuple[RoomReport, ...]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The stages of a run with their status, and the run's requirements.

    The memory plans are for one rank's GPU. They are None if the model's shape is unknown. Without a warm start,
    `warm_start_memory` is None. `versions` has the versions of the trainer's packages. If this process uses another
    version of a package, the key `flow.<package>` has the version of this process.
    """

    run_id: str
    run_dir: Path
    settings_fingerprint: str
    code_fingerprint: str
    stages: tuple[StageStatus, ...]
    committed_step: int
    total_steps: int
    disk: DiskBudget
    memory: MemoryPlan | None
    warm_start_memory: MemoryPlan | None
    published_model: str | None
    versions: Mapping[str, str]
    warning: str = ""

    @property
    def is_done(self) -> bool:
        """True if all stages are done."""
        return all(stage.cached for stage in self.stages)


def count_parameters(config: RunConfig) -> tuple[int, int] | None:
    """Return the number of trained parameters (policy and critic) and the number of all policy parameters, or None if
    the model's shape is unknown.
    """
    lora, shape = config.model.lora, shape_of(config.model)
    if shape is None:
        return None
    whole = shape.policy_parameters
    policy = whole if lora is None else shape.adapter_parameters(lora)
    critic = 0 if config.critic is None else critic_shape(config, shape).critic_parameters
    return policy + critic, whole


def make_plan(config: RunConfig, *, planning_config: RunConfig | None = None) -> RunPlan:
    """Return the plan of a run from the current state on disk.

    If the run's model does not exist yet, `planning_config` names an existing model with the same shape and tokenizer.
    Raises DataError if the source files of the dataset are missing, and CheckpointError if the run cannot resume.
    """
    run = OpenRun(config, planning_config=planning_config)
    committed, planning_config = run.committed, run.planning_config
    require_same_inputs(config, run.layout)
    stages = tuple(stage.status(run) for stage in stages_of(config))
    has_initial_policy = next(stage.cached for stage in stages if stage.name == WarmStart.name)
    has_warm_start = planning_config.warm_start.enabled and not has_initial_policy and not config.is_supervised
    return RunPlan(
        run_id=run.run_id,
        run_dir=run.layout.run_dir,
        settings_fingerprint=settings_fingerprint(config),
        code_fingerprint=code_for_run(config).fingerprint,
        stages=stages,
        committed_step=committed,
        total_steps=config.total_steps,
        disk=_disk(config, run.layout, count_parameters(planning_config), has_initial_policy=has_initial_policy),
        memory=plan_memory_here(stage_settings(planning_config) if config.is_supervised else planning_config),
        warm_start_memory=plan_memory_here(stage_settings(planning_config)) if has_warm_start else None,
        published_model=published_model_path(planning_config),
        versions=run_versions(config.runtime.python),
    )


def plan_memory_here(config: RunConfig) -> MemoryPlan | None:
    """Return the memory plan for one rank on this host's GPU, or None if the model's shape is unknown."""
    shape = shape_of(config.model)
    return None if shape is None else fit_settings(config, shape, detect_device(config))[1]


def published_model_path(config: RunConfig) -> str | None:
    """Return `model.path` if this machine lacks the model but Millrace knows its shape, otherwise None."""
    path = config.model.path
    if path is None or path not in PUBLISHED:
        return None
    file = smollm2_file() if path == SMOLLM2 else config_file(path)
    return path if file is None else None


def _disk(
    config: RunConfig, layout: RunLayout, count: tuple[int, int] | None, *, has_initial_policy: bool
) -> DiskBudget:
    known, trainer = scan(layout.checkpoints).checkpoints, config.trainer
    expected = None if count is None else checkpoint_bytes(count[0])
    one = known[-1].size_bytes if known else expected
    number = max_num_checkpoints(
        config.checkpoint, total_steps=trainer.total_steps, steps_per_chunk=trainer.steps_per_chunk
    )
    reserve = reserve_bytes(config.checkpoint)
    committed = known[-1].step if known else 0
    more = (
        0 if committed >= trainer.total_steps else max(0, number * (one or 0) - sum(info.size_bytes for info in known))
    )
    needs = disk_needs(
        config,
        layout,
        checkpoints_bytes=more,
        num_weights=0 if count is None else count[1],
        steps_left=max(0, trainer.total_steps - committed),
        has_initial_policy=has_initial_policy,
    )
    reports = check_needs(needs, reserve)
    return DiskBudget(one, number, reserve, more + reserve, free_bytes(layout.checkpoints), reports)


MAX_DETAIL_CHARACTERS = 57  # length of the list of unfinished stages


def show_plan(plan: RunPlan, *, as_json: bool) -> None:
    """Print the plan as tables or as JSON."""
    if as_json:
        print(json.dumps(TypeAdapter(RunPlan).dump_python(plan, mode="json"), indent=2))
        return
    from rich.table import Table

    console = console_for_tables()
    console.print(
        f"run {plan.run_id} in {plan.run_dir}, settings {plan.settings_fingerprint}, code {plan.code_fingerprint}"
    )
    table = Table("stage", "fingerprint", "state", "what", box=None, pad_edge=False, header_style="bold")
    for name, group in groupby(plan.stages, lambda stage: stage.name):
        table.add_row(name, *_cells(list(group)))
    console.print(table, soft_wrap=False)
    if plan.published_model is not None:
        text = f"model: {plan.published_model} is not on this machine; sizes are planned from its published config.json"
        if plan.published_model == SMOLLM2:
            text += f". {INSTALL_SMOLLM2}"
        console.print(text)
    if any(stage.name == Train.name for stage in plan.stages):
        console.print(f"training: committed step {plan.committed_step} of {plan.total_steps}")
    disk = plan.disk
    one = "unknown before the first" if disk.checkpoint_bytes is None else size(disk.checkpoint_bytes)
    console.print(
        f"disk: a checkpoint {one}, at most {disk.num_checkpoints} at a time, {size(disk.reserve_bytes)} in "
        f"reserve: {size(disk.needed_bytes)} still needed, {size(disk.free_bytes)} free"
    )
    for report in disk.file_systems:
        short = f"; MISSING {size(report.missing_bytes)}" if report.missing_bytes else ""
        to_write, free = size(report.needed_bytes), size(report.free_bytes)
        console.print(f"  {report.path}: {to_write} to write on this file system, {free} free{short}")
    console.print(f"versions: {', '.join(f'{name} {version}' for name, version in plan.versions.items())}")
    if plan.warning:
        console.print(plan.warning)
    if plan.memory is None:
        print("memory: no plan: the model's config.json is not on this machine, or of an unknown kind")
    else:
        show_memory(plan.memory)
    if plan.warm_start_memory is not None and (note := memory_note(plan.warm_start_memory)):
        console.print(f"warm start: {note}")


def show_memory(plan: MemoryPlan) -> None:
    """Print the memory that one rank's GPU needs in each phase of a step."""
    from rich.table import Table

    room = "" if plan.usable_bytes is None else f", {size(plan.usable_bytes)} of it for tensors"
    sums = [sum(parts.values()) for parts in plan.phases.values()]
    scale, unit = unit_for(max(sums))
    table = Table(title=f"Memory of {plan.device.name}{room}, {unit} by phase", box=None, pad_edge=False,
                  title_justify="left", header_style="bold")  # fmt: skip
    table.add_column("part")
    for phase in plan.phases:
        table.add_column(phase, justify="right")
    for part in dict.fromkeys(part for parts in plan.phases.values() for part in parts):
        sizes = (parts.get(part) for parts in plan.phases.values())
        table.add_row(part, *("" if held is None else f"{held / scale:.3f}" for held in sizes))
    table.add_row("sum", *(f"{held / scale:.3f}" for held in sums), style="bold")
    console = console_for_tables()
    console.print(table, soft_wrap=False)
    if note := memory_note(plan):
        console.print(note)


def memory_note(plan: MemoryPlan) -> str:
    """Return a line that says whether the run fits into memory, or '' if the device's memory is unknown."""
    if plan.usable_bytes is None:
        return ""
    peak = f"{plan.peak_phase} needs {size(plan.peak_bytes)}"
    if plan.cannot_fit:
        return f"memory: CANNOT FIT: {size(plan.floor_bytes)} even with one longest response per micro-batch"
    if not plan.fits:
        return f"memory: {peak} as planned; passes that run out of memory are split (runtime.fit_memory=auto plans it)"
    return f"memory: fits, {peak}"


def _cells(stages: Sequence[StageStatus]) -> tuple[str, str, str]:
    done = sum(stage.cached for stage in stages)
    fingerprint = stages[0].fingerprint or "not known yet"
    if len(stages) == 1:
        return fingerprint, "done" if done else "to do", stages[0].detail
    left = ", ".join(stage.detail for stage in stages if not stage.cached)
    shown = left if len(left) <= MAX_DETAIL_CHARACTERS else f"{left[:MAX_DETAIL_CHARACTERS]}..."
    detail = f"{done} of {len(stages)} done"
    return (fingerprint, "to do", f"{detail}; to do: {shown}") if left else (fingerprint, "done", detail)
