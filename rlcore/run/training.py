"""The training of a run: steps, their lines in the journal, checkpoints where chunks end, and the way back.

The state of the run is the newest committed checkpoint; what is held here can be rebuilt from it.
"""

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
from rlcore.trainer.alarms import Alarm
from rlcore.trainer.experience import all_unscored_error
from rlcore.trainer.step import StepResult

ALARMS_HINT = "See its metrics, then change the settings, or alarms.*, which may change when a run goes on"

W = TypeVar("W", bound=TrainingWorkers)


class Training(Generic[W]):
    """Goes from one checkpoint to the next, and keeps the last finished step between two calls."""

    STAGE = "train"
    """Its name in events."""

    def __init__(self, record: RunRecord, workers: W) -> None:
        self._config, self._layout = record.config, record.layout
        self.record = record
        self.workers = workers
        self._events = RunEvents(record, self.STAGE, may_end_early=self.may_end_early)
        self._stop = record.guard.stop
        self._system = SystemSampler(record.layout.run_dir)
        self._state: LoopState | None = None
        self._metrics: Mapping[str, float] = {}
        self._saved_step = -1
        """Step of the newest checkpoint: on disk, or being written."""
        self._seconds_for_saves = 0.0
        self._meter: CostMeter | None = None

    @property
    def may_end_early(self) -> bool:
        """Whether a figure may end it before its last step."""
        return False

    @property
    def step(self) -> int:
        """The last finished step of this process; 0 before the first."""
        return 0 if self._state is None else self._state.step

    def train_to(self, to_step: int, *, settle: bool = True) -> Mapping[str, float]:
        """Train to a step, and save where a chunk ends and there. Returns the metrics of the last step.

        `settle`: the checkpoint of that step is committed on return; otherwise the next call trains on meanwhile.
        """
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
        if self._saved_step != state.step:  # it ends no chunk
            self._begin_save(state)
        if settle:
            self.settle_save()
        return self._metrics

    def _is_over(self, state: LoopState, metrics: Mapping[str, float]) -> bool:
        """Whether the training ends with this step, before the last one that it may take."""
        return False

    def settle_save(self) -> None:
        """Wait for the checkpoint under way, if there is one."""
        self._saving(self.record.saves.settle)

    def save_finished(self) -> str:
        """Save the last finished step, if it is not: a stop was asked for. Says what is saved."""
        if self._state is None or self.workers.holds != name_of(self._state.step):
            return "the trainer was told to stop; start again to go on from its last checkpoint"
        self._save_before(self._state)
        return f"stopped after step {self._state.step}, which is saved; start again to go on"

    # ------------------------------------------------------------------ start

    def _begin(self) -> LoopState:
        """The state to go on from: in memory after a chunk, else from the newest checkpoint, else step 0."""
        self.workers.start()
        if self._state is not None and self.workers.holds == name_of(self._state.step):
            return self._state  # perhaps ahead of its newest checkpoint, which is still being written
        self.settle_save()
        found = self.record.store.find_latest()
        newest = found.checkpoint
        state = self.record.restore(newest)
        self._events.failures(state.step)
        self.workers.load("start" if newest is None else newest.name)
        self._events.resumed(state.step, found)
        self.record.log_event(WORKERS, state.step, self.workers.found)
        self._saved_step = state.step
        self._state = self._record_start(state) if newest is None else state
        return self._state

    def _record_start(self, state: LoopState) -> LoopState:
        """Step 0: the held-out score before any training."""
        metrics, state = self._evaluate(state)
        self._check_responses()
        self.record.log_step(0, {**metrics, **self._cost()})
        return state

    def _cost(self) -> dict[str, float]:
        """What the run has cost so far; the journal, by its first call, is the one that is gone on with."""
        if self._meter is None:
            self._meter = CostMeter(self.record.layout.journal)
        return self._meter.metrics(self.workers.gpu_uses())

    def _check_responses(self) -> None:
        """Audit the reward, where there is one, once the model of step 0 is measured."""

    # ------------------------------------------------------------------ a step

    def _train_step(self, state: LoopState, to_step: int, pace: Pace) -> tuple[LoopState, tuple[Alarm, ...]]:
        """Take one step, and write its line."""
        try:
            result = self.workers.step(state)
        except UnscoredError as error:  # the step has changed nothing yet
            self._save_before(state)
            raise self._add_remedy(error) from error
        except StepAbandonedError as error:
            self._save_before(state)
            raise StopRequestedError(f"{error}; step {state.step} is saved; start again to go on") from error
        step = result.state.step
        self._events.shortages(step, result.shortages, self.workers.config.trainer.max_tokens_per_micro_batch)
        self._metrics, self._state = self._write_line(result)
        pace.tick()
        self._events.progress(result, to_step, pace)
        self._events.unscored(step, *self.workers.unscored)
        self._events.alarms(step, result.alarms)
        return self._state, result.alarms

    def _end_if_fatal(self, state: LoopState, alarms: Sequence[Alarm]) -> None:
        """Save and end where an alarm's action is stop."""
        if fatal := [alarm for alarm in alarms if alarm.action == "stop"]:
            self._save_before(state)
            raise AlarmError(f"step {state.step}: {'; '.join(alarm.text for alarm in fatal)}. {ALARMS_HINT}")

    def _add_remedy(self, error: UnscoredError) -> UnscoredError:
        """The error with what is saved, and how to go on."""
        self.settle_save()
        newest = self.record.store.latest()
        text = f"{error}. Mend what failed and start the same command again"
        if newest is not None:
            fork = f"--fork {self._layout.run_dir.name}@{newest.step} and a run_id of its own"
            text += f": step {newest.step} is saved. Where the scorer's code has to change, go on by {fork}"
        return UnscoredError(text)

    def _write_line(self, result: StepResult) -> tuple[Mapping[str, float], LoopState]:
        """Validate if it is due, and write the step's line."""
        step = result.state.step
        metrics = dict(result.metrics)
        after = result.state
        if self._is_due(step):
            begun = time.perf_counter()
            found, after = self._evaluate(after)
            metrics["timing_s/testing"] = time.perf_counter() - begun
            metrics |= found
        self._write_responses(result)
        metrics |= self._system.sample() | self.record.room_metrics() | self._cost()
        if self._events.num_faults:
            metrics["fault/num_retries"] = float(self._events.num_faults)
        if self._seconds_for_saves:
            metrics["timing_s/save_checkpoint"] = self._seconds_for_saves
            self._seconds_for_saves = 0.0
        self.record.log_step(step, metrics)
        self.workers.holds = name_of(step)
        return metrics, after

    # ------------------------------------------------------------------ held-out problems

    def _is_due(self, step: int) -> bool:
        """Whether something is measured after this step."""
        raise NotImplementedError

    def _evaluate(self, state: LoopState) -> tuple[Mapping[str, float], LoopState]:
        """The model of this state on the held-out problems that are due, and the state with its score."""
        raise NotImplementedError

    def _write_responses(self, result: StepResult) -> None:
        """Keep the answers of a step, where it has any."""

    # ------------------------------------------------------------------ saves

    def _begin_save(self, state: LoopState) -> None:
        """Begin a checkpoint of this state, when the one under way is committed."""
        self.settle_save()
        settings = self._config.validation
        metrics = {name: value for name, value in self._metrics.items() if not settings.is_of_suite(name)}
        if not self._ends_chunk(state.step) and not self._is_over(state, metrics):
            # The start model is the best of the chunks' ends, whatever stop came between.
            metrics.pop(HELD_OUT_LOSS, None)
        self._saving(lambda: self.record.begin_save(state, metrics, self.workers))
        self._saved_step = state.step

    def _save_before(self, state: LoopState) -> None:
        """Save the last finished step: no further one has changed anything."""
        self.workers.holds = name_of(state.step)
        if self._saved_step != state.step:
            self._begin_save(state)
        self.settle_save()

    def _ends_chunk(self, step: int) -> bool:
        trainer = self._config.trainer
        return step % trainer.steps_per_chunk == 0 or step == trainer.total_steps

    def _saving(self, advance: Callable[[], Saved | None]) -> None:
        """Go on with the save under way; the time in which the loop stands still for it stands in a step's line."""
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
    """The reinforcement learning of a run, judged by answers to held-out problems."""

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
        step = result.state.step
        if self.record.answers.stores_step(step):
            self.record.write_responses(step, self.workers.responses_of(result))

    def _check_responses(self) -> None:
        file = self.file_of(name_of(0))
        if not self._config.reward.audit or self._config.data.environment:
            return
        findings = self.workers.audit(ValidationResult.read(file))
        if findings:
            text = f"{self._config.data.scorer} pays for what is no answer: {'; '.join(map(str, findings))}"
            self.record.record_event("reward_audit", 0, {"text": text, "kinds": [finding.kind for finding in findings]})

    def evaluate(self, name: str, step: int, suite: SuiteConfig | None = None) -> ValidationResult:
        """Judge what the workers hold on the held-out problems, or a suite's, and keep the result under this name.

        Raises:
            UnscoredError: no problem has a score; nothing is kept.
        """
        if suite is None:
            result, answers = self.workers.validate(name, step)
            self._require_metrics(result, None)
            self.record.write_validation(name, answers)
            self.record.report({"event": "validated", "name": name, "step": step, "summary": dict(result.metrics())})
            self._events.unscored(step, *self.workers.unscored)
        else:
            result, reason = self.workers.validate_suite(suite, name, step)
            self._require_metrics(result, suite)
            if count := len(result.failures):
                which = f"suite {suite.name}: {count:,} answer(s) have no score"
                text = f"{which} and are in no figure; the last one: {reason}"
                data = {"suite": suite.name, "num_answers": count, "reason": reason, "text": text}
                self.record.record_event("scorer_failed", step, data)
        self._write_result(result, suite)
        return result

    def _require_metrics(self, result: ValidationResult, suite: SuiteConfig | None) -> None:
        if result.problems and not result.scored_only.problems:
            data = self._config.data if suite is None else suite.data
            where = f"validation {result.name}" if suite is None else f"suite {suite.name}"
            raise self._add_remedy(all_unscored_error(where, data.environment or data.scorer, result.failures))

    def evaluate_checkpoint(self, checkpoint: str, name: str, suite: SuiteConfig | None = None) -> ValidationResult:
        """Judge a checkpoint on all held-out problems, or on all of a suite; a result of training is taken over."""
        step = self.record.store.step_of(checkpoint)
        result = (
            self._known_result(step, suite)
            if suite is None
            else self._known_result(step, suite, name) or self._known_result(step, suite)
        )
        if result is None:
            self.workers.load(checkpoint)
            return self.evaluate(name, step, suite)
        result = replace(result, name=name)
        self._write_result(result, suite)
        return result

    def file_of(self, name: str, suite: SuiteConfig | None = None) -> Path:
        """Where a result of this name is kept."""
        folder = self._layout.validation if suite is None else self._layout.suites / suite.name
        return folder / f"{name}.json"

    def _write_result(self, result: ValidationResult, suite: SuiteConfig | None) -> None:
        result.write(self.file_of(result.name, suite))

    def _known_result(self, step: int, suite: SuiteConfig | None, name: str | None = None) -> ValidationResult | None:
        """The result of this name; None: of this step's validation in training, where that one saw all problems."""
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
