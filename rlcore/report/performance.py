"""The phases of a step, and the plan of a run's memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd
from pydantic import TypeAdapter

from rlcore.errors import DataError
from rlcore.report.document import Block, Cell, Kind, Prose, Row, Table, cell, table
from rlcore.report.plots import LIGHT, MAX_POINTS, format_axes
from rlcore.report.record import RunRecord
from rlcore.report.series import Series, thin
from rlcore.storage.disk import BYTES_PER_GB
from rlcore.storage.documents import read_document

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PHASES: Mapping[str, tuple[str, str]] = {
    "gen": ("Generation", "blue"),
    "environment": ("Environment", "lime"),
    "reward": ("Scoring", "orange"),
    "old_log_prob": ("Old log-probabilities", "teal"),
    "ref": ("Reference pass", "purple"),
    "values": ("Values", "pink"),
    "adv": ("Advantages", "muted"),
    "update_critic": ("Critic update", "red"),
    "update_actor": ("Policy update", "green"),
    "update_weights": ("Weight hand-over", "sand"),
    "other": ("Between phases", "grey"),
}
"""Title and colour of phases that lie inside a step, by their name in `timing_s/<name>`; `other` is the rest."""


def phase_seconds(record: RunRecord) -> pd.DataFrame:
    """Seconds of each phase, a column each, at each step; `other` is what the phases leave of the step."""
    whole = record.series("timing_s/step")
    if whole is None:
        return pd.DataFrame()
    measured = {f"timing_s/{name}": name for name in PHASES}
    found = record.metrics.reindex(index=whole.index, columns=list(measured)).fillna(0.0).rename(columns=measured)
    found = found.loc[:, found.any()]
    return found.assign(other=(whole - found.sum(axis=1)).clip(lower=0.0))


def mean_phases(record: RunRecord) -> dict[str, float]:
    """Mean seconds of each phase, the first step left out where there are others; they add up to the step."""
    found = phase_seconds(record)
    means = found.iloc[min(1, len(found) - 1) :].mean()
    return {str(name): float(seconds) for name, seconds in means.items()}


def draw_phases(record: RunRecord, figure: "Figure") -> None:
    """Seconds of each phase at each step, stacked."""
    seconds = phase_seconds(record)
    if not len(seconds):
        return
    axes = figure.subplots()
    phases: list[Series] = [thin(seconds[name], MAX_POINTS // 4) for name in seconds]
    labels = [PHASES[str(name)][0] for name in seconds]
    colours = [LIGHT[PHASES[str(name)][1]] for name in seconds]
    if len(seconds) == 1:
        tops = seconds.iloc[0].cumsum()
        axes.bar(seconds.index.repeat(len(tops)), seconds.iloc[0], 0.4, tops - seconds.iloc[0], color=colours,
                 label=labels)  # fmt: skip
    else:
        axes.stackplot(phases[0].index, phases, colors=colours, labels=labels, alpha=0.88, linewidth=0)
    format_axes(axes, y="seconds a step")
    axes.set_ylim(bottom=0, top=1.15 * float(seconds.sum(axis=1).quantile(0.99)))


def phase_table(record: RunRecord) -> Table:
    """Mean seconds of each phase, and of what happens after some steps and is not counted to them."""
    phases = mean_phases(record)
    total = sum(phases.values())
    rows: list[Row] = [
        (PHASES[name][0], seconds, seconds / total, "" if name == "other" else f"timing_s/{name}")
        for name, seconds in phases.items()
    ]
    if phases:
        rows.append(("Step", record.step_s, 1.0, "timing_s/step"))
    for name, title in (("save_checkpoint", "Checkpoint"), ("testing", "Validation")):
        series = record.series(f"timing_s/{name}")
        if series is not None:
            times = "once" if len(series) == 1 else f"{len(series)} times"
            if name == "save_checkpoint":  # every step has this metric, and it is 0 at most of them
                times = f"mean over {len(series)} steps"
            rows.append((f"{title} ({times}, not in the step)", float(series.mean()), "", f"timing_s/{name}"))
    columns: dict[str, Kind] = {"Phase": "text", "Mean": "seconds", "Share": "share", "Metric": "code"}
    return table("phases", "Phases of a step", columns, rows, "The first step is left out: it warms up.")


# ------------------------------------------------------------------ memory

TENSORS_GB = "perf/max_memory_allocated_gb"
PLAN_FILE = "memory_plan.json"


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """`memory_plan.json`, as `rlcore.workers.memory_plan.fit_run` writes it: bytes on one device by what they are for.

    `capacity_bytes`: 0 where not known.
    """

    parts: Mapping[str, int]
    capacity_bytes: int = 0
    device: str = ""
    notes: tuple[str, ...] = ()


_PLAN = TypeAdapter(PlannedMemory)


def memory_plan(record: RunRecord) -> tuple[Block, ...]:
    """The plan by part, with the measured peak of the device's tensors; why there is none, where there is none."""
    try:
        plan = read_document(record.run_dir / PLAN_FILE, _PLAN, "the report goes on without this memory plan")
    except DataError as error:
        return (Prose(str(error)),)
    if plan is None:
        return (Prose("No memory plan was made for this run; these are the peaks alone."),)
    total = sum(plan.parts.values())
    rows: list[Row] = [(name, _gb(size), size / max(1, total)) for name, size in [*plan.parts.items(), ("Sum", total)]]
    if (held := record.series(TENSORS_GB)) is not None:
        peak = float(held.max()) * BYTES_PER_GB
        rows.append(("Measured: held by tensors, peak", _gb(peak), peak / max(1, total)))
    if plan.capacity_bytes:
        rows.append(("The device has", _gb(plan.capacity_bytes), ""))
    title = f"Memory, planned on {plan.device}" if plan.device else "Memory, planned"
    columns: dict[str, Kind] = {"Part": "text", "Planned": "number", "Share": "share"}
    return (table("memory_plan", title, columns, rows), *map(Prose, plan.notes))


def _gb(size: float) -> Cell:
    return Cell(cell(size / BYTES_PER_GB, unit="GB").text, size)
