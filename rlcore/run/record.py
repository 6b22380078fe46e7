"""The record of a run: its journal, its checkpoints, the state that ties them together, and its events.

Order matters. A step's line is in the journal before the checkpoint that contains the step is published. Going back to
a checkpoint cuts the journal to the length that it had then.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial

import pyarrow as pa

from rlcore.checkpoint.catalog import CheckpointInfo, name_of
from rlcore.checkpoint.save import CheckpointSaver, Saved, SavingRanks, prune
from rlcore.checkpoint.state import LoopState, TrainerState
from rlcore.checkpoint.store import CheckpointStore, FoundCheckpoint
from rlcore.config import RunConfig
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.errors import CheckpointError
from rlcore.evaluation.result import ValidationResult
from rlcore.responses.store import ResponseWriter
from rlcore.run.disk import DiskRoom
from rlcore.run.failures import read_failures
from rlcore.run.layout import RunLayout
from rlcore.run.watchdog import Watchdog
from rlcore.storage.disk import checkpoint_bytes
from rlcore.storage.documents import sha256_of
from rlcore.storage.finished import LEFT, set_aside
from rlcore.tracking.attempts import CLOSE_TIMEOUT_S, FinalStatus
from rlcore.tracking.journal import RunJournal, load_journal, missing_steps
from rlcore.trainer.alarms import Alarm
from rlcore.trainer.step import StepResult
from rlcore.workers.passes import OomRetry

HEADLINE = (
    *("critic/score/mean", "actor/entropy", "response_length/mean", "actor/grad_norm", "perf/throughput"),
    *("sft/loss", "sft/accuracy", "sft/held_out_loss", "sft/reward"),
)
"""Metrics that travel with a progress event; all of them are in the journal."""

log = logging.getLogger("rlcore.run.record")


class RunRecord:
    """Settings, layout, journal and checkpoints of one run, kept consistent with each other."""

    def __init__(
        self, config: RunConfig, layout: RunLayout, guard: Watchdog, *, tags: Mapping[str, str] | None = None
    ) -> None:
        """`tags`: in MLflow, besides the settings' own."""
        self.config, self.layout, self.guard, self.report = config, layout, guard, guard.report
        self.store = CheckpointStore(layout.checkpoints, config.checkpoint, config, journal=layout.journal)
        self.journal = RunJournal(layout.run_dir, config, tags={**config.tags, **(tags or {})})
        self.room = DiskRoom(
            config.checkpoint, log_event=self.record_event, stop=guard.stop, prune=lambda: prune(self.store)
        )
        self.saves = CheckpointSaver(self.store, self.room, partial(guard.phase, "commit"))
        self.answers = ResponseWriter(layout.answers, config.answers)
        self._first_save_bytes = 0

    # ------------------------------------------------------------------ checkpoints

    def begin_save(self, state: LoopState, metrics: Mapping[str, float], ranks: SavingRanks) -> Saved | None:
        """Begin a checkpoint of `state`, see `CheckpointSaver.begin`. The answers up to there are written before it."""
        self.answers.start_part()

        def record() -> TrainerState:
            self.answers.wait()
            journal_bytes = self.journal.sync()  # which forces the journal to the disk
            return TrainerState(
                **asdict(state),
                journal_bytes=journal_bytes,
                journal_sha256=sha256_of(self.layout.journal, journal_bytes),
                settings_fingerprint=settings_fingerprint(self.config),
            )

        return self.saves.begin(state.step, record, metrics, ranks)

    def set_num_trained_parameters(self, num_trained_parameters: int) -> None:
        """How large the first checkpoint will be; later ones are as large as those there are."""
        self._first_save_bytes = checkpoint_bytes(num_trained_parameters)

    @property
    def _next_save_bytes(self) -> int:
        return self.store.measured_bytes() or self._first_save_bytes

    def room_metrics(self) -> dict[str, float]:
        """`disk/free_gb`, `disk/needed_gb`: of the next checkpoint, with the reserve."""
        return self.room.check(self.layout.checkpoints, self._next_save_bytes).metrics

    def wait_for_room(self, step: int, settle: Callable[[], None]) -> None:
        """Wait until the next checkpoint has room. Raises as `Room.wait` does.

        `settle` waits for the save under way, which takes room, and lets older checkpoints go when it is committed.
        """
        if not self.room.check(self.layout.checkpoints, self._next_save_bytes).enough:
            settle()
        self.room.wait(self._next_save_bytes, step=step, path=self.layout.checkpoints)

    # ------------------------------------------------------------------ going back

    def restore(self, info: CheckpointInfo | None) -> LoopState:
        """The state of a checkpoint, or of step 0; the journal is cut to it, and a save under way is given up.

        Whole checkpoints of later steps, which the journal does not fit, are renamed. The steps that were cut off are
        done again as they were, so the results of these steps stay.
        """
        step = 0 if info is None else info.step
        self.saves.abandon()
        self.store.set_aside_later(step)
        self.answers.truncate(step)
        if info is None:
            self._set_aside_results(step)
            self.journal.resume_at(0, 0)
            return LoopState(0, 0, 0, 0, self.config.algo.kl.coef)
        saved = self.store.load_state(info)
        self.journal.resume_at(saved.step, saved.journal_bytes)
        return LoopState(**{field.name: getattr(saved, field.name) for field in fields(LoopState)})

    def _set_aside_results(self, step: int) -> None:
        """Rename exports and the results of later steps: of equal steps they would count as those of the training to
        come.
        """
        kept = {"before", *map(name_of, range(step + 1))}
        folders = [self.layout.validation, *self.layout.suites.glob("*")]
        judged = [file for folder in folders for file in folder.glob("*.json") if file.stem not in kept]
        for path in (self.layout.exported_model, self.layout.exported_best, *judged):
            if path.exists():
                set_aside(path, LEFT, f"{path}: the run goes on from step {step}", error=CheckpointError)

    # ------------------------------------------------------------------ journal

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line of the journal. Raises DiskSpaceError where there is no room for it."""
        self.journal.append_step(step, metrics)
        self.journal.require_written()

    def write_responses(self, step: int, table: pa.Table) -> None:
        """Keep the answers of a step until its chunk's end, or until they are many. Raises DiskSpaceError."""
        self.answers.add(table)
        if self.answers.is_full:
            self.answers.start_part()

    def write_validation(self, name: str, table: pa.Table) -> None:
        """Write the answers of a validation. Raises DiskSpaceError."""
        self.answers.write_validation(name, table)

    def log_event(self, name: str, step: int, data: Mapping[str, object]) -> None:
        """Record an event in the journal alone."""
        self.journal.append_event(name, step, data)

    def record_event(self, name: str, step: int, data: Mapping[str, object]) -> None:
        """Record an event in the journal, in the log and at the flow. `text` in the data is for display."""
        self.log_event(name, step, data)
        log.warning("%s", data["text"])
        self.report({"event": name, "step": step, **data})

    def with_score(self, state: LoopState, result: ValidationResult) -> LoopState:
        """The state with a validation's score, if that is the best so far; it has none if the scorer always failed."""
        samples = self.config.validation.samples_per_problem
        score = result.metrics().get(f"val-core/{result.data_source}/reward/mean@{samples}")
        if score is None or score <= state.best_metric:
            return state
        return replace(state, best_metric=score, best_step=result.step)

    def finish(self, *, failed: bool, is_over: bool = False) -> None:
        """Commit the save under way, and record how the run ended. `is_over`: it counts as
        finished before its last step, and MLflow is not waited for."""
        try:
            self.saves.settle()
        except Exception as reason:
            log.warning("the checkpoint that was being written is given up: %s", reason)
        status: FinalStatus = "FAILED" if failed else "FINISHED" if is_over or self._is_finished else "KILLED"
        self.journal.finish(status, None if is_over else CLOSE_TIMEOUT_S)

    @property
    def _is_finished(self) -> bool:
        """Whether the last step is committed: by this process, or by one that was killed before it recorded that."""
        try:
            known = self.store.list()
        except (OSError, CheckpointError) as reason:
            where = self.layout.checkpoints
            log.warning("%s: cannot be read, so the run does not count as finished: %s", where, reason)
            return False
        return bool(known) and known[-1].step >= self.config.trainer.total_steps


