"""The report of a run: read its folder, draw conclusions, write HTML, JSON and pictures."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from rlcore.report import curves, held_out, markdown, measures
from rlcore.report import document as doc
from rlcore.report.document import Block, Cell, Code, Column, Gallery, Picture, Prose, Report, Section, Table
from rlcore.report.findings import findings_of
from rlcore.report.lineage import Lineage
from rlcore.report.memory import memory_blocks
from rlcore.report.overview import state_of, subtitle_of, tiles_of
from rlcore.report.page import Chart, render, report_page
from rlcore.report.record import RunRecord, read_run
from rlcore.report.settings import reproduce_command, settings_tables
from rlcore.storage.publish import write_json_atomically, write_text_atomically

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """Where a report was written. Pictures lie in `figures/` beside them."""

    html: Path
    json: Path
    summary: str
    """The head as Markdown, with the most telling tables."""


def build_report(run_dir: Path, *, target: Path | None = None) -> ReportFiles:
    """Write the report of a run, finished or not, into `target` (default: `report` in the run's folder).

    The same folder gives the same bytes, whenever the report is made.

    Raises:
        DataError: the folder holds no run. Any other part may be missing; the report says which.
    """
    folder = target or run_dir / "report"
    return write_files(report_of(read_run(run_dir), folder / "figures"), folder, "report", ("curves",))


def write_files(report: Report, folder: Path, stem: str, in_summary: Collection[str]) -> ReportFiles:
    """Write a report's HTML and JSON, each whole or not at all. `in_summary` names the tables of its summary."""
    summary = markdown.summary(report, [table for table in report.tables() if table.name in in_summary])
    files = ReportFiles(folder / f"{stem}.html", folder / f"{stem}.json", summary)
    write_text_atomically(files.html, report_page(report))
    write_json_atomically(files.json, report_json(report))
    return files


def report_of(record: RunRecord, figures: Path) -> Report:
    """The report before it is written; pictures are written into `figures`."""
    return _headed(record, sections_of(record, figures))


def _headed(record: RunRecord, sections: tuple[Section, ...] = ()) -> Report:
    state, tone = state_of(record)
    return Report(
        genre="run report",
        title=record.run_id,
        subtitle=subtitle_of(record),
        state=state,
        state_tone=tone,
        tiles=tiles_of(record),
        findings=findings_of(record),
        missing=record.missing,
        sections=sections,
    )


def report_json(report: Report) -> dict[str, JsonValue]:
    """Everything a report says, for programs: values as they are in the inputs, not as they are shown."""
    return {
        "format_version": FORMAT_VERSION,
        "genre": report.genre,
        "title": report.title,
        "state": report.state,
        "missing": list(report.missing),
        "findings": [
            {
                "topic": finding.topic,
                "verdict": finding.verdict,
                "statement": finding.statement,
                "rule": finding.rule,
                "numbers": dict(finding.numbers),
            }
            for finding in report.findings
        ],
        "tables": {table.name: table_json(table) for table in report.tables()},
    }


def table_json(table: Table) -> dict[str, JsonValue]:
    """A table's columns, and its rows as values."""
    return {
        "title": table.title,
        "columns": [column.title for column in table.columns],
        "rows": [[cell.value for cell in row] for row in table.rows],
    }


def summary_markdown(run_dir: Path) -> str:
    """The report's head as Markdown: key figures, conclusions, curves as text: for a Prefect artifact.

    Raises:
        DataError: the folder holds no run.
    """
    record = read_run(run_dir)
    return markdown.summary(_headed(record), [measures.curve_table(record)])


_SPEED = frozenset({"phases", "timeline", "throughput"})
_CRITIC_ONLY = frozenset({"critic", "value_loss"})


def sections_of(record: RunRecord, figures: Path) -> tuple[Section, ...]:
    """All chapters; pictures are drawn and written into `figures`."""
    drawn = [(chart, render(chart, figures)) for chart in curves.charts(record)]
    learning = [(chart, picture) for chart, picture in drawn if chart.name not in _SPEED]
    if record.config.critic is None:
        learning = [(chart, picture) for chart, picture in learning if chart.name not in _CRITIC_ONLY]
    speed = [(chart, picture) for chart, picture in drawn if chart.name in _SPEED]
    return (
        Section("curves", "Curves", (_gallery(learning), measures.curve_table(record))),
        _held_out(record, figures),
        Section(
            "answers",
            "Answers",
            (held_out.samples_of(record.before, record.after),),
            "The same held-out problems before and after, by the greedy answer or the first sample: the first of each "
            "kind by id, not the best.",
        ),
        Section("convergence", "Convergence",
                (measures.convergence_table(record), measures.check_table(record))),
        Section("performance", "Performance",
                (_gallery(speed), measures.phase_table(record), measures.performance_table(record),
                 measures.efficiency_table(record), measures.cost_table(record))),
        Section("memory", "Memory", memory_blocks(record)),
        Section("configuration", "Configuration", settings_tables(record.config)),
        Section("reproduce", "Reproduce", _reproduce(record)),
        Section("lineage", "Lineage", _lineage(record)),
        Section("journal", "Journal", (_events(record), measures.last_step_table(record))),
    )  # fmt: skip


def _gallery(drawn: Sequence[tuple[Chart, Picture | None]]) -> Gallery:
    absent = tuple(chart.title for chart, picture in drawn if picture is None)
    return Gallery(tuple(picture for _, picture in drawn if picture is not None), absent)


def _held_out(record: RunRecord, figures: Path) -> Section:
    results = held_out.judged(record)
    lead = ""
    blocks: list[Block | None] = []
    if len(results) == 2:
        settings = results[1][1].settings
        lead = (
            f"{settings.samples_per_problem} samples a problem at temperature {settings.sampling.temperature:g}, "
            f"{settings.confidence:.0%} intervals from {settings.num_resamples:,} bootstrap resamples over problems. "
            f"Before is step {results[0][1].step}, after is step {results[1][1].step}."
        )
        blocks.append(held_out.result_table(record.paired))
    elif results:
        blocks.append(held_out.single_table(results[0][1]))
    drawn = [(chart, render(chart, figures)) for chart in held_out.charts(record)]
    if results:
        blocks += [
            _gallery(drawn),
            held_out.source_table(record),
            held_out.difficulty_table(record),
            held_out.pass_table(record),
        ]
    blocks.append(held_out.progress_table(record))
    return Section("held_out", "Held-out problems", tuple(block for block in blocks if block is not None), lead)


def _reproduce(record: RunRecord) -> tuple[Block, ...]:
    blocks: list[Block] = []
    typed = record.lineage.command if record.lineage is not None else ()
    if typed:
        blocks += [Prose("As it was started:"), Code(" ".join(typed))]
    command = reproduce_command(record.config)
    if command is not None:
        blocks += [Prose("The same settings, complete, from this version of Millrace:"), Code(command)]
    else:
        blocks.append(
            Prose(
                "No command line of this version composes to these settings (a model path that is not on this machine "
                "is a usual reason); settings.json in the run's folder holds all of them."
            )
        )
    blocks.append(
        Prose(
            f"Seed {record.config.seed} fixes data, initial weights, order of prompts and every sampled token. The "
            "same versions of torch and transformers, the same kind of device and the same number of threads give the "
            "same numbers; others differ in the last digits, which sampling turns into other answers."
        )
    )
    return tuple(blocks)


def _lineage(record: RunRecord) -> tuple[Block, ...]:
    blocks: list[Block] = []
    if record.lineage is not None:
        blocks += _lineage_tables(record.lineage)
    if record.checkpoints:
        rows = tuple((doc.text(note.name), doc.number(note.size_bytes / 1e6, "MB")) for note in record.checkpoints)
        blocks.append(
            Table("checkpoints", "Checkpoints on disk", (Column("Name", "code"), Column("Size", "number")), rows)
        )
    return tuple(blocks) or (Prose("Nothing is recorded of where this run comes from."),)


def _lineage_tables(lineage: Lineage) -> list[Block]:
    blocks: list[Block] = []
    if lineage.stages:
        rows = tuple(
            (doc.text(stage.name), doc.text(stage.fingerprint), doc.text(stage.path),
             Cell(", ".join(f"{key} {value}" for key, value in stage.facts.items()), dict(stage.facts)))
            for stage in lineage.stages
        )  # fmt: skip
        columns = (Column("Stage"), Column("Fingerprint", "code"), Column("Path", "code"), Column("Facts"))
        blocks.append(Table("stages", "Stages", columns, rows))
    facts = dict(lineage.environment)
    if lineage.git_commit:
        facts = {"git commit": lineage.git_commit + (" + changes" if lineage.git_dirty else ""), **facts}
    if facts:
        pairs = tuple((doc.text(key), doc.text(value)) for key, value in facts.items())
        blocks.append(Table("environment", "Code and packages", (Column("What"), Column("Version", "code")), pairs))
    return blocks


def _events(record: RunRecord) -> Table:
    rows = tuple(
        (doc.number(event.step), doc.text(event.name), doc.text(json.dumps(event.data, ensure_ascii=False)))
        for event in record.events
    )
    return Table("events", "Events", (Column("Step", "number"), Column("Event", "code"), Column("Data", "code")), rows)
