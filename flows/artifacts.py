"""The Prefect artifacts of a run, such as its progress and report. A failed request to Prefect's server does not stop
the run.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from prefect.artifacts import LinkArtifact, MarkdownArtifact, ProgressArtifact, TableArtifact
from prefect.assets import Asset, AssetProperties
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.objects import Artifact as Made
from prefect.logging import get_run_logger

from flows.progress import CI_SUFFIXES, ValidationSummary, with_interval
from flows.stages.stage import Stage
from flows.work.open_run import OpenRun
from flows.work.status import failure_of
from rlcore.checkpoint.catalog import scan
from rlcore.tracking.mlflow_store import table_url

NUM_VALIDATIONS = 4  # columns of the table of latest validations; the first one is the first validation seen
RETRY_AFTER_S = 30.0  # seconds without requests after a failed one
Content = Callable[[], object]  # content of an artifact: Markdown, rows as JSON, or per cent


def artifact_key(subject: str, content: str) -> str:
    """Return the key of an artifact, which consists of lower-case letters, digits and dashes.

    >>> artifact_key("countdown_demo-s1-1bb2114f", "report")
    'countdown-demo-s1-1bb2114f-report'
    """
    return re.sub(r"[^a-z0-9]+", "-", f"{subject}-{content}".lower()).strip("-")


def show_artifact(of: str, what: str, description: str, data: Content, kind: str = "markdown") -> None:
    """Create a Prefect artifact, whose key consists of `of` and `what`. `data`: a function that returns the content.
    The content is Markdown text, or the rows of a table as JSON if `kind` is `table`.
    """
    log_failure(lambda: _create(of, what, description, data, kind))


def _create(of: str, what: str, description: str, data: Content, kind: str) -> Made:
    # Each kind has its own class, because the base class would encode the data as JSON again.
    named: dict[str, Any] = {"key": artifact_key(of, what), "description": description}
    shown: Any = data()
    if kind == "table":
        made = TableArtifact(table=json.loads(shown), **named).create()
    elif kind == "link":
        made = LinkArtifact(link=shown, link_text=description, **named).create()
    elif kind == "progress":
        made = ProgressArtifact(progress=shown, **named).create()
    else:
        made = MarkdownArtifact(markdown=shown, **named).create()
    assert isinstance(made, Made)  # no event loop runs here, so it was made before the call returned
    return made


def _update(run: OpenRun, what: str, description: str, data: Content, kind: str = "markdown") -> None:
    """Create an artifact at the first call and change it at later calls, so that the server keeps no history.

    After a failure, no request is sent for `RETRY_AFTER_S`. The trainer's pipe is not read during a request, and a full
    pipe blocks the trainer.
    """
    shown = run.prefect_view
    if time.monotonic() < shown.retry_at:
        return

    def ask() -> None:
        shown.retry_at = time.monotonic() + RETRY_AFTER_S
        if what not in shown.artifacts:
            shown.artifacts[what] = _create(run.run_id, what, description, data, kind).id
        else:
            with get_client(sync_client=True) as client:
                client.update_artifact(shown.artifacts[what], ArtifactUpdate(data=data(), description=description))
        shown.retry_at = float("-inf")

    log_failure(ask)


def show_progress(run: OpenRun, stage: str, percent: float, text: str) -> None:
    """Show the progress of a stage in percent. A training in several chunks of steps has one progress bar."""
    _update(run, f"progress-{stage}", text, lambda: percent, "progress")


def show_latest_validation(run: OpenRun, step: int, summary: Mapping[str, float]) -> None:
    """Add the validation of a training step to a table. The table shows the first validation and the latest
    validations.
    """
    known = run.prefect_view.validations
    known[step] = summary
    shown = sorted(known)[:1] + sorted(known)[1:][-(NUM_VALIDATIONS - 1) :]
    rows = _rows({f"step {step}": known[step] for step in reversed(shown)})
    _update(run, "latest-validation", f"{run.run_id} at step {step}", lambda: json.dumps(rows), "table")


def show_summary(run: OpenRun, now: str) -> None:
    """Show the run's progress and the link to its MLflow page. `now` is the progress as text."""
    page = f"[{run.run_id} in MLflow]({run.prefect_view.mlflow_page})" if run.prefect_view.mlflow_page else ""
    if not page and run.config.tracking.enabled:
        page = f"`millrace ui --root {quote(str(run.layout.root))}` serves the run's MLflow page."
    text = "\n\n".join(part for part in (f"## {run.run_id}", now, page) if part)
    _update(run, "summary", f"{run.run_id}: progress", lambda: text)