class Pace:
    """Mean seconds a step over the last steps. The first step of a process, which compiles and warms up, is left out.

    `is_warm`: the process has taken a step before.
    """

    WINDOW_STEPS = 20

    def __init__(self, *, is_warm: bool) -> None:
        self._ends: deque[float] = deque([time.monotonic()] if is_warm else [], maxlen=self.WINDOW_STEPS + 1)

    def tick(self) -> None:
        """Note that a step has ended."""
        self._ends.append(time.monotonic())

    def eta_s(self, steps_left: int) -> float:
        """Seconds until `steps_left` more steps are done, at the present pace; NaN while that is not known."""
        taken = len(self._ends) - 1
        if not steps_left:
            return 0.0
        return steps_left * (self._ends[-1] - self._ends[0]) / taken if taken > 0 else float("nan")


class RunEvents:
    """Reports one run's steps to its flow and its log, and to its journal what should last."""

    def __init__(self, record: RunRecord, stage: str, *, may_end_early: bool = False) -> None:
        self._record, self._stage, self._may_end_early = record, stage, may_end_early
        self._report = record.report
        self._total_steps = record.config.trainer.total_steps
        self._alarms_on: set[str] = set()
        self._tell_unscored_at = 1
        self.num_faults = 0
        """Faults that the run went on after."""

    def progress(self, result: StepResult, to_step: int, pace: Pace) -> None:
        """A step has ended, on the way to the chunk's end."""
        step = result.state.step
        self._report(
            {
                "event": "progress",
                "stage": self._stage,
                "step": step,
                "to_step": to_step,
                "total_steps": self._total_steps,
                "metrics": {name: result.metrics[name] for name in HEADLINE if name in result.metrics},
                "tokens_per_s": result.metrics["perf/throughput"],
                "num_devices": self._record.config.runtime.num_workers,
                "eta_s": pace.eta_s(self._total_steps - step),
                "may_end_early": self._may_end_early,
            }
        )

    def alarms(self, step: int, alarms: Sequence[Alarm]) -> None:
        """An event for each alarm that the step before did not raise."""
        for alarm in alarms:
            if alarm.name not in self._alarms_on:
                data = {"alarm": alarm.name, "action": alarm.action, "text": f"alarm at step {step}: {alarm.text}"}
                self._record.record_event("alarm", step, data)
        self._alarms_on = {alarm.name for alarm in alarms}

    def unscored(self, step: int, num_responses: int, reason: str) -> None:
        """Report answers without a score, at the first of them and whenever their number has doubled."""
        if num_responses < self._tell_unscored_at:
            return
        self._tell_unscored_at = 2 * num_responses
        which = "environment" if self._record.config.data.environment else "scorer"
        text = (
            f"data.{which} failed on {num_responses:,} answer(s) so far, which are left out of training and of held-out "
            f"figures; the last time: {reason}"
        )
        self._record.record_event("scorer_failed", step, {"num_answers": num_responses, "reason": reason, "text": text})

    def shortages(self, step: int, shortages: Sequence[OomRetry], micro_batch_tokens: int) -> None:
        """Passes of a step that ran out of memory and were done again; `micro_batch_tokens`: the budget they had."""
        for shortage in shortages:
            data = {
                "max_tokens_per_micro_batch": max(1, micro_batch_tokens // shortage.factor),
                **asdict(shortage),
                "text": f"step {step}: {shortage}",
            }
            self._record.record_event("out_of_memory", step, data)

    def failures(self, step: int) -> None:
        """Faults that this run goes on after; the journal was cut to a checkpoint just now and may not have them."""
        faults = read_failures(self._record.layout.run_dir)
        told = {
            event.data.get("time")
            for event in load_journal(self._record.layout.journal).events
            if event.name == "fault"
        }
        for fault in faults:
            if fault.time not in told:
                self._record.log_event("fault", step, asdict(fault))
        self.num_faults = len(faults)

    def resumed(self, step: int, found: FoundCheckpoint) -> None:
        """Report where the run goes on from: the newer checkpoints that were refused, and what the journal lacks where
        no checkpoint fits it."""
        taken = found.checkpoint
        for refusal in found.refusals:
            text = f"going on from {'the start' if taken is None else taken.name}: {refusal.reason}"
            self._record.record_event("checkpoint_refused", step, {"text": text, "path": str(refusal.path)})
        if problem := found.journal_problem:
            gap = missing_steps(load_journal(self._record.layout.journal), step)
            lacks = f"it lacks {gap} for good" if gap else "some of its values may not be those that were measured"
            text = f"going on from step {step} all the same, since no other checkpoint fits: {problem}; {lacks}"
            self._record.record_event(
                "journal_mismatch", step, {"text": text, "path": str(self._record.layout.journal)}
            )
        if taken is not None:
            self._report({"event": "resumed", "step": taken.step, "text": f"going on from step {taken.step}"})
