"""The trainer process of a run, which reads commands from one file descriptor and sends events to another.

    python -m rlcore.run.process --run RUN_DIR --commands-fd N --replies-fd M [--lock-fd L]

A command is a method of `Session` with its arguments. Commands and events are JSON objects, one a line:

    {"command": "train", "to_step": 40}
    {"command": "validate", "checkpoint": "start" | "last" | "best" | "step-000040", "name": "before"}
    {"command": "close"}

    {"event": "progress", ...}  {"event": "note", "text": ...}
    {"event": "done", "command": ..., "result": {...}}
    {"event": "error", "command": ..., "type": ..., "message": ...}

Exit codes: 0 is done, 75 is saved and resumable, 1 is failed. A stop request (`rlcore.run.stop`) and a phase that hangs
(`rlcore.run.watchdog`) also end the process. The next process resumes from the last checkpoint.
"""

import argparse
import json
import logging
import os
import select
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from pydantic import JsonValue

from rlcore.checkpoint.catalog import is_exported
from rlcore.config import RunConfig
from rlcore.config.fingerprint import RUN_FILE
from rlcore.errors import EXIT_RESUMABLE, RESUMABLE, CheckpointError, DataError, MillraceError, StopRequestedError
from rlcore.evaluation.result import ValidationResult
from rlcore.run.initial_policy import InitialPolicy, known_initial_policy, remove_leftovers, stage_layout
from rlcore.run.layout import RunInputs, RunLayout
from rlcore.run.pass_rates import PassRateMeasurement
from rlcore.run.record import RunRecord
from rlcore.run.reinforcement import RunTraining, RunWorkers
from rlcore.run.stop import StopFlag, locked_run
from rlcore.run.supervised import Demonstrations, WarmStart
from rlcore.run.training import Training
from rlcore.run.watchdog import Report, Watchdog, exit_immediately, report_and_exit
from rlcore.storage.documents import iter_json, open_ordinary
from rlcore.storage.manifest import MANIFEST
from rlcore.storage.publish import published_directory
from rlcore.tracking.journal import load_journal
from rlcore.tracking.lineage import read_origin
from rlcore.user_code import run_code

EXIT_DONE, EXIT_FAILED = 0, 1
POLL_S = 0.25  # seconds between two checks for a stop request

log = logging.getLogger("rlcore.run.process")


