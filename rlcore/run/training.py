"""The training loop of a run. A chunk is the training from one checkpoint to the next."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

from rlcore.checkpoint.catalog import HELD_OUT_LOSS, name_of
from rlcore.checkpoint.save import Saved
from rlcore.checkpoint.state import LoopState
from rlcore.config import SuiteConfig
from rlcore.errors import AlarmError, StopRequestedError, UnscoredError, WorkerLostError
from rlcore.evaluation.result import ValidationResult
from rlcore.run.inputs import suite_fingerprint
from rlcore.run.record import Pace, RunEvents, RunRecord
from rlcore.run.watchdog import StepAbandonedError
from rlcore.run.workers import RunWorkers, TrainingWorkers
from rlcore.tracking.cost import CostMeter
from rlcore.tracking.journal import WORKERS
from rlcore.tracking.lineage import SystemSampler
from rlcore.trainer.experience import all_unscored_error
from rlcore.trainer.metrics import Alarm
from rlcore.trainer.step import StepResult

ALARMS_HINT = "See its metrics, then change the settings, or alarms.*, which may change when a run is resumed"

W = TypeVar("W", bound=TrainingWorkers)


class Training(Generic[W]):
    """A training that saves checkpoints and keeps the last finished step in memory between two calls."""

    STAGE = "train"

    def __init__(self, record: RunRecord, workers: W) -> None:
        self._config, self._layout = record.config, record.layout
        self.record = record
        self.workers = workers
        self._events = RunEvents(record, self.STAGE, may_end_early=self.may_end_early)
        self._stop = record.guard.stop
        self._system = SystemSampler(record.layout.run_dir)
        self._state: LoopState | None = None
        self._metrics: Mapping[str, float] = {}
        self._saved_step = -1  # the step of the newest checkpoint, on disk or in progress
        self._seconds_for_saves = 0.0
        self._meter: CostMeter | None = None

    @property
    def may_end_early(self) -> bool:
        """True if a metric may end the training before its last step."""
        return False

    @property
    def step(self) -> int:
        """The last step that this process has finished, or 0 before the first one."""
        return 0 if self._state is None else self._state.step

    def train_to(self, to_step: int, *, settle: bool = True) -> Mapping[str, float]:
        """Train to a step, save checkpoints at chunk ends and at this step, and return the metrics of the last step. If
        `settle` is false, the last checkpoint is written during the next call."""
        state = self._begin()
        self.record.wait_for_room(state.step, self.settle_save)
        pace = Pace(is_warm=bool(self._metrics))
        while state.step < to_step and not self._is_over(state, self._metrics):
            state, alarms = self._train_step(state, to_step, pace)
            if self._ends_chunk(state.step):
                self._begin_save(state)
            else:
                self._saving(self.record.saves.poll)
            self._end_if_fatal(state, alarms)
            if self._stop():
                raise StopRequestedError(self.save_finished())
        if self._saved_step != state.step:  # the step does not end a chunk
            self._begin_save(state)
        if settle:
            self.settle_save()
        return self._metrics

    def _is_over(self, state: LoopState, metrics: Mapping[str, float]) -> bool:
        return False

    def settle_save(self) -> None:
        """Wait for the current save, if there is one."""
        self._saving(self.record.saves.settle)

    def save_finished(self) -> str:
        """Save the last finished step after a stop request, if it is not saved yet. Return a message for the user."""
        if self._state is None or self.workers.holds != name_of(self._state.step):
            return "the trainer was stopped; start again to resume from its last checkpoint"
        self._save_before(self._state)
        return f"stopped after step {self._state.step}, which is saved; start again to resume"

    def _begin(self) -> LoopState:
        """Return the state in memory if the workers hold its weights, otherwise the state of the newest checkpoint."""
        self.workers.start()
        if self._state is not None and self.workers.holds == name_of(self._state.step):
            return self._state  # possibly ahead of its newest checkpoint
        self.settle_save()
        found = self.record.store.find_latest()
        newest = found.checkpoint
        state = self.record.restore(newest)
        self._events.failures(state.step)
        self.workers.load("start" if newest is None else newest.name)
        self._events.resumed(state.step, found)
        self.record.journal.append_event(WORKERS, state.step, self.workers.found)
        self._saved_step = state.step
        if newest is None:
            metrics, state = self._evaluate(state)
            self._check_responses()
            self.record.journal.append_step(0, {**metrics, **self._cost()})
        self._state = state
        return state

    def _cost(self) -> dict[str, float]:
        """Return the run's cost metrics, with earlier attempts. After a resume, the journal must be truncated first."""
        if self._meter is None:
            self._meter = CostMeter(self.record.layout.journal)
        return self._meter.metrics(self.workers.gpu_uses())

    def _check_responses(self) -> None:
        """Check, after the evaluation of step 0, whether the scorer rewards worthless responses."""

    def _train_step(self, state: LoopState, to_step: int, pace: Pace) -> tuple[LoopState, tuple[Alarm, ...]]:
        try:
            result = self.workers.step(state)
        except UnscoredError as error:  # the step has changed nothing yet
            self._save_before(state)
            raise self._add_remedy(error) from error
        except StepAbandonedError as error:
            self._save_before(state)
            raise StopRequestedError(f"{error}; step {state.step} is saved; start again to resume") from error
        step = result.state.step
        self._events.shortages(step, result.shortages, self.workers.config.trainer.max_tokens_per_micro_batch)
        self._metrics, self._state = self._write_line(result)
        pace.tick()
        self._events.progress(result, to_step, pace)
        self._events.unscored(step, *self.workers.unscored)
        self._events.alarms(step, result.alarms)
        return self._state, result.alarms

    def _end_if_fatal(self, state: LoopState, alarms: Sequence[Alarm]) -> None:
        if fatal := [alarm for alarm in alarms if alarm.action == "stop"]:
            self._save_before(state)
            raise AlarmError(f"step {state.step}: {'; '.join(alarm.text for alarm in fatal)}. {ALARMS_HINT}")

    def _add_remedy(self, error: UnscoredError) -> UnscoredError:
        self.settle_save()
        newest = self.record.store.latest()
        text = f"{error}. Repair it and start the same command again"
        if newest is not None:
            fork = f"--fork {self._layout.run_dir.name}@{newest.step} and another run_id"
            text += f": step {newest.step} is saved. Where the scorer's code has to change, continue by {fork}"
        return UnscoredError(text)

    def _write_line(self, result: StepResult) -> tuple[Mapping[str, float], LoopState]:
        step = result.state.step
        metrics = dict(result.metrics)
        after = result.state
        if self._is_due(step):
            begun = time.perf_counter()
            found, after = self._evaluate(after)
            metrics["timing_s/testing"] = time.perf_counter() - begun
            metrics |= found
        self._write_responses(result)
        metrics |= self._system.sample() | self.record.room.check(self.record.next_save_bytes).metrics | self._cost()
        if self._events.num_failures:
            metrics["fault/num_retries"] = float(self._events.num_failures)
        if self._seconds_for_saves:
            metrics["timing_s/save_checkpoint"] = self._seconds_for_saves
            self._seconds_for_saves = 0.0
        self.record.journal.append_step(step, metrics)
        self.workers.holds = name_of(step)
        return metrics, after

    def _is_due(self, step: int) -> bool:
        raise NotImplementedError

    def _evaluate(self, state: LoopState) -> tuple[Mapping[str, float], LoopState]:
        """Run the evaluations that are due. Return their metrics, and the state with the best score so far."""
        raise NotImplementedError

    def _write_responses(self, result: StepResult) -> None:
        """Store the responses of a step. By default this does nothing."""

    def _begin_save(self, state: LoopState) -> None:
        self.settle_save()
        settings = self._config.validation
        metrics = {name: value for name, value in self._metrics.items() if not settings.is_of_suite(name)}
        if not self._ends_chunk(state.step) and not self._is_over(state, metrics):
            # The model with the best loss is chosen among chunk ends, independent of stops.
            metrics.pop(HELD_OUT_LOSS, None)
        self._saving(lambda: self.record.begin_save(state, metrics, self.workers))
        self._saved_step = state.step

    def _save_before(self, state: LoopState) -> None:
        """Save the last finished step, whose weights the workers must still hold."""
        self.workers.holds = name_of(state.step)
        if self._saved_step != state.step:
            self._begin_save(state)
        self.settle_save()

    def _ends_chunk(self, step: int) -> bool:
        trainer = self._config.trainer
        return step % trainer.steps_per_chunk == 0 or step == trainer.total_steps

    def _saving(self, advance: Callable[[], Saved | None]) -> None:
        """Call `advance`, which continues the current save. Add the call's duration to a metric of the next step."""
        begun = time.perf_counter()
        try:
            saved = advance()
        except WorkerLostError:
            self.record.saves.abandon()
            raise
        finally:
            self._seconds_for_saves += time.perf_counter() - begun
        if saved is not None:
            self.record.report({"event": "checkpoint", "step": saved.step, "path": str(saved.path)})


