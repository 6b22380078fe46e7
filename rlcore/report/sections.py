"""The chapters of a run's report."""

import json
from collections.abc import Sequence
from pathlib import Path

from rlcore.report import curves, distributions, measures
from rlcore.report import document as doc
from rlcore.report.document import Block, Cell, Code, Column, Gallery, Picture, Prose, Section, Table
from rlcore.report.held_out import (
    difficulty_table,
    pass_table,
    progress_table,
    result_table,
    samples_of,
    single_table,
    source_table,
)
from rlcore.report.lineage import Lineage
from rlcore.report.memory import memory_blocks
from rlcore.report.record import RunRecord
from rlcore.report.settings import reproduce_command, settings_tables
from rlcore.report.style import Chart, render

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
            (samples_of(record.before, record.after),),
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
    results = distributions.judged(record)
    lead = ""
    blocks: list[Block | None] = []
    if len(results) == 2:
        settings = results[1][1].settings
        lead = (
            f"{settings.samples_per_problem} samples a problem at temperature {settings.sampling.temperature:g}, "
            f"{settings.confidence:.0%} intervals from {settings.num_resamples:,} bootstrap resamples over problems. "
            f"Before is step {results[0][1].step}, after is step {results[1][1].step}."
        )
        blocks.append(result_table(record.paired))
    elif results:
        blocks.append(single_table(results[0][1]))
    drawn = [(chart, render(chart, figures)) for chart in distributions.charts(record)]
    if results:
        blocks += [_gallery(drawn), source_table(record), difficulty_table(record), pass_table(record)]
    blocks.append(progress_table(record))
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
