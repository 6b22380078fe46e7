"""The report of a run: its key figures and sections; written as HTML, JSON and pictures."""

import json
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from pydantic import JsonValue

from rlcore.config.problems import masked
from rlcore.evaluation.result import Comparison
from rlcore.report import curves, held_out, measures, numbers, page, samples
from rlcore.report.document import Block, Cell, Prose, Report, Section, Table, Tile, cell, table
from rlcore.report.findings import findings_of
from rlcore.report.plots import gallery_of
from rlcore.report.record import RunRecord, read_run
from rlcore.report.series import first_tenth, last_tenth
from rlcore.report.settings import reproduce_command, settings_tables
from rlcore.storage.publish import write_json_atomically, write_text_atomically
from rlcore.tracking.lineage import Lineage

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """Where a report was written. Pictures lie in `figures/` beside them."""

    html: Path
    json: Path
    summary: str
    """The head as Markdown, with the most telling tables."""


def build_report(run_dir: Path, *, target: Path | None = None, failure: str = "") -> ReportFiles:
    """Write the report of a run, finished or not, into `target` (default: `report` in the run's folder).

    The same folder and `failure` (how the run failed, '' where it did not) give the same bytes, whenever it is made.

    Raises:
        DataError: the folder holds no run. Any other part may be missing; the report says which.
    """
    folder = target or run_dir / "report"
    return write_files(report_of(read_run(run_dir), folder / "figures", failure), folder, "report", ("curves",))


def write_files(report: Report, folder: Path, stem: str, in_summary: Collection[str]) -> ReportFiles:
    """Write a report's HTML and JSON, each whole or not at all. `in_summary` names the tables of its summary."""
    summary = page.markdown_of(report, [table for table in report.tables() if table.name in in_summary])
    files = ReportFiles(folder / f"{stem}.html", folder / f"{stem}.json", summary)
    write_text_atomically(files.html, page.page("report.html.j2", report=report))
    write_json_atomically(files.json, _json_of(report))
    return files


def report_of(record: RunRecord, figures: Path | None, failure: str = "") -> Report:
    """The report before it is written; pictures are written into `figures`. None: its head alone."""
    total, config = record.config.trainer.total_steps, record.config
    workers = config.runtime.num_workers
    return Report(
        genre="run report",
        title=record.run_id,
        subtitle=(
            f"{algorithm_of(record)} · {config.data.task} · {_model_of(record)} · seed {config.seed} · "
            f"{config.trainer.batch_size} prompts × {config.rollout.samples_per_prompt} answers a step · "
            f"{workers} worker{'s' if workers > 1 else ''} ({config.runtime.backend})"
        ),
        state=f"all {total} steps" if record.is_complete else f"step {record.last_step} of {total}",
        state_tone="bad" if failure else "good" if record.is_complete else "watch",
        failure=failure,
        sections=() if figures is None else _sections_of(record, figures),
        tiles=tuple(_tiles_of(record)),
        findings=findings_of(record),
        missing=record.missing,
        facts=tuple(_facts_of(record)),
    )


def _json_of(report: Report) -> dict[str, JsonValue]:
    """All of a report for programs: values as they are in the inputs, not as they are shown."""
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
                "columns": [column.title for column in found.columns],
                "rows": [[cell.value for cell in row] for row in found.rows],
            }
            for found in report.tables()
        },
    }


def summary_markdown(run_dir: Path, failure: str = "") -> str:
    """The report's head as Markdown: key figures, conclusions, curves as text: for a Prefect artifact.

    Raises:
        DataError: the folder holds no run.
    """
    record = read_run(run_dir)
    return page.markdown_of(report_of(record, None, failure), [measures.curve_table(record)])


def _sections_of(record: RunRecord, figures: Path) -> tuple[Section, ...]:
    draw = partial(gallery_of, folder=figures)
    shown = "The same held-out problems before and after, by the greedy answer or the first sample: the first of each "
    runs = {record.run_id: record}
    return (
        Section("curves", "Curves", (draw(curves.charts(record)), measures.curve_table(record))),
        held_out.section_of(record, draw),
        Section("answers", "Answers", (samples.samples_of(record),), f"{shown}kind by id, not the best."),
        Section("convergence", "Convergence",
                (measures.convergence_table(record), measures.check_table(record))),
        Section("performance", "Performance",
                (draw(curves.speed_charts(record)), measures.phase_table(record), measures.performance_table(record),
                 measures.efficiency_table(record), measures.cost_table(runs),
                 *filter(None, [measures.spent_table(runs)]))),
        Section("memory", "Memory", measures.memory_blocks(record)),
        Section("configuration", "Configuration", settings_tables(record.config)),
        Section("reproduce", "Reproduce", tuple(_reproduce(record))),
        Section("lineage", "Lineage", tuple(_lineage(record))),
        Section("journal", "Journal", (_events(record), measures.last_step_table(record))),
    )  # fmt: skip


