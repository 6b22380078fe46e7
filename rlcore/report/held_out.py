"""The section on held-out problems. It compares one run before and after training, or several runs after training."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcore.errors import DataError
from rlcore.evaluation.result import Comparison, ValidationResult, compare, pass_curve
from rlcore.report.document import Block, Cell, Kind, Row, Section, Table, Value, table
from rlcore.report.plots import CYCLE, LIGHT, Chart, format_axes
from rlcore.report.record import RunRecord, Runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ValidationPair = Mapping[str, ValidationResult]
"""Validation results by label: `before` and `after`, or the names of the runs."""
OTHER_PROBLEMS = "evaluated on other problems"
_MEANING: Mapping[str, str] = {
    "reward/mean": "mean score of {k} sampled responses",
    "reward/pass": "at least one of {k} samples is correct (unbiased)",
    "reward/pass_all": "all of {k} samples are correct (unbiased)",
    "reward/maj": "the most frequent of {k} final answers is correct",
    "reward/greedy": "score of the greedy response",
    "acc/mean": "share of {k} sampled responses that are correct",
    "acc/greedy": "the greedy response is correct",
}


def section_of(runs: Runs, draw: Callable[[Iterable[Chart]], Block]) -> Section:
    """Return the section on held-out problems."""
    (first, *others), lead = runs.values(), ""
    if others:
        results = {label: run.after for label, run in runs.items() if run.after is not None}
        blocks: list[Block | None] = [_last_table(runs), _paired_table(runs)]
    else:
        results, blocks = first.before_and_after, [_result_table(first)] if first.before_and_after else []
        if len(results) == 2:
            before, after = results.values()
            lead = (
                f"{after.settings.samples_per_problem} samples per problem at temperature "
                f"{after.settings.sampling.temperature:g}, {after.settings.confidence:.0%} intervals over problems: "
                f"Wilson's for metrics that are 0 or 1 per problem, else {after.settings.num_resamples:,} bootstrap "
                f"resamples. Before is step {before.step}, after is step {after.step}."
            )
    if 0 < len(results) <= len(CYCLE):  # more bars would be unreadable
        statistics = [name for name in first.core_statistics[: 1 if others else None] if "/maj_at_" not in name]
        blocks += [
            draw([Chart("solve_rates", "How often problems are solved",
                        "Held-out problems by number of correct samples.", partial(_solve_rates, results))]),
            _parts_table(results, statistics, "source", "By data source", ("Source", "code"),
                         ValidationResult.by_source, "Each dataset of the mixture, with its own scorer."),
            _parts_table(results, statistics, "difficulty", "By difficulty", ("Difficulty", "number"),
                         ValidationResult.by_difficulty, "Difficulty as the task defines it; for countdown, the "
                         "minimum number of operations."),
            _pass_table(results),
        ]  # fmt: skip
    if not others:
        blocks.append(suite_table(first))
    return Section("held_out", "Held-out problems", tuple(block for block in blocks if block is not None), lead)


_COMPARED: dict[str, Kind] = {"Metric": "code", "Before": "number", "After": "number",
                              "Paired difference": "difference", "Better on": "number",
                              "Worse on": "number"}  # fmt: skip


def _rows(results: ValidationPair, paired: Sequence[Comparison]) -> list[Row]:
    if paired:
        return [(one.statistic, one.first, one.second, *_difference(one)) for one in paired]
    columns = [result.intervals if result else {} for result in (results.get("before"), results.get("after"))]
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, *(column.get(name) for column in columns), *(None,) * 3) for name in names]


def _difference(found: Comparison) -> tuple[Value, ...]:
    return found.paired.difference, found.paired.wins, found.paired.losses


def _result_table(record: RunRecord) -> Table:
    rows: list[Row] = []
    for row in _rows(record.before_and_after, record.paired):
        kind, _, k = str(row[0]).partition("_at_")
        rows.append((*row, _MEANING.get(kind, "").format(k=k)))
    count = max(len(result.scored_only.problems) for result in record.before_and_after.values())
    note = f"{record.paired[0].num_problems if record.paired else count} held-out problems"
    note += "; paired differences have bootstrap intervals. correct: the part `correct` or the total is 1."
    return table("held_out", "Metrics before and after training", {**_COMPARED, "Meaning": "text"}, rows, note)


def suite_table(record: RunRecord) -> Table | None:
    """Return a table with each suite's statistics before and after training, or None if no suite has results."""
    rows: list[Row] = []
    for name, results in record.suites.items():
        both = [results[label] for label in ("before", "after") if label in results]
        rows += [(name, *row) for row in _rows(results, compare(*both) if len(both) == 2 else ())]
    note = "Held-out sets without training data; intervals over the problems of each."
    return table("suites", "Suites", {"Suite": "code", **_COMPARED}, rows, note) if rows else None


