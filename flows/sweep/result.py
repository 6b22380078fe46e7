"""What a sweep leaves: the comparison of its runs, the best point as an experiment, tables in Prefect."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.logging import get_run_logger

from flows.naming import artifact_key
from flows.parameters import command_words, written
from flows.sweep.record import PointRecord
from rlcore.config.documents import experiment_text
from rlcore.config.sweep_load import Sweep
from rlcore.storage.publish import write_text_atomically

BEST_FILE = "best.yaml"
FEWEST_TO_COMPARE = 2


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a call has come to. `num_runs` and `num_steps` are what it has worked on; the rest is of the whole sweep."""

    sweep_id: str
    folder: Path
    num_points: int
    num_finished: int
    num_stopped_early: int
    failed: list[str]
    num_not_begun: int
    ended_by: str
    num_runs: int
    num_steps: int
    best_point: int | None
    best_label: str
    best_score: float | None
    best_experiment: Path | None
    comparison: Path | None
    mlflow_run_id: str | None


def write_best(folder: Path, sweep: Sweep, best: PointRecord) -> Path:
    """The best point with its first seed as an experiment's file."""
    file = folder / BEST_FILE
    metric = sweep.metric_of(best.members[0].config)
    comment = (
        f"{join(command_words('run', written(str(file)), [f'paths.root={written(str(folder.parent.parent))}']))}\n"
        f"The best point of sweep {sweep.sweep_id}: {best.label}\n"
        f"{metric} {best.score:.4g}, mean over seeds {', '.join(str(one.seed) for one in best.members)}."
    )
    write_text_atomically(file, experiment_text(best.members[0].config, comment))
    return file


def write_comparison(folder: Path, points: Sequence[PointRecord], *, is_news: bool) -> Path | None:
    """The report that compares all runs that have come to a score; None where fewer than two have."""
    file = folder / "comparison" / "comparison.html"
    if not is_news and file.is_file():
        return file
    run_dirs = [
        member.run_dir for point in points for member in point.members if point.scores or member.score is not None
    ]
    if len(run_dirs) < FEWEST_TO_COMPARE:
        return None
    from rlcore.report import compare_runs

    return compare_runs(run_dirs, target=file.parent).html


def show_table(sweep: Sweep, points: Sequence[PointRecord]) -> None:
    """A table in Prefect: a row a point, best first."""
    metric = sweep.metric_of(sweep.base)
    sign = -1.0 if sweep.spec.objective.direction == "maximize" else 1.0
    order = sorted(points, key=lambda one: (one.state != "finished", one.score is None, sign * (one.score or 0.0)))
    rows = [
        {"point": point.number}
        | {key: str(value) for key, value in point.settings.items()}
        | {metric: point.score, "state": point.state, "step": max(member.step for member in point.members)}
        | {f"seed {member.seed}": member.score if not member.error else "failed" for member in point.members}
        for point in order
    ]
    harmless(lambda: create_table_artifact(rows, key=artifact_key(sweep.sweep_id, "sweep"), description=metric))


def show_summary(sweep: Sweep, result: SweepResult) -> None:
    """Where everything is, as Markdown in Prefect."""
    lines = [f"# Sweep {result.sweep_id}", "", *(f"- {line}" for line in summary_of(result))]
    key = artifact_key(sweep.sweep_id, "sweep-summary")
    harmless(lambda: create_markdown_artifact("\n".join(lines) + "\n", key=key))


def summary_of(result: SweepResult) -> list[str]:
    """The last lines of `millrace sweep`."""
    counts = [
        f"{result.num_finished} of {result.num_points} points finished",
        f"{result.num_stopped_early} stopped early" if result.num_stopped_early else "",
        f"{len(result.failed)} failed" if result.failed else "",
        f"{result.num_not_begun} not begun" if result.num_not_begun else "",
        f"{result.num_runs} runs worked on, {result.num_steps} steps",
    ]
    lines = [", ".join(text for text in counts if text)]
    lines += [f"failed: {text}" for text in result.failed]
    if result.ended_by:
        lines.append(f"the budget is used up: {result.ended_by}; the same command goes on")
    if result.best_score is not None:
        lines.append(f"best: point {result.best_point}, {result.best_label}: {result.best_score:.4g}")
        lines.append(f"best settings: {result.best_experiment}")
    if result.comparison is not None:
        lines.append(f"comparison: {result.comparison}")
    return lines


def harmless(action: Callable[[], object]) -> None:
    """Whatever Prefect says to it, the sweep goes on."""
    try:
        action()
    except Exception as error:
        get_run_logger().warning("Prefect did not take an artifact: %s", error)
