"""The report of a run: its key figures, sections and head picture; written as HTML, JSON and pictures."""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import JsonValue

from rlcore.evaluation.result import Comparison
from rlcore.report import curves, held_out, measures, numbers, page
from rlcore.report import document as doc
from rlcore.report.curves import plot_reward
from rlcore.report.document import (
    Block,
    Cell,
    Code,
    Column,
    Prose,
    Report,
    Section,
    Table,
    Tile,
    Tone,
)
from rlcore.report.findings import findings_of
from rlcore.report.measures import memory_blocks
from rlcore.report.page import LIGHT, gallery_of, house_style
from rlcore.report.record import Lineage, RunRecord, read_run
from rlcore.report.settings import reproduce_command, settings_tables
from rlcore.storage.publish import temporary_beside, write_json_atomically, write_text_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

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
    summary = page.markdown_of(report, [table for table in report.tables() if table.name in in_summary])
    files = ReportFiles(folder / f"{stem}.html", folder / f"{stem}.json", summary)
    write_text_atomically(files.html, page.page("report.html.j2", report=report))
    write_json_atomically(files.json, report_json(report))
    return files


def report_of(record: RunRecord, figures: Path | None) -> Report:
    """The report before it is written; pictures are written into `figures`. None: its head alone."""
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
        sections=() if figures is None else sections_of(record, figures),
        facts=facts_of(record),
    )


def report_json(report: Report) -> dict[str, JsonValue]:
    """All of a report for programs: values as they are in the inputs, not as they are shown."""
    fields = ("topic", "verdict", "statement", "rule", "numbers")
    return {
        "format_version": FORMAT_VERSION,
        "genre": report.genre,
        "title": report.title,
        "state": report.state,
        "missing": list(report.missing),
        "findings": [{name: getattr(finding, name) for name in fields} for finding in report.findings],
        "tables": {
            found.name: {
                "title": found.title,
                "columns": [column.title for column in found.columns],
                "rows": [[cell.value for cell in row] for row in found.rows],
            }
            for found in report.tables()
        },
    }


def summary_markdown(run_dir: Path) -> str:
    """The report's head as Markdown: key figures, conclusions, curves as text: for a Prefect artifact.

    Raises:
        DataError: the folder holds no run.
    """
    record = read_run(run_dir)
    return page.markdown_of(report_of(record, None), [measures.curve_table(record)])


def sections_of(record: RunRecord, figures: Path) -> tuple[Section, ...]:
    """All chapters; pictures are drawn and written into `figures`."""
    shown = "The same held-out problems before and after, by the greedy answer or the first sample: the first of each "
    learning, speed = (gallery_of(found, figures) for found in (curves.charts(record), curves.speed_charts(record)))
    return (
        Section("curves", "Curves", (learning, measures.curve_table(record))),
        _held_out(record, figures),
        Section("answers", "Answers", (held_out.samples_of(record.before, record.after),),
                f"{shown}kind by id, not the best."),
        Section("convergence", "Convergence",
                (measures.convergence_table(record), measures.check_table(record))),
        Section("performance", "Performance",
                (speed, measures.phase_table(record), measures.performance_table(record),
                 measures.efficiency_table(record), measures.cost_table(record),
                 *filter(None, [measures.spent_table([(record.run_id, record)])]))),
        Section("memory", "Memory", memory_blocks(record)),
        Section("configuration", "Configuration", settings_tables(record.config)),
        Section("reproduce", "Reproduce", _reproduce(record)),
        Section("lineage", "Lineage", _lineage(record)),
        Section("journal", "Journal", (_events(record), measures.last_step_table(record))),
    )  # fmt: skip


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
    if results:
        blocks += [
            gallery_of(held_out.charts(record), figures),
            held_out.source_table(record),
            held_out.difficulty_table(record),
            held_out.pass_table(record),
        ]
    blocks += [held_out.progress_table(record), held_out.suite_table(record)]
    return Section("held_out", "Held-out problems", tuple(block for block in blocks if block is not None), lead)


def _reproduce(record: RunRecord) -> tuple[Block, ...]:
    typed = record.lineage.command if record.lineage is not None else ()
    command = reproduce_command(record.config)
    elsewhere = (
        "No command line of this version composes to these settings (a model path that is not on this machine "
        "is a usual reason); settings.json in the run's folder holds all of them."
    )
    complete = "The same settings, complete, from this version of Millrace:"
    same = (
        f"Seed {record.config.seed} fixes data, initial weights, order of prompts and every sampled token. The "
        "same versions of torch and transformers, the same kind of device and the same number of threads give the "
        "same numbers; others differ in the last digits, which sampling turns into other answers."
    )
    return (
        *((Prose("As it was started:"), Code(" ".join(typed))) if typed else ()),
        *((Prose(complete), Code(command)) if command is not None else (Prose(elsewhere),)),
        Prose(same),
    )


