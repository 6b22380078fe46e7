"""Tables of a run's training: convergence, speed, memory against its plan, checks, every metric of the last step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from rlcore.errors import DataError
from rlcore.report import numbers
from rlcore.report.curves import BESIDE, mean_phases
from rlcore.report.document import Block, Cell, Column, Prose, Table, Value, cell, table
from rlcore.report.findings import LATE, stability_checks
from rlcore.report.record import RunRecord
from rlcore.report.series import Series, trend_of
from rlcore.storage.publish import write_json_atomically
from rlcore.tracking.catalog import describe
from rlcore.tracking.cost import NOTHING as NO_COST
from rlcore.tracking.cost import Spent

MOST_LEVELS = 8
"""Rows of the table of costs at most: the highest levels."""

How = Literal["median", "max", "late", "mean", "last", "change", "extent"]
Measure = tuple[str, str, How, str]
"""Label, metric, how its values are summed up, unit."""

_MEASURES = (Column("Measure"), Column("Value", "number"), Column("Metric", "code"), Column("Definition"))

_CONVERGENCE: tuple[Measure, ...] = (
    ("Entropy, first → last tenth", "actor/entropy", "change", ""),
    ("KL in the loss, first → last tenth", "actor/kl_loss", "change", ""),
    ("KL in the reward, first → last tenth", "actor/reward_kl_penalty", "change", ""),
    ("Explained variance, first → last tenth", "critic/vf_explained_var", "change", ""),
    ("Value loss, first → last tenth", "critic/vf_loss", "change", ""),
    ("Step size in KL, median / largest", "actor/ppo_kl", "extent", ""),
    ("Gradient norm, median / largest", "actor/grad_norm", "extent", ""),
    ("Clipped tokens, last third", "actor/pg_clipfrac", "late", "%"),
    ("Learning rate of the policy, last", "actor/lr", "last", ""),
    ("Learning rate of the critic, last", "critic/lr", "last", ""),
)
_PERFORMANCE: tuple[Measure, ...] = (
    ("Throughput, median", "perf/throughput", "median", "tokens/s/device"),
    ("Model FLOP utilization, policy", "perf/mfu/actor", "mean", "%"),
    ("Model FLOP utilization, critic", "perf/mfu/critic", "mean", "%"),
    ("Device memory held, peak", "perf/max_memory_allocated_gb", "max", "GB"),
    ("Device memory reserved, peak", "perf/max_memory_reserved_gb", "max", "GB"),
    ("Host memory in use, peak", "perf/cpu_memory_used_gb", "max", "GB"),
)
_EFFICIENCY: tuple[Measure, ...] = (
    ("Answer length, last third", "response_length/mean", "late", "tokens"),
    ("Answers cut at the limit, last third", "response_length/clip_ratio", "late", "%"),
    ("Prompt length, mean", "prompt_length/mean", "mean", "tokens"),
    ("Groups of equal score, last third", "reward/equal_group_share", "late", "%"),
    ("Groups replaced, mean a step", "reward/groups_dropped", "mean", ""),
    ("Generation per answer token", "timing_per_token_ms/gen", "median", "ms"),
    ("Policy update per token", "timing_per_token_ms/update_actor", "median", "ms"),
    ("Reference pass per token", "timing_per_token_ms/ref", "median", "ms"),
    ("Critic update per token", "timing_per_token_ms/update_critic", "median", "ms"),
    ("Sampler's distance from the trainer", "training/rollout_probs_diff_mean", "mean", ""),
)


def _measured(record: RunRecord, measures: Iterable[Measure]) -> Iterable[tuple[Value, ...]]:
    """A row of each measure whose metric the run has."""
    for label, metric, how, unit in measures:
        series = record.series(metric)
        if series is not None:
            yield _row(label, _summed_up(series, how, unit), metric)


def _summed_up(series: Series, how: How, unit: str) -> Cell:
    values = series.values
    match how:
        case "change":
            return _pair({"first": float(series.head(0.1).mean()), "last": series.tail(0.1).mean()}, "→")
        case "extent":
            return _pair({"median": float(np.median(np.abs(values))), "max": float(np.abs(values).max())}, "/")
        case "median":
            value = float(np.median(values))
        case "max":
            value = float(values.max())
        case "late":
            value = series.tail(LATE).mean()
        case "mean":
            value = series.mean()
        case "last":
            value = series.last
    return Cell(numbers.percent(value, 2), value) if unit == "%" else cell(value, unit=unit)


def _pair(values: Mapping[str, float], sign: str) -> Cell:
    return Cell(f" {sign} ".join(map(numbers.compact, values.values())), dict(values))


def _row(label: str, value: Value, metric: str, note: str = "") -> tuple[Value, ...]:
    return label, value, metric, note or _definition_of(metric)


def convergence_table(record: RunRecord) -> Table:
    """What changed from the first steps to the last."""
    rows: list[tuple[Value, ...]] = []
    reward = record.series("critic/score/mean")
    if reward is not None:
        best = int(np.argmax(reward.smooth))
        note = f"Highest moving mean, at step {int(reward.steps[best])}."
        rows += [
            _row("Training reward, first tenth", cell(float(reward.head(0.1).mean()), "score"), reward.name),
            _row("Training reward, last tenth", cell(reward.tail(0.1).mean(), "score"), reward.name),
            _row(
                f"Training reward, best {reward.window} steps",
                cell(float(reward.smooth[best]), "score"),
                reward.name,
                note,
            ),
        ]
        trend = trend_of(reward)
        if trend is not None:
            note = f"Change of the fitted line over the last {trend.num_steps} steps, with a 95% interval."
            rows.append(_row("Trend of the training reward", cell(trend.change, "difference"), reward.name, note))
    held_out = record.held_out(record.reward_statistic)
    if held_out:
        step, found = held_out[-1]
        rows.append(_row("Held-out reward, last", found, f"val-core/{record.data_source}/{record.reward_statistic}"))
        if reward is not None and step > 0:
            gap = cell(reward.tail(0.1).mean() - found.value, "signed")
            rows.append(_row("Training less held-out reward", gap, "", "A large gap is learning by heart."))
    rows += _measured(record, _CONVERGENCE)
    return table("convergence", "From the first steps to the last", _MEASURES, rows)


def performance_table(record: RunRecord) -> Table:
    """How fast it went, and what it took."""
    rows: list[tuple[Value, ...]] = []
    if record.seconds is not None:
        note = "Sum over steps; validation, checkpoints and start-up come on top."
        rows.append(_row("Seconds of training steps", cell(record.seconds.last, "seconds"), "timing_s/step", note))
    if record.step_s is not None:
        note = "Mean without the first step, which warms up."
        rows.append(_row("Seconds a step", cell(record.step_s, "seconds"), "timing_s/step", note))
    if len(record.steps) > 1:
        wall = cell(record.steps[-1].time - record.steps[0].time, "seconds")
        rows.append(_row("From first to last line of the journal", wall, "", "By the clock, all included."))
    if record.tokens is not None:
        rows.append(_row("Tokens trained on", record.tokens.last, "perf/total_num_tokens", "Sum over steps."))
    rows += _measured(record, _PERFORMANCE)
    return table("performance", "Speed and memory", _MEASURES, rows)


def efficiency_table(record: RunRecord) -> Table:
    """How much of the work taught something."""
    rows = list(_measured(record, _EFFICIENCY))
    low, high = record.series("global_seqlen/balanced_min"), record.series("global_seqlen/balanced_max")
    if low is not None and high is not None and record.config.runtime.num_workers > 1:
        idle = float(((high.values - low.values) / np.maximum(high.values, 1)).mean())
        note = "Mean of 1 - balanced_min / balanced_max. Shares cost the same: long answers cost more a token."
        rows.append(_row("Tokens the lightest rank lacks", Cell(numbers.percent(idle, 2), idle), high.name, note))
    return table("efficiency", "Efficiency", _MEASURES, rows)


def phase_table(record: RunRecord) -> Table:
    """Mean seconds of each phase; what happens beside the steps below."""
    phases = mean_phases(record)
    total = sum(phase.seconds for phase in phases)
    rows: list[tuple[Value, ...]] = [
        (phase.title, phase.seconds, phase.seconds / total, "" if phase.name == "other" else f"timing_s/{phase.name}")
        for phase in phases
    ]
    if phases:
        rows.append(("Step", record.step_s, 1.0, "timing_s/step"))
    for name, title in BESIDE.items():
        series = record.series(f"timing_s/{name}")
        if series is not None:
            times = "once" if len(series) == 1 else f"{len(series)} times"
            if name == "save_checkpoint":  # every step has this metric, and it is 0 at most of them
                times = f"mean over {len(series)} steps"
            rows.append((f"{title} ({times}, not in the step)", series.mean(), "", series.name))
    columns = (Column("Phase"), Column("Mean", "seconds"), Column("Share", "share"), Column("Metric", "code"))
    return table("phases", "Phases of a step", columns, rows, "The first step is left out: it warms up.")


def cost_table(record: RunRecord) -> Table:
    """What each level of held-out reward cost."""
    rows = [
        (level, cost.step, cost.tokens, cost.seconds)
        for level in levels_of(record)[-MOST_LEVELS:]
        if (cost := cost_of(record, level)) is not None
    ]
    columns = (Column("Held-out reward", "number"), Column("Step", "number"), Column("Tokens", "number"),
               Column("Seconds of training", "seconds"))  # fmt: skip
    note = "The first validation at or above the level, with the tokens and seconds of all training steps up to it."
    return table("cost", "What a score cost", columns, rows, note)


POINT = 0.01
"""Of the held-out reward: what costs are told by."""


def spent_table(runs: Sequence[tuple[str, RunRecord]]) -> Table | None:
    """GPU time, energy and price of each run and of all, and by point of held-out reward gained; None without GPUs."""
    counted = [(label, run, run.spent) for label, run in runs if run.spent is not None]
    if not counted:
        return None
    rows = [_spent_row(label, used, used.price(_price_of(run)), run.gained) for label, run, used in counted]
    if len(counted) > 1:
        prices = [used.price(_price_of(run)) for _, run, used in counted]
        price = None if None in prices else sum(price for price in prices if price is not None)
        total = sum((used for _, _, used in counted), NO_COST)
        rows.append(_spent_row("all", total, price, max(run.gained for _, run, _ in counted)))
    columns = (Column("Run", "code"), Column("GPU time", "seconds"), Column("Energy, Wh", "number"),
               Column("Price", "number"), Column("Points gained", "number"), Column("GPU time a point", "seconds"),
               Column("Energy a point, Wh", "number"), Column("Price a point", "number"))  # fmt: skip
    note = (
        f"GPU time and energy are those of all attempts; a point is {POINT:g} of held-out reward, from the first "
        "validation to the last; all runs together are set against the largest gain of one. Prices are by "
        "tracking.price_per_gpu_hour."
    )
    return table("spent", "What it cost", columns, rows, note)


def _price_of(run: RunRecord) -> float | None:
    return run.config.tracking.price_per_gpu_hour


def _spent_row(label: str, used: Spent, price: float | None, gained: float) -> tuple[Value, ...]:
    points = gained / POINT
    costs = (used.gpu_seconds, used.energy_wh, price)
    by_point = (None if cost is None or points <= 0 else cost / points for cost in costs)
    return label, *costs, points, *by_point


def check_table(record: RunRecord) -> Table:
    """The checks of stability."""
    results = {
        True: Cell("passes", True, "good"),
        False: Cell("fails", False, "bad"),
        None: Cell("no data", None, "muted"),
    }
    rows = [
        (check.name, results[check.ok], Cell(check.measured, check.value), check.rule, check.metric)
        for check in stability_checks(record)
    ]
    columns = (Column("Check"), Column("Result"), Column("Measured"), Column("Rule"), Column("Metric", "code"))
    return table("checks", "Checks of stability", columns, rows)


_CURVES = ("critic/score/mean", "actor/entropy", "actor/ppo_kl", "actor/kl_loss", "actor/grad_norm",
           "actor/pg_clipfrac", "critic/vf_explained_var", "response_length/mean", "response_length/clip_ratio",
           "reward/equal_group_share", "perf/throughput", "timing_s/step")  # fmt: skip


def curve_table(record: RunRecord) -> Table:
    """The main curves as text, for where no picture is shown."""
    found = [series for name in _CURVES if (series := record.series(name)) is not None]
    rows = [
        (series.name, numbers.sparkline(series.values.tolist()), series.first, series.last,
         float(series.values.min()), float(series.values.max()), _unit_of(series.name))
        for series in found
    ]  # fmt: skip
    columns = (Column("Metric", "code"), Column("Curve"), Column("First", "number"), Column("Last", "number"),
               Column("Lowest", "number"), Column("Highest", "number"), Column("Unit"))  # fmt: skip
    return table("curves", "Curves as text", columns, rows, folded=True)


def last_step_table(record: RunRecord) -> Table:
    """Every metric of the last training step."""
    columns = (Column("Metric", "code"), Column("Value", "number"), Column("Unit"), Column("Definition"))
    last = record.training_steps[-1] if record.training_steps else None
    metrics = sorted(last.metrics.items()) if last is not None else []
    rows = [(name, value, _unit_of(name), _definition_of(name)) for name, value in metrics]
    title = f"Every metric of {'the last step' if last is None else f'step {last.step}'}"
    return table("last_step", title, columns, rows, folded=True)


def _definition_of(metric: str) -> str:
    found = describe(metric) if metric else None
    return found.definition if found is not None else ""


def _unit_of(metric: str) -> str:
    found = describe(metric)
    return found.unit if found is not None and found.unit != "1" else ""


LEVEL_STEP = 0.1
"""Costs are listed for every tenth of a point between the first validation and the best."""

ROUNDING = 1e-9
"""A mean of scores may lie so far beside the tenth that it is."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The first validation at or above a level. `tokens` and `seconds` are None where they were not measured."""

    step: int
    tokens: float | None
    seconds: float | None


