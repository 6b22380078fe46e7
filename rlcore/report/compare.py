"""Several runs in one report: settings that differ, curves over one another, figures with intervals, costs, seeds."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

from rlcore.config.fingerprint import fingerprint
from rlcore.errors import DataError
from rlcore.evaluation import Comparison, compare
from rlcore.report import document as doc
from rlcore.report import numbers
from rlcore.report.build import ReportFiles, write_files
from rlcore.report.document import Cell, Column, Finding, Gallery, Report, Section, Table, Tile
from rlcore.report.groups import (
    Group,
    charts,
    core_statistics,
    differing_settings,
    final_scores,
    groups_of,
    how_to_read,
    last_values,
    run_labels,
    spread_of,
)
from rlcore.report.measures import cost_of, levels_of
from rlcore.report.overview import algorithm_of
from rlcore.report.page import render
from rlcore.report.record import RunRecord, read_run
from rlcore.report.settings import meaning, plain_text

FEWEST_RUNS = 2
IN_SUMMARY = ("runs", "settings", "held_out", "paired", "seeds", "cost")
"""Tables of a comparison's summary."""


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
    groups = groups_of(runs)
    drawn = [(chart, render(chart, figures)) for chart in charts(groups)]
    gallery = Gallery(
        tuple(picture for _, picture in drawn if picture is not None),
        tuple(chart.title for chart, picture in drawn if picture is None),
    )
    return Report(
        genre="comparison",
        title=_title(groups),
        subtitle=f"{len(runs)} runs, {len(groups)} setting{'s' if len(groups) > 1 else ''}",
        state="" if all(run.is_complete for run in runs) else "some runs are not finished",
        state_tone="watch",
        tiles=_tiles(groups),
        findings=(_best(groups), _paired(runs)),
        missing=_missing(runs),
        sections=(
            Section("runs", "Runs", (run_table(runs, groups), settings_table(runs))),
            Section("curves", "Curves", (gallery,), how_to_read(groups)),
            Section("figures", "Figures",
                    (held_out_table(runs), paired_table(runs), seed_table(groups))),
            Section("costs", "Costs", (cost_table(runs),)),
            Section("metrics", "Metrics", (metric_table(runs),)),
        ),
    )  # fmt: skip


def _title(groups: Sequence[Group]) -> str:
    if len(groups) == 1:
        return f"{groups[0].label}: {len(groups[0].runs)} seeds"
    return " · ".join(group.label for group in groups)


def _tiles(groups: Sequence[Group]) -> tuple[Tile, ...]:
    """The held-out reward of each setting."""
    tiles = []
    for group in groups:
        values = final_scores(group).get(group.runs[0].reward_statistic)
        if not values:
            tiles.append(Tile(group.label, numbers.NOTHING, "no validation"))
            continue
        found = spread_of(values)
        ends = f"{numbers.fixed(found.lowest)} to {numbers.fixed(found.highest)}, {found.num_runs} seeds"
        tiles.append(Tile(group.label, numbers.fixed(found.mean.value), ends if found.num_runs > 1 else "1 seed"))
    return tuple(tiles)


def _best(groups: Sequence[Group]) -> Finding:
    """Which setting is best over seeds, if that can be said."""
    rule = (
        "The setting with the highest mean of the last held-out reward over seeds; better than another if its lowest "
        "seed is above the other's highest, with two seeds each at least."
    )
    found = {
        group.label: spread_of(values)
        for group in groups
        if (values := final_scores(group).get(group.runs[0].reward_statistic))
    }
    if len(found) < FEWEST_RUNS:
        text = "Fewer than two settings have been judged on held-out problems."
        return Finding("Best setting", "not known", "muted", text, rule, {})
    (first, best), (second, next_best), *_ = sorted(found.items(), key=lambda pair: -pair[1].mean.value)
    means: dict[str, JsonValue] = {label: doc.interval_value(spread.mean) for label, spread in found.items()}
    said = f"{first} has {numbers.fixed(best.mean.value)}, {second} {numbers.fixed(next_best.mean.value)}"
    if min(best.num_runs, next_best.num_runs) < FEWEST_RUNS:
        text = f"{said}; with one seed of a setting nothing is said about the setting."
        return Finding("Best setting", "one seed is too few", "watch", text, rule, means)
    if best.lowest > next_best.highest:
        return Finding("Best setting", first, "good", f"{said}; no seed overlaps.", rule, means)
    return Finding("Best setting", "not told apart", "watch", f"{said}; their seeds overlap.", rule, means)


