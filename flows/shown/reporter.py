"""Carries a trainer's events and log to Prefect while a stage runs: artifacts, log lines, events."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.events import emit_event
from prefect.logging import get_run_logger

from flows.server.pause import show_paused, show_running
from flows.server.watch import end_if_cancelled, told_to_end
from flows.shown.artifacts import (
    harmless,
    show_checkpoints,
    show_latest_validation,
    show_mlflow_page,
    show_progress,
    show_summary,
)
from flows.shown.progress import describe, display
from flows.trainer.protocol import CheckpointSaved, Event, Happening, Note, Progress, Validated
from flows.work.open_run import OpenRun
from rlcore.run.disk import PAUSED

UPDATE_EVERY_S = 5.0
"""Between two updates of the progress artifact; one costs 15 ms."""
SUMMARY_EVERY_S = 20.0
"""Between two looks at all of a run: its journal, its checkpoints, the page's curve."""
LOG_EVERY_S = 30.0
"""Between two progress lines in the flow run's log."""
_LEVELS = (("CRITICAL", logging.CRITICAL), ("ERROR", logging.ERROR), ("WARNING", logging.WARNING))


class RunReporter:
    """What one task hears of its trainer."""

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._log = get_run_logger()
        self._last_update = self._last_log = float("-inf")
        self._progress_now: Progress | None = None
        self._is_paused = False

    def event(self, event: Event) -> None:
        """Called for each event, in the flow's thread."""
        self._show_pause(event)
        match event:
            case Progress():
                self._progress(event)
            case CheckpointSaved(step, path):
                self._log.info("%s", describe(event))
                self._emit("checkpoint.saved", {"step": step, "path": path})
                self._look_at_all()
            case Validated(name, step, summary):
                self._log.info("%s", describe(event))
                if name.startswith("step-"):
                    show_latest_validation(self._run, step, summary)
            case Note(text):
                self._log.info("%s", text)
            case Happening(name, data):
                self._log.warning("%s", describe(event))
                self._emit(name, dict(data))

    def _show_pause(self, event: Event) -> None:
        """The flow run is Paused from a full disk until there is room, or until the trainer says anything else."""
        if isinstance(event, Happening) and event.name == PAUSED:
            self._is_paused = True
            harmless(lambda: show_paused(str(event.data.get("text"))))
        else:
            self.go_on()

    def go_on(self) -> None:
        """The flow run is Running again, if it was Paused."""
        if self._is_paused:
            self._is_paused = False
            harmless(show_running)

    def line(self, line: str) -> None:
        """A line of the trainer's log."""
        level = next((level for word, level in _LEVELS if f" {word} " in line[:80]), logging.INFO)
        self._log.log(level, "%s", line)

    def end(self) -> None:
        """The stage is done: a warm start that has learned enough stops before its last step."""
        last = self._progress_now
        if last is not None and last.to_step is None:
            show_progress(self._run, last.stage, 100.0, f"{describe(last)}  done")
        if last is not None and last.to_step == last.total_steps:
            self._look_at_all(now=True)

    def _progress(self, event: Progress) -> None:
        self._progress_now = event
        now, is_end = time.monotonic(), event.step in (event.to_step, event.total_steps)
        if is_end or now - self._last_log >= LOG_EVERY_S:
            self._last_log = now
            self._log.info("%s", describe(event))
        if is_end or now - self._last_update >= UPDATE_EVERY_S:
            self._last_update = now
            show_progress(self._run, event.stage, 100.0 * event.step / event.total_steps, describe(event))

    def _look_at_all(self, *, now: bool = False) -> None:
        """Checkpoints, summary and the way to MLflow, after a checkpoint, but not after each of many."""
        shown = self._run.shown
        if not now and time.monotonic() - shown.summary_at < SUMMARY_EVERY_S:
            return
        shown.summary_at = time.monotonic()
        show_checkpoints(self._run)
        text = "" if self._progress_now is None else describe(self._progress_now)
        show_summary(self._run, text)
        show_mlflow_page(self._run)

    def _emit(self, name: str, payload: dict[str, object]) -> None:
        resource = {
            "prefect.resource.id": f"millrace.run.{self._run.run_id}",
            "prefect.resource.name": self._run.run_id,
        }
        harmless(lambda: emit_event(f"millrace.{name}", resource=resource, payload=payload))


@contextmanager
def reported(run: OpenRun) -> Iterator[None]:
    """Inside the block the trainer's events and log go to the current task's log, and to whoever watches."""
    reporter = RunReporter(run)

    def event(event: Event) -> None:
        reporter.event(event)
        display().event(event)

    try:
        with told_to_end(), run.heard_by(event, reporter.line, end_if_cancelled):
            yield
    finally:
        reporter.go_on()  # a flow run that stays Paused starts no further task, nor this one again
    reporter.end()
