"""The phases of a step: their mean seconds, and their timeline."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlcore.evaluation.stats import Array
from rlcore.report import numbers
from rlcore.report.page import LIGHT, tidy
from rlcore.report.record import RunRecord
from rlcore.report.series import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PHASES: Mapping[str, str] = {
    "gen": "Generation",
    "reward": "Scoring",
    "old_log_prob": "Old log-probabilities",
    "ref": "Reference pass",
    "values": "Values",
    "adv": "Advantages",
    "update_critic": "Critic update",
    "update_actor": "Policy update",
    "update_weights": "Weight hand-over",
}
"""Phases that lie inside a step, by their name in `timing_s/<name>`."""

BESIDE: Mapping[str, str] = {"save_checkpoint": "Checkpoint", "testing": "Validation"}
"""Phases that happen after some steps and are not counted to them."""

COLOURS: Mapping[str, str] = {
    "gen": "blue",
    "reward": "orange",
    "old_log_prob": "teal",
    "ref": "purple",
    "values": "pink",
    "adv": "muted",
    "update_critic": "red",
    "update_actor": "green",
    "update_weights": "sand",
    "other": "grey",
}
"""A phase has the same colour in every picture."""

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
    return tuple(Phase(name, title_of(name), float(values[kept].mean())) for name, values in seconds.items())


def phase_seconds(record: RunRecord) -> tuple[Array, dict[str, Array]]:
    """Steps, and seconds of each phase at each of them; `other` is what the phases leave of the step."""
    whole = record.series("timing_s/step")
    if whole is None:
        return np.empty(0), {}
    found = {name: _aligned(record.series(f"timing_s/{name}"), whole) for name in PHASES}
    present = {name: values for name, values in found.items() if values.any()}
    rest = whole.values - sum(present.values(), np.zeros(len(whole)))
    present[OTHER] = np.clip(rest, 0.0, None)
    return whole.steps.astype(float), present


def title_of(name: str) -> str:
    """A phase's name for people."""
    return PHASES.get(name) or BESIDE.get(name) or "Between phases"


def _aligned(series: Series | None, whole: Series) -> Array:
    """Values at the steps of `whole`, 0 where there is none."""
    values = np.zeros(len(whole))
    if series is not None:
        at = np.searchsorted(whole.steps, series.steps)
        inside = at < len(whole)
        inside[inside] = whole.steps[at[inside]] == series.steps[inside]
        values[at[inside]] = series.values[inside]
    return values


SMALLEST_GAP = 0.002
"""Parts of the run that are nearer to each other than this share of it are drawn as one: nobody sees the gap."""

ROWS = (("training", "green"), ("validation", "blue"), ("checkpoint", "orange"))


@dataclass(frozen=True, slots=True)
class Span:
    """From one second of the run to another."""

    start: float
    end: float


def run_spans(record: RunRecord) -> dict[str, list[Span]]:
    """When the run trained, validated and saved, in seconds since the beginning of its first step.

    A step's line is written after its validation; the seconds for which a checkpoint held up the training stand in the
    line of the step after it.
    """
    found: dict[str, list[Span]] = {name: [] for name, _ in ROWS}
    earlier = 0.0
    for record_ in record.steps:
        metrics, end = record_.metrics, record_.time
        testing = metrics.get("timing_s/testing", 0.0)
        if "timing_s/step" in metrics:
            found["training"].append(Span(end - testing - metrics["timing_s/step"], end - testing))
        if testing:
            found["validation"].append(Span(end - testing, end))
        if (save := metrics.get("timing_s/save_checkpoint")) and earlier:
            found["checkpoint"].append(Span(earlier, earlier + save))
        earlier = end
    begun = min((span.start for spans in found.values() for span in spans), default=0.0)
    return {name: [Span(span.start - begun, span.end - begun) for span in spans] for name, spans in found.items()}


def joined(spans: list[Span], gap_s: float) -> list[Span]:
    """Spans that overlap or are nearer than `gap_s` as one.

    >>> joined([Span(0, 1), Span(1.1, 2), Span(5, 6)], 0.5)
    [Span(start=0, end=2), Span(start=5, end=6)]
    """
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        if merged and span.start - merged[-1].end <= gap_s:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def draw_timeline(record: RunRecord, figure: "Figure") -> bool:
    """Above the phases of a mean step one after another; below the run by the clock, with its interruptions."""
    phases = mean_phases(record)
    if not phases:
        return False
    upper, lower = figure.subplots(2, 1, height_ratios=(len(phases) + 1, len(ROWS) + 2))
    at = 0.0
    for place, phase in enumerate(phases):
        upper.barh(place, phase.seconds, left=at, height=0.7, color=LIGHT[COLOURS[phase.name]])
        at += phase.seconds
    _rows(upper, [f"{phase.title}, {numbers.duration(phase.seconds)}" for phase in phases], "seconds of a mean step")
    spans = run_spans(record)
    end = max((span.end for each in spans.values() for span in each), default=0.0)
    for place, (name, colour) in enumerate(ROWS):
        bars = [(span.start, span.end - span.start) for span in joined(spans[name], SMALLEST_GAP * end)]
        lower.broken_barh(bars, (place - 0.35, 0.7), color=LIGHT[colour])
    _rows(lower, [name for name, _ in ROWS], "seconds since the first step began; gaps: the run stood still")
    return True


def _rows(axes: "Axes", labels: list[str], x: str) -> None:
    tidy(axes, x=x, steps=False)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
