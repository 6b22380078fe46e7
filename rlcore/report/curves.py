"""Pictures of a run over its steps, and the phases of a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from rlcore.evaluation.stats import Array, Interval
from rlcore.report import numbers
from rlcore.report.page import LIGHT, Chart, legend, tidy
from rlcore.report.record import RunRecord
from rlcore.report.series import Series, series_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_POINTS = 400
"""Points on a line at most: more cannot be seen."""

FEW_POINTS = 12
"""A line of so few points shows them."""

Draw = Callable[[RunRecord, "Figure"], object]
ONE_UPDATE = "each batch is used for one update, before which the old policy and the new one are the same"


def charts(record: RunRecord) -> tuple[Chart, ...]:
    """Every curve of learning that a run can have, in the order of the report."""
    rows = _LEARNING if record.config.critic is None else _LEARNING + _CRITIC
    rows = rows + _PASS_RATES if record.rows_by_passes else rows
    return _of(record, rows + _SUPERVISED if record.config.warm_start.enabled else rows)


def speed_charts(record: RunRecord) -> tuple[Chart, ...]:
    """Where the time goes."""
    return _of(record, _SPEED)


def _of(record: RunRecord, rows: "tuple[Row, ...]") -> tuple[Chart, ...]:
    trainer = record.config.trainer
    once = trainer.mini_batch_size == trainer.batch_size and trainer.epochs_per_batch == 1
    flat = {"reward": "no answer has scored"} | ({"ppo_kl": ONE_UPDATE, "clipping": ONE_UPDATE} if once else {})
    return tuple(
        Chart(name, title, caption, partial(draw, record), height_in, flat.get(name, ""))
        for name, title, caption, draw, height_in in rows
    )


def plot_series(axes: "Axes", series: Series, colour: str, label: str, *, smooth: bool = True) -> None:
    """The values faintly and their moving mean; the values alone where they are few or `smooth` is off."""
    thin = series.thinned(MOST_POINTS)
    if not smooth or len(series) <= FEW_POINTS:
        marker = "o" if len(series) <= FEW_POINTS else ""
        axes.plot(thin.steps, thin.values, color=LIGHT[colour], marker=marker, markersize=3.5, label=label)
        return
    smoothed = Series(series.name, series.steps, series.smooth).thinned(MOST_POINTS)
    axes.plot(thin.steps, thin.values, color=LIGHT[colour], alpha=0.28, linewidth=0.9)
    axes.plot(smoothed.steps, smoothed.values, color=LIGHT[colour], label=f"{label} (mean of {series.window} steps)")


def plot_held_out(
    axes: "Axes", found: Sequence[tuple[int, Interval]], colour: str, label: str, *, aside: float = 0.0
) -> None:
    """Validations with their intervals, `aside` steps to the right, so that intervals do not hide each other."""
    steps = [step + aside for step, _ in found]
    values = np.array([interval.value for _, interval in found])
    below = values - [interval.low for _, interval in found]
    above = [interval.high for _, interval in found] - values
    axes.errorbar(
        steps,
        values,
        yerr=np.clip(np.stack([below, above]), 0, None),
        color=LIGHT[colour],
        marker="o",
        markersize=4,
        capsize=2.5,
        elinewidth=1.0,
        label=label,
    )


def _one(record: RunRecord, figure: "Figure", *, lines: Sequence[tuple[str, str, str]], unit: str) -> "Axes":
    """Lines of (metric, colour, label) in one set of axes; beside others a line that is 0 all along is left out."""
    axes = figure.subplots()
    found = [(series, colour, label) for metric, colour, label in lines if (series := record.series(metric))]
    for series, colour, label in [one for one in found if one[0].values.any()] or found[:1]:
        plot_series(axes, series, colour, label)
    tidy(axes, y=unit)
    legend(axes)
    return axes


def _reward(record: RunRecord, figure: "Figure") -> None:
    held_out = [(record.reward_statistic, "blue", f"held-out {record.reward_statistic.removeprefix('reward/')}")]
    plot_reward(figure.subplots(), record, "training", held_out)


def plot_reward(axes: "Axes", record: RunRecord, training: str, held_out: Sequence[tuple[str, str, str]]) -> None:
    """The training reward under this label, and held-out statistics of (name, colour, label)."""
    train = record.series("critic/score/mean")
    if train is not None:
        plot_series(axes, train, "grey", training)
    for statistic, colour, label in held_out:
        if found := record.held_out(statistic):
            plot_held_out(axes, found, colour, label)
    tidy(axes, y="score")
    legend(axes)


def _validation(record: RunRecord, figure: "Figure") -> None:
    axes = figure.subplots()
    colours = ("blue", "green", "purple", "orange")[-len(record.core_statistics) :]
    for place, (statistic, colour) in enumerate(zip(record.core_statistics, colours, strict=False)):
        found = record.held_out(statistic)
        if found:
            aside = (place - 1.5) * 0.004 * (found[-1][0] - found[0][0])
            plot_held_out(axes, found, colour, statistic.removeprefix("reward/"), aside=aside)
    tidy(axes, y="score or share solved")
    legend(axes)


def _pass_rates(record: RunRecord, figure: "Figure") -> None:
    counts = np.array(record.rows_by_passes)
    axes = figure.subplots()
    colours = [LIGHT["grey" if passes in (0, len(counts) - 1) else "blue"] for passes in range(len(counts))]
    axes.bar(np.arange(len(counts)), 100 * counts / max(1, counts.sum()), 0.8, color=colours)
    tidy(axes, x=f"of {len(counts) - 1} answers right", y="% of training rows")


def _supervised(record: RunRecord, figure: "Figure") -> None:
    axes = figure.subplots()
    for metric, colour, label in (("sft/loss", "grey", "training"), ("sft/held_out_loss", "blue", "held out")):
        series = series_of(record.supervised_steps, metric)
        if series is not None:
            plot_series(axes, series, colour, label, smooth=False)
    tidy(axes, y="nats/token")
    legend(axes)


def _throughput(record: RunRecord, figure: "Figure") -> None:
    axes = _one(record, figure, lines=(("perf/throughput", "green", "throughput"),), unit="tokens/s/device")
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # else a steady line lies on the edge


def _grad_norm(record: RunRecord, figure: "Figure") -> None:
    lines = (("actor/grad_norm", "blue", "policy"), ("critic/grad_norm", "orange", "critic"))
    axes, clip = _one(record, figure, lines=lines, unit="global norm before clipping"), record.config.optim.grad_clip
    if axes.lines and clip < 3 * axes.get_ylim()[1]:
        axes.axhline(clip, color=LIGHT["grey"], linewidth=0.9, linestyle=(0, (4, 3)))
        axes.annotate("clipped above", (1.0, clip), xycoords=("axes fraction", "data"), fontsize=7.5,
                      color=LIGHT["muted"], ha="right", va="bottom")  # fmt: skip


def _lengths(record: RunRecord, figure: "Figure") -> None:
    mean, high, low = (record.series(f"response_length/{part}") for part in ("mean", "max", "min"))
    cut = record.series("response_length/clip_ratio")
    if mean is None:
        return
    is_cut = cut is not None and bool(cut.values.any())
    heights = (3, 1.15) if is_cut else (1,)
    upper, *lower = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    if high is not None and low is not None:
        top, bottom = high.thinned(MOST_POINTS), low.thinned(MOST_POINTS)
        upper.fill_between(top.steps, bottom.values, top.values, color=LIGHT["blue"], alpha=0.14, linewidth=0,
                           label="shortest to longest")  # fmt: skip
    plot_series(upper, mean, "blue", "average")
    upper.axhline(record.config.rollout.max_response_tokens, color=LIGHT["red"], linewidth=0.9, linestyle=(0, (4, 3)),
                  label="limit")  # fmt: skip
    tidy(upper, x="" if is_cut else "training step", y="tokens an answer")
    upper.set_ylim(bottom=0)
    legend(upper)
    for axes in lower:
        assert cut is not None, "else there is no second set of axes"
        plot_series(axes, Series(cut.name, cut.steps, 100 * cut.values), "red", "cut at the limit", smooth=False)
        tidy(axes, y="cut, %")
        axes.set_ylim(bottom=0, top=max(1.0, axes.get_ylim()[1]))


def _phases(record: RunRecord, figure: "Figure") -> None:
    steps, seconds = phase_seconds(record)
    if not steps.size:
        return
    axes = figure.subplots()
    thin = [Series(name, steps.astype(np.int64), values).thinned(MOST_POINTS // 4) for name, values in seconds.items()]
    colours = [LIGHT[PHASES[series.name][1]] for series in thin]
    labels = [PHASES[series.name][0] for series in thin]
    if len(steps) == 1:
        floor = 0.0
        for series, colour, label in zip(thin, colours, labels, strict=True):
            axes.bar([series.steps[0]], [series.first], bottom=floor, color=colour, label=label, width=0.4)
            floor += series.first
    else:
        axes.stackplot(thin[0].steps, [series.values for series in thin], colors=colours, labels=labels, alpha=0.88,
                       linewidth=0)  # fmt: skip
    tidy(axes, y="seconds a step")
    axes.set_ylim(bottom=0, top=1.15 * float(np.quantile(sum(seconds.values()), 0.99)))
    legend(axes)


PHASES: Mapping[str, tuple[str, str]] = {
    "gen": ("Generation", "blue"),
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
"""Title and colour of phases that lie inside a step, by their name in `timing_s/<name>`."""

BESIDE: Mapping[str, str] = {"save_checkpoint": "Checkpoint", "testing": "Validation"}
"""Phases that happen after some steps and are not counted to them."""

OTHER = "other"
"""What is left of a step: the time between the phases."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Mean seconds of a phase a step."""

    name: str
    title: str
    seconds: float


