"""Construction of the report of one run, or of the comparison of several runs, as HTML, JSON and pictures."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from pydantic import JsonValue

from rlcore.checkpoint.catalog import HELD_OUT_LOSS
from rlcore.config.fingerprint import fingerprint
from rlcore.errors import DataError
from rlcore.evaluation.result import Comparison
from rlcore.report import compare, document, held_out, page, panels, run_sections
from rlcore.report.document import Block, Finding, Report, Section, Table, Tile, cell, compact, duration, fixed
from rlcore.report.findings import check_table, findings_of
from rlcore.report.page import sample_table
from rlcore.report.panels import Groups
from rlcore.report.plots import Chart, first_tenth, gallery_of, last_tenth
from rlcore.report.record import RunRecord, Runs, read_run
from rlcore.storage.publish import write_json_atomically, write_text_atomically

FORMAT_VERSION = 1
Draw = Callable[[Iterable[Chart]], Block]


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """The files and findings of a report. The pictures are in `figures/` in the same folder."""

    html: Path
    json: Path
    findings: tuple[Finding, ...]
    summary: str
    """The title, key metrics and findings of the report as Markdown."""


def build_report(run_dir: Path, *, target: Path | None = None, failure: str = "") -> ReportFiles:
    """Write the report of a finished or unfinished run into `target`. The default of `target` is `report` in the run's
    folder. `failure`: the error that ended the run, or ''. Raises DataError if `run_dir` is not a run."""
    return _write({run_dir.name: read_run(run_dir)}, target or run_dir / "report", "report", failure)


def compare_runs(run_dirs: Sequence[Path], *, root: Path | None = None, target: Path | None = None) -> ReportFiles:
    """Write a comparison of two or more finished or unfinished runs into `target`. The default of `target` is a folder
    in `<root>/comparisons`. The default of `root` is the artifact folder of the first run. Raises DataError if fewer
    than two different runs are named, or if a folder is not a run."""
    folders = list(dict.fromkeys(folder.resolve() for folder in run_dirs))
    if len(folders) < compare.MIN_RUNS:
        raise DataError(
            f"compare: needs {compare.MIN_RUNS} different runs, got {len(folders)}; name another run's folder"
        )
    runs = compare.label_runs([read_run(folder) for folder in folders])
    name = fingerprint("comparison", [str(folder) for folder in folders])
    return _write(runs, target or (root or folders[0].parent.parent) / "comparisons" / name, "comparison")


def summary_markdown(run_dir: Path, failure: str = "") -> str:
    """Return the title, key metrics and findings of a run as Markdown. `failure`: the error that ended the run, or ''.
    Raises DataError if the folder is not a run."""
    return page.markdown_of(_run_head(read_run(run_dir), failure, ()))


def _write(runs: Runs, folder: Path, stem: str, failure: str = "") -> ReportFiles:
    report = report_of(runs, partial(gallery_of, folder=folder / "figures"), failure)
    files = ReportFiles(folder / f"{stem}.html", folder / f"{stem}.json", report.findings, page.markdown_of(report))
    write_text_atomically(files.html, page.page("report.html.j2", report=report))
    write_json_atomically(files.json, _json_of(report))
    return files


def report_of(runs: Runs, draw: Draw, failure: str = "") -> Report:
    """Return the report of one run, or the comparison of several runs, without writing a report file. `draw`: a
    function that draws charts and returns the block of the report that contains them."""
    groups = compare.groups_of(list(runs.values()))
    sections = tuple(_sections_of(runs, groups, draw))
    if len(runs) > 1:
        return _comparison_head(runs, groups, sections)
    return _run_head(next(iter(runs.values())), failure, sections)


def _json_of(report: Report) -> dict[str, JsonValue]:
    fields = ("topic", "verdict", "statement", "rule", "numbers")
    return {
        "format_version": FORMAT_VERSION,
        "genre": report.genre,
        "title": report.title,
        "state": report.state,
        "failure": report.failure,
        "missing": list(report.missing),
        "findings": [{name: getattr(finding, name) for name in fields} for finding in report.findings],
        "tables": {
            found.name: {
                "title": found.title,
                "columns": list(found.columns),
                "rows": [[cell.value for cell in row] for row in found.rows],
            }
            for section in report.sections
            for found in section.blocks
            if isinstance(found, Table)
        },
    }


def _sections_of(runs: Runs, groups: Groups, draw: Draw) -> Iterator[Section]:
    (first, *others), charts = runs.values(), panels.charts_of(groups, panels.learning_panels(runs))
    how, on_time = "", [run_sections.phase_table(first)]
    if others:
        yield Section("runs", "Runs", (compare.run_table(runs, groups), compare.settings_table(runs)))
        how, on_time = "One line per run. Noisy curves are moving means.", []
        if len(groups) < len(runs):
            how = "One line per setting: the mean of its runs, with a band from the lowest to the highest."
        charts = panels.reward_charts(groups) + charts
    yield Section("curves", "Curves", (draw(charts),), how)
    yield held_out.section_of(runs, draw)
    if others:
        yield Section("seeds", "Seeds", (compare.seed_table(groups),))
    else:
        yield Section(
            "answers", "Responses", (sample_table(first),), "The first of each kind by id, not the best ones."
        )
    yield Section("convergence", "Convergence", (
        panels.measure_table("convergence", runs),
        *([] if others or first.config.is_supervised else [check_table(first)])))  # fmt: skip
    yield Section("performance", "Performance", (
        draw(panels.charts_of(groups, panels.SPEED)), *on_time, panels.measure_table("performance", runs),
        panels.measure_table("memory_peak", runs)))  # fmt: skip
    if not others:
        yield Section("configuration", "Configuration", (run_sections.settings_table(first.config),))
        yield Section("origin", "Origin", tuple(run_sections.origin(first)))
    rows = [(event.step, event.name, json.dumps(event.data, ensure_ascii=False)) for event in first.events]
    events = document.table("events", "Events", {"Step": "number", "Event": "code", "Data": "code"}, rows)
    yield Section("journal", "Journal", (*([] if others else [events]), panels.last_values(runs)))


def _comparison_head(runs: Runs, groups: Groups, sections: tuple[Section, ...]) -> Report:
    return Report(
        genre="comparison",
        title=compare.title_of(groups),
        subtitle=f"{len(runs)} runs, {len(groups)} setting{'s' if len(groups) > 1 else ''}",
        state="" if all(run.is_complete for run in runs.values()) else "some runs are not finished",
        state_tone="watch",
        tiles=tuple(compare.tile_of(label, group) for label, group in groups.items()),
        findings=tuple(compare.comparison_findings(runs, groups)),
        missing=tuple(
            f"{label}: {text}" for label, run in runs.items() for text in run.missing if "lineage" not in text
        ),
        sections=sections,
    )


def _run_head(record: RunRecord, failure: str, sections: tuple[Section, ...]) -> Report:
    total, config, workers = record.config.total_steps, record.config, record.config.runtime.num_workers
    batch = f"{config.trainer.batch_size} prompts × {config.rollout.samples_per_prompt} responses per step"
    done = f"all {total} steps"
    if config.is_supervised:
        batch, done = f"{config.warm_start.batch_size} demonstrations per step", f"{record.last_step} supervised steps"
    return Report(
        genre="run report",
        title=record.run_id,
        subtitle=(
            f"{run_sections.algorithm_of(config)} · {config.data.task} · {run_sections.model_of(config)} · seed "
            f"{config.seed} · {batch} · {workers} worker{'s' if workers > 1 else ''} ({config.runtime.backend})"
        ),
        state=done if record.is_complete else f"step {record.last_step} of {total}",
        state_tone="bad" if failure else "good" if record.is_complete else "watch",
        failure=failure,
        sections=sections,
        tiles=tuple(_tiles_of(record)),
        findings=findings_of(record),
        missing=record.missing,
        facts=tuple(_facts_of(record)),
    )


def _facts_of(record: RunRecord) -> Iterator[str]:
    if record.workers:
        device, count = record.workers["device_name"], record.workers["num_workers"]
        yield f"{count} × {device}" if device != "CPU" else "CPU"
        yield f"{record.workers['num_parameters']:,} parameters"
    if record.steps:
        started, ended = record.steps[0].time, record.steps[-1].time
        yield f"started {datetime.fromtimestamp(started, UTC):%Y-%m-%d %H:%M} UTC"
        yield f"{duration(ended - started)} from the first to the last step"


def _tiles_of(record: RunRecord) -> Iterator[Tile]:
    rows = {row.statistic: row for row in record.paired}
    k = record.num_samples
    wanted = {record.reward_statistic: "Held-out reward", "reward/greedy": "Greedy response",
              f"reward/pass_at_{k}": f"pass_at_{k}"}  # fmt: skip
    held_out, reward = record.held_out(record.reward_statistic), record.series("critic/score/mean")
    if rows:
        yield from (_gain_tile(label, rows[name]) for name, label in wanted.items() if name in rows)
    elif held_out:
        step, found = held_out[-1]
        yield Tile("Held-out reward", fixed(found.value), f"[{fixed(found.low)}, {fixed(found.high)}], step {step}")
    elif reward is not None:
        shown = f"{fixed(first_tenth(reward))} → {fixed(last_tenth(reward))}"
        yield Tile("Training reward", shown, "first and last tenth of the steps")
    if record.config.is_supervised and (loss := record.series(HELD_OUT_LOSS)) is not None and len(loss):
        at = record.after.step if record.after is not None else loss.index[-1]
        yield Tile("Held-out loss", f"{fixed(loss.iloc[0])} → {fixed(loss.get(at))}", f"nats/token, step {at}")
    if record.seconds is not None:
        detail = f"{document.short(record.tokens.iloc[-1])} tokens" if record.tokens is not None else ""
        count = len(record.training_steps)
        yield Tile(f"{count} training step{'s' if count != 1 else ''}", duration(record.seconds.iloc[-1]), detail)
    if record.gpu_seconds is not None:
        yield Tile("GPU time", duration(record.gpu_seconds))
    if (throughput := record.series("perf/throughput")) is not None:
        detail = f"{duration(record.step_s)} per step" if record.step_s is not None else ""
        yield Tile("Tokens/s/device", compact(throughput.median(), 3), detail)


def _gain_tile(label: str, row: Comparison) -> Tile:
    gain = cell(row.paired.difference, "difference")
    unit = row.statistic.partition("/")[2]
    title = label if unit in (label, "greedy") else f"{label} ({unit})"
    return Tile(title, f"{fixed(row.first.value)} → {fixed(row.second.value)}", gain.text, gain.tone)