def _last_table(runs: Runs) -> Table:
    statistics = dict.fromkeys(statistic for run in runs.values() for statistic in run.core_statistics)
    curves = {statistic: [run.held_out(statistic) for run in runs.values()] for statistic in statistics}
    rows = [(name, *(found[-1][1] if found else None for found in each)) for name, each in curves.items() if any(each)]
    note = "At each run's last validation; intervals are over problems, within the run."
    return table("held_out", "Held-out metrics at the end",
                 {"Metric": "code", **dict.fromkeys(runs, "number")}, rows, note)  # fmt: skip


def _paired_table(runs: Runs) -> Table:
    rows: list[Row] = []
    (base, first), *others = runs.items()
    for label, run in others:
        found, why = paired_runs(first, run)
        if not found:
            rows.append((label, Cell("–"), Cell(why, why, "muted"), *(Cell(""),) * 3))
        shown = [one for one in found if one.statistic in run.core_statistics]
        rows += [(label, one.statistic, *_difference(one), one.num_problems) for one in shown]
    note = "Paired over problems, so their difficulty cancels. The variation between seeds is not included."
    return table("paired", "The same problems, run against run",
                 {"Run": "code", "Metric": "code", f"Difference from {base}": "difference", "Better on": "number",
                  "Worse on": "number", "Problems": "number"}, rows, note)  # fmt: skip


def paired_runs(first: RunRecord, second: RunRecord) -> tuple[tuple[Comparison, ...], str]:
    """Compare the validations of two trained runs problem by problem. Return the paired statistics and ''. If the runs
    cannot be paired, return () and the reason."""
    if first.after is None or second.after is None:
        return (), "no validation after training with its answers"
    try:
        return compare(first.after, second.after), ""
    except DataError:
        return (), OTHER_PROBLEMS


def _table_by_key(
    name: str, title: str, key: tuple[str, Kind], columns: Mapping[str, Mapping[Any, Value]], note: str
) -> Table | None:
    keys = sorted({each for column in columns.values() for each in column})
    rows = [(each, *(column.get(each) for column in columns.values())) for each in keys]
    return table(name, title, dict([key]) | dict.fromkeys(columns, "number"), rows, note) if len(rows) > 1 else None


def _pass_table(results: ValidationPair) -> Table | None:
    curves = {f"pass_at_k, {label}": pass_curve(result) for label, result in results.items()}
    note = "If pass_at_1 rises but pass_at_k of many samples does not, training sharpened existing abilities."
    return _table_by_key("pass_at_k", "pass_at_k", ("k", "number"), curves, note)


def _parts_table(
    results: ValidationPair,
    statistics: Sequence[str],
    name: str,
    title: str,
    key: tuple[str, Kind],
    parts_of: Callable[[ValidationResult], Mapping[Any, ValidationResult]],
    note: str,
) -> Table | None:
    """Return a table with a row for each subset of the problems, such as one difficulty, and a column for each
    statistic and validation. `parts_of` splits a validation into subsets. Return None for fewer than two subsets."""
    parts = {label: parts_of(result) for label, result in results.items()}
    columns: dict[str, dict[Any, Value]] = {
        "Problems": {each: len(part.problems) for found in parts.values() for each, part in found.items()}
    }
    for statistic in statistics:
        for label, found in parts.items():
            column = f"{statistic.removeprefix('reward/')}, {label}"
            columns[column] = {each: part.intervals.get(statistic) for each, part in found.items()}
    return _table_by_key(name, title, key, columns, note)


BEFORE_AND_AFTER = ("grey", "blue")
_BARS = 0.76  # the width of all bars at one position


def _solve_rates(results: ValidationPair, figure: "Figure") -> None:
    k = max(result.num_samples for result in results.values())
    axes = figure.subplots()
    colors, width = BEFORE_AND_AFTER if len(results) <= len(BEFORE_AND_AFTER) else CYCLE, _BARS / max(2, len(results))
    for place, (label, result) in enumerate(results.items()):
        solved = [problem.num_solved for problem in result.problems if problem.scored_samples]
        counts = np.bincount(solved, minlength=k + 1)
        at = np.arange(k + 1) + (place - (len(results) - 1) / 2) * width
        axes.bar(at, 100 * counts / max(1, counts.sum()), width, color=LIGHT[colors[place]], label=label)
    format_axes(axes, x=f"correct samples of {k}", y="% of problems")