def _reproduce(record: RunRecord) -> Iterator[Block]:
    if record.lineage is not None and record.lineage.command:
        command = shlex.join(map(masked, record.lineage.command))
        yield from (Prose("As it was started:"), Prose(command, is_code=True))
    if (complete := reproduce_command(record.config)) is not None:
        yield Prose("The same settings, complete, from this version of Millrace:")
        yield Prose(complete, is_code=True)
    else:
        yield Prose(
            "No command line of this version composes to these settings (a model path that is not on this machine "
            "is a usual reason); settings.json in the run's folder holds all of them."
        )
    yield Prose(
        f"Seed {record.config.seed} fixes initial weights, order of prompts and every sampled token, "
        f"data.seed={record.config.data.seed} the rows. The "
        "same versions of torch and transformers, the same kind of device and the same number of threads give the "
        "same numbers; others differ in the last digits, which sampling turns into other answers."
    )


def _lineage(record: RunRecord) -> Iterator[Block]:
    lineage = record.lineage or Lineage()
    if lineage.stages:
        rows = [
            (stage.name, stage.fingerprint, stage.path,
             Cell(", ".join(f"{key} {value}" for key, value in stage.facts.items()), dict(stage.facts)))
            for stage in lineage.stages
        ]  # fmt: skip
        yield table("stages", "Stages", {"Stage": "text", "Fingerprint": "code", "Path": "code", "Facts": "text"}, rows)
    commit = lineage.git_commit + (" + changes" if lineage.git_dirty else "")
    facts = {**({"git commit": commit} if commit else {}), **lineage.environment}
    if facts:
        yield table("environment", "Code and packages", {"What": "text", "Version": "code"}, list(facts.items()))
    if record.checkpoints:
        sizes = [(info.name, cell(info.size_bytes / 1e6, unit="MB")) for info in record.checkpoints]
        yield table("checkpoints", "Checkpoints on disk", {"Name": "code", "Size": "number"}, sizes)
    elif not lineage.stages and not facts:
        yield Prose("Nothing is recorded of where this run comes from.")


def _events(record: RunRecord) -> Table:
    rows = [(event.step, event.name, json.dumps(event.data, ensure_ascii=False)) for event in record.events]
    return table("events", "Events", {"Step": "number", "Event": "code", "Data": "code"}, rows)


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


def _model_of(record: RunRecord) -> str:
    model = record.config.model
    if model.path is not None:
        return model.path.rstrip("/").rpartition("/")[2]
    layers = f"{model.scratch.num_layers} layer{'' if model.scratch.num_layers == 1 else 's'}"
    return f"a model from nothing ({layers} of {model.scratch.hidden_size})"


def _facts_of(record: RunRecord) -> Iterator[str]:
    """Devices, size of the model, when the run began, and how long it took by the clock; what is known of them."""
    if record.workers:
        device, count = record.workers["device_name"], record.workers["num_workers"]
        yield f"{count} × {device}" if device != "CPU" else "on a CPU"
        yield f"{record.workers['num_parameters']:,} parameters"
    if record.steps:
        begun, ended = record.steps[0].time, record.steps[-1].time
        yield f"begun {datetime.fromtimestamp(begun, UTC):%Y-%m-%d %H:%M} UTC"
        yield f"{numbers.duration(ended - begun)} by the clock"


def _tiles_of(record: RunRecord) -> Iterator[Tile]:
    """The key figures: what was gained, or one held-out figure alone, or the training reward; and what it took."""
    rows = {row.statistic: row for row in record.paired}
    k = record.num_samples
    wanted = {record.reward_statistic: "Held-out reward", "reward/greedy": "Greedy answer",
              f"reward/pass@{k}": f"pass@{k}"}  # fmt: skip
    held_out, reward = record.held_out(record.reward_statistic), record.series("critic/score/mean")
    if rows:
        yield from (_gain(label, rows[name]) for name, label in wanted.items() if name in rows)
    elif held_out:
        step, found = held_out[-1]
        ends = f"[{numbers.fixed(found.low)}, {numbers.fixed(found.high)}], step {step}"
        yield Tile("Held-out reward", numbers.fixed(found.value), ends)
    elif reward is not None:
        shown = f"{numbers.fixed(first_tenth(reward))} → {numbers.fixed(last_tenth(reward))}"
        yield Tile("Training reward", shown, "first and last tenth of steps")
    if record.seconds is not None:
        detail = f"{numbers.short(record.tokens.iloc[-1])} tokens" if record.tokens is not None else ""
        count = len(record.training_steps)
        label = f"{count} training step{'s' if count != 1 else ''}"
        yield Tile(label, numbers.duration(record.seconds.iloc[-1]), detail)
    if record.spent is not None:
        costs = (("{} Wh", record.spent.energy_wh), ("price {}", record.price))
        details = [text.format(numbers.compact(cost, 3)) for text, cost in costs if cost is not None]
        yield Tile("GPU time", numbers.duration(record.spent.gpu_seconds), " · ".join(details))
    if (throughput := record.series("perf/throughput")) is not None:
        detail = f"{numbers.duration(record.step_s)} a step" if record.step_s is not None else ""
        yield Tile("Tokens/s/device", numbers.compact(throughput.median(), 3), detail)


def _gain(label: str, row: Comparison) -> Tile:
    gain = cell(row.paired.difference, "difference")
    unit = row.statistic.partition("/")[2]
    title = label if unit in (label, "greedy") else f"{label} ({unit})"
    return Tile(title, f"{numbers.fixed(row.first.value)} → {numbers.fixed(row.second.value)}", gain.text, gain.tone)
