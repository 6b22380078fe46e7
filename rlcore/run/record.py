"""The record of a run: journal, checkpoints and events. A step is written to the journal before its checkpoint is
published. A resume truncates the journal to the length that it had when the checkpoint was saved."""

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from types import MappingProxyType

from rlcore.checkpoint.catalog import name_of
from rlcore.checkpoint.save import CheckpointSaver, prune
from rlcore.checkpoint.store import CheckpointStore, FoundCheckpoint
from rlcore.config import RunConfig
from rlcore.errors import CheckpointError
from rlcore.responses.store import ResponseWriter
from rlcore.run.layout import RunLayout
from rlcore.run.watchdog import Watchdog, read_failures
from rlcore.storage.disk import DiskRoom
from rlcore.storage.manifest import LEFT, set_aside
from rlcore.tracking.attempts import CLOSE_TIMEOUT_S, FinalStatus
from rlcore.tracking.journal import CostMeter, GpuUse, RunJournal, load_journal, missing_steps
from rlcore.tracking.lineage import SystemSampler
from rlcore.trainer.metrics import Alarm
from rlcore.trainer.step import StepResult
from rlcore.workers.device import OomRetry

HEADLINE = (
    *("critic/score/mean", "actor/entropy", "response_length/mean", "actor/grad_norm", "perf/throughput"),
    *("sft/loss", "sft/accuracy", "sft/held_out_loss", "sft/reward"),
)
"""The metrics in a progress event. The journal has all metrics."""

WARM_START = "warm-start"  # the stage of the supervised training in events

log = logging.getLogger("rlcore.run.record")


class Pace:
    """The mean seconds per step over the latest steps. A process's first step, which compiles code, does not count."""

    WINDOW_STEPS = 20

    def __init__(self, *, is_warm: bool) -> None:
        """Start measuring the seconds per step. `is_warm`: whether this process has already finished a step."""
        self._ends: deque[float] = deque([time.monotonic()] if is_warm else [], maxlen=self.WINDOW_STEPS + 1)

    def tick(self) -> None:
        """Record the end of a step."""
        self._ends.append(time.monotonic())

    def eta_s(self, steps_left: int) -> float:
        """Return the expected seconds for `steps_left` more steps, or NaN if no step is measured yet."""
        taken = len(self._ends) - 1
        if not steps_left:
            return 0.0
        return steps_left * (self._ends[-1] - self._ends[0]) / taken if taken > 0 else float("nan")