def levels_of(*records: RunRecord) -> tuple[float, ...]:
    """Multiples of 0.1 above the lowest first validation, up to the highest one of all runs."""
    curves = [found for record in records if (found := record.held_out(record.reward_statistic))]
    if not curves:
        return ()
    first = min(curve[0][1].value for curve in curves)
    best = max(interval.value for curve in curves for _, interval in curve)
    low, high = (math.floor(value / LEVEL_STEP + ROUNDING) for value in (first, best))
    return tuple(round(tenth * LEVEL_STEP, 10) for tenth in range(low + 1, high + 1))


def cost_of(record: RunRecord, level: float) -> Cost | None:
    """Step, tokens and seconds to a level of the held-out reward; None if the run never reached it."""
    for step, interval in record.held_out(record.reward_statistic):
        if interval.value >= level - ROUNDING:
            totals = (record.tokens, record.seconds)
            return Cost(step, *(None if each is None else float(each.up_to(np.array([step]))[0]) for each in totals))
    return None


PLAN_FILE = "memory_plan.json"
BYTES_PER_GB = 1e9

_MEASURED = (
    ("perf/max_memory_allocated_gb", "Device memory held by tensors, peak"),
    ("perf/max_memory_reserved_gb", "Device memory reserved by the allocator, peak"),
    ("perf/cpu_memory_used_gb", "Host memory in use, all processes, peak"),
    ("system/process_memory_gb", "Memory of the trainer's process, peak"),
)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one device by what they are for, as estimated before the run; `capacity_bytes`: 0 where not known."""

    parts: Mapping[str, int]
    capacity_bytes: int = 0
    device: str = ""
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def total_bytes(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    def write(self, run_dir: Path) -> Path:
        """Keep it in the run's folder."""
        target = run_dir / PLAN_FILE
        write_json_atomically(target, _PLAN.dump_python(self, mode="json"))
        return target