def mean_phases(record: RunRecord) -> tuple[Phase, ...]:
    """Phases with their mean seconds, the first step left out where there are others; they add up to the step."""
    steps, seconds = phase_seconds(record)
    if not steps.size:
        return ()
    kept = slice(1, None) if steps.size > 1 else slice(None)
    return tuple(Phase(name, PHASES[name][0], float(values[kept].mean())) for name, values in seconds.items())


def phase_seconds(record: RunRecord) -> tuple[Array, dict[str, Array]]:
    """Steps, and seconds of each phase at each of them; `other` is what the phases leave of the step."""
    whole = record.series("timing_s/step")
    if whole is None:
        return np.empty(0), {}
    present: dict[str, Array] = {}
    for name in PHASES:
        series = record.series(f"timing_s/{name}")
        at = {} if series is None else dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
        if any(at.values()):
            present[name] = np.array([at.get(step, 0.0) for step in whole.steps.tolist()])
    rest = whole.values - sum(present.values(), np.zeros(len(whole)))
    present[OTHER] = np.clip(rest, 0.0, None)
    return whole.steps.astype(float), present


SMALLEST_GAP = 0.002
"""Parts of the run that are nearer to each other than this share of it are drawn as one: the gap cannot be seen."""

ROWS = (("training", "green"), ("validation", "blue"), ("checkpoint", "orange"))