class RunTraining(Training[RunWorkers]):
    """The reinforcement learning of a run, which is evaluated on held-out problems."""

    def _evaluate(self, state: LoopState) -> tuple[Mapping[str, float], LoopState]:
        step, total = state.step, self._config.trainer.total_steps
        rates = self.workers.problems.pass_rates if step == 0 else None
        found: dict[str, float] = {} if rates is None else dict(rates.metrics())
        if self._config.validation.is_due(step, total):
            result = self.evaluate(name_of(step), step)
            found, state = {**found, **result.metrics()}, self.record.with_score(state, result)
        for suite in self._config.validation.suites:
            if suite.is_due(step, total):
                found |= self.evaluate(name_of(step), step, suite).metrics()
        return found, state

    def _is_due(self, step: int) -> bool:
        settings, total = self._config.validation, self._config.trainer.total_steps
        return any(each.is_due(step, total) for each in (settings, *settings.suites))

    def _write_responses(self, result: StepResult) -> None:
        if self.record.answers.stores_step(result.state.step):
            self.record.answers.add(self.workers.responses_of(result))

    def _check_responses(self) -> None:
        if not self._config.reward.audit or self._config.data.environment:
            return
        if findings := self.workers.audit(ValidationResult.read(self.file_of(name_of(0)))):
            text = f"{self._config.data.scorer} pays for responses that are no answers: {'; '.join(map(str, findings))}"
            self.record.record_event("reward_audit", 0, {"text": text, "kinds": [finding.kind for finding in findings]})

    def evaluate(self, name: str, step: int, suite: SuiteConfig | None = None) -> ValidationResult:
        """Evaluate the weights on held-out problems or a suite. Store the result. Raises UnscoredError if nothing is
        scored."""
        if suite is None:
            result, responses = self.workers.validate(name, step)
            self._require_metrics(result, None)
            self.record.answers.write_validation(name, responses)
            self.record.report({"event": "validated", "name": name, "step": step, "summary": dict(result.metrics())})
            self._events.unscored(step, *self.workers.unscored)
        else:
            result, reason = self.workers.validate_suite(suite, name, step)
            self._require_metrics(result, suite)
            if count := len(result.failures):
                which = f"suite {suite.name}: {count:,} response(s) have no score"
                text = f"{which} and are in no metric; the last error: {reason}"
                data = {"suite": suite.name, "num_answers": count, "reason": reason, "text": text}
                self.record.record_event("scorer_failed", step, data)
        result.write(self.file_of(result.name, suite))
        return result

    def _require_metrics(self, result: ValidationResult, suite: SuiteConfig | None) -> None:
        if result.problems and not result.scored_only.problems:
            data = self._config.data if suite is None else suite.data
            where = f"validation {result.name}" if suite is None else f"suite {suite.name}"
            raise self._add_remedy(all_unscored_error(where, data.environment or data.scorer, result.failures))

    def evaluate_checkpoint(
        self, checkpoint: str, name: str, suite: SuiteConfig | None = None, *, step: int | None = None
    ) -> ValidationResult:
        """Evaluate a checkpoint on all held-out problems or on a suite. Reuse a stored result with the same settings.
        `step`: the step that the result records, by default the checkpoint's."""
        step = self.record.store.step_of(checkpoint) if step is None else step
        result = None if suite is None else self._known_result(step, suite, name)
        result = result or self._known_result(step, suite)
        if result is None:
            self.workers.load(checkpoint)
            return self.evaluate(name, step, suite)
        result = replace(result, name=name)
        result.write(self.file_of(result.name, suite))
        return result

    def file_of(self, name: str, suite: SuiteConfig | None = None) -> Path:
        """Return the file for the result of a validation."""
        folder = self._layout.validation if suite is None else self._layout.suites / suite.name
        return folder / f"{name}.json"

    def _known_result(self, step: int, suite: SuiteConfig | None, name: str | None = None) -> ValidationResult | None:
        """Return the stored result if it has the present settings, otherwise None. If `name` is None, look for the
        result that training stored for the step. A result of only `max_problems` problems is not used."""
        settings = self._config.validation if suite is None else suite
        file = self.file_of(name or name_of(step), suite)
        if (name is None and settings.max_problems) or not file.is_file():
            return None
        result = ValidationResult.read(file)
        wanted = ""
        if suite is not None:
            folder = self.workers.inputs.for_suite(suite.name).filtered_directory
            wanted = suite_fingerprint(self._config, suite, folder)
        is_same = (result.step, result.suite) == (step, wanted) and result.settings.evaluates_as(settings)
        return result if is_same else None
