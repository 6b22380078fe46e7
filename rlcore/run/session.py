"""A run in one process: what it can be asked to do, with its lock held and its faults watched.

Workers stay alive between chunks. The state of the run is the newest committed checkpoint; everything else here can be
rebuilt from it.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from rlcore.checkpoint.export import export_transformers
from rlcore.config import RunConfig
from rlcore.errors import MillraceError, StopRequestedError
from rlcore.run.crew import Crew, Report
from rlcore.run.guard import Guard
from rlcore.run.held_out import HeldOut
from rlcore.run.inputs import RunInputs
from rlcore.run.layout import RunLayout
from rlcore.run.ledger import Ledger
from rlcore.run.news import News
from rlcore.run.taken import taken_run
from rlcore.run.training import Training
from rlcore.run.warm_start import WarmStartProgress, ensure_start_model
from rlcore.storage.temporary import remove_stale_temporaries

log = logging.getLogger("rlcore.run.session")


class Session:
    """Use as a context manager: the run's lock is held inside."""

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        *,
        report: Report,
        stop: Callable[[], bool],
        after_start: Callable[[], None] = lambda: None,
        stop_asked_s: Callable[[], float | None] = lambda: None,
        give_up: Callable[[MillraceError], None] = lambda error: log.error("%s", error),
    ) -> None:
        """See `rlcore.run.process`, which passes what only a process of its own can do.

        `after_start` is called when workers have been started: Ray takes SIGTERM for itself. `stop_asked_s`: seconds
        since a stop was asked for. `give_up`: ends the process, where a phase or a stop takes too long.
        """
        self._config = config
        self._layout = layout
        self._report = report
        self._stop = stop
        self._after_start = after_start
        self._stop_asked_s = stop_asked_s
        self._give_up = give_up
        self._has_failed = False

    def __enter__(self) -> Self:
        """Take the run's lock and read what lies on disk."""
        config, layout, report = self._config, self._layout, self._report
        layout.run_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            opened.enter_context(taken_run(layout.run_dir, report, self._stop))
            layout.require_kinds()
            remove_stale_temporaries(layout.run_dir)
            guard = Guard(
                config,
                layout,
                stop_asked_s=self._stop_asked_s,
                report=report,
                give_up=self._give_up,
                step=lambda: self._training.step,
            )
            self._guard = opened.enter_context(guard)
            self.inputs = RunInputs.read(layout)
            self._ledger = Ledger(config, layout, report=report, stop=self._stop, phase=guard.phase)
            guard.attend(self._ledger.saving)
            crew = Crew(config, layout, self.inputs, guard, self._ledger, report=report, after_start=self._after_start)
            self._crew = opened.enter_context(crew)
            news = News(layout, guard, self._ledger, total_steps=config.trainer.total_steps, report=report)
            self._held_out = HeldOut(config, layout, crew, self._ledger, news, report=report)
            self._training = Training(config, layout, crew, self._ledger, self._held_out, news, stop=self._stop)
            self._resources = opened.pop_all()  # the block gives all back where something failed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the workers, deliver what is left to the tracker, give the lock back."""
        with self._resources:
            self._ledger.finish(failed=self._has_failed)

    # ------------------------------------------------------------------ commands

    def warm_start(self) -> Mapping[str, object]:
        """Make the model of step 0, unless it is there."""

        def show(progress: WarmStartProgress) -> None:
            self._report(
                {
                    "event": "progress",
                    "stage": "warm-start",
                    "step": progress.step,
                    "total_steps": progress.max_steps,
                    "metrics": {"loss": progress.loss, "reward": progress.reward},
                }
            )
            if self._stop():
                raise StopRequestedError(
                    f"stopped after {progress.step} steps of the warm start, which begins anew at the next start"
                )

        result = ensure_start_model(self._config, self.inputs, show)
        return {
            "directory": str(result.directory),
            "cached": result.cached,
            "reward": result.reward,
            "steps": result.steps,
        }

    def train(self, to_step: int, *, at_most: int | None = None) -> Mapping[str, object]:
        """Train from the newest checkpoint until a checkpoint of `to_step`, a chunk's end, is committed.

        While that is being written training goes on into the next chunk; the next call finds those steps done. It
        never goes beyond the chunk that ends with `at_most`: a sweep may not want more of the run.

        Raises:
            StopRequestedError: a stop was asked for; the last finished step is saved.
        """
        committed = self._ledger.newest()
        if committed is not None and committed.step >= to_step:
            return {"step": committed.step, "checkpoint": str(committed.path), "metrics": {}, "skipped": True}
        saved = self._training.to(to_step, at_most)
        return {"step": saved.step, "checkpoint": str(saved.path), "metrics": dict(saved.metrics)}

    def validate(self, checkpoint: str, name: str) -> Mapping[str, object]:
        """Judge a checkpoint (`start`, `last`, `best` or its folder's name) on all held-out problems."""
        self._training.settle_save()
        result = self._held_out.judge_checkpoint(checkpoint, name)
        return {"summary": dict(result.summary()), "file": str(self._held_out.file_of(name))}

    def export(self, checkpoint: str) -> Mapping[str, object]:
        """Write a checkpoint's weights as a transformers directory in the run's folder."""
        self._training.settle_save()
        target = self._layout.exported_best if checkpoint == "best" else self._layout.exported_model
        step = self._ledger.step_of(checkpoint)
        if not self._ledger.is_exported(target, step):
            self._crew.load(checkpoint)
            weights = self._crew.full_weights()

            def write() -> None:
                with self._guard.phase("export"):
                    export_transformers(weights, self._crew.start_model, target, step=step)

            self._ledger.with_room(write, step=step, path=target)
        return {"directory": str(target), "step": step}

    def save_finished(self) -> str:
        """Save the last finished step, if it is not: a stop was asked for between two commands. Says what is saved."""
        return self._training.save_finished()

    def fail(self) -> None:
        """The run has failed: the tracker is told so when the session ends."""
        self._has_failed = True

    def fault(self, error: Exception) -> Exception:
        """Record an error that ends this process; the error to raise for it."""
        return self._guard.fault(error)
