"""The warm start, a supervised training that creates the initial policy. A warm start resumes from the journal and
checkpoints in `warm-starts/warm-start-<fingerprint>`. Runs with the same warm-start settings share the model in
`models/<fingerprint>`."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import JsonValue

from rlcore.batching.prompts import Demonstration, PromptStream, read_demonstrations, read_pairs, read_solutions
from rlcore.checkpoint.catalog import HELD_OUT_LOSS, CheckpointInfo, LoopState
from rlcore.config import RunConfig, WarmStartConfig
from rlcore.errors import DataError
from rlcore.models.load import build_scratch_model
from rlcore.models.memory import release_cached_memory
from rlcore.rollout.engine import WARM_START_STREAM, make_requests
from rlcore.run.initial_policy import (
    METRICS,
    REFERENCE,
    REWARD,
    InitialPolicy,
    ensure_configured_model,
    known_initial_policy,
    planned_initial_policy,
    remove_checkpoints,
    stage_layout,
    stage_settings,
)
from rlcore.run.layout import RunInputs
from rlcore.run.problems import Problems, spread
from rlcore.run.record import WARM_START, RunRecord
from rlcore.run.stop import locked_run
from rlcore.run.training import Training, TrainingWorkers
from rlcore.run.watchdog import Watchdog
from rlcore.storage.manifest import FINGERPRINT, read_finished_or_set_aside
from rlcore.storage.publish import published_directory
from rlcore.tracking.lineage import TRAINED_FOR_TAG, Origin
from rlcore.trainer.experience import ResponseSampler
from rlcore.trainer.step import StepResult, SupervisedTrainer
from rlcore.types import Prompt
from rlcore.workers.group import WorkerGroup

MIN_CHECK_PROBLEMS = 16  # the minimum number of problems on which the reward is sampled

_FILE = "logprobs.npy"


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """The demonstrations of a warm start in training order, and its held-out demonstrations."""

    shown: PromptStream[Demonstration]
    held_out: tuple[Demonstration, ...]
    misdirected_share: float
    seed: int
    num_dropped: int

    @classmethod
    def read(cls, config: RunConfig, inputs: RunInputs) -> "Demonstrations":
        """Read the tokenized demonstrations. Raises DataError if no demonstration fits into `warm_start.max_tokens`."""
        warm, folder = config.warm_start, inputs.demonstrations_directory
        if folder is not None:
            read = read_pairs if warm.loss == "dpo" else read_demonstrations
            rows, held_out = (read(folder / f"{split}.parquet") for split in ("train", "validation"))
        else:
            rows = [row for file in inputs.train_parquets for row in read_solutions(file)]
            held_out = [row for file in inputs.validation_parquets for row in read_solutions(file)]
        fitting = [row for row in rows if len(row.token_ids) <= warm.max_tokens]
        if not fitting:
            longest = f": all {len(rows):,} are longer than warm_start.max_tokens={warm.max_tokens}" if rows else ""
            manifests = [read_finished_or_set_aside(part) for part in inputs.parts] if folder is None else []
            unwritten = [manifest.values.get("unwritten_solutions") for manifest in manifests if manifest is not None]
            why = "".join(f". Of {one['rows']:,} solutions the chat template {one['why']}" for one in unwritten if one)
            raise DataError(
                f"{folder or inputs.filtered_directory}: warm_start.enabled needs demonstrations, and there is none"
                f"{longest}{why}. Set warm_start.enabled=false, name a file (warm_start.demonstrations), or use a task "
                "that writes extra_info.solution"
            )
        kept = [row for row in held_out if len(row.token_ids) <= warm.max_tokens][: warm.held_out_rows]
        stream = PromptStream(fitting, seed=config.seed, part=WARM_START_STREAM)
        return cls(stream, tuple(kept), warm.misdirected_share, config.seed, len(rows) - len(fitting))

    def draw(self, position: int, step: int, count: int) -> list[Demonstration]:
        """Return the demonstrations of a training step. With the probability `misdirected_share`, a demonstration
        has the response to another problem instead of its own response."""
        rng = np.random.default_rng((self.seed, WARM_START_STREAM, step))
        misdirected = (rng.random(count) < self.misdirected_share).tolist()
        rows = self.shown.take(position, count)
        return [
            row.misdirected if is_misdirected and row.misdirected is not None else row
            for row, is_misdirected in zip(rows, misdirected, strict=True)
        ]


def add_reference(
    folder: Path,
    trainer: SupervisedTrainer,
    batches: Sequence[Sequence[Demonstration]],
    pairs: Sequence[Demonstration],
    report: Callable[[Mapping[str, object]], None],
) -> None:
    """Set the reference log-probabilities of `pairs`. The first call computes them and stores them in `folder`, and
    later calls read them. In the first call, the workers must hold the model before its first training step. `batches`:
    the pairs of each training step in the first epoch, and the held-out pairs. Training uses the same batches. Rounding
    errors are therefore the same, and all reward margins of the first step are exactly 0."""
    if read_finished_or_set_aside(folder) is None:
        report({"event": "note", "text": f"computes the reference log-probabilities of {len(pairs):,} pairs"})
        for batch in reversed(batches):  # the last step of the epoch repeats pairs of its first steps
            trainer.fill_reference(batch)
        with published_directory(folder, {"kind": "reference", "pairs": len(pairs)}) as made:
            np.save(made / _FILE, np.concatenate([pair.reference for pair in pairs]))
        return
    values = np.load(folder / _FILE)
    ends = np.cumsum([len(pair.reference) for pair in pairs])[:-1]
    for pair, stored in zip(pairs, np.split(values, ends), strict=True):
        pair.reference[:] = stored


class SupervisedWorkers(TrainingWorkers):
    """The ranks of a warm start."""

    _trainer: SupervisedTrainer
    _sampler: ResponseSampler | None = None  # the sampler, if a sampled reward can end the warm start
    _problems: Sequence[Prompt] = ()  # the problems on which the reward is sampled

    def __init__(self, record: RunRecord, inputs: RunInputs, demonstrations: Demonstrations, source: Path) -> None:
        super().__init__(record, source)
        self._inputs = inputs
        self._demonstrations = demonstrations

    def sync_weights(self, version: int) -> None:
        """Do nothing, because the engines receive the weights immediately before sampling."""

    def measure(self, step: int) -> dict[str, float]:
        """Return the metrics on held-out demonstrations. After step 0, add the mean reward of sampled responses if
        `warm_start.stop_at_reward` is set."""
        self.start()
        with self._guard.phase("testing"):
            metrics = self._trainer.held_out(self._demonstrations.held_out)
        if self._sampler is not None and step:
            super().sync_weights(step)
            with self._guard.phase("testing"):
                metrics[REWARD] = self._reward(self._sampler, step)
        return metrics

    def _reward(self, sampler: ResponseSampler, step: int) -> float:
        config = sampler.config
        requests = make_requests(self._problems, 1, run_seed=config.seed, stream=WARM_START_STREAM, step=step)
        responses = sampler.sample(requests, config.rollout.sampling, policy_version=step)
        totals = [score.total for _, score, _ in responses if score.failure is None]
        if not totals:
            raise DataError(
                f"data.scorer: {config.data.scorer} failed on all {len(responses)} responses of the warm start, with "
                f"the last error: {responses[-1][1].failure}. Repair it, or set warm_start.enabled=false"
            )
        return sum(totals) / len(totals)

    def _start(self) -> None:
        config, demonstrations = self.config, self._demonstrations
        build_sampler: Callable[[WorkerGroup], ResponseSampler] | None = None
        if config.warm_start.stop_at_reward is not None:
            problems = Problems.read(config, self._inputs)
            build_sampler = problems.build_sampler(self._inputs, self._open)
            self._problems = spread(problems.train)[: max(MIN_CHECK_PROBLEMS, config.warm_start.check_problems)]
        self._start_group()
        size = config.warm_start.batch_size
        self._trainer = SupervisedTrainer(
            config,
            self.group,
            lambda drawn, step: demonstrations.draw(drawn, step, size),
            enter_phase=self._guard.phase,
        )
        self._sampler = build_sampler and build_sampler(self.group)
        if config.warm_start.loss == "dpo":
            shown, held_out = demonstrations.shown, demonstrations.held_out
            starts = range(0, min(len(shown), size * config.trainer.total_steps), size)
            batches = [*(shown.take(start, size) for start in starts), *([held_out] if held_out else [])]
            folder = self._layout.run_dir / REFERENCE
            add_reference(folder, self._trainer, batches, [*shown.take(0, len(shown)), *held_out], self._report)

    def _take_step(self, state: LoopState) -> StepResult:
        return self._trainer.step(state, epoch=self._demonstrations.shown.epoch_at(state.num_prompts_drawn))


class SupervisedTraining(Training):
    """A supervised training that ends at its last step, or earlier if `has_learned` is true."""

    workers: SupervisedWorkers

    def _evaluate(self, state: LoopState) -> tuple[Mapping[str, float], LoopState]:
        step = state.step
        if step != self._config.trainer.total_steps and step % self._config.warm_start.check_every:
            return {}, state
        metrics = self.workers.measure(step)
        score = -metrics.get(HELD_OUT_LOSS, math.inf)
        return metrics, replace(state, best_metric=score, best_step=step) if score > state.best_metric else state

    def _is_over(self, state: LoopState, metrics: Mapping[str, float]) -> bool:
        return has_learned(self._config, state.step, state.best_step, metrics)


def has_learned(config: RunConfig, step: int, best_step: int, metrics: Mapping[str, float]) -> bool:
    """Return whether the warm start can end early. This is true if the reward has reached its target, or if the last
    `warm_start.patience` checks found no new minimum of the held-out loss."""
    warm = config.warm_start
    if warm.stop_at_reward is not None and metrics.get(REWARD, -math.inf) >= warm.stop_at_reward:
        return True
    is_measured = HELD_OUT_LOSS in metrics
    return warm.patience is not None and is_measured and step - best_step >= warm.patience * warm.check_every


class WarmStart:
    """An object that creates the initial policy. After an error, it keeps its workers and the lock of the warm start's
    folder until `close` is called."""

    def __init__(self, config: RunConfig, inputs: RunInputs, guard: Watchdog, run_id: str) -> None:
        self._config, self._inputs, self._guard, self._run_id = config, inputs, guard, run_id
        self._directory = planned_initial_policy(config, inputs.filtered_directory)
        self._layout = stage_layout(config, inputs.filtered_directory)
        self._open = ExitStack()
        self.training: SupervisedTraining | None = None

    def make(self) -> InitialPolicy:
        """Return the initial policy. If needed, create it or continue an earlier attempt from its newest checkpoint.
        After a stop request, save the last finished step and raise StopRequestedError."""
        config, guard = self._config, self._guard
        if config.model.path is not None:
            ensure_configured_model(config)
        if (known := known_initial_policy(config, self._inputs)) is not None:
            return known
        if not config.warm_start.enabled:
            with published_directory(self._directory, {FINGERPRINT: self._directory.name}) as folder:
                build_scratch_model(config.model.scratch, seed=config.seed, directory=folder)
            return InitialPolicy(self._directory, cached=False)
        self._open.enter_context(locked_run(self._layout.run_dir, guard.report, guard.stop, math.inf))
        if (known := known_initial_policy(config, self._inputs)) is not None:  # another run has created it
            self.close(failed=False)
            return known
        self.training = self._open_training()
        self._publish(self.training)
        gc.collect()
        release_cached_memory()  # the run's workers may be other processes
        return InitialPolicy.of(self._directory, read_finished_or_set_aside(self._directory), cached=False)

    def base(self) -> InitialPolicy:
        """Return the model before the supervised steps, and create it first if needed."""
        config = self._config.model_copy(update={"warm_start": WarmStartConfig()})
        return WarmStart(config, self._inputs, self._guard, self._run_id).make()

    def close(self, *, failed: bool, is_over: bool = False) -> None:
        """End the workers and release the lock of the folder. `failed`, `is_over`: see `RunRecord.finish`."""
        training, self.training = self.training, None
        with self._open:
            if training is not None:
                training.record.finish(failed=failed, is_over=is_over)

    def _open_training(self) -> SupervisedTraining:
        demonstrations = Demonstrations.read(self._config, self._inputs)
        settings = stage_settings(self._config, len(demonstrations.shown))
        if demonstrations.num_dropped:
            limit = f"longer than warm_start.max_tokens={self._config.warm_start.max_tokens}"
            text = f"{demonstrations.num_dropped:,} demonstrations are {limit}, and left out"
            self._guard.report({"event": "note", "text": text})
        Origin(settings).write(self._layout.run_dir)
        tags = {TRAINED_FOR_TAG: self._run_id}
        record = RunRecord(settings, self._layout, self._guard, stage=WARM_START, tags=tags)
        source = self.base().directory
        workers = self._open.enter_context(SupervisedWorkers(record, self._inputs, demonstrations, source))
        return SupervisedTraining(record, workers)

    def _has_ended(self, record: RunRecord, newest: CheckpointInfo) -> bool:
        best = record.store.load_state(newest).best_step
        is_last = newest.step >= record.config.trainer.total_steps
        return is_last or has_learned(record.config, newest.step, best, newest.metrics)

    def _publish(self, training: SupervisedTraining) -> None:
        record, workers = training.record, training.workers
        newest = record.store.latest()
        if newest is None or not self._has_ended(record, newest):
            training.train_to(record.config.trainer.total_steps)
            newest = record.store.latest()
            assert newest is not None, "training has committed one"
        ends_at_reward = self._config.warm_start.stop_at_reward is not None
        source = newest if ends_at_reward else record.store.best() or newest
        workers.load(source.name)
        facts: dict[str, JsonValue] = {FINGERPRINT: self._directory.name, "steps": source.step}
        facts["steps_taken"] = newest.step
        facts |= {name.partition("/")[2]: source.metrics[name] for name in METRICS if name in source.metrics}
        workers.export(self._directory, "start_model", facts=facts)
        self.close(failed=False, is_over=True)
        remove_checkpoints(self._layout)
