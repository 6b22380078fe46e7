"""Several runs in one report: settings that differ, curves over one another, figures with intervals, costs, seeds."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from pydantic import JsonValue
from scipy.special import stdtrit

from rlcore.config.fingerprint import fingerprint
from rlcore.config.problems import masked, plain_text
from rlcore.errors import DataError
from rlcore.evaluation.result import Comparison, compare
from rlcore.evaluation.stats import Interval
from rlcore.report import numbers
from rlcore.report.build import ReportFiles, algorithm_of, write_files
from rlcore.report.document import Cell, Finding, Report, Row, Section, Table, Tile, table
from rlcore.report.measures import cost_table, spent_table
from rlcore.report.plots import CYCLE, FEW_POINTS, LIGHT, MOST_POINTS, Chart, gallery_of, plot_intervals, tidy
from rlcore.report.record import RunRecord, read_run
from rlcore.report.series import Series, smooth, thinned, up_to
from rlcore.report.settings import meaning, settings_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEWEST_RUNS = 2
IN_SUMMARY = ("runs", "settings", "held_out", "paired", "seeds", "cost", "spent")
"""Tables of a comparison's summary."""

LABELS = ("name", "run_id", "tags", "paths", "tracking")
"""Settings that name a run or say where it is kept: no difference between two runs."""

GRID_POINTS = 120
"""Points at which the curves of several seeds are averaged."""

MOST_KEYS_IN_A_LABEL = 2

CODE = "code"
"""A run's stage of that name (`Lineage`) has the fingerprint of the code that its settings name."""

Runs = Mapping[str, RunRecord]
"""Runs by what they are called: by id, or by folder where two have the same id."""
Groups = Mapping[str, Sequence[RunRecord]]
"""Runs of the same settings and code, whatever their seed, by what tells them from the others."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over seeds. `mean` has the 95% interval of Student's t; its ends are the mean for a single seed."""

    mean: Interval
    deviation: float
    lowest: float
    highest: float
    num_seeds: int


def differing_settings(runs: Sequence[RunRecord]) -> dict[str, tuple[JsonValue, ...]]:
    """Settings that are not the same in all runs, with each run's value (None where it has no such key); likewise
    `code`, the fingerprint of the code that the settings name, where it is known of all."""
    codes = [_code_of(run) for run in runs]
    known = zip(runs, codes if all(codes) else [None] * len(runs), strict=True)
    found = [{**settings_of(run.config), CODE: code} for run, code in known]
    keys = dict.fromkeys(key for settings in found for key in settings if key.partition(".")[0] not in LABELS)
    values = {key: tuple(settings.get(key) for settings in found) for key in keys}
    return {
        key: tuple(masked(value) if isinstance(value, str) else value for value in row)
        for key, row in values.items()
        if any(value != row[0] for value in row)
    }


def _code_of(run: RunRecord) -> str | None:
    stages = run.lineage.stages if run.lineage is not None else ()
    return next((stage.fingerprint for stage in stages if stage.name == CODE), None)