_PLAN = TypeAdapter(MemoryPlan)


def read_memory_plan(run_dir: Path) -> MemoryPlan | None:
    """What `MemoryPlan.write` wrote; None without a plan.

    Raises:
        DataError: the file is there and cannot be read.
    """
    file = run_dir / PLAN_FILE
    if not file.is_file():
        return None
    try:
        return _PLAN.validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise DataError(f"{file}: cannot be read as a memory plan; the report goes on without it") from error


def memory_blocks(record: RunRecord) -> tuple[Block, ...]:
    """The plan by part, and each measured peak with what was planned for it."""
    try:
        plan = read_memory_plan(record.run_dir)
    except DataError as error:
        return (Prose(str(error)), _peaks(record, None))
    if plan is None:
        return (Prose("No memory plan was made for this run; these are the peaks alone."), _peaks(record, None))
    return (_planned(plan), *map(Prose, plan.notes), _peaks(record, plan))


def _planned(plan: MemoryPlan) -> Table:
    parts = [*plan.parts.items(), ("Sum", plan.total_bytes)]
    rows: list[tuple[Value, ...]] = [(name, _gb(size), size / max(1, plan.total_bytes)) for name, size in parts]
    if plan.capacity_bytes:
        rows.append(("The device has", _gb(plan.capacity_bytes), ""))
    columns = (Column("Part"), Column("Planned", "number"), Column("Share", "share"))
    return table("memory_plan", f"Planned on {plan.device}" if plan.device else "Planned", columns, rows)


def _peaks(record: RunRecord, plan: MemoryPlan | None) -> Table:
    rows: list[tuple[Value, ...]] = []
    for metric, label in _MEASURED:
        series = record.series(metric)
        if series is None:
            continue
        peak = float(series.values.max())
        on_device = plan is not None and metric.startswith("perf/max_memory_allocated")
        planned = plan.total_bytes / BYTES_PER_GB if plan is not None and on_device else None
        share = peak / planned if planned else Cell("")
        rows.append((label, cell(peak, unit="GB"), cell(planned, unit="GB"), share, metric))
    columns = (Column("Measure"), Column("Peak", "number"), Column("Planned", "number"),
               Column("Of the plan", "share"), Column("Metric", "code"))  # fmt: skip
    return table("memory_peak", "Measured", columns, rows)


def _gb(size: int) -> Cell:
    return Cell(cell(size / BYTES_PER_GB, unit="GB").text, size)
