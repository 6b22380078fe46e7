"""A run in one process: its commands, with its lock held and its faults recorded."""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, Self

from rlcore.checkpoint.catalog import is_exported
from rlcore.config import RunConfig
from rlcore.errors import MillraceError
from rlcore.run.initial_policy import remove_leftovers
from rlcore.run.inputs import RunInputs
from rlcore.run.layout import RunLayout
from rlcore.run.measuring import PassRateMeasurement
from rlcore.run.record import RunRecord
from rlcore.run.stop import StopFlag, locked_run
from rlcore.run.supervised import WarmStart
from rlcore.run.training import RunTraining, Training
from rlcore.run.watchdog import Report, Watchdog
from rlcore.run.workers import RunWorkers

log = logging.getLogger("rlcore.run.session")


class Session:
    """Use as a context manager: the run's lock is held inside."""

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
        """`give_up` ends the process, where a phase or a stop takes too long; it is called from a thread. `is_locked`:
        this process has inherited the run's lock."""
        self._is_locked = is_locked
        self._config, self._layout = config, layout
        self._guard = Watchdog(
            config, layout, stop=stop, report=report, abandon=abandon, step=lambda: self._current.step
        )
        self._has_failed = False
        self._is_evaluated = False

    @property
    def _current(self) -> Training[Any]:
        """The training under way: the warm start's, else the run's."""
        return self._warm_start.training or self._training

    def __enter__(self) -> Self:
        """Take the run's lock, unless this process has it, and read what is on disk."""
        config, layout, guard = self._config, self._layout, self._guard
        with ExitStack() as opened:
            if not self._is_locked:
                opened.enter_context(locked_run(layout.run_dir, guard.report, guard.stop))
            layout.require_kinds()
            opened.enter_context(guard)
            self._inputs = RunInputs.read(layout)
            remove_leftovers(config, self._inputs)
            self._record = RunRecord(config, layout, guard)
            self._warm_start = WarmStart(config, self._inputs, guard)
            opened.callback(lambda: self._warm_start.close(failed=self._has_failed))
            self._workers = opened.enter_context(RunWorkers(self._record, self._inputs))
            self._measuring = PassRateMeasurement(self._record, self._inputs, self._workers)
            self._training = RunTraining(self._record, self._workers)
            guard.aside = lambda: self._current.record.saves.at
            self._resources = opened.pop_all()  # the block gives all back where something failed
        return self

    def __exit__(self, *error: object) -> None:
        """End the workers, deliver what is left to the tracker, give the lock back."""
        with self._resources:
            is_over = self._is_evaluated and not self._has_failed
            self._record.finish(failed=self._has_failed, is_over=is_over)

    # ------------------------------------------------------------------ commands

    def warm_start(self) -> Mapping[str, object]:
        """Make the model of step 0, unless it is there; see `WarmStart.make`."""
        result = self._warm_start.make()
        return {**asdict(result), "directory": str(result.directory)}

    def measure_pass_rates(self) -> Mapping[str, object]:
        """Make the table of pass rates, see `PassRateMeasurement.make`; the model of step 0 must be there."""
        return {"directory": str(self._measuring.make().directory)}

    def train(self, to_step: int, *, settle: bool = True) -> Mapping[str, object]:
        """Train from the newest checkpoint to a step, and save there; see `Training.to`.

        Raises:
            StopRequestedError: a stop was asked for; the last finished step is saved.
        """
        committed = self._record.store.latest()
        if committed is not None and committed.step >= to_step:
            return {"step": committed.step, "checkpoint": str(committed.path), "metrics": {}, "skipped": True}
        metrics = self._training.train_to(to_step, settle=settle)
        step = self._training.step
        return {"step": step, "checkpoint": str(self._record.store.path_of(step)), "metrics": dict(metrics)}

    def validate(self, checkpoint: str, name: str) -> Mapping[str, object]:
        """Judge a checkpoint (`start`, `last`, `best` or its folder's name) on all held-out problems and suites."""
        self._training.settle_save()
        summary: dict[str, float] = {}
        for suite in (None, *self._config.validation.suites):
            summary |= self._training.evaluate_checkpoint(checkpoint, name, suite).metrics()
        return {"summary": summary, "file": str(self._training.file_of(name))}

    def evaluate(self) -> Mapping[str, object]:
        """Judge the model of step 0 on its suites: an evaluation. The journal has it as step 0."""
        self._is_evaluated = True
        self._record.restore(None)  # first, for it cuts the journal, and a suite may have something to say in it
        summary: dict[str, float] = {}
        for suite in self._config.validation.suites:
            summary |= self._training.evaluate_checkpoint("start", "before", suite).metrics()
        self._record.log_step(0, summary)
        return {"summary": summary}

    def export(self, checkpoint: str) -> Mapping[str, object]:
        """Write a checkpoint's weights as a transformers directory in the run's folder."""
        self._training.settle_save()
        target = self._layout.exported_best if checkpoint == "best" else self._layout.exported_model
        step = self._record.store.step_of(checkpoint)
        if not is_exported(target, step):
            self._workers.load(checkpoint)
            self._workers.export(target, "export", facts={"step": step})
        return {"directory": str(target), "step": step}

    def save_finished(self) -> str:
        """Save the last finished step, if it is not: a stop was asked for between two commands. Says what is saved."""
        return self._current.save_finished()

    def fail(self) -> None:
        """Have the run recorded as failed when the session ends."""
        self._has_failed = True

    def record_failure(self, error: Exception) -> Exception:
        """Record an error that ends this process; the error to raise for it."""
        return self._guard.record_failure(error)