def show_validation(run: OpenRun, summary: ValidationSummary) -> None:
    """Add a validation to the table of the validations before and after training."""
    run.prefect_view.final_validations[summary.name] = summary
    known = run.prefect_view.final_validations.values()
    rows = _rows({one.name: one.summary for one in known})
    steps = ", ".join(f"{one.name}: step {one.step}" for one in known)
    show_artifact(
        run.run_id, "validation", f"{run.run_id} on held-out problems: {steps}", lambda: json.dumps(rows), "table"
    )


def _rows(summaries: Mapping[str, Mapping[str, float]]) -> list[dict[str, str]]:
    """Return a table with a row for each metric and a column for each validation."""
    metrics = sorted({metric for one in summaries.values() for metric in one if not metric.endswith(CI_SUFFIXES)})
    return [
        {"metric": metric} | {name: with_interval(one, metric) for name, one in summaries.items()} for metric in metrics
    ]


def show_checkpoints(run: OpenRun) -> None:
    """Show a table of the checkpoints on disk."""
    rows = [
        {
            "step": info.step,
            "MB": round(info.size_bytes / 1e6, 1),
            "score": None if info.score is None else round(info.score, 3),
            "path": str(info.path),
        }
        for info in scan(run.layout.checkpoints).checkpoints
    ]
    _update(run, "checkpoints", f"{run.run_id}: checkpoints on disk", lambda: json.dumps(rows), "table")


def show_mlflow_page(run: OpenRun) -> None:
    """Show the link to MLflow's table of all runs. Do nothing before the address of the run's page is known."""
    if (page := run.prefect_view.mlflow_page) and "mlflow" not in run.prefect_view.artifacts:
        _update(run, "mlflow", f"{run.run_id} among all runs in MLflow", lambda: table_url(page), "link")


def show_report(run: OpenRun, html: Path) -> None:
    """Show the summary of a run's report, and a link to the full report (`html`) in MLflow or on disk."""
    run_dir, page = run.layout.run_dir, run.prefect_view.mlflow_page

    def text() -> str:
        from rlcore.report.build import summary_markdown

        return f"{summary_markdown(run_dir, failure_of(run_dir))}\n\nFull report: `{html}`\n"

    show_artifact(run.run_id, "report", f"{run.run_id}: metrics and conclusions", text)
    address, _, view = page.partition("?")
    link = f"{address}/artifacts/report/{html.name}?{view}" if page else html.as_uri()
    show_artifact(run.run_id, "report-page", f"{run.run_id}: full report with charts", lambda: link, "link")


def assets_of(stage: Stage[Any], run: OpenRun) -> list[Asset]:
    """Return the asset that a stage of a run adds to Prefect, if there is one."""
    if (place := stage.asset(run)) is None:
        return []
    properties = AssetProperties(name=stage.title(run), url=place.as_uri())
    return [Asset(key=f"millrace://{place.parent.name}/{place.name}", properties=properties)]


def log_failure(action: Callable[[], object]) -> None:
    """Call a function and log its error instead of raising it, so that the run continues."""
    try:
        action()
    except Exception as error:
        get_run_logger().warning("Prefect did not accept an artifact or event: %s", error)
