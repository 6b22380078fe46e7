"""Charts and summary tables of metrics. A `Panel` describes a chart with several metrics of one run. In a comparison of
several runs, the chart shows only the first of these metrics, with the curves of all runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from rlcore.checkpoint.catalog import HELD_OUT_LOSS
from rlcore.config import RunConfig
from rlcore.report import plots, run_sections
from rlcore.report.document import Cell, Kind, Row, Table, Value, cell, compact, table
from rlcore.report.plots import LIGHT, Chart, Series, first_tenth, last_tenth, late_mean, series_of, smooth, thin
from rlcore.report.record import RunRecord, Runs
from rlcore.tracking.catalog import describe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ONE_UPDATE = "each batch is used for one update, so the old and new policies are equal before it"
Groups = Mapping[str, Sequence[RunRecord]]
"""Groups of runs by label. The runs of a group have the same code. They differ only in their seed, or in settings that
`groups_of` ignores."""
Lines = Mapping[str, tuple[str, str]]
"""The color and the label of each line, by metric."""
REWARD, STEP_S = "critic/score/mean", "timing_s/step"
STATISTIC_COLOURS = ("blue", "green", "purple", "orange")


@dataclass(frozen=True, slots=True)
class Panel:
    """The description of a chart over steps. `held_out`: the number of held-out statistics in the chart. `band`: the
    lower and the upper metric of a shaded band, and the band's label. `limit`: the label of a dashed horizontal line,
    and a function that returns its value. `draw`: a function that draws the chart, used instead of `lines`, `held_out`,
    `band` and `limit`. `flat`: an explanation that is shown if all values are 0."""

    name: str
    title: str
    caption: str
    unit: str
    lines: Lines = field(default_factory=dict)
    held_out: int = 0
    band: tuple[str, str, str] | None = None
    limit: tuple[str, Callable[[RunConfig], float]] | None = None
    from_zero: bool = False
    draw: "Callable[[RunRecord, Figure], object] | None" = None
    when: Callable[[RunRecord], bool] = lambda record: True
    height_in: float = 2.5
    flat: str = ""

    def draw_run(self, record: RunRecord, figure: "Figure") -> None:
        """Draw the curves of one run into an empty figure. A curve that is 0 at every step is omitted."""
        if self.draw is not None:
            self.draw(record, figure)
            return
        axes = figure.subplots()
        if self.band is not None:
            low, high = (record.series(metric) for metric in self.band[:2])
            if low is not None and high is not None:
                low, high = thin(low, plots.MAX_POINTS), thin(high, plots.MAX_POINTS)
                axes.fill_between(low.index, low, high, color=LIGHT["blue"], alpha=0.14, lw=0, label=self.band[2])
        found = [(series, look) for metric, look in self.lines.items() if (series := record.series(metric)) is not None]
        for series, look in [one for one in found if one[0].any()] or found[:1]:
            plots.plot_series(axes, series, *look)
        statistics = record.core_statistics[: self.held_out]
        for place, (statistic, color) in enumerate(zip(statistics, STATISTIC_COLOURS, strict=False)):
            points = record.held_out(statistic)
            # points are shifted, so that intervals do not overlap
            aside = (place - (len(statistics) - 1) / 2) * 0.004 * (points[-1][0] - points[0][0] if points else 0)
            if points:
                label = ("held-out " if self.lines else "") + statistic.removeprefix("reward/")
                plots.plot_intervals(axes, [(step + aside, interval) for step, interval in points], color, label)
        plots.format_axes(axes, y=self.unit)
        if self.limit is not None and axes.lines:
            label, height = self.limit[0], self.limit[1](record.config)
            if height < 3 * axes.get_ylim()[1]:
                axes.axhline(height, color=LIGHT["red"], linewidth=0.9, linestyle=(0, (4, 3)), label=label)
        if self.from_zero:
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # otherwise noise looks like change


def _supervised(record: RunRecord, figure: "Figure") -> None:
    axes, panel = figure.subplots(), SUPERVISED[0]
    for metric, (color, label) in panel.lines.items():
        points = [(each.step, each.metrics[metric]) for each in record.supervised_steps if metric in each.metrics]
        if (series := series_of(points)) is not None:
            plots.plot_series(axes, series, color, label, smoothed=False)
    plots.format_axes(axes, y=panel.unit)


def _has_critic(record: RunRecord) -> bool:
    return record.config.critic is not None


SUPERVISED = (
    Panel("supervised", "Loss", "Cross-entropy at the demonstrations' responses.", "nats/token",
          {"sft/loss": ("grey", "training"), HELD_OUT_LOSS: ("blue", "held out")}, height_in=2.9),
    Panel("accuracy", "Accuracy", "Share of response tokens to which the model gives the highest probability.", "share",
          {"sft/accuracy": ("grey", "training"), "sft/held_out_accuracy": ("blue", "held out")}, height_in=2.9),
    Panel("grad_norm", "Gradient norm", "Before clipping.", "global norm", {"sft/grad_norm": ("blue", "policy")},
          limit=("clipped above", lambda config: config.warm_start.optim.grad_clip)),
)  # fmt: skip
LEARNING = (
    Panel("reward", "Reward", "Score of training responses, and of held-out responses with 95% intervals.",
          "score", {REWARD: ("grey", "training")}, held_out=1, height_in=2.9, flat="no response earned a score"),
    Panel("validation", "Held-out problems", "Each held-out metric with its interval over problems.",
          "score or share solved", held_out=4, height_in=2.9),
    Panel("entropy", "Entropy", "At response tokens. A fall means that responses become similar.", "nats/token",
          {"actor/entropy": ("purple", "entropy")}),
    Panel("ppo_kl", "KL", "ppo_kl: change of the policy in a step. kl: distance from the reference or teacher.",
          "nats/token", {"actor/ppo_kl": ("blue", "ppo_kl"), "actor/kl_loss": ("orange", "kl in the loss"),
                         "actor/reward_kl_penalty": ("orange", "kl in the reward"),
                         "actor/teacher_kl": ("teal", "kl to the teacher")}, flat=ONE_UPDATE),
    Panel("grad_norm", "Gradient norm", "Mean over the step's updates, before clipping.", "global norm before clipping",
          {"actor/grad_norm": ("blue", "policy"), "critic/grad_norm": ("orange", "critic")},
          limit=("clipped above", lambda config: config.optim.grad_clip)),
    Panel("clipping", "Clipped tokens", "Share of response tokens whose update is clipped.",
          "share of tokens",
          {"actor/pg_clipfrac": ("blue", "clip range"), "actor/pg_clipfrac_lower": ("red", "dual clip"),
           "critic/vf_clipfrac": ("orange", "value clip")}, flat=ONE_UPDATE),
    Panel("lengths", "Response length", "Band from the shortest to the longest response.", "tokens per response",
          {"response_length/mean": ("blue", "average")}, from_zero=True,
          band=("response_length/min", "response_length/max", "shortest to longest"),
          limit=("limit", lambda config: config.rollout.max_response_tokens)),
    Panel("cut", "Responses truncated at the limit", "They are scored as they are.", "share of responses",
          {"response_length/clip_ratio": ("red", "truncated")}, from_zero=True),
    Panel("groups", "Groups of equal score", "Groups whose responses score the same give group methods no gradient.",
          "share of prompts", {"reward/equal_group_share": ("teal", "equal groups")}),
    Panel("critic", "Critic", "Explained variance of the returns (1 is perfect, 0 is no better than their mean).",
          "share", {"critic/vf_explained_var": ("orange", "explained variance")}, when=_has_critic),
    Panel("value_loss", "Value loss", "Half the squared error, clipped.", "loss",
          {"critic/vf_loss": ("orange", "value loss")}, when=_has_critic),
    Panel("supervised", "Supervised stage", "Cross-entropy at the demonstrations' responses, before the steps above.",
          "nats/token", draw=_supervised, when=lambda record: record.config.warm_start.enabled),
)  # fmt: skip
SPEED = (
    Panel("phases", "Time of a step", "Wall seconds of each phase, stacked.", "seconds per step",
          {STEP_S: ("blue", "step")}, draw=run_sections.draw_phases, height_in=3.2),
    Panel("throughput", "Throughput", "Prompt and response tokens over seconds and devices.", "tokens/s/device",
          {"perf/throughput": ("green", "throughput")}, from_zero=True, height_in=3.2),
)  # fmt: skip
GetSeries = Callable[[RunRecord], Series | None]
_AXES: tuple[tuple[str, str, GetSeries], ...] = (
    ("step", "training step", lambda run: None),
    ("tokens", "tokens trained on", lambda run: run.tokens),
    ("seconds", "seconds of training steps", lambda run: run.seconds),
)


def learning_panels(runs: Runs) -> Sequence[Panel]:
    """Return the panels about learning. If all runs are supervised, return the panels of supervised learning."""
    if not all(run.config.is_supervised for run in runs.values()):
        return LEARNING
    return (*SUPERVISED, *(panel for panel in LEARNING if panel.name == "validation"))


def charts_of(groups: Groups, panels: Sequence[Panel]) -> list[Chart]:
    """Return the charts of those panels whose condition `when` holds for at least one run. A comparison omits panels
    with held-out statistics and panels without metric lines."""
    runs = [run for group in groups.values() for run in group]
    if len(runs) > 1:
        compared = [panel for panel in panels if panel.lines and not panel.held_out and any(map(panel.when, runs))]
        return [_compared(groups, panel) for panel in compared]
    (record,) = runs
    config = record.config.trainer
    once = config.mini_batch_size == config.batch_size and config.epochs_per_batch == 1
    return [
        Chart(panel.name, panel.title, panel.caption, partial(panel.draw_run, record), panel.height_in,
              panel.flat if once or panel.flat != ONE_UPDATE else "")
        for panel in panels
        if panel.when(record)
    ]  # fmt: skip


def reward_charts(groups: Groups) -> list[Chart]:
    """Return charts of the held-out and training reward of several runs over steps, tokens and seconds."""
    kinds: tuple[tuple[str, str, GetSeries], ...] = (
        ("held_out", "Held-out reward", _held_out_reward),
        ("training", "Training reward", partial(_metric, REWARD)),
    )
    return [
        Chart(f"{name}_by_{axis}", f"{title} by {axis}", "",
              partial(_draw, groups, find, totals, label, "score"))
        for name, title, find in kinds
        for axis, label, totals in _AXES
    ]  # fmt: skip


def _held_out_reward(run: RunRecord) -> Series | None:
    return series_of((step, found.value) for step, found in run.held_out(run.reward_statistic))


def _compared(groups: Groups, panel: Panel) -> Chart:
    metric, (_, label) = next(iter(panel.lines.items()))
    title = f"{panel.title} ({label})" if len(panel.lines) > 1 else panel.title
    axis, find = _AXES[0], partial(_metric, metric)
    return Chart(panel.name, title, "", partial(_draw, groups, find, axis[2], axis[1], panel.unit), flat=panel.flat)


def _metric(name: str, run: RunRecord) -> Series | None:
    series = run.series(name)
    return series if series is None or len(series) <= plots.FEW_POINTS else thin(smooth(series), plots.MAX_POINTS)


def _draw(groups: Groups, find: GetSeries, totals: GetSeries, x_label: str, unit: str, figure: "Figure") -> None:
    axes = figure.subplots()
    for place, (label, runs) in enumerate(groups.items()):
        found = [(run, series) for run in runs if (series := find(run)) is not None]
        if found:
            count = num_seeds([run for run, _ in found])
            seeds = f" ({count} seeds)" if count > 1 else ""
            curves = [plots.series_over(series, totals(run)) for run, series in found]
            plots.plot_group(axes, curves, place, label + seeds)
    plots.format_axes(axes, x=x_label, y=unit, steps=x_label == "training step")


def num_seeds(runs: Sequence[RunRecord]) -> int:
    """Return the number of different seeds."""
    return len({run.config.seed for run in runs})


class Measure(NamedTuple):
    """A row of a table. `summarize`: a function that computes the value from the metric's series. `of_run`: a function
    that computes the value from the whole run, used instead of `summarize`. `note`: a text that is shown instead of the
    metric's definition."""

    label: str
    metric: str
    summarize: Callable[[Series], Value]
    kind: Kind = "number"
    unit: str = ""
    note: str = ""
    of_run: Callable[[RunRecord], Value] | None = None

    def value_of(self, record: RunRecord) -> Value:
        """Return the value of this measure for a run, or None if the run has no value."""
        if self.of_run is not None:
            return self.of_run(record)
        series = record.series(self.metric)
        return None if series is None else self.summarize(series)


