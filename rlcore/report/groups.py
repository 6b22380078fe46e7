"""Groups of runs: which settings differ, which runs are seeds of one setting, how far seeds spread, their curves."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from pydantic import JsonValue

from rlcore.evaluation.stats import Array, Interval
from rlcore.report.curves import FEW_POINTS, MOST_POINTS
from rlcore.report.page import CYCLE, LIGHT, Chart, legend, tidy
from rlcore.report.record import RunRecord
from rlcore.report.series import Series, make_series
from rlcore.report.settings import plain_text, settings_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LABELS = ("name", "run_id", "tags", "paths", "tracking")
"""Settings that name a run or say where it is kept: no difference between two runs."""

GRID_POINTS = 120
"""Points at which the curves of several seeds are averaged."""

MOST_KEYS_IN_A_LABEL = 2

# Two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom.
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
         2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Group:
    """Runs whose settings are equal but for the seed."""

    label: str
    runs: tuple[RunRecord, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over seeds. `mean` has the 95% interval of Student's t; its ends are the mean for a single run."""

    mean: Interval
    deviation: float
    lowest: float
    highest: float
    num_runs: int


@dataclass(frozen=True, slots=True)
class Band:
    """A curve over seeds: mean, lowest and highest at each x."""

    x: Array
    mean: Array
    low: Array
    high: Array