def _lineage(record: RunRecord) -> tuple[Block, ...]:
    blocks: list[Block] = []
    if record.lineage is not None:
        blocks += _lineage_tables(record.lineage)
    if record.checkpoints:
        rows = [(info.name, doc.cell(info.size_bytes / 1e6, unit="MB")) for info in record.checkpoints]
        columns = (Column("Name", "code"), Column("Size", "number"))
        blocks.append(doc.table("checkpoints", "Checkpoints on disk", columns, rows))
    return tuple(blocks) or (Prose("Nothing is recorded of where this run comes from."),)


def _lineage_tables(lineage: Lineage) -> Iterator[Table]:
    if lineage.stages:
        rows = [
            (stage.name, stage.fingerprint, stage.path,
             Cell(", ".join(f"{key} {value}" for key, value in stage.facts.items()), dict(stage.facts)))
            for stage in lineage.stages
        ]  # fmt: skip
        columns = (Column("Stage"), Column("Fingerprint", "code"), Column("Path", "code"), Column("Facts"))
        yield doc.table("stages", "Stages", columns, rows)
    facts = dict(lineage.environment)
    if lineage.git_commit:
        facts = {"git commit": lineage.git_commit + (" + changes" if lineage.git_dirty else ""), **facts}
    if facts:
        pairs = (Column("What"), Column("Version", "code"))
        yield doc.table("environment", "Code and packages", pairs, list(facts.items()))


def _events(record: RunRecord) -> Table:
    rows = [(event.step, event.name, json.dumps(event.data, ensure_ascii=False)) for event in record.events]
    return doc.table(
        "events", "Events", (Column("Step", "number"), Column("Event", "code"), Column("Data", "code")), rows
    )


ALGORITHMS = {
    "gae": "PPO",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "rloo": "RLOO",
    "reinforce_pp": "REINFORCE++",
    "reinforce_pp_baseline": "REINFORCE++ (group baseline)",
    "remax": "ReMax",
    "opo": "OPO",
}


def algorithm_of(record: RunRecord) -> str:
    """The algorithm's usual name."""
    algo = record.config.algo
    name = ALGORITHMS.get(algo.advantage, algo.advantage)
    return name if algo.policy_loss == "ppo_clip" else f"{name} with {algo.policy_loss}"


def model_of(record: RunRecord) -> str:
    """The model, in a few words."""
    model = record.config.model
    if model.path is not None:
        return model.path.rstrip("/").rpartition("/")[2]
    layers = f"{model.scratch.num_layers} layer{'' if model.scratch.num_layers == 1 else 's'}"
    return f"a model from nothing ({layers} of {model.scratch.hidden_size})"


def subtitle_of(record: RunRecord) -> str:
    """What ran, in a line."""
    config = record.config
    workers = config.runtime.num_workers
    return (
        f"{algorithm_of(record)} · {config.data.task} · {model_of(record)} · seed {config.seed} · "
        f"{config.trainer.batch_size} prompts × {config.rollout.samples_per_prompt} answers a step · "
        f"{workers} worker{'s' if workers > 1 else ''} ({config.runtime.backend})"
    )


def facts_of(record: RunRecord) -> tuple[str, ...]:
    """Devices, size of the model, when the run began, and how long it took by the clock; what is known of them."""
    facts = []
    if record.workers:
        device, count = record.workers["device_name"], record.workers["num_workers"]
        facts.append(f"{count} × {device}" if device != "CPU" else "on a CPU")
        facts.append(f"{record.workers['num_parameters']:,} parameters")
    if record.steps:
        begun, ended = record.steps[0].time, record.steps[-1].time
        facts.append(f"begun {datetime.fromtimestamp(begun, UTC):%Y-%m-%d %H:%M} UTC")
        facts.append(f"{numbers.duration(ended - begun)} by the clock")
    return tuple(facts)


def state_of(record: RunRecord) -> tuple[str, Tone]:
    """How far the run is."""
    total = record.config.trainer.total_steps
    if record.is_complete:
        return f"all {total} steps", "good"
    return f"step {record.last_step} of {total}", "watch"


def tiles_of(record: RunRecord) -> tuple[Tile, ...]:
    """The key figures."""
    rows = {row.statistic: row for row in record.paired}
    k = record.num_samples
    wanted = ((record.reward_statistic, "Held-out reward"), ("reward/greedy", "Greedy answer"),
              (f"reward/pass@{k}", f"pass@{k}"))  # fmt: skip
    tiles = [_gain(label, rows[name]) for name, label in dict(wanted).items() if name in rows]
    if not tiles:
        tiles = _without_pairs(record)
    return (*tiles, *_effort(record))