def _paired(runs: Sequence[RunRecord]) -> Finding:
    """Which runs differ from the first one on the same problems."""
    rule = "Paired difference of the held-out reward from the first run; told apart if its 95% interval excludes 0."
    labels, parts = run_labels(runs), []
    for label, run in zip(labels[1:], runs[1:], strict=True):
        rows, _ = paired_rows(runs[0], run)
        gain = next((row.paired.difference for row in rows if row.statistic == run.reward_statistic), None)
        if gain is not None:
            parts.append((label, gain))
    if not parts:
        text = "No other run was judged on the same problems as the first one."
        return Finding("Against the first run", "not known", "muted", text, rule, {})
    apart = sum(gain.excludes_zero for _, gain in parts)
    text = f"From {labels[0]}: " + "; ".join(f"{label} {numbers.signed_interval(gain)}" for label, gain in parts) + "."
    verdict = f"{apart} of {len(parts)} told apart"
    values = {label: doc.interval_value(gain) for label, gain in parts}
    return Finding("Against the first run", verdict, "" if apart else "watch", text, rule, dict(values))


def _missing(runs: Sequence[RunRecord]) -> tuple[str, ...]:
    return tuple(
        f"{label}: {text}"
        for label, run in zip(run_labels(runs), runs, strict=True)
        for text in run.missing
        if "lineage" not in text
    )


def run_table(runs: Sequence[RunRecord], groups: Sequence[Group]) -> Table:
    """Each run in a row."""
    setting = {id(run): group.label for group in groups for run in group.runs}
    rows = []
    for label, run in zip(run_labels(runs), runs, strict=True):
        held_out = run.held_out(run.reward_statistic)
        rows.append(
            (
                doc.text(label),
                doc.text(setting[id(run)]),
                doc.text(algorithm_of(run)),
                doc.number(run.config.seed),
                Cell(f"{run.last_step} of {run.config.trainer.total_steps}", run.last_step),
                doc.interval(held_out[0][1] if held_out else None),
                doc.interval(held_out[-1][1] if held_out else None),
                doc.number(run.tokens.last if run.tokens else None),
                doc.seconds(run.seconds.last if run.seconds else None),
            )
        )
    columns = (Column("Run", "code"), Column("Setting"), Column("Algorithm"), Column("Seed", "number"),
               Column("Steps", "number"), Column("Held-out reward, first", "number"), Column("last", "number"),
               Column("Tokens", "number"), Column("Training time", "number"))  # fmt: skip
    return Table("runs", "Runs", columns, tuple(rows))


def settings_table(runs: Sequence[RunRecord]) -> Table:
    """Settings that differ, a column a run."""
    rows = tuple(
        (doc.text(key), *(Cell(plain_text(value), value) for value in values), doc.text(meaning(key)))
        for key, values in differing_settings(runs).items()
    )
    columns = (Column("Setting", "code"), *(Column(label, "code") for label in run_labels(runs)), Column("Meaning"))
    note = "All other settings are the same; names, tags, paths and tracking are not compared."
    return Table("settings", "Settings that differ", columns, rows, note)


