"""The progress of a run in Prefect: artifacts, events, log lines and the state Paused.

A failed request to Prefect's server does not stop the run.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shlex import join, quote
from typing import Any

from prefect.artifacts import LinkArtifact, MarkdownArtifact, ProgressArtifact, TableArtifact
from prefect.assets import Asset, AssetProperties
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.objects import Artifact as Made
from prefect.events import emit_event
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Paused, Running

from flows.progress import CI_SUFFIXES, ValidationSummary, describe, display, with_interval
from flows.server import watch
from flows.stages.stage import Stage
from flows.work.open_run import OpenRun
from flows.work.protocol import CheckpointSaved, Event, Progress, RunEvent, Validated
from flows.work.runs import failure_of, is_stop_requested, worker_of
from flows.work.trainer import WAITS_FOR_SLOTS
from rlcore.checkpoint.catalog import scan
from rlcore.storage.disk import PAUSED
from rlcore.tracking.mlflow_store import table_url

NUM_VALIDATIONS = 4  # columns of the table of latest validations; the first one is the first validation seen
RETRY_AFTER_S = 30.0  # seconds without requests after a failed one
UPDATE_EVERY_S = 5.0  # seconds between two updates of the progress artifact, each of which takes 15 ms
SUMMARY_EVERY_S = 20.0  # seconds between two updates of the checkpoints and the summary
LOG_EVERY_S = 30.0  # seconds between two progress lines in the flow run's log
_LEVELS = (("CRITICAL", logging.CRITICAL), ("ERROR", logging.ERROR), ("WARNING", logging.WARNING))
Content = Callable[[], object]  # content of an artifact: Markdown, rows as JSON, or per cent


def artifact_key(subject: str, content: str) -> str:
    """Return the key of an artifact: lower-case letters, digits and dashes.

    >>> artifact_key("countdown_demo-s1-1bb2114f", "report")
    'countdown-demo-s1-1bb2114f-report'
    """
    return re.sub(r"[^a-z0-9]+", "-", f"{subject}-{content}".lower()).strip("-")


def show_artifact(of: str, what: str, description: str, data: Content, kind: str = "markdown") -> None:
    """Create an artifact. Its key is `artifact_key(of, what)`. `data`: a function that returns Markdown, or the rows of
    a table as JSON if `kind` is `table`."""
    log_failure(lambda: _create(of, what, description, data, kind))


def _create(of: str, what: str, description: str, data: Content, kind: str) -> Made:
    named: dict[str, Any] = {"key": artifact_key(of, what), "description": description}
    shown: Any = data()
    # Each kind has its own class, because the base class would encode the data as JSON again.
    match kind:
        case "table":
            made = TableArtifact(table=json.loads(shown), **named).create()
        case "link":
            made = LinkArtifact(link=shown, link_text=description, **named).create()
        case "progress":
            made = ProgressArtifact(progress=shown, **named).create()
        case _:
            made = MarkdownArtifact(markdown=shown, **named).create()
    assert isinstance(made, Made)  # no event loop runs here, so it was made before the call returned
    return made


def _update(run: OpenRun, what: str, description: str, data: Content, kind: str = "markdown") -> None:
    """Create an artifact at the first call and overwrite it at later calls. The server therefore keeps no old versions.

    After a failed request, no further request is sent for `RETRY_AFTER_S` seconds, because the trainer's events wait
    during each request.
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
    """Show the progress of a stage in percent. The training runs in chunks of steps, which share one progress bar."""
    _update(run, f"progress-{stage}", text, lambda: percent, "progress")


def show_latest_validation(run: OpenRun, step: int, summary: Mapping[str, float]) -> None:
    """Show a table of the first validation and the latest validations during training."""
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
    found = {metric for one in summaries.values() for metric in one if not metric.endswith(CI_SUFFIXES)}
    metrics = sorted(found, key=lambda metric: ("/reward/" not in metric, metric))
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
    """Show the link to MLflow's table of all runs. The link is made from the address of this run's MLflow page, so
    nothing is shown while this address is unknown."""
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
    """Return a list with the Prefect asset for the folder that a stage writes, or [] if `stage.asset` returns None."""
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