def _last(series: Series) -> float:
    return float(series.iloc[-1])


def _change(series: Series) -> Cell:
    return _pair({"first": first_tenth(series), "last": last_tenth(series)}, "→")


def _extent(series: Series) -> Cell:
    return _pair({"median": series.abs().median(), "max": series.abs().max()}, "/")


def _pair(values: Mapping[str, float], sign: str) -> Cell:
    return Cell(f" {sign} ".join(map(compact, values.values())), {key: float(v) for key, v in values.items()})


def _last_held_out(record: RunRecord) -> Value:
    found = record.held_out(record.reward_statistic)
    return found[-1][1] if found else None


def _gap(record: RunRecord) -> Value:
    reward, held_out = record.series(REWARD), record.held_out(record.reward_statistic)
    if reward is None or not held_out or held_out[-1][0] == 0:
        return None
    return last_tenth(reward) - held_out[-1][1].value


def _gpu_seconds_a_point(record: RunRecord) -> Value:
    if record.gpu_seconds is None or record.reward_gain <= 0:
        return None
    return 0.01 * record.gpu_seconds / record.reward_gain


TABLES: Mapping[str, tuple[str, Sequence[Measure]]] = {
    "convergence": ("From the first steps to the last", (
        Measure("Training reward, first tenth", REWARD, first_tenth, "score"),
        Measure("Training reward, last tenth", REWARD, last_tenth, "score"),
        Measure("Training reward, best", REWARD, lambda each: smooth(each).max(), "score",
                note="Highest moving mean, over 1/15 of the run."),
        Measure("Trend of the training reward", REWARD, plots.trend_of, "difference",
                note="Change of the fitted line over the last third of the steps, with a 95% interval."),
        Measure("Held-out reward, last", "", _last, note="At the last validation, with its interval over problems.",
                of_run=_last_held_out),
        Measure("Training less held-out reward", "", _last, "signed", note="A large gap indicates overfitting.",
                of_run=_gap),
        Measure("Supervised loss, first → last tenth", "sft/loss", _change),
        Measure("Held-out loss, first → last tenth", HELD_OUT_LOSS, _change),
        Measure("Held-out accuracy, first → last tenth", "sft/held_out_accuracy", _change),
        Measure("Entropy, first → last tenth", "actor/entropy", _change),
        Measure("KL in the loss, first → last tenth", "actor/kl_loss", _change),
        Measure("KL in the reward, first → last tenth", "actor/reward_kl_penalty", _change),
        Measure("Explained variance, first → last tenth", "critic/vf_explained_var", _change),
        Measure("Value loss, first → last tenth", "critic/vf_loss", _change),
        Measure("Policy change in KL, median / largest", "actor/ppo_kl", _extent),
        Measure("Gradient norm, median / largest", "actor/grad_norm", _extent),
        Measure("Clipped tokens, last third", "actor/pg_clipfrac", late_mean, "percent"),
        Measure("Learning rate of the policy, last", "actor/lr", _last),
        Measure("Learning rate of the critic, last", "critic/lr", _last),
    )),
    "performance": ("Speed", (
        Measure("From first to last line of the journal", "", _last, "seconds", note="Wall time, all included.",
                of_run=lambda run: run.steps[-1].time - run.steps[0].time if len(run.steps) > 1 else None),
        Measure("Seconds of training steps", STEP_S, pd.Series.sum, "seconds",
                note="Sum over steps, without validation, checkpoints and start-up."),
        Measure("Seconds per step", STEP_S, lambda each: plots.without_first_step(each).mean(), "seconds",
                note="Mean without the first step (warm-up)."),
        Measure("Tokens trained on", "perf/total_num_tokens", pd.Series.sum, note="Sum over steps."),
        Measure("Throughput, median", "perf/throughput", pd.Series.median, unit="tokens/s/device"),
        Measure("Response length, last third", "response_length/mean", late_mean, unit="tokens"),
        Measure("GPU time, all attempts", "", _last, "seconds", note="Sum over ranks, from their start.",
                of_run=lambda run: run.gpu_seconds),
        Measure("GPU time per point gained", "", _last, "seconds", note="A point is 0.01 of held-out reward, from the "
                "first validation to the last.", of_run=_gpu_seconds_a_point),
        Measure("Model FLOP utilization, policy", "perf/mfu/actor", pd.Series.mean, "percent"),
        Measure("Model FLOP utilization, critic", "perf/mfu/critic", pd.Series.mean, "percent"),
    )),
    "memory_peak": ("Memory, measured", (
        Measure("Device memory held by tensors, peak", "perf/max_memory_allocated_gb", pd.Series.max, unit="GB"),
        Measure("Device memory reserved by the allocator, peak", "perf/max_memory_reserved_gb", pd.Series.max,
                unit="GB"),
        Measure("Host memory of all processes, peak", "perf/cpu_memory_used_gb", pd.Series.max, unit="GB"),
        Measure("Memory of the trainer process, peak", "system/process_memory_gb", pd.Series.max, unit="GB"),
    )),
}  # fmt: skip


