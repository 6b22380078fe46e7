"""Events of a run's steps: progress, alarms, faults, checkpoints that were passed over."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict

from rlcore.checkpoint.catalog import CheckpointInfo
from rlcore.checkpoint.save import Saved
from rlcore.run.faults import read_faults
from rlcore.run.record import RunRecord
from rlcore.tracking.journal import load_journal, missing_steps
from rlcore.trainer.alarms import Alarm
from rlcore.trainer.step import StepResult
from rlcore.workers.budget import Shortage

HEADLINE = ("critic/score/mean", "actor/entropy", "response_length/mean", "actor/grad_norm", "perf/throughput")
"""Metrics that travel with a progress event; all of them are in the journal."""


class Pace:
    """Mean seconds a step over the last steps of this process."""

    WINDOW_STEPS = 20

    def __init__(self) -> None:
        self._ends: deque[float] = deque([time.monotonic()], maxlen=self.WINDOW_STEPS + 1)

    def tick(self) -> None:
        """A step has ended."""
        self._ends.append(time.monotonic())

    def eta_s(self, steps_left: int) -> float:
        """Seconds until `steps_left` more steps are done, at the present pace."""
        taken = len(self._ends) - 1
        return steps_left * (self._ends[-1] - self._ends[0]) / taken if taken else float("nan")


class RunEvents:
    """Reports one run's steps to its flow and its log, and to its journal what should last."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
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
                "stage": "train",
                "step": step,
                "to_step": to_step,
                "total_steps": self._total_steps,
                "metrics": {name: result.metrics[name] for name in HEADLINE if name in result.metrics},
                "tokens_per_s": result.metrics["perf/throughput"],
                "eta_s": pace.eta_s(self._total_steps - step),
            }
        )

    def saved(self, saved: Saved) -> None:
        """A checkpoint is committed."""
        self._report({"event": "checkpoint", "step": saved.step, "path": str(saved.path)})

    def alarms(self, step: int, alarms: Sequence[Alarm]) -> None:
        """An event for each alarm that the step before did not raise."""
        for alarm in alarms:
            if alarm.name not in self._alarms_on:
                data = {"alarm": alarm.name, "action": alarm.action, "text": f"alarm at step {step}: {alarm.text}"}
                self._record.happened("alarm", step, data)
        self._alarms_on = {alarm.name for alarm in alarms}

    def unscored(self, step: int, num_answers: int, reason: str) -> None:
        """Report answers that the scorer failed on, at the first of them and whenever their number has doubled."""
        if num_answers < self._tell_unscored_at:
            return
        self._tell_unscored_at = 2 * num_answers
        text = (
            f"data.scorer failed on {num_answers:,} answer(s) so far, which are left out of training and of held-out "
            f"figures; the last time: {reason}"
        )
        self._record.happened("scorer_failed", step, {"num_answers": num_answers, "reason": reason, "text": text})

    def shortages(self, step: int, shortages: Sequence[Shortage], micro_batch_tokens: int) -> None:
        """Passes of a step that ran out of memory and were done again; `micro_batch_tokens`: the budget they had."""
        for shortage in shortages:
            data = {
                "max_tokens_per_micro_batch": max(1, micro_batch_tokens // shortage.factor),
                **asdict(shortage),
                "text": f"step {step}: {shortage}",
            }
            self._record.happened("out_of_memory", step, data)

    def rolled_back(self, to_step: int, from_step: int, why: str, lr_factor: float) -> None:
        """The run goes on from before the alarm."""
        text = f"alarm at step {from_step}: {why}; back to step {to_step}, learning rate x {lr_factor:g}"
        data = {"from_step": from_step, "lr_factor": lr_factor, "text": text}
        self._record.happened("roll_back", to_step, data)
        self._alarms_on = set()

    def faults(self, step: int) -> None:
        """Faults that this run goes on after; the journal was cut to a checkpoint just now and may not have them."""
        faults = read_faults(self._record.layout.run_dir)
        told = {
            event.data.get("time")
            for event in load_journal(self._record.layout.journal).events
            if event.name == "fault"
        }
        for fault in faults:
            if fault.time not in told:
                self._record.log_event("fault", step, asdict(fault))
        self.num_faults = len(faults)

    def refusals(self, step: int, taken: CheckpointInfo | None) -> None:
        """Newer checkpoints than the one taken that had to be passed over."""
        for refusal in self._record.refusals:
            text = f"going on from {'the start' if taken is None else taken.name}: {refusal.reason}"
            self._record.happened("checkpoint_refused", step, {"text": text, "path": str(refusal.path)})

    def journal_problem(self, step: int) -> None:
        """The journal does not have all that the run has done, and no checkpoint is left that fits it."""
        if problem := self._record.journal_problem:
            gap = missing_steps(load_journal(self._record.layout.journal), step)
            lacks = f"it lacks {gap} for good" if gap else "some of its values may not be those that were measured"
            text = f"going on from step {step} all the same, since no other checkpoint fits: {problem}; {lacks}"
            self._record.happened("journal_mismatch", step, {"text": text, "path": str(self._record.layout.journal)})

    def resumed(self, step: int) -> None:
        """The run goes on from a checkpoint."""
        self._report({"event": "resumed", "step": step, "text": f"going on from step {step}"})
