"""Tables of a run's training: convergence, speed, memory against its plan, checks, every metric of the last step."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd
from pydantic import TypeAdapter

from rlcore.errors import DataError
from rlcore.report import numbers
from rlcore.report.curves import PHASES, mean_phases
from rlcore.report.document import Block, Cell, Kind, Prose, Row, Table, Value, cell, table
from rlcore.report.findings import stability_checks
from rlcore.report.record import RunRecord
from rlcore.report.series import Series, first_tenth, last_tenth, late_mean, smooth, trend_of, up_to, warmed_up
from rlcore.storage.disk import BYTES_PER_GB
from rlcore.storage.documents import read_document
from rlcore.tracking.catalog import describe
from rlcore.tracking.cost import NOTHING as NO_COST


def _change(series: Series) -> Cell:
    return _pair({"first": first_tenth(series), "last": last_tenth(series)}, "→")


def _extent(series: Series) -> Cell:
    return _pair({"median": series.abs().median(), "max": series.abs().max()}, "/")


def _pair(values: Mapping[str, float], sign: str) -> Cell:
    return Cell(f" {sign} ".join(map(numbers.compact, values.values())), {key: float(v) for key, v in values.items()})


class Measure(NamedTuple):
    """A row of a table: how a metric's values are summed up (None: nothing to say), and how that is shown.

    `note`: what it means, where that is not the metric's own definition.
    """

    label: str
    metric: str
    sum_up: Callable[[Series], Value]
    kind: Kind = "number"
    unit: str = ""
    note: str = ""


REWARD, STEP_S = "critic/score/mean", "timing_s/step"
_CONVERGENCE = (
    Measure("Training reward, first tenth", REWARD, first_tenth, "score"),
    Measure("Training reward, last tenth", REWARD, last_tenth, "score"),
    Measure("Training reward, best", REWARD, lambda each: smooth(each).max(), "score",
            note="Highest moving mean, over 1/15 of the run."),
    Measure("Trend of the training reward", REWARD, trend_of, "difference", note="Change of the fitted line over the "
            "last third of the steps, with a 95% interval."),
    Measure("Entropy, first → last tenth", "actor/entropy", _change),
    Measure("KL in the loss, first → last tenth", "actor/kl_loss", _change),
    Measure("KL in the reward, first → last tenth", "actor/reward_kl_penalty", _change),
    Measure("Explained variance, first → last tenth", "critic/vf_explained_var", _change),
    Measure("Value loss, first → last tenth", "critic/vf_loss", _change),
    Measure("Step size in KL, median / largest", "actor/ppo_kl", _extent),
    Measure("Gradient norm, median / largest", "actor/grad_norm", _extent),
    Measure("Clipped tokens, last third", "actor/pg_clipfrac", late_mean, "percent"),
    Measure("Learning rate of the policy, last", "actor/lr", lambda each: each.iloc[-1]),
    Measure("Learning rate of the critic, last", "critic/lr", lambda each: each.iloc[-1]),
)  # fmt: skip
_PERFORMANCE = (
    Measure("Seconds of training steps", STEP_S, pd.Series.sum, "seconds",
            note="Sum over steps; validation, checkpoints and start-up come on top."),
    Measure("Seconds a step", STEP_S, lambda each: warmed_up(each).mean(), "seconds",
            note="Mean without the first step, which warms up."),
    Measure("Tokens trained on", "perf/total_num_tokens", pd.Series.sum, note="Sum over steps."),
    Measure("Throughput, median", "perf/throughput", pd.Series.median, unit="tokens/s/device"),
    Measure("Model FLOP utilization, policy", "perf/mfu/actor", pd.Series.mean, "percent"),
    Measure("Model FLOP utilization, critic", "perf/mfu/critic", pd.Series.mean, "percent"),
    Measure("Device memory held, peak", "perf/max_memory_allocated_gb", pd.Series.max, unit="GB"),
    Measure("Device memory reserved, peak", "perf/max_memory_reserved_gb", pd.Series.max, unit="GB"),
    Measure("Host memory in use, peak", "perf/cpu_memory_used_gb", pd.Series.max, unit="GB"),
)  # fmt: skip
_EFFICIENCY = (
    Measure("Answer length, last third", "response_length/mean", late_mean, unit="tokens"),
    Measure("Answers cut at the limit, last third", "response_length/clip_ratio", late_mean, "percent"),
    Measure("Prompt length, mean", "prompt_length/mean", pd.Series.mean, unit="tokens"),
    Measure("Groups of equal score, last third", "reward/equal_group_share", late_mean, "percent"),
    Measure("Groups replaced, mean a step", "reward/groups_dropped", pd.Series.mean),
    Measure("Generation per answer token", "timing_per_token_ms/gen", pd.Series.median, unit="ms"),
    Measure("Policy update per token", "timing_per_token_ms/update_actor", pd.Series.median, unit="ms"),
    Measure("Reference pass per token", "timing_per_token_ms/ref", pd.Series.median, unit="ms"),
    Measure("Critic update per token", "timing_per_token_ms/update_critic", pd.Series.median, unit="ms"),
    Measure("Sampler's distance from the trainer", "training/rollout_probs_diff_mean", pd.Series.mean),
)
_MEMORY = {
    "Device memory held by tensors, peak": "perf/max_memory_allocated_gb",
    "Device memory reserved by the allocator, peak": "perf/max_memory_reserved_gb",
    "Host memory in use, all processes, peak": "perf/cpu_memory_used_gb",
    "Memory of the trainer's process, peak": "system/process_memory_gb",
}


def _table(name: str, title: str, rows: Iterable[Row]) -> Table:
    columns: dict[str, Kind] = {"Measure": "text", "Value": "number", "Metric": "code", "Definition": "text"}
    return table(name, title, columns, rows)


def _measured(record: RunRecord, measures: Iterable[Measure]) -> Iterable[Row]:
    """A row of each measure whose metric the run has."""
    for label, metric, sum_up, kind, unit, note in measures:
        series = record.series(metric)
        if series is not None and (value := sum_up(series)) is not None:
            yield label, cell(value, kind, unit), metric, note or _doc_of(metric)[1]


def _doc_of(metric: str) -> tuple[str, str]:
    """Unit and definition of a metric, as far as they are known."""
    found = describe(metric)
    return ("", "") if found is None else (found.unit if found.unit != "1" else "", found.definition)


def convergence_table(record: RunRecord) -> Table:
    """What changed from the first steps to the last."""
    rows = list(_measured(record, _CONVERGENCE))
    reward, held_out = record.series(REWARD), record.held_out(record.reward_statistic)
    if held_out:
        step, found = held_out[-1]
        name = f"val-core/{record.data_source}/{record.reward_statistic}"
        rows.append(("Held-out reward, last", found, name, _doc_of(name)[1]))
        if reward is not None and step > 0:
            gap = cell(last_tenth(reward) - found.value, "signed")
            rows.append(("Training less held-out reward", gap, "", "A large gap is learning by heart."))
    return _table("convergence", "From the first steps to the last", rows)


def performance_table(record: RunRecord) -> Table:
    """How fast it went, and what it took."""
    rows = list(_measured(record, _PERFORMANCE))
    if len(record.steps) > 1:
        wall = cell(record.steps[-1].time - record.steps[0].time, "seconds")
        rows.insert(0, ("From first to last line of the journal", wall, "", "By the clock, all included."))
    return _table("performance", "Speed and memory", rows)


def efficiency_table(record: RunRecord) -> Table:
    """How much of the work taught something."""
    rows = list(_measured(record, _EFFICIENCY))
    low, high = record.series("global_seqlen/balanced_min"), record.series("global_seqlen/balanced_max")
    if low is not None and high is not None and record.config.runtime.num_workers > 1:
        idle = cell(float(((high - low) / high.clip(lower=1)).mean()), "percent")
        note = "Mean of 1 - balanced_min / balanced_max. Shares cost the same: long answers cost more a token."
        rows.append(("Tokens the lightest rank lacks", idle, "global_seqlen/balanced_max", note))
    return _table("efficiency", "Efficiency", rows)


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


_RESULTS = {
    True: Cell("passes", True, "good"),
    False: Cell("fails", False, "bad"),
    None: Cell("no data", None, "muted"),
}


def check_table(record: RunRecord) -> Table:
    """The checks of stability."""
    rows = [
        (check.name, _RESULTS[check.ok], Cell(check.measured, check.value), check.rule, check.metric)
        for check in stability_checks(record)
    ]
    columns: dict[str, Kind] = {"Check": "text", "Result": "text", "Measured": "text", "Rule": "text", "Metric": "code"}
    return table("checks", "Checks of stability", columns, rows)


_CURVES = ("critic/score/mean", "actor/entropy", "actor/ppo_kl", "actor/kl_loss", "actor/grad_norm",
           "actor/pg_clipfrac", "critic/vf_explained_var", "response_length/mean", "response_length/clip_ratio",
           "reward/equal_group_share", "perf/throughput", "timing_s/step")  # fmt: skip


def curve_table(record: RunRecord) -> Table:
    """The main curves as text, for where no picture is shown."""
    return table("curves", "Curves as text",
                 {"Metric": "code", "Curve": "text", "First": "number", "Last": "number", "Lowest": "number",
                  "Highest": "number", "Unit": "text"},
                 [(name, numbers.sparkline(series.tolist()), series.iloc[0], series.iloc[-1], series.min(),
                   series.max(), _doc_of(name)[0])
                  for name in _CURVES if (series := record.series(name)) is not None], folded=True)  # fmt: skip


def last_step_table(record: RunRecord) -> Table:
    """Every metric of the last training step."""
    last = record.training_steps[-1] if record.training_steps else None
    rows = [] if last is None else [(name, value, *_doc_of(name)) for name, value in sorted(last.metrics.items())]
    title = f"Every metric of {'the last step' if last is None else f'step {last.step}'}"
    columns: dict[str, Kind] = {"Metric": "code", "Value": "number", "Unit": "text", "Definition": "text"}
    return table("last_step", title, columns, rows, folded=True)


# ------------------------------------------------------------------ costs, of one run or several

LEVEL_STEP = 0.1
"""Costs are listed for every tenth of a point between the first validation and the best."""

ROUNDING = 1e-9
"""A mean of scores may lie so far beside the tenth that it is."""

MOST_LEVELS = 8
"""A table of costs has at most so many levels, the highest ones."""

POINT = 0.01
"""A gain in held-out reward, by which costs are divided."""


def levels_of(*records: RunRecord) -> list[float]:
    """The highest multiples of 0.1 above the lowest first validation, up to the best one of all runs."""
    curves = [found for record in records if (found := record.held_out(record.reward_statistic))]
    if not curves:
        return []
    ends = min(curve[0][1].value for curve in curves), max(each.value for curve in curves for _, each in curve)
    low, high = (math.floor(value / LEVEL_STEP + ROUNDING) for value in ends)
    return [round(tenth * LEVEL_STEP, 10) for tenth in range(max(low, high - MOST_LEVELS) + 1, high + 1)]


def cost_of(record: RunRecord, level: float) -> tuple[int, float | None, float | None] | None:
    """Step of the first validation at or above a level of the held-out reward, and tokens and seconds up to it, None
    where they were not measured; None if the run never reached it.
    """
    for step, interval in record.held_out(record.reward_statistic):
        if interval.value >= level - ROUNDING:
            totals = (record.tokens, record.seconds)
            tokens, seconds = (None if each is None else up_to(each, pd.Index([step])).iloc[0] for each in totals)
            return step, tokens, seconds
    return None


def cost_table(runs: Mapping[str, RunRecord]) -> Table:
    """What each level of held-out reward cost each run, by its label."""
    never = (Cell("not reached", None, "muted"),) * 3
    rows: list[Row] = [
        (level, label, *(cost_of(run, level) or never))
        for level in levels_of(*runs.values())
        for label, run in runs.items()
    ]
    columns: dict[str, Kind] = {"Held-out reward": "number", "Run": "code", "Step": "number", "Tokens": "number",
                                "Training time": "seconds"}  # fmt: skip
    note = "The first validation at or above the level, with the tokens and seconds of all training steps up to it."
    return table("cost", "What a score cost", columns, rows, note)


def spent_table(runs: Mapping[str, RunRecord]) -> Table | None:
    """GPU time, energy and price of each run and of all, and by point of held-out reward gained; None without GPUs."""
    spent = {label: (run.spent, run.price, run.gained) for label, run in runs.items() if run.spent is not None}
    if not spent:
        return None
    if len(spent) > 1:
        uses, prices, gains = zip(*spent.values(), strict=True)
        spent["all"] = (sum(uses, NO_COST), None if None in prices else sum(prices), max(gains))
    rows = []
    for label, (used, price, gained) in spent.items():
        costs, points = (used.gpu_seconds, used.energy_wh, price), gained / POINT
        by_point = (None if cost is None or points <= 0 else cost / points for cost in costs)
        rows.append((label, *costs, points, *by_point))
    columns: dict[str, Kind] = {"Run": "code", "GPU time": "seconds", "Energy, Wh": "number", "Price": "number",
                                "Points gained": "number", "GPU time a point": "seconds",
                                "Energy a point, Wh": "number", "Price a point": "number"}  # fmt: skip
    note = (
        f"GPU time and energy are those of all attempts; a point is {POINT:g} of held-out reward, from the first "
        "validation to the last; all runs together are set against the largest gain of one. Prices are by "
        "tracking.price_per_gpu_hour."
    )
    return table("spent", "What it cost", columns, rows, note)


# ------------------------------------------------------------------ memory

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


def memory_blocks(record: RunRecord) -> tuple[Block, ...]:
    """The plan by part, and each measured peak with what was planned for it."""
    try:
        plan = read_document(record.run_dir / PLAN_FILE, _PLAN, "the report goes on without this memory plan")
        why = "No memory plan was made for this run; these are the peaks alone."
    except DataError as error:
        plan, why = None, str(error)
    if plan is None:
        return (Prose(why), _peaks(record, None))
    total = sum(plan.parts.values())
    rows: list[Row] = [(name, _gb(size), size / max(1, total)) for name, size in [*plan.parts.items(), ("Sum", total)]]
    if plan.capacity_bytes:
        rows.append(("The device has", _gb(plan.capacity_bytes), ""))
    title = f"Planned on {plan.device}" if plan.device else "Planned"
    planned = table("memory_plan", title, {"Part": "text", "Planned": "number", "Share": "share"}, rows)
    return (planned, *map(Prose, plan.notes), _peaks(record, total / BYTES_PER_GB))


def _peaks(record: RunRecord, planned_gb: float | None) -> Table:
    """The measured peaks; that of the device's tensors beside what was planned."""
    rows: list[Row] = []
    for label, metric in _MEMORY.items():
        series = record.series(metric)
        if series is not None:
            peak, planned = float(series.max()), planned_gb if metric == "perf/max_memory_allocated_gb" else None
            share = peak / planned if planned else Cell("")
            rows.append((label, cell(peak, unit="GB"), cell(planned, unit="GB"), share, metric))
    columns: dict[str, Kind] = {"Measure": "text", "Peak": "number", "Planned": "number", "Of the plan": "share",
                                "Metric": "code"}  # fmt: skip
    return table("memory_peak", "Measured", columns, rows)


def _gb(size: int) -> Cell:
    return Cell(cell(size / BYTES_PER_GB, unit="GB").text, size)
