"""Tables of a run's training: convergence, speed, memory against its plan, checks, every metric of the last step."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from rlcore.errors import DataError
from rlcore.report import document as doc
from rlcore.report import numbers
from rlcore.report.curves import BESIDE, mean_phases, title_of
from rlcore.report.document import Block, Cell, Column, Table
from rlcore.report.findings import LATE, stability_checks
from rlcore.report.record import RunRecord
from rlcore.report.series import Series, trend_of
from rlcore.storage.publish import write_json_atomically
from rlcore.tracking.catalog import describe

Row = tuple[Cell, ...]
_MEASURES = (Column("Measure"), Column("Value", "number"), Column("Metric", "code"), Column("Definition"))
MOST_LEVELS = 8
"""Rows of the table of costs at most: the highest levels."""


def convergence_table(record: RunRecord) -> Table:
    """What changed from the first steps to the last."""
    rows: list[Row] = []
    reward = record.series("critic/score/mean")
    if reward is not None:
        best = int(np.argmax(reward.smooth))
        rows += [
            _row("Training reward, first tenth", doc.score(float(reward.head(0.1).mean())), reward.name),
            _row("Training reward, last tenth", doc.score(reward.tail(0.1).mean()), reward.name),
            _row(f"Training reward, best {reward.window} steps", doc.score(float(reward.smooth[best])), reward.name,
                 f"Highest moving mean, at step {int(reward.steps[best])}."),
        ]  # fmt: skip
        trend = trend_of(reward)
        if trend is not None:
            cell = Cell(numbers.signed_interval(trend.change), doc.interval_value(trend.change))
            note = f"Change of the fitted line over the last {trend.num_steps} steps, with a 95% interval."
            rows.append(_row("Trend of the training reward", cell, reward.name, note))
    held_out = record.held_out(record.reward_statistic)
    if held_out:
        name = f"val-core/{record.data_source}/{record.reward_statistic}"
        rows.append(_row("Held-out reward, last", doc.interval(held_out[-1][1]), name))
        if reward is not None and held_out[-1][0] > 0:
            gap = reward.tail(0.1).mean() - held_out[-1][1].value
            cell = Cell(numbers.signed(gap), gap)
            rows.append(_row("Training less held-out reward", cell, "", "A large gap is learning by heart."))
    rows += _first_to_last(
        record,
        ("Entropy, first → last tenth", "actor/entropy"),
        ("KL in the loss, first → last tenth", "actor/kl_loss"),
        ("KL in the reward, first → last tenth", "actor/reward_kl_penalty"),
        ("Explained variance, first → last tenth", "critic/vf_explained_var"),
        ("Value loss, first → last tenth", "critic/vf_loss"),
    )
    rows += _summaries(record)
    return Table("convergence", "From the first steps to the last", _MEASURES, tuple(rows))


def _summaries(record: RunRecord) -> Iterable[Row]:
    for metric, label in (("actor/ppo_kl", "Step size in KL"), ("actor/grad_norm", "Gradient norm")):
        series = record.series(metric)
        if series is not None:
            sizes = np.abs(series.values)
            middle, most = float(np.median(sizes)), float(sizes.max())
            cell = Cell(f"{numbers.compact(middle)} / {numbers.compact(most)}", {"median": middle, "max": most})
            yield _row(f"{label}, median / largest", cell, metric)
    clipped = record.series("actor/pg_clipfrac")
    if clipped is not None:
        yield _row("Clipped tokens, last third", doc.share(clipped.tail(LATE).mean(), 2), clipped.name)
    for metric in ("actor/lr", "critic/lr"):
        rate = record.series(metric)
        if rate is not None:
            owner = "policy" if metric.startswith("actor") else "critic"
            yield _row(f"Learning rate of the {owner}, last", doc.number(rate.last), metric)


def _first_to_last(record: RunRecord, *wanted: tuple[str, str]) -> Iterable[Row]:
    for label, metric in wanted:
        series = record.series(metric)
        if series is not None:
            first, last = float(series.head(0.1).mean()), series.tail(0.1).mean()
            cell = Cell(f"{numbers.compact(first)} → {numbers.compact(last)}", {"first": first, "last": last})
            yield _row(label, cell, metric)


def performance_table(record: RunRecord) -> Table:
    """How fast it went, and what it took."""
    rows: list[Row] = []
    tokens, seconds = record.tokens, record.seconds
    if seconds is not None:
        rows.append(_row("Seconds of training steps", doc.seconds(seconds.last), "timing_s/step",
                         "Sum over steps; validation, checkpoints and start-up come on top."))  # fmt: skip
    if len(record.steps) > 1:
        wall = record.steps[-1].time - record.steps[0].time
        rows.append(
            _row("From first to last line of the journal", doc.seconds(wall), "", "By the clock, all included.")
        )
    if tokens is not None:
        rows.append(_row("Tokens trained on", doc.number(tokens.last), "perf/total_num_tokens", "Sum over steps."))
    rows += _means(
        record,
        ("Seconds a step, median", "perf/time_per_step", "median", "s"),
        ("Throughput, median", "perf/throughput", "median", "tokens/s/device"),
        ("Model FLOP utilization, policy", "perf/mfu/actor", "mean", "%"),
        ("Model FLOP utilization, critic", "perf/mfu/critic", "mean", "%"),
        ("Device memory held, peak", "perf/max_memory_allocated_gb", "max", "GB"),
        ("Device memory reserved, peak", "perf/max_memory_reserved_gb", "max", "GB"),
        ("Host memory in use, peak", "perf/cpu_memory_used_gb", "max", "GB"),
    )
    return Table("performance", "Speed and memory", _MEASURES, tuple(rows))


def efficiency_table(record: RunRecord) -> Table:
    """How much of the work taught something."""
    rows = list(
        _means(
            record,
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
    )
    low, high = record.series("global_seqlen/balanced_min"), record.series("global_seqlen/balanced_max")
    if low is not None and high is not None and record.config.runtime.num_workers > 1:
        idle = float(((high.values - low.values) / np.maximum(high.values, 1)).mean())
        note = "Mean of 1 - balanced_min / balanced_max: time in which ranks wait for each other."
        rows.append(_row("Tokens the lightest rank lacks", doc.share(idle, 2), "global_seqlen/balanced_max", note))
    return Table("efficiency", "Efficiency", _MEASURES, tuple(rows))


def _means(record: RunRecord, *wanted: tuple[str, str, str, str]) -> Iterable[Row]:
    """Rows of (label, metric, how it is summed up, unit)."""
    for label, metric, how, unit in wanted:
        series = record.series(metric)
        if series is None:
            continue
        value = _summed_up(series, how)
        yield _row(label, doc.share(value, 1) if unit == "%" else doc.number(value, unit), metric)


def _summed_up(series: Series, how: str) -> float:
    match how:
        case "median":
            return float(np.median(series.values))
        case "max":
            return float(series.values.max())
        case "late":
            return series.tail(LATE).mean()
    return series.mean()


def phase_table(record: RunRecord) -> Table:
    """Mean seconds of each phase; what happens beside the steps below."""
    phases = mean_phases(record)
    total = sum(phase.seconds for phase in phases)
    rows = [
        (doc.text(phase.title), doc.seconds(phase.seconds), doc.share(phase.seconds / total), _metric_of(phase.name))
        for phase in phases
    ]
    if phases:
        rows.append((doc.text("Step"), doc.seconds(total), doc.share(1.0), _metric_of("step")))
    for name in BESIDE:
        series = record.series(f"timing_s/{name}")
        if series is not None:
            times = "once" if len(series) == 1 else f"{len(series)} times"
            if name == "save_checkpoint":  # every step has this metric, and it is 0 at most of them
                times = f"mean over {len(series)} steps"
            each = f"{title_of(name)} ({times}, not in the step)"
            rows.append((doc.text(each), doc.seconds(series.mean()), doc.text(""), _metric_of(name)))
    columns = (Column("Phase"), Column("Mean", "number"), Column("Share", "number"), Column("Metric", "code"))
    return Table("phases", "Phases of a step", columns, tuple(rows), "The first step is left out: it warms up.")


def _metric_of(phase: str) -> Cell:
    return doc.text("") if phase == "other" else doc.text(f"timing_s/{phase}")


def cost_table(record: RunRecord) -> Table:
    """What each level of held-out reward cost."""
    costs = [cost for level in levels_of(record)[-MOST_LEVELS:] if (cost := cost_of(record, level)) is not None]
    rows = tuple(
        (
            Cell(f"{cost.level:.1f}", cost.level),
            doc.number(cost.step),
            doc.number(cost.tokens),
            doc.seconds(cost.seconds),
        )
        for cost in costs
    )
    columns = tuple(Column(title, "number") for title in ("Held-out reward", "Step", "Tokens", "Seconds of training"))
    note = "The first validation at or above the level, with the tokens and seconds of all training steps up to it."
    return Table("cost", "What a score cost", columns, rows, note)


def check_table(record: RunRecord) -> Table:
    """The checks of stability."""
    tones = {True: ("passes", "good"), False: ("fails", "bad"), None: ("no data", "muted")}
    rows = []
    for check in stability_checks(record):
        verdict, tone = tones[check.ok]
        result = Cell(verdict, check.ok, tone)  # type: ignore[arg-type]
        rows.append((doc.text(check.name), result, Cell(check.measured, check.value), doc.text(check.rule),
                     doc.text(check.metric)))  # fmt: skip
    columns = (Column("Check"), Column("Result"), Column("Measured"), Column("Rule"), Column("Metric", "code"))
    return Table("checks", "Checks of stability", columns, tuple(rows))


def curve_table(record: RunRecord) -> Table:
    """The main curves as text, for where no picture is shown."""
    wanted = ("critic/score/mean", "actor/entropy", "actor/ppo_kl", "actor/kl_loss", "actor/grad_norm",
              "actor/pg_clipfrac", "critic/vf_explained_var", "response_length/mean", "response_length/clip_ratio",
              "reward/equal_group_share", "perf/throughput", "timing_s/step")  # fmt: skip
    found = [series for name in wanted if (series := record.series(name)) is not None]
    rows = tuple(
        (doc.text(series.name), doc.text(numbers.sparkline(series.values.tolist())), doc.number(series.first),
         doc.number(series.last), doc.number(float(series.values.min())), doc.number(float(series.values.max())),
         doc.text(_unit_of(series.name)))
        for series in found
    )  # fmt: skip
    columns = (Column("Metric", "code"), Column("Curve"), Column("First", "number"), Column("Last", "number"),
               Column("Lowest", "number"), Column("Highest", "number"), Column("Unit"))  # fmt: skip
    return Table("curves", "Curves as text", columns, rows, folded=True)


def last_step_table(record: RunRecord) -> Table:
    """Every metric of the last training step."""
    columns = (Column("Metric", "code"), Column("Value", "number"), Column("Unit"), Column("Definition"))
    if not record.training_steps:
        return Table("last_step", "Every metric of the last step", columns, (), folded=True)
    last = record.training_steps[-1]
    rows = tuple(
        (doc.text(name), doc.number(value), doc.text(_unit_of(name)), doc.text(_definition_of(name)))
        for name, value in sorted(last.metrics.items())
    )
    return Table("last_step", f"Every metric of step {last.step}", columns, rows, folded=True)


def _row(label: str, value: Cell, metric: str, note: str = "") -> Row:
    return (doc.text(label), value, doc.text(metric), doc.text(note or _definition_of(metric)))


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

    level: float
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
            return Cost(level, step, total_at(record.tokens, step), total_at(record.seconds, step))
    return None


def total_at(totals: Series | None, step: int) -> float | None:
    """A running total after a step; 0 before the first one."""
    if totals is None:
        return None
    index = int(np.searchsorted(totals.steps, step, side="right")) - 1
    return float(totals.values[index]) if index >= 0 else 0.0


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
        return (doc.Prose(str(error)), _peaks(record, None))
    if plan is None:
        return (doc.Prose("No memory plan was made for this run; these are the peaks alone."), _peaks(record, None))
    return (_planned(plan), *(doc.Prose(note) for note in plan.notes), _peaks(record, plan))


def _planned(plan: MemoryPlan) -> Table:
    parts = [*plan.parts.items(), ("Sum", plan.total_bytes)]
    rows = [(doc.text(name), _gb(size), doc.share(size / max(1, plan.total_bytes))) for name, size in parts]
    if plan.capacity_bytes:
        rows.append((doc.text("The device has"), _gb(plan.capacity_bytes), doc.text("")))
    columns = (Column("Part"), Column("Planned", "number"), Column("Share", "number"))
    title = f"Planned on {plan.device}" if plan.device else "Planned"
    return Table("memory_plan", title, columns, tuple(rows))


def _peaks(record: RunRecord, plan: MemoryPlan | None) -> Table:
    rows = []
    for metric, label in _MEASURED:
        series = record.series(metric)
        if series is None:
            continue
        peak = float(series.values.max())
        on_device = plan is not None and metric.startswith("perf/max_memory_allocated")
        planned = plan.total_bytes / BYTES_PER_GB if plan is not None and on_device else None
        share = doc.share(peak / planned) if planned else Cell("")
        rows.append((doc.text(label), doc.number(peak, "GB"), doc.number(planned, "GB"), share, doc.text(metric)))
    columns = (Column("Measure"), Column("Peak", "number"), Column("Planned", "number"),
               Column("Of the plan", "number"), Column("Metric", "code"))  # fmt: skip
    return Table("memory_peak", "Measured", columns, tuple(rows))


def _gb(size: int) -> Cell:
    return Cell(doc.number(size / BYTES_PER_GB, "GB").text, size)