Span = tuple[float, float]
"""From one second of the run to another."""


def run_spans(record: RunRecord) -> dict[str, list[Span]]:
    """When the run trained, validated and saved, in seconds since the beginning of its first step.

    A step's line is written after its validation; the seconds for which a checkpoint held up the training stand in the
    line of the step after it.
    """
    found: dict[str, list[Span]] = {name: [] for name, _ in ROWS}
    earlier = 0.0
    for line in record.steps:
        metrics, end = line.metrics, line.time
        testing = metrics.get("timing_s/testing", 0.0)
        if "timing_s/step" in metrics:
            found["training"].append((end - testing - metrics["timing_s/step"], end - testing))
        if testing:
            found["validation"].append((end - testing, end))
        if (save := metrics.get("timing_s/save_checkpoint")) and earlier:
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


def draw_timeline(record: RunRecord, figure: "Figure") -> None:
    """Above the phases of a mean step one after another; below the run by the clock, with its interruptions."""
    phases = mean_phases(record)
    if not phases:
        return
    upper, lower = figure.subplots(2, 1, height_ratios=(len(phases) + 1, len(ROWS) + 2))
    at = 0.0
    for place, phase in enumerate(phases):
        upper.barh(place, phase.seconds, left=at, height=0.7, color=LIGHT[PHASES[phase.name][1]])
        at += phase.seconds
    _rows(upper, [f"{phase.title}, {numbers.duration(phase.seconds)}" for phase in phases], "seconds of a mean step")
    spans = run_spans(record)
    last = max((end for each in spans.values() for _, end in each), default=0.0)
    for place, (name, colour) in enumerate(ROWS):
        bars = [(start, end - start) for start, end in joined(spans[name], SMALLEST_GAP * last)]
        lower.broken_barh(bars, (place - 0.35, 0.7), color=LIGHT[colour])
    _rows(lower, [name for name, _ in ROWS], "seconds since the first step began; gaps: the run stood still")