class Session:
    """The commands of one run. A session is a context manager, which holds the run's lock."""

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        *,
        report: Report,
        stop: StopFlag,
        abandon: Callable[[MillraceError], None] = lambda error: log.error("%s", error),
        is_locked: bool = False,
    ) -> None:
        """Create a session without opening it. `abandon`: a function that ends the process. Another thread calls it if
        a phase or a stop takes too long. `is_locked`: whether this process has inherited the run's lock."""
        self._is_locked = is_locked
        self._config, self._layout = config, layout
        self._guard = Watchdog(
            config, layout, stop=stop, report=report, abandon=abandon, step=lambda: self._current.step
        )
        self._has_failed = False
        self._is_evaluated = False

    @property
    def _current(self) -> Training:
        return self._warm_start.training or self._training

    def __enter__(self) -> Self:
        """Acquire the run's lock unless it is inherited, and read the run's state from disk."""
        config, layout, guard = self._config, self._layout, self._guard
        with ExitStack() as opened:
            if not self._is_locked:
                opened.enter_context(locked_run(layout.run_dir, guard.report, guard.stop))
            layout.require_kinds()
            opened.enter_context(guard)
            self._inputs = RunInputs.read(layout)
            remove_leftovers(config, self._inputs)
            self._record = RunRecord(config, layout, guard)
            self._warm_start = WarmStart(config, self._inputs, guard, layout.run_dir.name)
            opened.callback(lambda: self._warm_start.close(failed=self._has_failed))
            self._workers = opened.enter_context(RunWorkers(self._record, self._inputs))
            self._training = RunTraining(self._record, self._workers)
            guard.aside = lambda: self._current.record.saves.at
            self._resources = opened.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """End the workers, deliver the remaining metrics to MLflow and release the lock."""
        with self._resources:
            is_over = self._is_evaluated and not self._has_failed
            self._record.finish(failed=self._has_failed, is_over=is_over)

    def warm_start(self) -> Mapping[str, object]:
        """Create the initial policy if it does not exist yet. Return the fields of `InitialPolicy`."""
        result = self._warm_start.make()
        return {**asdict(result), "directory": str(result.directory)}

    def measure_pass_rates(self) -> Mapping[str, object]:
        """Measure the pass rates of the initial policy unless they are already stored. The initial policy must exist.
        Return the folder of the table."""
        workers = self._workers
        measurement = PassRateMeasurement(
            self._config, self._inputs, self._guard, workers.training_prompts, workers.training_responses
        )
        return {"directory": str(measurement.make().directory)}

    def train(self, to_step: int, *, settle: bool = True) -> Mapping[str, object]:
        """Train to step `to_step` and save a checkpoint, unless a checkpoint of this or a later step exists. `settle`:
        whether to wait until the checkpoint is saved. After a stop request, save the last finished step and raise
        StopRequestedError."""
        committed = self._record.store.latest()
        if committed is not None and committed.step >= to_step:
            return {"step": committed.step, "checkpoint": str(committed.path), "metrics": {}, "skipped": True}
        metrics = self._training.train_to(to_step, settle=settle)
        step = self._training.step
        return {"step": step, "checkpoint": str(self._record.store.path_of(step)), "metrics": dict(metrics)}

    def validate(self, checkpoint: str, name: str) -> Mapping[str, object]:
        """Evaluate a checkpoint (`start`, `last`, `best` or a checkpoint's name) on all held-out problems and suites.
        In a run without reinforcement learning, `start` means the model before the supervised stage, and any other
        value means the model after this stage. `name`: the name of the validation."""
        self._training.settle_save()
        step, summary = None, dict[str, float]()
        if self._config.is_supervised:
            if checkpoint == "start":
                Demonstrations.read(self._config, self._inputs)  # raises DataError if there is none
                model = self._warm_start.base()
            else:
                model = self._supervised_model()
            self._workers.use(model.directory)
            step, checkpoint = model.steps, "start"
        for suite in (None, *self._config.validation.suites):
            summary |= self._training.evaluate_checkpoint(checkpoint, name, suite, step=step).metrics()
        return {"summary": summary, "file": str(self._training.file_of(name))}

    def evaluate(self) -> Mapping[str, object]:
        """Evaluate the initial policy on the run's suites, and record the result in the journal as step 0."""
        self._is_evaluated = True
        self._record.restore(0, 0)  # first, since it truncates the journal, and a suite may write events
        summary: dict[str, float] = {}
        for suite in self._config.validation.suites:
            summary |= self._training.evaluate_checkpoint("start", "before", suite).metrics()
        self._record.journal.append_step(0, summary)
        return {"summary": summary}

    def export(self, checkpoint: str) -> Mapping[str, object]:
        """Write a checkpoint's weights to the run's folder in the transformers format."""
        if self._config.is_supervised:
            return self._export_supervised()
        self._training.settle_save()
        target = self._layout.exported_best if checkpoint == "best" else self._layout.exported_model
        step = self._record.store.step_of(checkpoint)
        if not is_exported(target, step):
            self._workers.load(checkpoint)
            self._workers.export(target, "export", facts={"step": step})
        return {"directory": str(target), "step": step}

    def _supervised_model(self) -> InitialPolicy:
        if (known := known_initial_policy(self._config, self._inputs)) is None:
            raise DataError(f"{self._layout.run_dir}: the supervised stage is not done; start the run again")
        return known

    def _export_supervised(self) -> Mapping[str, object]:
        """Copy the supervised stage's journal into the run's journal, and the stage's model into the run's folder."""
        model, target = self._supervised_model(), self._layout.exported_model
        if not is_exported(target, model.steps):
            self._copy_journal(model.steps)
            facts: dict[str, JsonValue] = {"kind": "model", "step": model.steps, **model.figures}
            earlier = (target / MANIFEST).is_file()
            with (
                self._guard.phase("export"),
                published_directory(target, facts, replace=earlier, error=CheckpointError) as folder,
            ):
                for file in (path for path in model.directory.rglob("*") if path.is_file() and path.name != MANIFEST):
                    copy = folder / file.relative_to(model.directory)
                    copy.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, copy)  # `copytree` would hide a full disk
        return {"directory": str(target), "step": model.steps}

    def _copy_journal(self, last_step: int) -> None:
        journal, stage = self._record.journal, stage_layout(self._config, self._inputs.filtered_directory)
        if self._layout.journal.is_file() and load_journal(self._layout.journal).steps:  # of a killed process
            journal.resume_at(0, 0)
        if stage.journal.is_file():
            with open_ordinary(stage.journal) as file:
                for line, _ in iter_json(file.fileno(), 0):
                    if isinstance(line, dict):
                        journal.append(line)
        folders = [self._layout.validation, *self._layout.suites.glob("*")]
        for step, name in ((0, "before"), (last_step, "after")):  # merged with the lines of the stage
            files = [path for folder in folders if (path := folder / f"{name}.json").is_file()]
            results = [ValidationResult.read(path).metrics() for path in files]
            journal.append_step(step, {key: value for result in results for key, value in result.items()})

    def save_finished(self) -> str:
        """Save the last finished step when a stop is requested between two commands. Return a message for the user."""
        return self._current.save_finished()

    def record_failure(self, error: Exception, *, fails: bool = True) -> Exception:
        """Record an error that ends this process. Return the error as converted by `as_known_error`. `fails`: whether
        the run counts as failed."""
        self._has_failed = fails
        return self._guard.record_failure(error)