def differing_settings(runs: Sequence[RunRecord]) -> dict[str, tuple[JsonValue, ...]]:
    """Settings that are not the same in all runs, with each run's value (None where it has no such key)."""
    found = [_told_apart(run) for run in runs]
    keys = dict.fromkeys(key for settings in found for key in settings)
    values = {key: tuple(settings.get(key) for settings in found) for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def groups_of(runs: Sequence[RunRecord]) -> tuple[Group, ...]:
    """Runs put together that differ by their seed alone, in the order of their first run."""
    found: dict[str, list[RunRecord]] = {}
    for run in runs:
        settings = {key: value for key, value in _told_apart(run).items() if key != "seed"}
        found.setdefault(json.dumps(settings, sort_keys=True), []).append(run)
    members = list(found.values())
    return tuple(Group(label, tuple(group)) for label, group in zip(_labels(members), members, strict=True))


def _told_apart(run: RunRecord) -> dict[str, JsonValue]:
    settings = settings_of(run.config)
    return {key: value for key, value in settings.items() if key.partition(".")[0] not in LABELS}


def _labels(groups: Sequence[Sequence[RunRecord]]) -> list[str]:
    """What tells the groups apart: one or two settings, else their names, else their run ids."""
    firsts = [group[0] for group in groups]
    differing = {key: row for key, row in differing_settings(firsts).items() if key != "seed"}
    candidates: list[list[str]] = []
    if 1 <= len(differing) <= MOST_KEYS_IN_A_LABEL:
        candidates.append(
            [", ".join(f"{key}={plain_text(row[i])}" for key, row in differing.items()) for i in range(len(firsts))]
        )
    candidates.append([run.config.name for run in firsts])
    candidates.append([run.run_id for run in firsts])
    candidates.append([str(run.run_dir) for run in firsts])
    return next(labels for labels in candidates if len(set(labels)) == len(labels) or labels is candidates[-1])


def run_labels(runs: Sequence[RunRecord]) -> list[str]:
    """A name for each run: its id, or its folder where two have the same id."""
    ids = [run.run_id for run in runs]
    return ids if len(set(ids)) == len(ids) else [str(run.run_dir) for run in runs]


def spread_of(values: Sequence[float]) -> Spread:
    """Mean over seeds, its t interval, standard deviation (n - 1), lowest and highest.

    With three seeds the interval is 2.5 standard deviations to each side: few seeds say little.
    """
    found = np.asarray(values, dtype=float)
    count, mean = len(found), float(found.mean())
    deviation = float(found.std(ddof=1)) if count > 1 else 0.0
    half = t_quantile(count - 1) * deviation / np.sqrt(count) if count > 1 else 0.0
    interval = Interval(mean, mean - float(half), mean + float(half))
    return Spread(interval, deviation, float(found.min()), float(found.max()), count)


def t_quantile(freedom: int) -> float:
    """Two-sided 95% quantile of Student's t; to three digits from 21 degrees of freedom on."""
    return _T_95[freedom - 1] if freedom <= len(_T_95) else 1.96 + 2.5 / freedom


def against(series: Series, totals: Series | None) -> tuple[Array, Array]:
    """A series over steps, or over tokens or seconds up to each of its steps."""
    if totals is None:
        return series.steps.astype(float), series.values
    at = np.searchsorted(totals.steps, series.steps, side="right") - 1
    x = np.where(at >= 0, totals.values[np.maximum(at, 0)], 0.0)
    return x, series.values


def band_of(curves: Sequence[tuple[Array, Array]]) -> Band:
    """Mean and range of curves, interpolated onto points that all of them reach."""
    low = max(float(x[0]) for x, _ in curves)
    high = min(float(x[-1]) for x, _ in curves)
    grid = np.linspace(low, max(low, high), GRID_POINTS)
    values = np.stack([np.interp(grid, x, y) for x, y in curves])
    return Band(grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def final_scores(group: Group) -> dict[str, list[float]]:
    """The last held-out figures of a group's runs that have them, by the statistic's name."""
    found: dict[str, list[float]] = {}
    for run in group.runs:
        for statistic in core_statistics(run):
            curve = run.held_out(statistic)
            if curve:
                found.setdefault(statistic, []).append(curve[-1][1].value)
    return found


def core_statistics(run: RunRecord) -> Iterable[str]:
    """The held-out statistics that a comparison looks at."""
    k = run.num_samples
    return (f"reward/mean@{k}", f"reward/pass@{k}", f"reward/maj@{k}", "reward/greedy") if k else ("reward/greedy",)


def last_values(run: RunRecord) -> Mapping[str, float]:
    """Each metric's last value, as MLflow shows it."""
    found: dict[str, float] = {}
    for record in run.steps:
        found |= record.metrics
    return found


Find = Callable[[RunRecord], Series | None]
_AXES: tuple[tuple[str, str, str, Find], ...] = (
    ("step", "by step", "training step", lambda run: None),
    ("tokens", "by tokens", "tokens trained on", lambda run: run.tokens),
    ("seconds", "by seconds", "seconds of training steps", lambda run: run.seconds),
)
_METRICS: tuple[tuple[str, str, str], ...] = (
    ("actor/entropy", "Entropy", "nats/token"),
    ("actor/ppo_kl", "KL of a step (ppo_kl)", "nats/token"),
    ("actor/grad_norm", "Gradient norm", "before clipping"),
    ("response_length/mean", "Answer length", "tokens"),
    ("timing_s/step", "Seconds a step", "s"),
    ("perf/throughput", "Throughput", "tokens/s/device"),
)


def charts(groups: Sequence[Group]) -> tuple[Chart, ...]:
    """Held-out and training reward against steps, tokens and seconds; other metrics against steps."""
    found = []
    kinds: tuple[tuple[str, str, Find], ...] = (
        ("held_out", "Held-out reward", held_out_series),
        ("training", "Training reward", lambda run: _smoothed(run.series("critic/score/mean"))),
    )
    for name, title, find in kinds:
        for axis, how, label, totals in _AXES:
            draw = partial(_draw, groups, find, totals, label, "score")
            found.append(Chart(f"{name}_by_{axis}", f"{title} {how}", "", draw))
    for metric, title, unit in _METRICS:
        draw = partial(_draw, groups, partial(_metric, metric), _AXES[0][3], _AXES[0][2], unit)
        found.append(Chart(metric.replace("/", "_"), title, "", draw))
    return tuple(found)


def held_out_series(run: RunRecord) -> Series | None:
    """The held-out reward over its steps."""
    return make_series(
        run.reward_statistic, [(step, found.value) for step, found in run.held_out(run.reward_statistic)]
    )


def _metric(name: str, run: RunRecord) -> Series | None:
    return _smoothed(run.series(name))


def _smoothed(series: Series | None) -> Series | None:
    """The moving mean: lines of several runs over each other are not to be read in their noise."""
    if series is None or len(series) <= FEW_POINTS:
        return series
    return Series(series.name, series.steps, series.smooth).thinned(MOST_POINTS)


def how_to_read(groups: Sequence[Group]) -> str:
    """What lines and bands are."""
    if any(len(group.runs) > 1 for group in groups):
        return "A line is the mean over seeds, its band goes from the lowest to the highest seed."
    return "One line a run. Noisy curves are moving means."


def _draw(groups: Sequence[Group], find: Find, totals: Find, x_label: str, unit: str, figure: "Figure") -> bool:
    axes = figure.subplots()
    drawn = False
    for place, group in enumerate(groups):
        curves = [against(series, totals(run)) for run in group.runs if (series := find(run)) is not None]
        if curves:
            _plot_group(axes, curves, LIGHT[CYCLE[place % len(CYCLE)]], _label(group, len(curves)))
            drawn = True
    tidy(axes, x=x_label, y=unit, steps=x_label == "training step")
    legend(axes, 2)
    return drawn


def _label(group: Group, num_curves: int) -> str:
    return f"{group.label} ({num_curves} seeds)" if num_curves > 1 else group.label


def _plot_group(axes: "Axes", curves: Sequence[tuple[Array, Array]], colour: str, label: str) -> None:
    if len(curves) == 1:
        x, y = curves[0]
        axes.plot(x, y, color=colour, marker="o" if len(x) <= FEW_POINTS else "", markersize=3.5, label=label)
        return
    band = band_of(curves)
    if np.ptp(band.x) == 0:  # one point each: a range has no width to be drawn over
        ends = np.array([band.mean[:1] - band.low[:1], band.high[:1] - band.mean[:1]])
        axes.errorbar(band.x[:1], band.mean[:1], ends, color=colour, marker="o", capsize=3, label=label)
        return
    axes.fill_between(band.x, band.low, band.high, color=colour, alpha=0.16, linewidth=0)
    axes.plot(band.x, band.mean, color=colour, label=label)