def _rows(axes: "Axes", labels: list[str], x: str) -> None:
    tidy(axes, x=x, steps=False)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")


Row = tuple[str, str, str, Draw, float]
"""A chart's name, title, caption, drawing and height in inches."""

_LEARNING: tuple[Row, ...] = (
    ("reward", "Reward", "Score of training answers, and of answers to held-out problems with 95% intervals.",
     _reward, 2.9),
    ("validation", "Held-out problems", "Each held-out figure with its interval over problems.", _validation, 2.9),
    ("entropy", "Entropy", "Of the policy at answer tokens. Falling: answers become alike.",
     partial(_one, lines=(("actor/entropy", "purple", "entropy"),), unit="nats/token"), 2.5),
    ("ppo_kl", "KL", "ppo_kl: how far a step's updates move the policy. kl: distance from the reference, if on.",
     partial(_one, lines=(("actor/ppo_kl", "blue", "ppo_kl"), ("actor/kl_loss", "orange", "kl in the loss"),
                          ("actor/reward_kl_penalty", "orange", "kl in the reward")), unit="nats/token"), 2.5),
    ("grad_norm", "Gradient norm", "Before clipping, mean over the step's updates.", _grad_norm, 2.5),
    ("clipping", "Clipped tokens", "Share of answer tokens whose update the clip range holds back.",
     partial(_one, lines=(("actor/pg_clipfrac", "blue", "clip range"), ("actor/pg_clipfrac_lower", "red", "dual clip"),
                          ("critic/vf_clipfrac", "orange", "value clip")), unit="share of tokens"), 2.5),
    ("lengths", "Answer length", "Band from the shortest to the longest answer; below, the share cut at the limit.",
     _lengths, 3.2),
    ("groups", "Groups of equal score", "Prompts whose answers all scored the same teach a group method nothing.",
     partial(_one, lines=(("reward/equal_group_share", "teal", "equal groups"),), unit="share of prompts"), 2.5),
)  # fmt: skip
_CRITIC: tuple[Row, ...] = (
    ("critic", "Critic", "Explained variance of the returns (1 is perfect, 0 is no better than their mean).",
     partial(_one, lines=(("critic/vf_explained_var", "orange", "explained variance"),), unit="share"), 2.5),
    ("value_loss", "Value loss", "Half the squared error, clipped.",
     partial(_one, lines=(("critic/vf_loss", "orange", "value loss"),), unit="loss"), 2.5),
)  # fmt: skip
_PASS_RATES: tuple[Row, ...] = (
    ("pass_rates", "Pass rates before training", "Training rows by how many of the start model's answers are right. "
     "Grey: never or always solved, so their groups teach nothing.", _pass_rates, 2.5),
)  # fmt: skip
_SUPERVISED: tuple[Row, ...] = (
    ("supervised", "Supervised stage", "Cross-entropy at the demonstrations' answers, before the steps above.",
     _supervised, 2.5),
)  # fmt: skip
_SPEED: tuple[Row, ...] = (
    ("phases", "Where a step's time goes", "Wall seconds of each phase, stacked.", _phases, 3.2),
    ("timeline", "Phase timeline", "A mean step from its first phase to its last; below, the run by the clock.",
     draw_timeline, 3.6),
    ("throughput", "Throughput", "Prompt and answer tokens over seconds and devices.",
     _throughput, 3.2),
)  # fmt: skip