class Channel:
    """A channel that receives commands and sends events. If no process reads the events, training continues."""

    def __init__(self, commands_fd: int, replies_fd: int) -> None:
        self._commands_fd = commands_fd
        self._read = b""
        self._replies = os.fdopen(replies_fd, "w", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def commands(self, stop: Callable[[], bool]) -> Iterator[Mapping[str, Any]]:
        """Yield commands until the other side closes the channel or a stop is requested."""
        while not stop():
            line, found, rest = self._read.partition(b"\n")
            if found:
                self._read = rest
                yield json.loads(line)
                continue
            # Python resumes a blocking read after a signal, and would not check for a stop.
            if not select.select([self._commands_fd], [], [], POLL_S)[0]:
                continue
            content = os.read(self._commands_fd, 1 << 16)
            if not content:
                return
            self._read += content

    def send(self, event: Mapping[str, object]) -> None:
        """Send one event. Several threads may call this."""
        try:
            with self._lock:
                self._replies.write(json.dumps(event) + "\n")
        except (BrokenPipeError, ValueError):
            log.warning("no process reads the replies any more; continuing until the next checkpoint")


def serve(session: Session, commands: Iterator[Mapping[str, Any]], report: Report, stop: StopFlag) -> int:
    """Execute commands until `close`, the end of the commands, a stop request or an error. Return the exit code."""
    for command in commands:
        arguments = dict(command)
        name = str(arguments.pop("command", None))
        if stop() or name == "close":
            break
        try:
            result = getattr(session, name)(**arguments)
        except StopRequestedError as request:
            log.warning("%s", request)
            report(_error(name, request))
            return EXIT_RESUMABLE
        except Exception as error:
            log.exception("%s failed", name)
            report(_error(name, session.record_failure(error)))
            return _exit_code(error)
        report({"event": "done", "command": name, "result": result})
    if stop():  # between two commands: training may be some steps ahead of the last checkpoint
        try:
            report(_error("stop", StopRequestedError(session.save_finished())))
        except Exception as error:
            log.exception("the last finished step is not saved")
            report(_error("stop", session.record_failure(error, fails=False)))
        return EXIT_RESUMABLE
    return EXIT_DONE


def _exit_code(error: Exception) -> int:
    return EXIT_RESUMABLE if isinstance(error, RESUMABLE) else EXIT_FAILED


def _error(command: str, error: Exception) -> Mapping[str, object]:
    message = str(error) if isinstance(error, MillraceError) else f"{type(error).__name__}: {error}"
    return {"event": "error", "command": command, "type": type(error).__name__, "message": message}


def run(run_dir: Path, channel: Channel, stop: StopFlag, *, is_locked: bool = False) -> int:
    """Execute the commands from `channel` for a run, and return the exit code. `is_locked`: whether this process has
    inherited the run's lock."""
    report = channel.send

    def send_error(command: str, error: MillraceError) -> None:
        log.error("%s", error)
        report(_error(command, error))

    def abandon(error: MillraceError) -> None:
        report_and_exit(lambda: send_error("watch", error), _exit_code(error))

    try:
        if (origin := read_origin(run_dir)) is None:
            raise DataError(f"{run_dir / RUN_FILE}: does not exist. Name a run's folder made by `millrace train`")
        config = origin.settings
        layout = RunLayout(Path(config.paths.root).resolve(), run_dir.resolve())
        opened = Session(config, layout, report=report, stop=stop, abandon=abandon, is_locked=is_locked)
        with run_code(layout.code), opened as session:
            return serve(session, channel.commands(stop), report, stop)
    except MillraceError as error:
        send_error("start", error)
        return _exit_code(error)


def main() -> None:
    """Run the command line of `python -m rlcore.run.process`."""
    parser = argparse.ArgumentParser(description="The trainer process of a run.")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, with run.json in it")
    parser.add_argument("--commands-fd", type=int, required=True, help="descriptor from which commands are read")
    parser.add_argument("--replies-fd", type=int, required=True, help="descriptor to which events are written")
    parser.add_argument("--lock-fd", type=int, help="descriptor of the run's lock, which this process inherits")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("rlcore").setLevel(logging.INFO)
    stop = StopFlag(lambda: exit_immediately(EXIT_RESUMABLE))
    stop.install()
    channel = Channel(options.commands_fd, options.replies_fd)
    code = run(options.run, channel, stop, is_locked=options.lock_fd is not None)
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    main()