def groups_of(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Runs put together that differ by their seed at most, in the order of their first run.

    What tells groups apart is one or two settings, else their names, else their run ids.
    """
    differing = {key: row for key, row in differing_settings(runs).items() if key != "seed"}
    members: dict[str, list[int]] = {}
    for place in range(len(runs)):
        members.setdefault(json.dumps([row[place] for row in differing.values()]), []).append(place)
    firsts = [places[0] for places in members.values()]
    labels = [runs[first].config.name for first in firsts]
    named = {key: row for key, row in differing.items() if key != CODE}  # a scorer's name says more than its code's
    if len({json.dumps([row[first] for row in named.values()]) for first in firsts}) < len(firsts):
        named = differing
    if 1 <= len(named) <= MOST_KEYS_IN_A_LABEL:
        labels = [", ".join(f"{key}={plain_text(row[first])}" for key, row in named.items()) for first in firsts]
    elif len(set(labels)) < len(labels):
        labels = list(_labelled([runs[first] for first in firsts]))
    return {label: [runs[place] for place in found] for label, found in zip(labels, members.values(), strict=True)}


def _labelled(runs: Sequence[RunRecord]) -> dict[str, RunRecord]:
    by_id = {run.run_id: run for run in runs}
    return by_id if len(by_id) == len(runs) else {str(run.run_dir): run for run in runs}


def spread_of(values: Sequence[float]) -> Spread:
    """Mean over seeds, its t interval, standard deviation (n - 1), lowest and highest.

    With three seeds the interval is 2.5 standard deviations to each side: few seeds say little.
    """
    found = np.asarray(values, dtype=float)
    count, mean = len(found), float(found.mean())
    deviation = float(found.std(ddof=1)) if count > 1 else 0.0
    half = float(stdtrit(count - 1, 0.975)) * deviation / np.sqrt(count) if count > 1 else 0.0
    return Spread(Interval(mean, mean - half, mean + half), deviation, float(found.min()), float(found.max()), count)


def against(series: Series, totals: Series | None) -> Series:
    """A series over steps, or over tokens or seconds up to each of its steps."""
    return series if totals is None else series.set_axis(up_to(totals, series.index))


def band_of(curves: Sequence[Series]) -> pd.DataFrame:
    """`mean`, `min` and `max` of curves at points that all of them reach, interpolated."""
    low, high = max(curve.index[0] for curve in curves), min(curve.index[-1] for curve in curves)
    grid = np.linspace(low, max(low, high), GRID_POINTS)
    values = np.array([np.interp(grid, curve.index, curve) for curve in curves])
    return pd.DataFrame({"mean": values.mean(0), "min": values.min(0), "max": values.max(0)}, index=grid)


def _final_scores(group: Sequence[RunRecord]) -> dict[str, list[float]]:
    """The last held-out figures by the statistic's name: one for each seed, the mean of its runs that have them."""
    found: dict[str, dict[int, list[float]]] = {}
    for run in group:
        for statistic in run.core_statistics:
            if curve := run.held_out(statistic):
                found.setdefault(statistic, {}).setdefault(run.config.seed, []).append(curve[-1][1].value)
    return {statistic: [float(np.mean(each)) for each in by_seed.values()] for statistic, by_seed in found.items()}


def _num_seeds(runs: Iterable[RunRecord]) -> int:
    return len({run.config.seed for run in runs})


def _reward_of(group: Sequence[RunRecord]) -> Spread | None:
    """The last held-out reward over the group's seeds; None where none was judged."""
    values = _final_scores(group).get(group[0].reward_statistic)
    return spread_of(values) if values else None


# ------------------------------------------------------------------ pictures

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


def _charts(groups: Groups) -> list[Chart]:
    """Held-out and training reward against steps, tokens and seconds; other metrics against steps."""

    def chart(
        name: str, title: str, find: Find, unit: str, label: str = _AXES[0][2], totals: Find = _AXES[0][3]
    ) -> Chart:
        return Chart(name, title, "", partial(_draw, groups, find, totals, label, unit))

    kinds: tuple[tuple[str, str, Find], ...] = (
        ("held_out", "Held-out reward", lambda run: run.held_out_series(run.reward_statistic)),
        ("training", "Training reward", partial(_metric, "critic/score/mean")),
    )
    return [
        chart(f"{name}_by_{axis}", f"{title} {how}", find, "score", label, totals)
        for name, title, find in kinds
        for axis, how, label, totals in _AXES
    ] + [chart(name.replace("/", "_"), title, partial(_metric, name), unit) for name, title, unit in _METRICS]


def _metric(name: str, run: RunRecord) -> Series | None:
    """Moving mean of a metric: the noise of several runs over each other would hide their lines."""
    series = run.series(name)
    return series if series is None or len(series) <= FEW_POINTS else thinned(smooth(series), MOST_POINTS)


def _draw(groups: Groups, find: Find, totals: Find, x_label: str, unit: str, figure: "Figure") -> None:
    axes = figure.subplots()
    for place, (label, runs) in enumerate(groups.items()):
        found = [(run, series) for run in runs if (series := find(run)) is not None]
        curves, count = [against(series, totals(run)) for run, series in found], _num_seeds(run for run, _ in found)
        if curves:
            seeds = f" ({count} seeds)" if count > 1 else ""
            _plot_group(axes, curves, CYCLE[place % len(CYCLE)], label + seeds)
    tidy(axes, x=x_label, y=unit, steps=x_label == "training step")


def _plot_group(axes: "Axes", curves: Sequence[Series], colour: str, label: str) -> None:
    if len(curves) == 1:
        marker = "o" if len(curves[0]) <= FEW_POINTS else ""
        axes.plot(curves[0].index, curves[0], color=LIGHT[colour], marker=marker, markersize=3.5, label=label)
        return
    band = band_of(curves)
    if band.index[0] == band.index[-1]:  # one point each: a range has no width to be drawn over
        plot_intervals(axes, [(band.index[0], Interval(*band.iloc[0]))], colour, label)
        return
    axes.fill_between(band.index, band["min"], band["max"], color=LIGHT[colour], alpha=0.16, linewidth=0)
    axes.plot(band.index, band["mean"], color=LIGHT[colour], label=label)


# ------------------------------------------------------------------ the comparison


def compare_runs(run_dirs: Sequence[Path], *, root: Path | None = None, target: Path | None = None) -> ReportFiles:
    """Write the comparison of two or more runs, finished or not; the first is what the others are compared with.

    `target`: where to write; None: `<root>/comparisons/<fingerprint of the runs>`, without `root` in the first run's.

    Raises:
        DataError: fewer than two different runs, or a folder that holds no run.
    """
    folders = list(dict.fromkeys(folder.resolve() for folder in run_dirs))
    if len(folders) < FEWEST_RUNS:
        raise DataError(f"compare: needs {FEWEST_RUNS} different runs, got {len(folders)}; name another run's folder")
    runs = _labelled([read_run(folder) for folder in folders])
    groups = groups_of(list(runs.values()))
    name = fingerprint("comparison", [str(folder) for folder in folders])
    folder = target or (root or folders[0].parent.parent) / "comparisons" / name
    how = "One line a run. Noisy curves are moving means."
    if len(groups) < len(runs):
        how = "A line is the mean over a setting's runs, its band goes from the lowest to the highest run."
    report = Report(
        genre="comparison",
        title=_title(groups),
        subtitle=f"{len(runs)} runs, {len(groups)} setting{'s' if len(groups) > 1 else ''}",
        state="" if all(run.is_complete for run in runs.values()) else "some runs are not finished",
        state_tone="watch",
        tiles=tuple(_tile(label, _reward_of(group)) for label, group in groups.items()),
        findings=(*_over_seeds(groups), *([_best(groups)] if len(groups) > 1 else []), _against_first(runs)),
        missing=tuple(
            f"{label}: {text}" for label, run in runs.items() for text in run.missing if "lineage" not in text
        ),
        sections=(
            Section("runs", "Runs", (_run_table(runs, groups), _settings_table(runs))),
            Section("curves", "Curves", (gallery_of(_charts(groups), folder / "figures"),), how),
            Section("figures", "Figures", (_held_out_table(runs), _paired_table(runs), _seed_table(groups))),
            Section("costs", "Costs", tuple(filter(None, [cost_table(runs), spent_table(runs)]))),
            Section("metrics", "Metrics", (_metric_table(runs),)),
        ),
    )
    return write_files(report, folder, "comparison", IN_SUMMARY)


def _title(groups: Groups) -> str:
    """Short enough for one line; the tiles have all labels."""
    names = list(dict.fromkeys(run.config.name for group in groups.values() for run in group))
    if len(groups) == 1:
        (group,) = groups.values()
        count = _num_seeds(group)
        return f"{names[0]}: {count} seeds" if count > 1 else f"{names[0]}: {len(group)} runs of one seed"
    return f"{names[0]}: {len(groups)} settings" if len(names) == 1 else f"{names[0]} and {len(groups) - 1} more"


def _tile(label: str, reward: Spread | None) -> Tile:
    if reward is None:
        return Tile(label, numbers.NOTHING, "no validation")
    ends = f"{numbers.fixed(reward.lowest)} to {numbers.fixed(reward.highest)}, {reward.num_seeds} seeds"
    return Tile(label, numbers.fixed(reward.mean.value), ends if reward.num_seeds > 1 else "1 seed")


def _over_seeds(groups: Groups) -> Iterator[Finding]:
    """Mean and range of the held-out reward of each setting that has several seeds."""
    rule = "The last held-out reward of each seed: their mean, the lowest and the highest."
    for label, group in groups.items():
        found = _reward_of(group)
        if found is not None and found.num_seeds > 1:
            text = (
                f"{label}: {group[0].reward_statistic} {numbers.fixed(found.mean.value)}, "
                f"{numbers.fixed(found.lowest)} to {numbers.fixed(found.highest)}."
            )
            yield Finding("Over seeds", f"{found.num_seeds} seeds", "", text, rule=rule, numbers={label: asdict(found)})


def _best(groups: Groups) -> Finding:
    """Which setting is best over seeds, if that can be said."""
    rule = (
        "The setting with the highest mean of the last held-out reward over seeds; better than another if its lowest "
        "seed is above the other's highest, with two seeds each at least."
    )
    finding = partial(Finding, "Best setting", rule=rule)
    found = {label: spread for label, group in groups.items() if (spread := _reward_of(group)) is not None}
    if len(found) < FEWEST_RUNS:
        text = "Fewer than two settings have been judged on held-out problems."
        return finding("not known", "muted", text)
    (first, best), (second, next_best), *_ = sorted(found.items(), key=lambda pair: -pair[1].mean.value)
    means = {label: asdict(spread.mean) for label, spread in found.items()}
    said = f"{first} has {numbers.fixed(best.mean.value)}, {second} {numbers.fixed(next_best.mean.value)}"
    if min(best.num_seeds, next_best.num_seeds) < FEWEST_RUNS:
        text = f"{said}; with one seed of a setting nothing is said about the setting."
        return finding("one seed is too few", "watch", text, numbers=means)
    if best.lowest > next_best.highest:
        return finding(first, "good", f"{said}; no seed overlaps.", numbers=means)
    return finding("not told apart", "watch", f"{said}; their seeds overlap.", numbers=means)


def _against_first(runs: Runs) -> Finding:
    """Which runs differ from the first one on the same problems."""
    rule = "Paired difference of the held-out reward from the first run; told apart if its 95% interval excludes 0."
    (base, first), *others = runs.items()
    gains = {
        label: row.paired.difference
        for label, run in others
        for row in _paired(first, run)[0]
        if row.statistic == run.reward_statistic
    }
    finding = partial(Finding, "Against the first run", rule=rule)
    if not gains:
        text = "No other run was judged on the same problems as the first one."
        return finding("not known", "muted", text)
    apart = sum(gain.excludes_zero for gain in gains.values())
    text = f"From {base}: " + "; ".join(f"{name} {numbers.signed_interval(gain)}" for name, gain in gains.items()) + "."
    values = {label: asdict(gain) for label, gain in gains.items()}
    return finding(f"{apart} of {len(gains)} told apart", "" if apart else "watch", text, numbers=values)


# ------------------------------------------------------------------ tables


def _run_table(runs: Runs, groups: Groups) -> Table:
    setting = {id(run): label for label, group in groups.items() for run in group}
    rows = []
    for label, run in runs.items():
        held_out: list[Interval | None] = [found for _, found in run.held_out(run.reward_statistic)] or [None]
        steps = Cell(f"{run.last_step} of {run.config.trainer.total_steps}", run.last_step)
        totals = (None if series is None else series.iloc[-1] for series in (run.tokens, run.seconds))
        rows.append(
            (label, setting[id(run)], algorithm_of(run), run.config.seed, steps, held_out[0], held_out[-1], *totals)
        )
    return table("runs", "Runs",
                 {"Run": "code", "Setting": "text", "Algorithm": "text", "Seed": "number", "Steps": "number",
                  "Held-out reward, first": "number", "last": "number", "Tokens": "number",
                  "Training time": "seconds"}, rows)  # fmt: skip


def _settings_table(runs: Runs) -> Table:
    differing = differing_settings(list(runs.values()))
    rows: list[Row] = [
        (
            key,
            *(Cell(plain_text(each), each) for each in row),
            "Fingerprint of the code that settings name" if key == CODE else meaning(key),
        )
        for key, row in differing.items()
    ]
    note = "All other settings are the same; names, tags, paths and tracking are not compared."
    return table("settings", "Settings that differ",
                 {"Setting": "code", **dict.fromkeys(runs, "code"), "Meaning": "text"}, rows, note)  # fmt: skip


def _held_out_table(runs: Runs) -> Table:
    statistics = dict.fromkeys(statistic for run in runs.values() for statistic in run.core_statistics)
    curves = {statistic: [run.held_out(statistic) for run in runs.values()] for statistic in statistics}
    rows = [(name, *(found[-1][1] if found else None for found in each)) for name, each in curves.items() if any(each)]
    note = "At each run's last validation; intervals are over problems, within the run."
    return table("held_out", "Held-out figures at the end",
                 {"Figure": "code", **dict.fromkeys(runs, "number")}, rows, note)  # fmt: skip


def _paired_table(runs: Runs) -> Table:
    rows: list[Row] = []
    (base, first), *others = runs.items()
    for label, run in others:
        found, why = _paired(first, run)
        if not found:
            rows.append((label, Cell("–"), Cell(why, why, "muted"), *(Cell(""),) * 3))
        rows += [
            (label, row.statistic, row.paired.difference, row.paired.wins, row.paired.losses, row.num_problems)
            for row in found
            if row.statistic in run.core_statistics
        ]
    note = "Paired over problems: how hard each one is cancels. One run each: what another seed would do is not in it."
    return table("paired", "The same problems, run against run",
                 {"Run": "code", "Figure": "code", f"Difference from {base}": "difference", "Better on": "number",
                  "Worse on": "number", "Problems": "number"}, rows, note)  # fmt: skip


def _paired(first: RunRecord, second: RunRecord) -> tuple[tuple[Comparison, ...], str]:
    """The statistics of two runs after training, paired; or why they cannot be."""
    if first.after is None or second.after is None:
        return (), "no validation after training with its answers"
    try:
        return compare(first.after, second.after), ""
    except DataError:
        return (), "judged on other problems"


def _seed_table(groups: Groups) -> Table:
    rows = []
    for label, group in groups.items():
        for statistic, values in _final_scores(group).items():
            found = spread_of(values)
            mean, deviation = (found.mean, found.deviation) if found.num_seeds > 1 else (found.mean.value, None)
            rows.append((label, statistic, found.num_seeds, mean, deviation, found.lowest, found.highest))
    note = "Mean with the 95% interval of Student's t over seeds; several runs of a seed count as one, by their mean."
    return table("seeds", "Over seeds",
                 {"Setting": "text", "Figure": "code", "Seeds": "number", "Mean": "score", "Deviation": "score",
                  "Lowest": "score", "Highest": "score"}, rows, note)  # fmt: skip


def _metric_table(runs: Runs) -> Table:
    """Every metric's last value, as MLflow shows it."""
    newest = [run.metrics.ffill().reindex([run.metrics.index.max()]).T for run in runs.values()]  # NaN without a step
    last = pd.concat(newest, axis="columns").sort_index()
    rows = [
        (str(name), *(None if np.isnan(value) else value for value in values)) for name, *values in last.itertuples()
    ]
    return table("metrics", f"Every metric's last value ({len(rows)})",
                 {"Metric": "code", **dict.fromkeys(runs, "number")}, rows, folded=True)  # fmt: skip