class RunReporter:
    """A reporter that passes the trainer's events and log lines to Prefect during one task."""

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._log = get_run_logger()
        self._last_update = self._last_log = float("-inf")
        self._progress_now: Progress | None = None
        self._is_paused = False

    def event(self, event: Event) -> None:
        """Report an event of the trainer. This method runs in the thread of the flow."""
        self._show_pause(event)
        if isinstance(event, Progress):
            self._progress(event)
            return
        self._log.log(logging.WARNING if isinstance(event, RunEvent) else logging.INFO, "%s", describe(event))
        match event:
            case CheckpointSaved(step, path) if Path(path).is_relative_to(self._run.layout.run_dir):  # its own
                self._emit("checkpoint.saved", {"step": step, "path": path})
                self._show_summary()
            case Validated(name, step, summary) if name.startswith("step-"):
                show_latest_validation(self._run, step, summary)
            case RunEvent(name, data):
                self._emit(name, dict(data))

    def _emit(self, event: str, payload: dict[str, object]) -> None:
        name = self._run.run_id
        resource = {"prefect.resource.id": f"millrace.run.{name}", "prefect.resource.name": name}
        log_failure(lambda: emit_event(f"millrace.{event}", resource=resource, payload=payload))

    def _show_pause(self, event: Event) -> None:
        """Set the flow run to Paused while the run waits for disk space or slots, and otherwise to Running.

        Slots limit the number of concurrent trainers (`millrace slots`)."""
        if isinstance(event, RunEvent) and event.name in (PAUSED, WAITS_FOR_SLOTS):
            self._is_paused = True
            log_failure(lambda: watch.set_flow_run_state(Paused(message=str(event.data.get("text")))))
        else:
            self.resume()

    def resume(self) -> None:
        """Set the flow run to Running if this reporter has paused it."""
        if self._is_paused:
            self._is_paused = False
            log_failure(lambda: watch.set_flow_run_state(Running(message="resumed")))

    def line(self, line: str) -> None:
        """Log a line of the trainer's log at the level that the line contains. The default level is INFO."""
        level = next((level for word, level in _LEVELS if f" {word} " in line[:80]), logging.INFO)
        self._log.log(level, "%s", line)

    def end(self) -> None:
        """If the last step of the run is done, update the artifacts (checkpoints, summary, MLflow link)."""
        last = self._progress_now
        if last is not None and last.to_step == last.total_steps:
            self._show_summary(now=True)

    def _progress(self, event: Progress) -> None:
        self._progress_now = event
        now, is_end = time.monotonic(), event.step in (event.to_step, event.total_steps)
        if is_end or now - self._last_log >= LOG_EVERY_S:
            self._last_log = now
            self._log.info("%s", describe(event))
        if is_end or now - self._last_update >= UPDATE_EVERY_S:
            self._last_update = now
            show_progress(self._run, event.stage, 100.0 * event.step / event.total_steps, describe(event))
        self._show_summary()

    def _show_summary(self, *, now: bool = False) -> None:
        """Update the artifacts of the checkpoints, the summary and the MLflow link.

        If `now` is false and the last update was less than `SUMMARY_EVERY_S` seconds ago, do nothing.
        """
        shown = self._run.prefect_view
        if not now and time.monotonic() - shown.summary_at < SUMMARY_EVERY_S:
            return
        shown.summary_at = time.monotonic()
        show_checkpoints(self._run)
        text = "" if self._progress_now is None else describe(self._progress_now)
        show_summary(self._run, text)
        show_mlflow_page(self._run)


@contextmanager
def report_to_task(run: OpenRun) -> Iterator[None]:
    """Send the trainer's events and log lines to Prefect inside the `with` block. The events also go to the console
    display."""
    reporter = RunReporter(run)

    def event(event: Event) -> None:
        reporter.event(event)
        display().event(event)

    def is_stopped() -> bool:
        return is_stop_requested(run.layout.run_dir, worker_of(run.layout.run_dir))

    try:
        heard = run.route_events(event, reporter.line, watch.end_if_cancelled)
        with watch.stop_as_cancellation(is_stopped), watch.limit_retries(1), heard:
            yield
    finally:
        reporter.resume()  # a Paused flow run starts no task
    reporter.end()


def log_and_print(text: str) -> None:
    """Write a line to the flow run's log and to the terminal."""
    get_run_logger().info("%s", text)
    display().line(text)


def log_unused_settings(lines: Iterable[str]) -> None:
    """Log the settings that have no effect. Only the outermost flow run logs them, so that they appear once."""
    if flow_run.parent_flow_run_id is None:
        for line in lines:
            get_run_logger().warning("%s", line)


def log_command(words: Iterable[str]) -> None:
    """Log the command that does the same work without Prefect."""
    get_run_logger().info("Equivalent command without Prefect: %s", join(words))
