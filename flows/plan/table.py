"""The plan for people and for machines."""

import json
from collections.abc import Sequence
from itertools import groupby

from flows.plan.plan import RunPlan
from flows.progress import console_for_tables
from flows.stages.stage import StageStatus
from rlcore.config.model import INSTALL_SMOLLM2, SMOLLM2
from rlcore.storage.disk import size, unit_for
from rlcore.workers.memory_plan import MemoryPlan

MAX_DETAIL_CHARACTERS = 57
"""Of the list of stages that are left to do."""


def show_plan(plan: RunPlan, *, as_json: bool) -> None:
    """Print the plan, as tables or as JSON."""
    if as_json:
        print(json.dumps(plan.to_json(), indent=2))
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
        text = f"model: {plan.published_model} is not on this machine; sizes are planned by its published config.json"
        if plan.published_model == SMOLLM2:
            text += f". {INSTALL_SMOLLM2}"
        console.print(text)
    console.print(f"training: committed step {plan.committed_step} of {plan.total_steps}")
    for line in (_tokens(plan), _disk(plan), plan.warning):
        if line:
            console.print(line)
    if plan.memory is None:
        print("memory: no plan: the model's config.json is not on this machine, or of a kind that is not counted")
    else:
        show_memory(plan.memory)
    if plan.warm_start_memory is not None and (note := memory_note(plan.warm_start_memory)):
        console.print(f"warm start: {note}")


def show_memory(plan: MemoryPlan) -> None:
    """Print what each phase of a step holds on one rank's GPU."""
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
    """Whether the plan fits, in words; '' where the device is not known."""
    if plan.usable_bytes is None:
        return ""
    peak = f"{plan.peak_phase} needs {size(plan.peak_bytes)}"
    if plan.cannot_fit:
        return f"memory: CANNOT FIT: {size(plan.floor_bytes)} even with one longest answer a micro-batch"
    if not plan.fits:
        return f"memory: {peak} as planned; passes that run out will be cut finer (runtime.fit_memory=auto plans it)"
    return f"memory: fits, {peak}"


def _cells(stages: Sequence[StageStatus]) -> tuple[str, str, str]:
    """Fingerprint, state and details of stages of one name."""
    done = sum(stage.cached for stage in stages)
    fingerprint = stages[0].fingerprint or "not known yet"
    if len(stages) == 1:
        return fingerprint, "done" if done else "to do", stages[0].detail
    left = ", ".join(stage.detail for stage in stages if not stage.cached)
    shown = left if len(left) <= MAX_DETAIL_CHARACTERS else f"{left[:MAX_DETAIL_CHARACTERS]}..."
    detail = f"{done} of {len(stages)} done"
    return (fingerprint, "to do", f"{detail}; to do: {shown}") if left else (fingerprint, "done", detail)


def _tokens(plan: RunPlan) -> str:
    tokens = plan.tokens
    return (
        f"tokens: {tokens.prompts_per_step:,} prompts and {tokens.sequences_per_step:,} answers a step, at most "
        f"{tokens.max_tokens_per_sequence:,} tokens each: at most {tokens.max_tokens_per_step:,} a step, "
        f"{tokens.max_tokens_left:,} in the steps left"
    )


def _disk(plan: RunPlan) -> str:
    disk = plan.disk
    one = "not known before the first" if disk.checkpoint_bytes is None else size(disk.checkpoint_bytes)
    lines = [
        f"disk: a checkpoint {one}, at most {disk.num_checkpoints} at a time, {size(disk.reserve_bytes)} in "
        f"reserve: {size(disk.needed_bytes)} still needed, {size(disk.free_bytes)} free"
    ]
    for report in disk.file_systems:
        short = f"; MISSING {size(report.missing_bytes)}" if report.missing_bytes else ""
        lines.append(
            f"  {report.path}: {size(report.needed_bytes)} to write on this file system, "
            f"{size(report.free_bytes)} free{short}"
        )
    return "\n".join(lines)