def measure_table(name: str, runs: Runs) -> Table:
    """Return a table with a row for each measure that has a value, and a column for each run."""
    title, measures = TABLES[name]
    rows: list[Row] = []
    for measure in measures:
        values = [measure.value_of(run) for run in runs.values()]
        if any(value is not None for value in values):
            shown = (cell(value, measure.kind, measure.unit) for value in values)
            definition = [measure.note or _doc_of(measure.metric)[1]] if len(runs) == 1 else []
            rows.append((measure.label, *shown, measure.metric, *definition))
    columns: dict[str, Kind] = {"Measure": "text", **_value_columns(runs), "Metric": "code"}
    return table(name, title, columns | ({"Definition": "text"} if len(runs) == 1 else {}), rows)


def _value_columns(runs: Runs) -> dict[str, Kind]:
    return dict.fromkeys(runs if len(runs) > 1 else ("Value",), "number")


def last_values(runs: Runs) -> Table:
    """Return a table with the last value of every metric."""
    newest = [run.metrics.ffill().reindex([run.metrics.index.max()]).T for run in runs.values()]  # NaN without a step
    last = pd.concat(newest, axis="columns").sort_index()
    rows = [
        (str(name), *(None if np.isnan(value) else value for value in values), *_doc_of(str(name)))
        for name, *values in last.itertuples()
    ]
    columns: dict[str, Kind] = {"Metric": "code", **_value_columns(runs), "Unit": "text", "Definition": "text"}
    return table("metrics", f"Every metric's last value ({len(rows)})", columns, rows, folded=True)


def _doc_of(metric: str) -> tuple[str, str]:
    found = describe(metric)
    return ("", "") if found is None else (found.unit if found.unit != "1" else "", found.definition)
