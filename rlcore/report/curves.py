"""Pictures of a run over its steps, and the phases of a step."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from rlcore.report import numbers
from rlcore.report.plots import LIGHT, MOST_POINTS, Chart, plot_intervals, plot_series, tidy
from rlcore.report.record import RunRecord
from rlcore.report.series import Series, series_of, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ONE_UPDATE = "each batch is used for one update, before which the old policy and the new one are the same"

Lines = Mapping[str, tuple[str, str]]
"""Colour and label of each line, by its metric."""

_LIMIT: Mapping[str, Any] = {"linewidth": 0.9, "linestyle": (0, (4, 3))}


def charts(record: RunRecord) -> tuple[Chart, ...]:
    """Every curve of learning that a run can have, in the order of the report."""
    config = record.config
    once = config.trainer.mini_batch_size == config.trainer.batch_size and config.trainer.epochs_per_batch == 1
    same = ONE_UPDATE if once else ""

    def lines(name: str, title: str, caption: str, unit: str, metrics: Lines, flat: str = "") -> Chart:
        return Chart(name, title, caption, partial(_lines, record, metrics, unit), 2.5, flat)

    found = [
        Chart("reward", "Reward", "Score of training answers, and of answers to held-out problems with 95% intervals.",
              partial(_reward, record), 2.9, "no answer has scored"),
        Chart("validation", "Held-out problems", "Each held-out figure with its interval over problems.",
              partial(_validation, record), 2.9),
        lines("entropy", "Entropy", "Of the policy at answer tokens. Falling: answers become alike.", "nats/token",
              {"actor/entropy": ("purple", "entropy")}),
        lines("ppo_kl", "KL", "ppo_kl: how far a step's updates move the policy. kl: distance from the reference, if "
              "on.", "nats/token", {"actor/ppo_kl": ("blue", "ppo_kl"), "actor/kl_loss": ("orange", "kl in the loss"),
                                    "actor/reward_kl_penalty": ("orange", "kl in the reward")}, same),
        Chart("grad_norm", "Gradient norm", "Before clipping, mean over the step's updates.",
              partial(_grad_norm, record), 2.5),
        lines("clipping", "Clipped tokens", "Share of answer tokens whose update the clip range holds back.",
              "share of tokens",
              {"actor/pg_clipfrac": ("blue", "clip range"), "actor/pg_clipfrac_lower": ("red", "dual clip"),
               "critic/vf_clipfrac": ("orange", "value clip")}, same),
        Chart("lengths", "Answer length", "Band from the shortest to the longest answer; below, the share cut at the "
              "limit.", partial(_lengths, record), 3.2),
        lines("groups", "Groups of equal score", "Prompts whose answers all scored the same teach a group method "
              "nothing.", "share of prompts", {"reward/equal_group_share": ("teal", "equal groups")}),
    ]  # fmt: skip
    if config.critic is not None:
        found += [
            lines("critic", "Critic", "Explained variance of the returns (1 is perfect, 0 is no better than their "
                  "mean).", "share", {"critic/vf_explained_var": ("orange", "explained variance")}),
            lines("value_loss", "Value loss", "Half the squared error, clipped.", "loss",
                  {"critic/vf_loss": ("orange", "value loss")}),
        ]  # fmt: skip
    if record.rows_by_passes:
        caption = (
            "Training rows by how many of the start model's answers are right. Grey: never or always solved, so their "
            "groups teach nothing."
        )
        found.append(Chart("pass_rates", "Pass rates before training", caption, partial(_pass_rates, record), 2.5))
    if config.warm_start.enabled:
        caption = "Cross-entropy at the demonstrations' answers, before the steps above."
        found.append(Chart("supervised", "Supervised stage", caption, partial(_supervised, record), 2.5))
    return tuple(found)


def speed_charts(record: RunRecord) -> tuple[Chart, ...]:
    """Charts of the seconds of each phase and of the speed."""
    return (
        Chart("phases", "Where a step's time goes", "Wall seconds of each phase, stacked.",
              partial(_phases, record), 3.2),
        Chart("timeline", "Phase timeline", "A mean step from first to last phase; below, the run by the clock.",
              partial(_timeline, record), 3.6),
        Chart("throughput", "Throughput", "Prompt and answer tokens over seconds and devices.",
              partial(_throughput, record), 3.2),
    )  # fmt: skip


def _lines(record: RunRecord, metrics: Lines, unit: str, figure: "Figure") -> "Axes":
    """Lines in one set of axes; beside others a line that is 0 all along is left out."""
    axes = figure.subplots()
    found = [(series, look) for metric, look in metrics.items() if (series := record.series(metric)) is not None]
    for series, look in [one for one in found if one[0].any()] or found[:1]:
        plot_series(axes, series, *look)
    tidy(axes, y=unit)
    return axes


def _reward(record: RunRecord, figure: "Figure") -> None:
    axes = figure.subplots()
    if (train := record.series("critic/score/mean")) is not None:
        plot_series(axes, train, "grey", "training")
    if found := record.held_out(record.reward_statistic):
        plot_intervals(axes, found, "blue", f"held-out {record.reward_statistic.removeprefix('reward/')}")
    tidy(axes, y="score")


def _validation(record: RunRecord, figure: "Figure") -> None:
    axes = figure.subplots()
    colours = ("blue", "green", "purple", "orange")[-len(record.core_statistics) :]
    for place, (statistic, colour) in enumerate(zip(record.core_statistics, colours, strict=True)):
        if found := record.held_out(statistic):
            aside = (place - 1.5) * 0.004 * (found[-1][0] - found[0][0])  # so that intervals do not hide each other
            points = [(step + aside, interval) for step, interval in found]
            plot_intervals(axes, points, colour, statistic.removeprefix("reward/"))
    tidy(axes, y="score or share solved")


def _pass_rates(record: RunRecord, figure: "Figure") -> None:
    counts = np.array(record.rows_by_passes)
    axes = figure.subplots()
    colours = [LIGHT["grey" if passes in (0, len(counts) - 1) else "blue"] for passes in range(len(counts))]
    axes.bar(np.arange(len(counts)), 100 * counts / max(1, counts.sum()), 0.8, color=colours)
    tidy(axes, x=f"of {len(counts) - 1} answers right", y="% of training rows")


def _supervised(record: RunRecord, figure: "Figure") -> None:
    axes = figure.subplots()
    for metric, colour, label in (("sft/loss", "grey", "training"), ("sft/held_out_loss", "blue", "held out")):
        points = [(each.step, each.metrics[metric]) for each in record.supervised_steps if metric in each.metrics]
        if (series := series_of(points)) is not None:
            plot_series(axes, series, colour, label, smoothed=False)
    tidy(axes, y="nats/token")


def _throughput(record: RunRecord, figure: "Figure") -> None:
    axes = _lines(record, {"perf/throughput": ("green", "throughput")}, "tokens/s/device", figure)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # else a steady line lies on the edge


def _grad_norm(record: RunRecord, figure: "Figure") -> None:
    norms = {"actor/grad_norm": ("blue", "policy"), "critic/grad_norm": ("orange", "critic")}
    axes, clip = _lines(record, norms, "global norm before clipping", figure), record.config.optim.grad_clip
    if axes.lines and clip < 3 * axes.get_ylim()[1]:
        axes.axhline(clip, color=LIGHT["grey"], **_LIMIT)
        axes.annotate("clipped above", (1.0, clip), xycoords=("axes fraction", "data"), fontsize=7.5,
                      color=LIGHT["muted"], ha="right", va="bottom")  # fmt: skip


def _lengths(record: RunRecord, figure: "Figure") -> None:
    mean, high, low, cut = (record.series(f"response_length/{part}") for part in ("mean", "max", "min", "clip_ratio"))
    if mean is None:
        return
    is_cut = cut is not None and bool(cut.any())
    heights = (3, 1.15) if is_cut else (1,)
    upper, *lower = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    if high is not None and low is not None:
        top, bottom = thinned(high, MOST_POINTS), thinned(low, MOST_POINTS)
        upper.fill_between(top.index, bottom, top, color=LIGHT["blue"], alpha=0.14, linewidth=0,
                           label="shortest to longest")  # fmt: skip
    plot_series(upper, mean, "blue", "average")
    upper.axhline(record.config.rollout.max_response_tokens, color=LIGHT["red"], label="limit", **_LIMIT)
    tidy(upper, x="" if is_cut else "training step", y="tokens an answer")
    upper.set_ylim(bottom=0)
    for axes in lower:
        assert cut is not None, "else there is no second set of axes"
        plot_series(axes, 100 * cut, "red", "cut at the limit", smoothed=False)
        tidy(axes, y="cut, %")
        axes.set_ylim(bottom=0, top=max(1.0, axes.get_ylim()[1]))


# ------------------------------------------------------------------ phases

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


def _phases(record: RunRecord, figure: "Figure") -> None:
    seconds = phase_seconds(record)
    if not len(seconds):
        return
    axes = figure.subplots()
    thin: list[Series] = [thinned(seconds[name], MOST_POINTS // 4) for name in seconds]
    labels = [PHASES[str(name)][0] for name in seconds]
    colours = [LIGHT[PHASES[str(name)][1]] for name in seconds]
    if len(seconds) == 1:
        tops = seconds.iloc[0].cumsum()
        axes.bar(seconds.index.repeat(len(tops)), seconds.iloc[0], 0.4, tops - seconds.iloc[0], color=colours,
                 label=labels)  # fmt: skip
    else:
        axes.stackplot(thin[0].index, thin, colors=colours, labels=labels, alpha=0.88, linewidth=0)
    tidy(axes, y="seconds a step")
    axes.set_ylim(bottom=0, top=1.15 * float(seconds.sum(axis=1).quantile(0.99)))


SMALLEST_GAP = 0.002
"""Parts of the run that are nearer to each other than this share of it are drawn as one: the gap cannot be seen."""

SHORTEST_SAVE_S = 1e-3
"""Saves that held up the training for less are not drawn: even in memory one takes milliseconds."""

ROWS = {"training": "green", "validation": "blue", "checkpoint": "orange"}

Span = tuple[float, float]
"""From one second of the run to another."""


def run_spans(record: RunRecord) -> dict[str, list[Span]]:
    """When the run trained, validated and saved, in seconds since the beginning of its first step.

    A step's line is written after its validation; the seconds for which a checkpoint held up the training stand in the
    line of the step after it.
    """
    found: dict[str, list[Span]] = {name: [] for name in ROWS}
    earlier = 0.0
    for line in record.steps:
        metrics, end = line.metrics, line.time
        testing = metrics.get("timing_s/testing", 0.0)
        if "timing_s/step" in metrics:
            found["training"].append((end - testing - metrics["timing_s/step"], end - testing))
        if testing:
            found["validation"].append((end - testing, end))
        save = metrics.get("timing_s/save_checkpoint", 0.0)  # at a step that saves nothing the microseconds of a look
        if save >= SHORTEST_SAVE_S and earlier:
            found["checkpoint"].append((earlier, earlier + save))
        earlier = end
    begun = min((start for spans in found.values() for start, _ in spans), default=0.0)
    return {name: [(start - begun, end - begun) for start, end in spans] for name, spans in found.items()}


def joined(spans: list[Span], gap_s: float) -> list[Span]:
    """Spans that overlap or are nearer than `gap_s` as one.

    >>> joined([(0, 1), (1.1, 2), (5, 6)], 0.5)
    [(0, 2), (5, 6)]
    """
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start - merged[-1][1] <= gap_s:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _timeline(record: RunRecord, figure: "Figure") -> None:
    """Above the phases of a mean step one after another; below the run by the clock, with its interruptions."""
    phases = mean_phases(record)
    if not phases:
        return
    upper, lower = figure.subplots(2, 1, height_ratios=(len(phases) + 1, len(ROWS) + 2))
    ends = np.cumsum([0.0, *phases.values()])
    upper.barh(range(len(phases)), phases.values(), 0.7, ends[:-1], color=[LIGHT[PHASES[name][1]] for name in phases])
    titles = [f"{PHASES[name][0]}, {numbers.duration(seconds)}" for name, seconds in phases.items()]
    _rows(upper, titles, "seconds of a mean step")
    spans = run_spans(record)
    last = max((end for each in spans.values() for _, end in each), default=0.0)
    for place, (name, colour) in enumerate(ROWS.items()):
        bars = [(start, end - start) for start, end in joined(spans[name], SMALLEST_GAP * last)]
        lower.broken_barh(bars, (place - 0.35, 0.7), color=LIGHT[colour])
    _rows(lower, list(ROWS), "seconds since the first step began; gaps: the run stood still")


def _rows(axes: "Axes", labels: list[str], x: str) -> None:
    tidy(axes, x=x, steps=False)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
