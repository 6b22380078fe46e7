"""What the Prefect UI shows of a run while it goes on, and after. None of it may stop the run."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.logging import get_run_logger

from flows.naming import artifact_key
from flows.server.watch import few_retries
from flows.shown.curve import curve_markdown
from flows.work.comparison import Comparison
from flows.work.open_run import OpenRun
from flows.work.report import Report
from flows.work.stages import Judgement
from rlcore.checkpoint.catalog import scan
from rlcore.tracking import read_journal

BYTES_PER_MB = 1e6
NUM_VALIDATIONS = 4
"""Columns of the table of a run's latest validations; the first one is of step 0."""
REWARD = "critic/score/mean"
LEFT_ALONE_S = 30.0
"""A server that was away."""


def show_progress(run: OpenRun, stage: str, percent: float, text: str) -> None:
    """A bar for each stage, one for all its chunks."""
    in_passing(run, lambda: _show_progress(run, stage, percent, text))


def _show_progress(run: OpenRun, stage: str, percent: float, text: str) -> None:
    known = run.shown.progress.get(stage)
    if known is not None:
        update_progress_artifact(known, progress=percent, description=text)
        return
    key = artifact_key(run.run_id, f"progress-{stage}")
    made = create_progress_artifact(percent, key=key, description=text)
    assert isinstance(made, UUID)
    run.shown.progress[stage] = made


def show_latest_validation(run: OpenRun, step: int, summary: Mapping[str, float]) -> None:
    """A table of the validations in training: the first one that this process saw, and the last few."""
    known = run.shown.validations
    known[step] = summary
    shown = sorted(known)[:1] + sorted(known)[1:][-(NUM_VALIDATIONS - 1) :]
    rows = [
        {"figure": figure} | {f"step {step}": _with_interval(known[step], figure) for step in shown}
        for figure in sorted(summary)
        if not figure.endswith(CI_ENDS)
    ]
    key = artifact_key(run.run_id, "latest-validation")
    in_passing(run, lambda: create_table_artifact(rows, key=key, description=f"{run.run_id} at step {step}"))


def show_summary(run: OpenRun, now: str) -> None:
    """Where the run stands, with a curve of its reward."""
    key = artifact_key(run.run_id, "summary")
    in_passing(run, lambda: create_markdown_artifact(_summary(run, now), key=key))


def _summary(run: OpenRun, now: str) -> str:
    records = read_journal(run.layout.journal)
    training = [(record.step, record.metrics[REWARD]) for record in records if REWARD in record.metrics]
    held_out = [
        (record.step, value)
        for record in records
        for name, value in record.metrics.items()
        if name.startswith("val-core/") and name.endswith(f"/reward/mean@{run.config.validation.samples_per_problem}")
    ]
    page = f"[{run.run_id} in MLflow]({run.shown.mlflow_page})" if run.shown.mlflow_page else ""
    curve = curve_markdown([("reward in training", training), ("reward on held-out problems", held_out)])
    return "\n\n".join(part for part in (f"## {run.run_id}", now, curve, page) if part)


def show_validations(run_id: str, judgements: Sequence[Judgement]) -> None:
    """A table with a row for each figure and a column for each validation."""
    figures = sorted({figure for one in judgements for figure in one.summary if not figure.endswith(CI_ENDS)})
    rows = [
        {"figure": figure} | {one.name: _with_interval(one.summary, figure) for one in judgements} for figure in figures
    ]
    steps = ", ".join(f"{one.name}: step {one.step}" for one in judgements)
    harmless(lambda: create_table_artifact(rows, key=artifact_key(run_id, "validation"), description=steps))


CI_ENDS = ("/ci_low", "/ci_high")


def _with_interval(summary: Mapping[str, float], figure: str) -> str:
    if figure not in summary:
        return ""
    low, high = (summary.get(f"{figure}{end}") for end in CI_ENDS)
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{summary[figure]:.3f}{interval}"


def show_checkpoints(run: OpenRun) -> None:
    """A table of the checkpoints on disk."""
    rows = [
        {
            "step": info.step,
            "MB": round(info.size_bytes / BYTES_PER_MB, 1),
            "score": info.score,
            "path": str(info.path),
        }
        for info in scan(run.layout.checkpoints).checkpoints
    ]
    in_passing(run, lambda: create_table_artifact(rows, key=artifact_key(run.run_id, "checkpoints")))


def show_mlflow_page(run: OpenRun) -> None:
    """A link to it, once it is known."""
    if run.shown.mlflow_link or not run.shown.mlflow_page:
        return

    def create() -> None:
        key = artifact_key(run.run_id, "mlflow")
        create_link_artifact(run.shown.mlflow_page, f"{run.run_id} in MLflow", key=key)
        run.shown.mlflow_link = True

    in_passing(run, create)


def show_report(run_dir: Path, report: Report) -> None:
    """The report's summary as the flow run shows it."""

    def create() -> object:
        from rlcore.report import summary_markdown

        text = f"{summary_markdown(run_dir)}\n\nFull report: `{report.html}`\n"
        return create_markdown_artifact(text, key=artifact_key(run_dir.name, "report"))

    harmless(create)


def show_comparison(made: Comparison) -> None:
    """A comparison as the flow run shows it, and a link to MLflow's page of the same runs."""
    text = f"{made.summary}\n\nFull comparison: `{made.html}`\n"
    name = f"comparison-{made.html.parent.name}"
    harmless(lambda: create_markdown_artifact(text, key=artifact_key(name, "report")))
    if made.mlflow_page:
        show_link(name, "mlflow", made.mlflow_page, "The same runs in MLflow")


def show_link(name: str, what: str, url: str, text: str) -> None:
    """A link."""
    harmless(lambda: create_link_artifact(url, text, key=artifact_key(name, what)))


def in_passing(run: OpenRun, action: Callable[[], object]) -> None:
    """As `harmless`, while a trainer works. A server that is away is soon given up, and left alone for a while: until
    then nobody hears the trainer, which stops once the pipe to us is full.
    """
    if time.monotonic() < run.shown.again_at:
        return

    def asked() -> None:
        run.shown.again_at = time.monotonic() + LEFT_ALONE_S
        with few_retries(1):
            action()
        run.shown.again_at = float("-inf")

    harmless(asked)


def harmless(action: Callable[[], object]) -> None:
    """Whatever Prefect says to it, the run goes on."""
    try:
        action()
    except Exception as error:
        get_run_logger().warning("Prefect did not take an artifact or event: %s", error)