def held_out_table(runs: Sequence[RunRecord]) -> Table:
    """The last held-out figures with their intervals, a column a run."""
    statistics = dict.fromkeys(statistic for run in runs for statistic in core_statistics(run))
    rows = []
    for statistic in statistics:
        curves = [run.held_out(statistic) for run in runs]
        if any(curves):
            rows.append((doc.text(statistic), *(doc.interval(curve[-1][1] if curve else None) for curve in curves)))
    columns = (Column("Figure", "code"), *(Column(label, "number") for label in run_labels(runs)))
    note = "At each run's last validation; intervals are over problems, within the run."
    return Table("held_out", "Held-out figures at the end", columns, tuple(rows), note)


def paired_table(runs: Sequence[RunRecord]) -> Table:
    """Each run after training against the first one, on the same held-out problems."""
    rows = []
    labels = run_labels(runs)
    for label, run in zip(labels[1:], runs[1:], strict=True):
        found, why = paired_rows(runs[0], run)
        if not found:
            rows.append((doc.text(label), Cell("–"), Cell(why, why, "muted"), Cell(""), Cell(""), Cell("")))
        rows += [
            (
                doc.text(label),
                doc.text(row.statistic),
                doc.difference(row.paired.difference),
                doc.number(row.paired.wins),
                doc.number(row.paired.losses),
                doc.number(row.num_problems),
            )
            for row in found
            if row.statistic in set(core_statistics(run))
        ]
    columns = (Column("Run", "code"), Column("Figure", "code"), Column(f"Difference from {labels[0]}", "number"),
               Column("Better on", "number"), Column("Worse on", "number"), Column("Problems", "number"))  # fmt: skip
    note = "Paired over problems: how hard each one is cancels. One run each: what another seed would do is not in it."
    return Table("paired", "The same problems, run against run", columns, tuple(rows), note)


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
    rows = []
    for group in groups:
        for statistic, values in final_scores(group).items():
            found = spread_of(values)
            several = found.num_runs > 1
            rows.append(
                (
                    doc.text(group.label),
                    doc.text(statistic),
                    doc.number(found.num_runs),
                    doc.interval(found.mean) if several else doc.score(found.mean.value),
                    doc.score(found.deviation) if several else Cell(numbers.NOTHING, None, "muted"),
                    doc.score(found.lowest),
                    doc.score(found.highest),
                )
            )
    columns = (Column("Setting"), Column("Figure", "code"), Column("Seeds", "number"), Column("Mean", "number"),
               Column("Deviation", "number"), Column("Lowest", "number"), Column("Highest", "number"))  # fmt: skip
    note = "Over runs that differ by their seed alone: mean with the 95% interval of Student's t over seeds."
    return Table("seeds", "Over seeds", columns, tuple(rows), note)


def cost_table(runs: Sequence[RunRecord]) -> Table:
    """What each level of the held-out reward cost each run."""
    labels = run_labels(runs)
    rows = []
    for level in levels_of(*runs):
        for label, run in zip(labels, runs, strict=True):
            cost = cost_of(run, level)
            if cost is None:
                never = Cell("not reached", None, "muted")
                rows.append((Cell(f"{level:.1f}", level), doc.text(label), never, never, never))
                continue
            rows.append((Cell(f"{level:.1f}", level), doc.text(label), doc.number(cost.step), doc.number(cost.tokens),
                         doc.seconds(cost.seconds)))  # fmt: skip
    columns = (Column("Held-out reward", "number"), Column("Run", "code"), Column("Step", "number"),
               Column("Tokens", "number"), Column("Training time", "number"))  # fmt: skip
    note = "The first validation at or above the level; finer than the steps between two validations it cannot be."
    return Table("cost", "What a score cost", columns, tuple(rows), note)


def metric_table(runs: Sequence[RunRecord]) -> Table:
    """Every metric's last value, a column a run."""
    found = [last_values(run) for run in runs]
    names = sorted({name for values in found for name in values})
    rows = tuple((doc.text(name), *(doc.number(values.get(name)) for values in found)) for name in names)
    columns = (Column("Metric", "code"), *(Column(label, "number") for label in run_labels(runs)))
    return Table("metrics", f"Every metric's last value ({len(names)})", columns, rows, folded=True)
