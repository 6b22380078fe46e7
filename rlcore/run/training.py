"""The training loop, and the worker ranks that it controls. A chunk is the training from one checkpoint to the next."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Concatenate, Self

from pydantic import JsonValue

from rlcore.checkpoint.catalog import HELD_OUT_LOSS, LoopState, TrainerState, name_of
from rlcore.checkpoint.load import export_transformers
from rlcore.checkpoint.save import RankSaver
from rlcore.config import RunConfig
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.errors import AlarmError, RankMemoryError, StopRequestedError, UnscoredError, WorkerLostError
from rlcore.run.record import Pace, RunRecord
from rlcore.run.watchdog import StepAbandonedError
from rlcore.runtime.cluster import restrict_ray
from rlcore.storage.disk import checkpoint_bytes
from rlcore.storage.documents import sha256_of
from rlcore.tracking.journal import WORKERS, GpuUse
from rlcore.trainer.metrics import Alarm
from rlcore.trainer.step import StepResult
from rlcore.types import Prompt
from rlcore.workers.group import LocalGroup, P, R, WorkerGroup
from rlcore.workers.memory_plan import fit_run
from rlcore.workers.worker import Worker

MID_STEP = "in the middle of a step"
"""The value of `TrainingWorkers.holds` during a step and after a failed step, when the weights belong to no
checkpoint."""


def start_workers(config: RunConfig, model_directory: str) -> WorkerGroup:
    """Start all ranks of a run with the model in `model_directory`."""
    if config.runtime.backend != "ray":
        return LocalGroup(config, model_directory)
    restrict_ray(config.runtime.ray_address)
    from rlcore.runtime.ray import RayGroup

    return RayGroup(config, model_directory)


class TrainingWorkers:
    """The ranks of a training. They start at their first use, when the method `start` sets `config` and `group`."""

    config: RunConfig  # the settings, fitted to the memory of this host
    group: WorkerGroup

    def __init__(self, record: RunRecord, initial_policy: Path) -> None:
        self._config, self._layout, self._report = record.config, record.layout, record.report
        self._record, self._guard = record, record.guard
        self._open = ExitStack()
        self._is_started = False
        self._version = 0
        self.initial_policy = initial_policy
        self.found: Mapping[str, object] = {}  # facts about the ranks after their start, such as the device
        self.holds: str | None = None
        """The name of the checkpoint whose weights the workers hold, or `MID_STEP`, or None before the first load."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @property
    def unscored(self) -> tuple[int, str]:
        """The number of responses so far that could not be scored, and the last error. In supervised training, the
        result is always (0, '')."""
        return 0, ""

    def gpu_uses(self) -> list[GpuUse]:
        """Return, for each rank, the seconds since the rank began to use its GPU. Return an empty list on a CPU or
        before the ranks start."""
        if not self._is_started or self.found.get("device_name") == "CPU":
            return []
        return [use for use in self.group.each(Worker.gpu_use) if use is not None]

    def load(self, checkpoint: str) -> None:
        """Load a checkpoint's weights into the workers and the engines, unless the workers hold these weights."""
        workers = self.start().group
        found = self._record.store.find(checkpoint)
        name = "start" if found is None else found.name
        if self.holds == name:
            return
        if found is None:
            if self.holds is not None:  # the workers hold trained weights
                workers.each(Worker.reset)
            version = 0
        else:
            saved = self._record.store.load_state(found)  # verifies every byte
            version = saved.policy_version
            with self._guard.phase("load"):
                workers.each(Worker.load, str(found.path))
        self.sync_weights(version)
        self.holds, self._version = name, version

    def sync_weights(self, version: int) -> None:
        """Send the policy's weights to the engines."""
        with self._guard.phase("update_weights"):
            weight_sync = self.start().group.each(Worker.sync_weights, version)[0]
        if weight_sync.warning:
            self._report({"event": "note", "text": weight_sync.warning})

    def export(self, target: Path, phase: str, *, facts: Mapping[str, JsonValue]) -> None:
        """Write the workers' weights to `target` in the transformers format. `phase`: the phase whose deadline applies.
        `facts`: entries for the manifest."""
        group, lora = self.start().group, self._config.model.lora
        with self._guard.phase(phase):
            weights, adapters = group.each(Worker.full_weights)[0], group.each(Worker.adapters)[0]
        with self._guard.phase(phase):
            export_transformers(weights, self.initial_policy, target, facts=facts, lora=lora, adapters=adapters)

    def each(self, verb: Callable[Concatenate[RankSaver, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method of `RankSaver` on every rank, with the deadline of the phase `save_checkpoint`."""
        with self._guard.phase("save_checkpoint"):
            return self.start().group.each(Worker.save, verb, *args, **kwargs)

    def step(self, state: LoopState) -> StepResult:
        """Run one training step. The caller must then record the result and set `holds` to the name of a checkpoint of
        the new step."""
        self.start()
        self.holds = MID_STEP
        is_profiled = self.config.runtime.profile.has_step(state.step + 1)
        if is_profiled:
            self.group.each(Worker.start_profile)
        result = self._take_step(state)
        if is_profiled:
            folder = self._layout.profile
            with self._guard.phase("profile"):
                self.group.each(Worker.stop_profile, str(folder), result.state.step)
            self._report({"event": "note", "text": f"profile of step {result.state.step} in {folder}"})
        self._version = result.state.policy_version
        return result

    def start(self) -> Self:
        """Start the workers unless they are already running."""
        if not self._is_started:
            self.config = fit_run(self._config, self._report)
            self._start()
            self._is_started, self.holds = True, None
        return self

    def _start(self) -> None:
        raise NotImplementedError

    def _take_step(self, state: LoopState) -> StepResult:
        raise NotImplementedError

    def _start_group(self, probe: Sequence[Prompt] = ()) -> None:
        """Start the ranks. `probe`: the prompts on which each weight sync to vLLM is checked."""
        try:
            with self._guard.phase("start"):
                self.group = group = start_workers(self.config, str(self.initial_policy))
                self._open.callback(group.close)
                group.each(Worker.set_probe, probe)
                if times := self._guard.num_failures(RankMemoryError.failure_kind):
                    group.each(Worker.split_micro_batches, times)
                    why = "one of several ranks ran out of memory before"
                    self._report(
                        {"event": "note", "text": f"forward passes in {2**times} times the micro-batches: {why}"}
                    )
                info = group.each(Worker.info)[0]
        finally:
            self._guard.stop.install()  # Ray replaces the handler of SIGTERM
        self._record.first_save_bytes = checkpoint_bytes(info.num_trained)
        text = (
            f"{group.world_size} worker(s) on {info.device_name}: {info.num_parameters:,} parameters, {info.dtype}, "
            f"attention {info.attention}"
        )
        self._report({"event": "note", "text": text})
        names = ("device_name", "num_parameters", "dtype", "attention")
        self.found = {"num_workers": group.world_size, **{name: getattr(info, name) for name in names}}


class Training:
    """A training that saves checkpoints. Between calls of `train_to`, the state after the last step stays in memory."""

    workers: TrainingWorkers

    def __init__(self, record: RunRecord, workers: TrainingWorkers) -> None:
        self._config, self._layout = record.config, record.layout
        self.record = record
        self.workers = workers
        self._stop = record.guard.stop
        self._state: LoopState | None = None
        self._metrics: Mapping[str, float] = {}
        self._saved_step = -1  # the step of the newest checkpoint, on disk or in progress
        self._seconds_for_saves = 0.0

    @property
    def step(self) -> int:
        """The last step that this process has finished, or 0 before the first one."""
        return 0 if self._state is None else self._state.step

    def train_to(self, to_step: int, *, settle: bool = True) -> Mapping[str, float]:
        """Train to step `to_step` and return the metrics of the last step. Save a checkpoint every
        `trainer.steps_per_chunk` steps and after the last step. `settle`: whether to wait until the last checkpoint is
        saved."""
        state = self._begin()
        if not self.record.room.check(self.record.next_save_bytes).enough:
            self.settle_save()  # older checkpoints can be deleted after it
        self.record.room.wait(self.record.next_save_bytes, state.step)
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
        """Return the training state in memory if the workers hold its weights. Otherwise, load the newest checkpoint,
        or the initial policy if there is none, and return its state."""
        self.workers.start()
        if self._state is not None and self.workers.holds == name_of(self._state.step):
            return self._state  # possibly ahead of its newest checkpoint
        self.settle_save()
        found = self.record.store.find_latest()
        newest = found.checkpoint
        state = LoopState(0, 0, 0, 0, self._config.algo.kl.coef)
        journal_bytes = 0
        if newest is not None:
            saved = self.record.store.load_state(newest)
            state = LoopState(**{field.name: getattr(saved, field.name) for field in fields(LoopState)})
            journal_bytes = saved.journal_bytes
        self.record.restore(state.step, journal_bytes)
        self.record.restore_failures(state.step)
        self.workers.load("start" if newest is None else newest.name)
        self.record.report_resume(state.step, found)
        self.record.journal.append_event(WORKERS, state.step, self.workers.found)
        self._saved_step = state.step
        if newest is None:
            metrics, state = self._evaluate(state)
            self.record.journal.append_step(0, {**metrics, **self.record.cost_metrics(self.workers.gpu_uses())})
        self._state = state
        return state

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
        self.record.record_shortages(step, result.shortages, self.workers.config.trainer.max_tokens_per_micro_batch)
        self._metrics, self._state = self._write_line(result)
        pace.tick()
        self.record.report_progress(result, to_step, pace)
        self.record.record_unscored(step, *self.workers.unscored)
        self.record.record_alarms(step, result.alarms)
        return self._state, result.alarms

    def _end_if_fatal(self, state: LoopState, alarms: Sequence[Alarm]) -> None:
        if fatal := [alarm for alarm in alarms if alarm.action == "stop"]:
            self._save_before(state)
            raise AlarmError(
                f"step {state.step}: {'; '.join(alarm.text for alarm in fatal)}. See its metrics, then change the "
                "settings, or alarms.*, which may change when a run is resumed"
            )

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
        begun = time.perf_counter()
        found, after = self._evaluate(result.state)
        if found:
            metrics |= {"timing_s/testing": time.perf_counter() - begun, **found}
        self._write_responses(result)
        metrics |= self.record.machine_metrics(self.workers.gpu_uses())
        if self._seconds_for_saves:
            metrics["timing_s/save_checkpoint"] = self._seconds_for_saves
            self._seconds_for_saves = 0.0
        self.record.journal.append_step(step, metrics)
        self.workers.holds = name_of(step)
        return metrics, after

    def _evaluate(self, state: LoopState) -> tuple[Mapping[str, float], LoopState]:
        """Run the evaluations that are due. Return their metrics, and the state with the best score so far."""
        raise NotImplementedError

    def _write_responses(self, result: StepResult) -> None:
        """Store the responses of a step. By default this does nothing."""

    def _begin_save(self, state: LoopState) -> None:
        """Begin to save a checkpoint, after the previous save is complete and all responses are written."""
        self.settle_save()
        record = self.record
        settings = self._config.validation
        metrics = {name: value for name, value in self._metrics.items() if not settings.is_of_suite(name)}
        if not self._ends_chunk(state.step) and not self._is_over(state, metrics):
            # The model with the best loss is chosen among chunk ends, independent of stops.
            metrics.pop(HELD_OUT_LOSS, None)
        record.answers.start_part()

        def complete() -> TrainerState:
            record.answers.wait()
            journal_bytes = record.journal.sync()
            return TrainerState(
                **asdict(state),
                journal_bytes=journal_bytes,
                journal_sha256=sha256_of(self._layout.journal, journal_bytes),
                settings_fingerprint=settings_fingerprint(self._config),
            )

        self._saving(lambda: record.saves.begin(state.step, complete, metrics, self.workers.each))
        self._saved_step = state.step

    def _save_before(self, state: LoopState) -> None:
        """Save `state`, the state after the last finished step, before the training stops. The workers must still hold
        this step's weights."""
        self.workers.holds = name_of(state.step)
        if self._saved_step != state.step:
            self._begin_save(state)
        self.settle_save()

    def _ends_chunk(self, step: int) -> bool:
        trainer = self._config.trainer
        return step % trainer.steps_per_chunk == 0 or step == trainer.total_steps

    def _saving(self, advance: Callable[[], int | None]) -> None:
        """Call `advance`, which continues the current save. Add the call's duration to `timing_s/save_checkpoint` of
        the next step."""
        begun = time.perf_counter()
        try:
            saved = advance()
        except WorkerLostError:
            self.record.saves.abandon()
            raise
        finally:
            self._seconds_for_saves += time.perf_counter() - begun
        if saved is not None:
            path = str(self.record.store.path_of(saved))
            self.record.report({"event": "checkpoint", "step": saved, "path": path})