def _gain(label: str, row: Comparison) -> Tile:
    gain = doc.cell(row.paired.difference, "difference")
    shown = f"{numbers.fixed(row.first.value)} → {numbers.fixed(row.second.value)}"
    unit = row.statistic.partition("/")[2]
    title = label if unit == label or label == "Greedy answer" else f"{label} ({unit})"
    return Tile(title, shown, gain.text, gain.tone)


def _without_pairs(record: RunRecord) -> list[Tile]:
    """One held-out figure alone, or the training reward."""
    held_out = record.held_out(record.reward_statistic)
    if held_out:
        step, found = held_out[-1]
        ends = f"[{numbers.fixed(found.low)}, {numbers.fixed(found.high)}], step {step}"
        return [Tile("Held-out reward", numbers.fixed(found.value), ends)]
    reward = record.series("critic/score/mean")
    if reward is None:
        return []
    first, last = float(reward.head(0.1).mean()), reward.tail(0.1).mean()
    return [Tile("Training reward", f"{numbers.fixed(first)} → {numbers.fixed(last)}", "first and last tenth of steps")]


def _effort(record: RunRecord) -> list[Tile]:
    tiles = []
    tokens, seconds = record.tokens, record.seconds
    if seconds is not None:
        detail = f"{numbers.amount(tokens.last)} tokens" if tokens is not None else ""
        count = len(record.training_steps)
        label = f"{count} training step{'s' if count != 1 else ''}"
        tiles.append(Tile(label, numbers.duration(seconds.last), detail))
    if record.spent is not None:
        price = record.spent.price(record.config.tracking.price_per_gpu_hour)
        energy_wh = record.spent.energy_wh
        details = ("" if energy_wh is None else f"{numbers.compact(energy_wh, 3)} Wh",
                   "" if price is None else f"price {numbers.compact(price, 3)}")  # fmt: skip
        detail = " · ".join(filter(None, details))
        tiles.append(Tile("GPU time", numbers.duration(record.spent.gpu_seconds), detail))
    throughput = record.series("perf/throughput")
    if throughput is not None:
        detail = f"{numbers.duration(record.step_s)} a step" if record.step_s is not None else ""
        tiles.append(Tile("Tokens/s/device", numbers.compact(float(np.median(throughput.values)), 3), detail))
    return tiles


_SIZE_IN = (10.0, 4.4)
_DPI = 200
_MOST_TILES = 5


def hero_png(run_dir: Path, path: Path) -> Path:
    """Draw the head of a run's report into a PNG of 2000 x 880 pixels.

    Raises:
        DataError: the folder holds no run.
    """
    from matplotlib.figure import Figure

    record = read_run(run_dir)
    with house_style():
        figure = Figure(figsize=_SIZE_IN, facecolor=LIGHT["surface"])
        plot, side = figure.subfigures(1, 2, width_ratios=(2.35, 1), squeeze=False)[0]
        _title(figure, record)
        _curve(plot, record)
        _figures(side, tiles_of(record)[:_MOST_TILES])
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_beside(path)
        figure.savefig(temporary, dpi=_DPI, format="png", metadata={})
    temporary.replace(path)
    return path


def _title(figure: "Figure", record: RunRecord) -> None:
    config = record.config
    figure.text(0.045, 0.925, config.name, fontsize=15, fontweight="bold", va="center")
    line = f"{algorithm_of(record)} on {config.data.task}, {model_of(record)}, seed {config.seed}"
    figure.text(0.045, 0.862, line, fontsize=9.5, color=LIGHT["muted"], va="center")


def _curve(figure: "SubFigure", record: RunRecord) -> None:
    axes = figure.add_axes((0.085, 0.125, 0.885, 0.62))
    greedy = [("reward/greedy", "orange", "held-out, greedy")] if record.reward_statistic != "reward/greedy" else []
    sampled = (record.reward_statistic, "blue", "held-out, sampled (95% interval)")
    plot_reward(axes, record, "training reward", [*greedy, sampled])


def _figures(figure: "SubFigure", tiles: tuple[Tile, ...]) -> None:
    tones = {"good": LIGHT["green"], "bad": LIGHT["red"], "watch": LIGHT["orange"]}
    step = 0.82 / _MOST_TILES
    for place, tile in enumerate(tiles):
        top = 0.925 - place * step * 1.08
        figure.text(0.08, top, tile.label, fontsize=8.5, color=LIGHT["muted"], va="center")
        figure.text(0.08, top - 0.055, tile.text, fontsize=15.5, fontweight="bold", va="center")
        figure.text(
            0.08, top - 0.108, tile.detail, fontsize=8.5, color=tones.get(tile.tone, LIGHT["muted"]), va="center"
        )
