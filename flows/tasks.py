"""The Prefect tasks that run the stages of a run inside the current flow run."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from pathlib import Path
from shlex import join
from typing import Any, Final, TypeVar
from uuid import UUID

from prefect.assets import Asset
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed, Paused, Running
from prefect.tasks import MaterializingTask

from flows import artifacts, chain
from flows.parameters import RunSettings, experiment_name
from flows.progress import ValidationSummary, describe, display
from flows.server import watch
from flows.stages.stage import Stage
from flows.work.open_run import OpenRun, open_run
from flows.work.protocol import CheckpointSaved, Event, Note, Progress, RunEvent, Validated
from flows.work.status import is_stop_requested, worker_of
from flows.work.trainer import WAITS_FOR_SLOTS
from rlcore.config.fingerprint import run_id
from rlcore.run.disk import PAUSED
from rlcore.run.initial_policy import InitialPolicy

R = TypeVar("R")

LAST_STAGE: Final = "report"  # last stage of a whole run


def flow_run_name() -> str:
    """Return a name such as `train/countdown_demo seed=2`. It consists of the run's last stage (or the flow's name),
    its experiment and its seed.
    """
    given = flow_run.parameters
    seed = [f"seed={given['seed']}"] if given.get("seed") is not None else []
    seed += [override for override in given.get("overrides") or [] if override.startswith("seed=")]
    return " ".join([f"{_flow_or_stage()}/{experiment_name(given.get('experiment'))}", *seed[:1]])


def _flow_or_stage() -> str:
    until: str = flow_run.parameters.get("until", LAST_STAGE)
    return str(flow_run.flow_name) if until == LAST_STAGE else until


CHECKED_SETTINGS: ContextVar[Any] = ContextVar("checked", default=None)
"""The settings of a run or a sweep that a command has checked before it starts the flow."""
_OUTCOME: ContextVar["Future[Any]"] = ContextVar("outcome")


def call_flow(checked: object, call: Callable[[], R]) -> R:
    """Call a flow with checked settings. The flow reads them from `CHECKED_SETTINGS` and does not check them again.

    If Prefect fails after the work of the flow, for example because its server has ended, return the stored outcome.
    """
    outcome: Future[R] = Future()

    def call_with() -> R:
        CHECKED_SETTINGS.set(checked)
        _OUTCOME.set(outcome)
        return call()

    try:
        copy_context().run(call_with)  # may return a state in place of the result
    except Exception:
        if not outcome.done():
            raise
    return outcome.result(timeout=0)


def keep_outcome(work: Callable[[], R]) -> R:
    """Execute `work`, store its result or error so that `call_flow` can read it, and return the result."""
    outcome = _OUTCOME.get(Future())
    try:
        outcome.set_result(work())
    except Exception as error:
        outcome.set_exception(error)
    result: R = outcome.result()
    return result


@contextmanager
def open_flow_run(settings: RunSettings, verb: str) -> Iterator[OpenRun]:
    """Open the run of these settings and watch the flow run for a cancellation inside the `with` block."""
    with watch.watch_flow_run(), open_run(settings.config, settings.command(verb), report=log_and_print) as run:
        yield run


def log_settings(settings: RunSettings, verb: str) -> None:
    """Name the flow run after the id of its Millrace run, and tag it. Log the equivalent command and the settings that
    have no effect.
    """
    name, what = run_id(settings.config), _flow_or_stage()
    label_flow_run(name if what == "pipeline" else f"{what} {name}", settings.config.name, settings.config.data.task)
    log_command(join(settings.command(verb)))
    log_unused_settings(settings.unused_settings())


def label_flow_run(name: str, *tags: str) -> None:
    """Name the current flow run and add tags to it."""

    def update() -> None:
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(flow_run.id), name=name, tags={*flow_run.tags, *tags})

    artifacts.log_failure(update)


def run_as_task(stage: Stage[R], run: OpenRun) -> R:
    """Run a stage of a run as a Prefect task. Raises Pause if the flow run was suspended before the task."""
    run.trainer.on_event = display().event  # also between tasks, where a signal may end the run
    assets = artifacts.assets_of(stage, run)

    def work() -> R:
        if not stage.in_trainer:
            return stage.find_or_make(run)
        with report_to_task(run):
            return chain.run_with_retries(stage, run, log_and_print)

    def describe(result: R) -> str:
        return _describe(stage, run, result)

    made = run_task(stage.name, stage.title(run), work, describe, assets, run.prefect_view.assets)
    run.prefect_view.assets += [asset.key for asset in assets]
    return made


def run_as_one_task(stages: Sequence[Stage[Any]], run: OpenRun, title: str) -> None:
    """Run stages of a run as a single Prefect task. Raises Pause after a stage if the flow run was suspended."""
    described = ""

    def work() -> object:
        nonlocal described
        result: object = None
        with report_to_task(run):
            for stage in stages:
                if described:
                    log_and_print(described)
                result = chain.run_with_retries(stage, run, log_and_print)
                described = _describe(stage, run, result)
                if watch.is_suspended():
                    break
        return result

    run_task(stages[-1].name, title, work, lambda _: described)
    watch.end_if_suspended()


def _describe(stage: Stage[R], run: OpenRun, result: R) -> str:
    """Update the artifacts that show the result of a stage, and return the line that describes it."""
    if isinstance(result, ValidationSummary):
        artifacts.show_validation(run, result)
    if isinstance(result, InitialPolicy) and f"progress-{WARM_START}" in run.prefect_view.artifacts:
        artifacts.show_progress(run, WARM_START, 100.0, f"{result}  done")  # it may end early
    return stage.describe(result)


def run_task(
    name: str,
    title: str,
    work: Callable[[], R],
    describe: Callable[[R], str],
    assets: Sequence[Asset] = (),
    made_from: Sequence[str] = (),
) -> R:
    """Run a function as a Prefect task, print a line about its result, and return the result.

    `describe`: a function that returns this line, or '' to print nothing. `made_from`: the keys of the assets that
    `assets` were built from. If the result existed before, the task run gets the state Cached. Raises Pause if the flow
    run was suspended before the task.
    """
    watch.end_if_suspended()
    signals = watch.DeferredSignals()

    results: list[R] = []  # a task that returns a state returns no result to its caller

    def do() -> State[None]:
        with signals.deliver():
            result = work()
        results.append(result)
        if line := describe(result):
            log_and_print(line)
        for asset in assets:
            asset.add_metadata({"result": line})
        state = "Cached" if getattr(result, "cached", False) else "Completed"  # not every result can exist before
        return Completed(name=state, message=line)

    options: dict[str, Any] = {"name": name, "task_run_name": lambda: title, "cache_policy": NO_CACHE}
    with signals:
        MaterializingTask(do, assets=assets, asset_deps=list(made_from), **options)()
    return results[0]


WARM_START = "warm-start"  # name of the stage in progress events
UPDATE_EVERY_S = 5.0  # seconds between two updates of the progress artifact, each of which takes 15 ms
SUMMARY_EVERY_S = 20.0  # seconds between two updates of the checkpoints and the summary
LOG_EVERY_S = 30.0  # seconds between two progress lines in the flow run's log
_LEVELS = (("CRITICAL", logging.CRITICAL), ("ERROR", logging.ERROR), ("WARNING", logging.WARNING))


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
        match event:
            case Progress():
                self._progress(event)
            case CheckpointSaved(step, path):
                self._log.info("%s", describe(event))
                if Path(path).is_relative_to(self._run.layout.run_dir):  # not a checkpoint of the warm start
                    emit("checkpoint.saved", "run", self._run.run_id, {"step": step, "path": path})
                    self._show_summary()
            case Validated(name, step, summary):
                self._log.info("%s", describe(event))
                if name.startswith("step-"):
                    artifacts.show_latest_validation(self._run, step, summary)
            case Note(text):
                self._log.info("%s", text)
            case RunEvent(name, data):
                self._log.warning("%s", describe(event))
                emit(name, "run", self._run.run_id, dict(data))

    def _show_pause(self, event: Event) -> None:
        """Set the flow run to Paused while the run waits for disk space or slots, and otherwise to Running."""
        if isinstance(event, RunEvent) and event.name in (PAUSED, WAITS_FOR_SLOTS):
            self._is_paused = True
            artifacts.log_failure(lambda: watch.set_flow_run_state(Paused(message=str(event.data.get("text")))))
        else:
            self.resume()

    def resume(self) -> None:
        """Set the flow run to Running if this reporter has paused it."""
        if self._is_paused:
            self._is_paused = False
            artifacts.log_failure(lambda: watch.set_flow_run_state(Running(message="resumed")))

    def line(self, line: str) -> None:
        """Log a line of the trainer's log at the level that the line names."""
        level = next((level for word, level in _LEVELS if f" {word} " in line[:80]), logging.INFO)
        self._log.log(level, "%s", line)

    def end(self) -> None:
        """Update the checkpoints, summary and MLflow link, if the last step of the run is done."""
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
            artifacts.show_progress(self._run, event.stage, 100.0 * event.step / event.total_steps, describe(event))
        self._show_summary()

    def _show_summary(self, *, now: bool = False) -> None:
        """Update the checkpoints, the summary and the MLflow link. An update less than `SUMMARY_EVERY_S` seconds after
        the last one is skipped unless `now` is true.
        """
        shown = self._run.prefect_view
        if not now and time.monotonic() - shown.summary_at < SUMMARY_EVERY_S:
            return
        shown.summary_at = time.monotonic()
        artifacts.show_checkpoints(self._run)
        text = "" if self._progress_now is None else describe(self._progress_now)
        artifacts.show_summary(self._run, text)
        artifacts.show_mlflow_page(self._run)


@contextmanager
def report_to_task(run: OpenRun) -> Iterator[None]:
    """Send the trainer's events and log lines to Prefect, and the events to the display, inside the `with` block."""
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


def emit(event: str, kind: str, name: str, payload: dict[str, object]) -> None:
    """Emit the event `millrace.<event>` for Prefect's automations. Its resource is `millrace.<kind>.<name>`."""
    resource = {"prefect.resource.id": f"millrace.{kind}.{name}", "prefect.resource.name": name}
    artifacts.log_failure(lambda: emit_event(f"millrace.{event}", resource=resource, payload=payload))


def log_and_print(text: str) -> None:
    """Write a line to the flow run's log and to the terminal."""
    get_run_logger().info("%s", text)
    display().line(text)


def log_unused_settings(lines: Iterable[str]) -> None:
    """Log the settings that have no effect. Only the outermost flow run logs them, so that they appear once."""
    if flow_run.parent_flow_run_id is None:
        for line in lines:
            get_run_logger().warning("%s", line)


def log_command(command: str) -> None:
    """Log the equivalent command, which does not use Prefect."""
    get_run_logger().info("Equivalent command without Prefect: %s", command)
