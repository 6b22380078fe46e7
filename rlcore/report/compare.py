"""Several runs in one report: settings that differ, curves over one another, figures with intervals, costs, seeds."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from pydantic import JsonValue
from scipy.special import stdtrit

from rlcore.config.fingerprint import fingerprint
from rlcore.config.problems import plain_text
from rlcore.errors import DataError
from rlcore.evaluation.result import Comparison, compare
from rlcore.evaluation.stats import Interval
from rlcore.report import numbers
from rlcore.report.build import ReportFiles, algorithm_of, write_files
from rlcore.report.document import Cell, Finding, Kind, Report, Section, Table, Tile, Value, table
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


def differing_settings(runs: Sequence[RunRecord]) -> dict[str, tuple[JsonValue, ...]]:
    """Settings that are not the same in all runs, with each run's value (None where it has no such key)."""
    found = [_settings_compared(run) for run in runs]
    keys = dict.fromkeys(key for settings in found for key in settings)
    values = {key: tuple(settings.get(key) for settings in found) for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def groups_of(runs: Sequence[RunRecord]) -> tuple[Group, ...]:
    """Runs put together that differ by their seed alone, in the order of their first run."""
    found: dict[str, list[RunRecord]] = {}
    for run in runs:
        settings = {key: value for key, value in _settings_compared(run).items() if key != "seed"}
        found.setdefault(json.dumps(settings, sort_keys=True), []).append(run)
    members = list(found.values())
    return tuple(Group(label, tuple(group)) for label, group in zip(_labels(members), members, strict=True))


def _settings_compared(run: RunRecord) -> dict[str, JsonValue]:
    settings = settings_of(run.config)
    return {key: value for key, value in settings.items() if key.partition(".")[0] not in LABELS}


def _labels(groups: Sequence[Sequence[RunRecord]]) -> list[str]:
    """What tells the groups apart: one or two settings, else their names, else their run ids."""
    firsts = [group[0] for group in groups]
    differing = {key: row for key, row in differing_settings(firsts).items() if key != "seed"}
    if 1 <= len(differing) <= MOST_KEYS_IN_A_LABEL:
        pairs = [[f"{key}={plain_text(value)}" for value in row] for key, row in differing.items()]
        return [", ".join(each) for each in zip(*pairs, strict=True)]
    names = [run.config.name for run in firsts]
    return names if len(set(names)) == len(names) else [label for label, _ in labelled(firsts)]


def labelled(runs: Sequence[RunRecord]) -> list[tuple[str, RunRecord]]:
    """Each run with its name: its id, or its folder where two have the same id."""
    unique = len({run.run_id for run in runs}) == len(runs)
    return [(run.run_id if unique else str(run.run_dir), run) for run in runs]


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
    values = pd.DataFrame([np.interp(grid, curve.index, curve) for curve in curves], columns=grid)
    return values.agg(["mean", "min", "max"]).T


def final_scores(group: Group) -> dict[str, list[float]]:
    """The last held-out figures of a group's runs that have them, by the statistic's name."""
    found: dict[str, list[float]] = {}
    for run in group.runs:
        for statistic in run.core_statistics:
            if curve := run.held_out(statistic):
                found.setdefault(statistic, []).append(curve[-1][1].value)
    return found


def reward_of(group: Group) -> Spread | None:
    """The last held-out reward over the group's seeds; None where none was judged."""
    values = final_scores(group).get(group.runs[0].reward_statistic)
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


def charts(groups: Sequence[Group]) -> tuple[Chart, ...]:
    """Held-out and training reward against steps, tokens and seconds; other metrics against steps."""
    kinds: tuple[tuple[str, str, Find], ...] = (
        ("held_out", "Held-out reward", lambda run: run.held_out_series(run.reward_statistic)),
        ("training", "Training reward", partial(_metric, "critic/score/mean")),
    )
    rewards = [
        Chart(f"{name}_by_{axis}", f"{title} {how}", "", partial(_draw, groups, find, totals, label, "score"))
        for name, title, find in kinds
        for axis, how, label, totals in _AXES
    ]
    _, _, label, totals = _AXES[0]
    others = [
        Chart(name.replace("/", "_"), title, "", partial(_draw, groups, partial(_metric, name), totals, label, unit))
        for name, title, unit in _METRICS
    ]
    return (*rewards, *others)


def _metric(name: str, run: RunRecord) -> Series | None:
    """Its moving mean: lines of several runs over each other are not to be read in their noise."""
    series = run.series(name)
    return series if series is None or len(series) <= FEW_POINTS else thinned(smooth(series), MOST_POINTS)


def how_to_read(groups: Sequence[Group]) -> str:
    """What lines and bands are."""
    if any(len(group.runs) > 1 for group in groups):
        return "A line is the mean over seeds, its band goes from the lowest to the highest seed."
    return "One line a run. Noisy curves are moving means."


def _draw(groups: Sequence[Group], find: Find, totals: Find, x_label: str, unit: str, figure: "Figure") -> None:
    axes = figure.subplots()
    for place, group in enumerate(groups):
        curves = [against(series, totals(run)) for run in group.runs if (series := find(run)) is not None]
        if curves:
            label = f"{group.label} ({len(curves)} seeds)" if len(curves) > 1 else group.label
            _plot_group(axes, curves, CYCLE[place % len(CYCLE)], label)
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


def compare_runs(run_dirs: Sequence[Path], *, target: Path | None = None) -> ReportFiles:
    """Write the comparison of two or more runs, finished or not.

    Args:
        run_dirs: folders of runs; the first one is what the others are compared with.
        target: where to write; None: `comparisons/<fingerprint of the runs>` beside the folder `runs`.

    Raises:
        DataError: fewer than two different runs, or a folder that holds no run.
    """
    folders = list(dict.fromkeys(folder.resolve() for folder in run_dirs))
    if len(folders) < FEWEST_RUNS:
        raise DataError(f"compare: needs {FEWEST_RUNS} different runs, got {len(folders)}; name another run's folder")
    runs = [read_run(folder) for folder in folders]
    name = fingerprint("comparison", [str(folder) for folder in folders])
    folder = target or folders[0].parent.parent / "comparisons" / name
    return write_files(comparison_of(runs, folder / "figures"), folder, "comparison", IN_SUMMARY)


def comparison_of(runs: Sequence[RunRecord], figures: Path) -> Report:
    """The comparison before it is written; pictures are written into `figures`."""
    groups, named = groups_of(runs), labelled(runs)
    return Report(
        genre="comparison",
        title=_title(groups),
        subtitle=f"{len(runs)} runs, {len(groups)} setting{'s' if len(groups) > 1 else ''}",
        state="" if all(run.is_complete for run in runs) else "some runs are not finished",
        state_tone="watch",
        tiles=tuple(map(_tile, groups)),
        findings=(_best(groups), _paired(runs)),
        missing=tuple(
            f"{label}: {text}" for label, run in named for text in run.missing if "lineage" not in text
        ),
        sections=(
            Section("runs", "Runs", (run_table(runs, groups), settings_table(runs))),
            Section("curves", "Curves", (gallery_of(charts(groups), figures),), how_to_read(groups)),
            Section("figures", "Figures",
                    (held_out_table(runs), paired_table(runs), seed_table(groups))),
            Section("costs", "Costs", tuple(filter(None, [cost_table(named), spent_table(named)]))),
            Section("metrics", "Metrics", (metric_table(runs),)),
        ),
    )  # fmt: skip


def _title(groups: Sequence[Group]) -> str:
    """Short enough for one line; the tiles have all labels."""
    names = list(dict.fromkeys(run.config.name for group in groups for run in group.runs))
    if len(groups) == 1:
        return f"{names[0]}: {len(groups[0].runs)} seeds"
    return f"{names[0]}: {len(groups)} settings" if len(names) == 1 else f"{names[0]} and {len(groups) - 1} more"


def _tile(group: Group) -> Tile:
    """The held-out reward of a setting."""
    found = reward_of(group)
    if found is None:
        return Tile(group.label, numbers.NOTHING, "no validation")
    ends = f"{numbers.fixed(found.lowest)} to {numbers.fixed(found.highest)}, {found.num_runs} seeds"
    return Tile(group.label, numbers.fixed(found.mean.value), ends if found.num_runs > 1 else "1 seed")


def _best(groups: Sequence[Group]) -> Finding:
    """Which setting is best over seeds, if that can be said."""
    topic = "Best setting"
    rule = (
        "The setting with the highest mean of the last held-out reward over seeds; better than another if its lowest "
        "seed is above the other's highest, with two seeds each at least."
    )
    found = {group.label: spread for group in groups if (spread := reward_of(group)) is not None}
    if len(found) < FEWEST_RUNS:
        text = "Fewer than two settings have been judged on held-out problems."
        return Finding(topic, "not known", "muted", text, rule, {})
    (first, best), (second, next_best), *_ = sorted(found.items(), key=lambda pair: -pair[1].mean.value)
    means: dict[str, JsonValue] = {label: asdict(spread.mean) for label, spread in found.items()}
    said = f"{first} has {numbers.fixed(best.mean.value)}, {second} {numbers.fixed(next_best.mean.value)}"
    if min(best.num_runs, next_best.num_runs) < FEWEST_RUNS:
        text = f"{said}; with one seed of a setting nothing is said about the setting."
        return Finding(topic, "one seed is too few", "watch", text, rule, means)
    if best.lowest > next_best.highest:
        return Finding(topic, first, "good", f"{said}; no seed overlaps.", rule, means)
    return Finding(topic, "not told apart", "watch", f"{said}; their seeds overlap.", rule, means)


def _paired(runs: Sequence[RunRecord]) -> Finding:
    """Which runs differ from the first one on the same problems."""
    topic = "Against the first run"
    rule = "Paired difference of the held-out reward from the first run; told apart if its 95% interval excludes 0."
    (base, first), *others = labelled(runs)
    gains = {
        label: row.paired.difference
        for label, run in others
        for row in paired_rows(first, run)[0]
        if row.statistic == run.reward_statistic
    }
    if not gains:
        text = "No other run was judged on the same problems as the first one."
        return Finding(topic, "not known", "muted", text, rule, {})
    apart = sum(gain.excludes_zero for gain in gains.values())
    text = f"From {base}: " + "; ".join(f"{name} {numbers.signed_interval(gain)}" for name, gain in gains.items()) + "."
    verdict = f"{apart} of {len(gains)} told apart"
    return Finding(topic, verdict, "" if apart else "watch", text, rule,
                   {label: asdict(gain) for label, gain in gains.items()})  # fmt: skip


# ------------------------------------------------------------------ tables


def _columns(runs: Sequence[RunRecord], kind: Kind) -> dict[str, Kind]:
    return {label: kind for label, _ in labelled(runs)}


def run_table(runs: Sequence[RunRecord], groups: Sequence[Group]) -> Table:
    """Each run in a row."""
    setting = {id(run): group.label for group in groups for run in group.runs}
    rows: list[tuple[Value, ...]] = []
    for label, run in labelled(runs):
        held_out: Sequence[Interval | None] = [found for _, found in run.held_out(run.reward_statistic)] or [None]
        steps = Cell(f"{run.last_step} of {run.config.trainer.total_steps}", run.last_step)
        totals = [None if series is None else series.iloc[-1] for series in (run.tokens, run.seconds)]
        rows.append(
            (label, setting[id(run)], algorithm_of(run), run.config.seed, steps, held_out[0], held_out[-1], *totals)
        )
    columns: dict[str, Kind] = {"Run": "code", "Setting": "text", "Algorithm": "text", "Seed": "number",
                                "Steps": "number", "Held-out reward, first": "number", "last": "number",
                                "Tokens": "number", "Training time": "seconds"}  # fmt: skip
    return table("runs", "Runs", columns, rows)


def settings_table(runs: Sequence[RunRecord]) -> Table:
    """Settings that differ, a column a run."""
    rows: list[tuple[Value, ...]] = [
        (key, *(Cell(plain_text(value), value) for value in values), meaning(key))
        for key, values in differing_settings(runs).items()
    ]
    columns: dict[str, Kind] = {"Setting": "code", **_columns(runs, "code"), "Meaning": "text"}
    note = "All other settings are the same; names, tags, paths and tracking are not compared."
    return table("settings", "Settings that differ", columns, rows, note)


def held_out_table(runs: Sequence[RunRecord]) -> Table:
    """The last held-out figures with their intervals, a column a run."""
    statistics = dict.fromkeys(statistic for run in runs for statistic in run.core_statistics)
    curves = {statistic: [run.held_out(statistic) for run in runs] for statistic in statistics}
    rows: list[tuple[Value, ...]] = [
        (name, *(found[-1][1] if found else None for found in each)) for name, each in curves.items() if any(each)
    ]
    note = "At each run's last validation; intervals are over problems, within the run."
    columns: dict[str, Kind] = {"Figure": "code", **_columns(runs, "number")}
    return table("held_out", "Held-out figures at the end", columns, rows, note)


def paired_table(runs: Sequence[RunRecord]) -> Table:
    """Each run after training against the first one, on the same held-out problems."""
    rows: list[tuple[Value, ...]] = []
    (base, first), *others = labelled(runs)
    for label, run in others:
        found, why = paired_rows(first, run)
        if not found:
            rows.append((label, Cell("–"), Cell(why, why, "muted"), Cell(""), Cell(""), Cell("")))
        rows += [
            (label, row.statistic, row.paired.difference, row.paired.wins, row.paired.losses, row.num_problems)
            for row in found
            if row.statistic in run.core_statistics
        ]
    columns: dict[str, Kind] = {"Run": "code", "Figure": "code", f"Difference from {base}": "difference",
                                "Better on": "number", "Worse on": "number", "Problems": "number"}  # fmt: skip
    note = "Paired over problems: how hard each one is cancels. One run each: what another seed would do is not in it."
    return table("paired", "The same problems, run against run", columns, rows, note)


def paired_rows(first: RunRecord, second: RunRecord) -> tuple[tuple[Comparison, ...], str]:
    """The statistics of two runs after training, paired; or why they cannot be."""
    if first.after is None or second.after is None:
        return (), "no validation after training with its answers"
    try:
        return compare(first.after, second.after), ""
    except DataError:
        return (), "judged on other problems"


def seed_table(groups: Sequence[Group]) -> Table:
    """Held-out figures over the seeds of each setting."""
    rows: list[tuple[Value, ...]] = []
    for group in groups:
        for statistic, values in final_scores(group).items():
            found = spread_of(values)
            mean, deviation = (found.mean, found.deviation) if found.num_runs > 1 else (found.mean.value, None)
            rows.append((group.label, statistic, found.num_runs, mean, deviation, found.lowest, found.highest))
    columns: dict[str, Kind] = {"Setting": "text", "Figure": "code", "Seeds": "number", "Mean": "score",
                                "Deviation": "score", "Lowest": "score", "Highest": "score"}  # fmt: skip
    note = "Over runs that differ by their seed alone: mean with the 95% interval of Student's t over seeds."
    return table("seeds", "Over seeds", columns, rows, note)


def metric_table(runs: Sequence[RunRecord]) -> Table:
    """Every metric's last value, as MLflow shows it, a column a run."""
    last = pd.concat([run.metrics.ffill().tail(1).T for run in runs], axis="columns").sort_index()
    rows: list[tuple[Value, ...]] = [
        (str(name), *(None if np.isnan(value) else value for value in values)) for name, *values in last.itertuples()
    ]
    columns: dict[str, Kind] = {"Metric": "code", **_columns(runs, "number")}
    return table("metrics", f"Every metric's last value ({len(rows)})", columns, rows, folded=True)