class RunRecord:
    """The settings, folders, journal and checkpoints of one run. Events are reported to the run's Prefect flow, log and
    journal."""

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        guard: Watchdog,
        *,
        stage: str = "train",
        tags: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Open the journal and the checkpoints. `stage`: the name of the training in events and in MLflow's tag.
        `tags`: MLflow tags in addition to the tags in the settings."""
        self.config, self.layout, self.guard, self.report = config, layout, guard, guard.report
        self.store = CheckpointStore(layout.checkpoints, config.checkpoint, config, journal=layout.journal)
        self.journal = RunJournal(layout.run_dir, config, tags={"stage": stage, **config.tags, **tags})
        self.room = DiskRoom(
            layout.checkpoints,
            config.checkpoint,
            log_event=self.record_event,
            stop=guard.stop,
            prune=lambda: prune(self.store),
        )
        self.saves = CheckpointSaver(self.store, self.room.wait, partial(guard.phase, "commit"))
        self.answers = ResponseWriter(layout.answers, config.answers)
        self.first_save_bytes = 0  # the estimated size of the first checkpoint
        self.num_failures = 0  # the number of failures after which the run was resumed
        self._stage = stage
        warm = config.warm_start
        has_patience = warm.patience is not None and warm.held_out_rows > 0
        self._may_end_early = stage == WARM_START and (warm.stop_at_reward is not None or has_patience)
        self._system = SystemSampler(layout.run_dir)
        self._meter: CostMeter | None = None
        self._alarms_on: set[str] = set()
        self._next_unscored_report = 1

    @property
    def next_save_bytes(self) -> int:
        """The estimated size of the next checkpoint."""
        known = self.store.list()
        return known[-1].size_bytes if known else self.first_save_bytes

    def restore(self, step: int, journal_bytes: int) -> None:
        """Abandon the current save, and remove all journal lines and responses after `step`. Rename intact checkpoints
        of later steps. If `step` is 0, also rename validation results of later steps and exported models. Otherwise,
        these files stay, because training repeats the later steps and reproduces them."""
        self.saves.abandon()
        self.store.set_aside_later(step)
        self.answers.truncate(step)
        if step == 0:
            folders = [self.layout.validation, *self.layout.suites.glob("*")]
            results = [file for folder in folders for file in folder.glob("*.json")]
            later = [file for file in results if file.stem not in ("before", name_of(0))]
            for path in (self.layout.exported_model, self.layout.exported_best, *later):
                if path.exists():
                    set_aside(path, LEFT, f"{path}: the run continues from step 0", error=CheckpointError)
        self.journal.resume_at(step, journal_bytes)

    def record_event(self, name: str, step: int, data: Mapping[str, object]) -> None:
        """Record an event in the journal, log it and report it to the flow. `data` must have a `text` for the user."""
        self.journal.append_event(name, step, data)
        log.warning("%s", data["text"])
        self.report({"event": name, "step": step, **data})

    def finish(self, *, failed: bool, is_over: bool) -> None:
        """Commit the current save and record the end of the run. If `is_over` is true, record the run as finished even
        before its last step, and do not wait for the delivery to MLflow."""
        try:
            self.saves.settle()
        except Exception as reason:
            log.warning("the checkpoint in progress is abandoned: %s", reason)
        status: FinalStatus = "FAILED" if failed else "FINISHED" if is_over or self._is_finished else "KILLED"
        self.journal.finish(status, None if is_over else CLOSE_TIMEOUT_S)

    @property
    def _is_finished(self) -> bool:
        if self.config.is_supervised:
            return self.layout.exported_model.is_dir()
        try:
            known = self.store.list()
        except (OSError, CheckpointError) as reason:
            where = self.layout.checkpoints
            log.warning("%s: cannot be read, so the run does not count as finished: %s", where, reason)
            return False
        return bool(known) and known[-1].step >= self.config.trainer.total_steps

    def report_progress(self, result: StepResult, to_step: int, pace: Pace) -> None:
        """Report a finished step to the flow, with its main metrics and the expected remaining time."""
        step = result.state.step
        self.report(
            {
                "event": "progress",
                "stage": self._stage,
                "step": step,
                "to_step": to_step,
                "total_steps": self.config.trainer.total_steps,
                "metrics": {name: result.metrics[name] for name in HEADLINE if name in result.metrics},
                "tokens_per_s": result.metrics["perf/throughput"],
                "num_devices": self.config.runtime.num_workers,
                "eta_s": pace.eta_s(self.config.trainer.total_steps - step),
                "may_end_early": self._may_end_early,
            }
        )

    def cost_metrics(self, uses: Sequence[GpuUse]) -> dict[str, float]:
        """Return the cost metrics over all attempts at the run. The first call reads the journal. On a resume, the
        journal must be truncated before this call."""
        if self._meter is None:
            self._meter = CostMeter(self.layout.journal)
        return self._meter.metrics(uses)

    def machine_metrics(self, uses: Sequence[GpuUse]) -> dict[str, float]:
        """Return the metrics of the machine, the disk, the cost and the number of failures."""
        room = self.room.check(self.next_save_bytes)
        metrics = self._system.sample() | room.metrics | self.cost_metrics(uses)
        return metrics | ({"fault/num_retries": float(self.num_failures)} if self.num_failures else {})

    def record_alarms(self, step: int, alarms: Sequence[Alarm]) -> None:
        """Record each alarm that the previous step did not have."""
        for alarm in alarms:
            if alarm.name not in self._alarms_on:
                data = {"alarm": alarm.name, "action": alarm.action, "text": f"alarm at step {step}: {alarm.text}"}
                self.record_event("alarm", step, data)
        self._alarms_on = {alarm.name for alarm in alarms}

    def record_unscored(self, step: int, num_responses: int, reason: str) -> None:
        """Record the number of responses without a score when the first one occurs. Record it again each time it has
        doubled."""
        if num_responses < self._next_unscored_report:
            return
        self._next_unscored_report = 2 * num_responses
        which = "environment" if self.config.data.environment else "scorer"
        text = (
            f"data.{which} failed on {num_responses:,} response(s) so far, which are left out of training and "
            f"held-out metrics; the last error: {reason}"
        )
        self.record_event("scorer_failed", step, {"num_answers": num_responses, "reason": reason, "text": text})

    def record_shortages(self, step: int, shortages: Sequence[OomRetry], micro_batch_tokens: int) -> None:
        """Record the passes that ran out of memory and were repeated in more micro-batches. `micro_batch_tokens`: the
        configured maximum number of tokens in a micro-batch."""
        for shortage in shortages:
            data = {
                "max_tokens_per_micro_batch": max(1, micro_batch_tokens // shortage.factor),
                **asdict(shortage),
                "text": f"step {step}: {shortage}",
            }
            self.record_event("out_of_memory", step, data)

    def restore_failures(self, step: int) -> None:
        """Restore the journal's records of failures, which were removed when the journal was truncated."""
        failures = read_failures(self.layout.run_dir)
        events = load_journal(self.layout.journal).events
        known = {event.data.get("time") for event in events if event.name == "fault"}
        for failure in failures:
            if failure.time not in known:
                self.journal.append_event("fault", step, asdict(failure))
        self.num_failures = len(failures)

    def report_resume(self, step: int, found: FoundCheckpoint) -> None:
        """Report the step from which the run resumes, refused checkpoints, and steps that the journal lacks."""
        used = found.checkpoint
        for refusal in found.refusals:
            text = f"resuming from {'the start' if used is None else used.name}: {refusal.reason}"
            self.record_event("checkpoint_refused", step, {"text": text, "path": str(refusal.path)})
        if problem := found.journal_problem:
            gap = missing_steps(load_journal(self.layout.journal), step)
            lacks = f"it lacks {gap} permanently" if gap else "some of its values may differ from the measured ones"
            text = f"resuming from step {step} nevertheless, since no other checkpoint fits: {problem}; {lacks}"
            self.record_event("journal_mismatch", step, {"text": text, "path": str(self.layout.journal)})
        if used is not None:
            self.report({"event": "resumed", "step": used.step, "text": f"resuming from step {used.step}"})
