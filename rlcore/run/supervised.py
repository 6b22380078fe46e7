"""The warm start: a training of its own that makes the model of step 0, by the machinery of a run, in one command.

It has a folder like a run's (`warm-starts/warm-start-<fingerprint>`) with journal and checkpoints, so it goes on where
it was, and settings that follow from those of the run. Its result is published under `models/<fingerprint>`, where runs
of equal settings find it; its journal stays where it is.
"""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import JsonValue

from rlcore.batching.loader import PromptStream
from rlcore.batching.prompts import Demonstration, read_demonstrations, read_solutions
from rlcore.checkpoint.catalog import HELD_OUT_LOSS, CheckpointInfo
from rlcore.checkpoint.state import LoopState
from rlcore.config import RunConfig
from rlcore.errors import DataError
from rlcore.models.memory import release_cached_memory
from rlcore.models.scratch import build_scratch_model
from rlcore.models.tokenizer import build_scratch_tokenizer, load_tokenizer
from rlcore.rollout.engine import WARM_START_STREAM, make_requests
from rlcore.run.initial_policy import (
    METRICS,
    REWARD,
    UNTRAINED,
    InitialPolicy,
    known_initial_policy,
    remove_checkpoints,
)
from rlcore.run.inputs import (
    RunInputs,
    configured_model,
    ensure_configured_model,
    planned_initial_policy,
    stage_layout,
    stage_settings,
)
from rlcore.run.problems import Problems, spread
from rlcore.run.record import RunRecord
from rlcore.run.stop import locked_run
from rlcore.run.training import Training
from rlcore.run.watchdog import Watchdog
from rlcore.run.workers import TrainingWorkers
from rlcore.storage.finished import FINGERPRINT, read_finished_or_set_aside
from rlcore.storage.publish import published_directory
from rlcore.tracking.lineage import Origin
from rlcore.trainer.experience import ResponseSampler
from rlcore.trainer.step import StepResult
from rlcore.trainer.supervised import SupervisedTrainer
from rlcore.types import Prompt
from rlcore.workers.group import WorkerGroup

MIN_CHECK_PROBLEMS = 16
"""Fewer sampled answers say nothing about a reward."""


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Demonstrations in the order in which they are shown, and those held out."""

    shown: PromptStream[Demonstration]
    held_out: tuple[Demonstration, ...]
    misdirected_share: float
    seed: int
    num_dropped: int

    @classmethod
    def read(cls, config: RunConfig, inputs: RunInputs) -> "Demonstrations":
        """Read the tokenized demonstrations; nothing is tokenized again.

        Raises:
            DataError: there is none.
        """
        warm, own = config.warm_start, inputs.demonstrations_directory
        if own is not None:
            rows, held_out = (read_demonstrations(own / f"{split}.parquet") for split in ("train", "validation"))
        else:
            rows = [row for file in inputs.train_parquets for row in read_solutions(file)]
            held_out = [row for file in inputs.validation_parquets for row in read_solutions(file)]
        fitting = [row for row in rows if len(row.token_ids) <= warm.max_tokens]
        if not fitting:
            longest = f": all {len(rows):,} are longer than warm_start.max_tokens={warm.max_tokens}" if rows else ""
            manifests = [read_finished_or_set_aside(part) for part in inputs.parts] if own is None else []
            untold = [manifest.values.get("unwritten_solutions") for manifest in manifests if manifest is not None]
            why = "".join(f". Of {one['rows']:,} solutions the chat template {one['why']}" for one in untold if one)
            raise DataError(
                f"{own or inputs.filtered_directory}: warm_start.enabled needs demonstrations, and there is none"
                f"{longest}{why}. Set warm_start.enabled=false, name a file (warm_start.demonstrations), or use a task "
                "that writes extra_info.solution"
            )
        kept = [row for row in held_out if len(row.token_ids) <= warm.max_tokens][: warm.held_out_rows]
        stream = PromptStream(fitting, seed=config.seed, part=WARM_START_STREAM)
        return cls(stream, tuple(kept), warm.misdirected_share, config.seed, len(rows) - len(fitting))

    def draw(self, position: int, step: int, count: int) -> list[Demonstration]:
        """The demonstrations of a step, some of them misdirected."""
        rng = np.random.default_rng((self.seed, WARM_START_STREAM, step))
        wrong = (rng.random(count) < self.misdirected_share).tolist()
        chosen = self.shown.take(position, count)
        return [
            row.misdirected if beside and row.misdirected is not None else row
            for row, beside in zip(chosen, wrong, strict=True)
        ]


class SupervisedWorkers(TrainingWorkers):
    """The ranks of a warm start, with its demonstrations."""

    _trainer: SupervisedTrainer
    _answerer: ResponseSampler | None = None
    """Where the sampled reward ends the stage."""
    _problems: Sequence[Prompt] = ()
    """Those whose answers it is measured on."""

    def __init__(self, record: RunRecord, inputs: RunInputs, lessons: Demonstrations, start_model: Path) -> None:
        super().__init__(record, start_model)
        self._inputs = inputs
        self._lessons = lessons

    def sync_weights(self, version: int) -> None:
        """Engines get the weights where answers are asked for, right before."""

    def measure(self, step: int) -> dict[str, float]:
        """Held-out loss, and the sampled reward where it ends the stage."""
        self.start()
        with self._guard.phase("testing"):
            metrics = self._trainer.held_out(self._lessons.held_out)
        if self._answerer is not None and step:
            super().sync_weights(step)
            with self._guard.phase("testing"):
                metrics[REWARD] = self._reward(self._answerer, step)
        return metrics

    def _reward(self, answerer: ResponseSampler, step: int) -> float:
        """Mean score of one sampled answer to each problem, over those that the scorer did not fail on."""
        config = answerer.config
        requests = make_requests(self._problems, 1, run_seed=config.seed, stream=WARM_START_STREAM, step=step)
        answers = answerer.sample(requests, config.rollout.sampling, policy_version=step)
        totals = [score.total for _, score, _ in answers if score.failure is None]
        if not totals:
            raise DataError(
                f"data.scorer: {config.data.scorer} failed on all {len(answers)} answers of the warm start, the last "
                f"time: {answers[-1][1].failure}. Repair it, or set warm_start.enabled=false"
            )
        return sum(totals) / len(totals)

    def _start(self) -> None:
        config, lessons = self.config, self._lessons
        answerer_of: Callable[[WorkerGroup], ResponseSampler] | None = None
        if config.warm_start.stop_at_reward is not None:
            problems = Problems.read(config, self._inputs)
            answerer_of = problems.build_answerer(self._inputs, self._open)
            self._problems = spread(problems.train)[: max(MIN_CHECK_PROBLEMS, config.warm_start.check_problems)]
        self._start_group()
        size = config.warm_start.batch_size
        self._trainer = SupervisedTrainer(
            config, self.group, lambda drawn, step: lessons.draw(drawn, step, size), enter_phase=self._guard.phase
        )
        self._answerer = answerer_of and answerer_of(self.group)

    def _take_step(self, state: LoopState) -> StepResult:
        return self._trainer.step(state, epoch=self._lessons.shown.epoch_at(state.num_prompts_drawn))


class SupervisedTraining(Training[SupervisedWorkers]):
    """Supervised steps until one of the ends that the settings name."""

    STAGE = "warm-start"

    @property
    def may_end_early(self) -> bool:
        """Whether a sampled reward or the held-out loss may end it before its last step."""
        warm = self._config.warm_start
        return warm.stop_at_reward is not None or (warm.patience is not None and warm.held_out_rows > 0)

    def _is_due(self, step: int) -> bool:
        return step == self._config.trainer.total_steps or step % self._config.warm_start.check_every == 0

    def _evaluate(self, state: LoopState) -> tuple[Mapping[str, float], LoopState]:
        step = state.step
        metrics = self.workers.measure(step)
        score = -metrics.get(HELD_OUT_LOSS, math.inf)
        return metrics, replace(state, best_metric=score, best_step=step) if score > state.best_metric else state

    def _is_over(self, state: LoopState, metrics: Mapping[str, float]) -> bool:
        return has_learned(self._config, state.step, state.best_step, metrics)


def has_learned(config: RunConfig, step: int, best_step: int, metrics: Mapping[str, float]) -> bool:
    """Whether the sampled reward is reached, or the held-out loss has not fallen for as long as `patience` says."""
    warm = config.warm_start
    if warm.stop_at_reward is not None and metrics.get(REWARD, -math.inf) >= warm.stop_at_reward:
        return True
    is_measured = HELD_OUT_LOSS in metrics
    return warm.patience is not None and is_measured and step - best_step >= warm.patience * warm.check_every


class WarmStart:
    """Makes the model of step 0. While it trains it holds its folder's lock and its workers; after an error until
    `close`."""

    def __init__(self, config: RunConfig, inputs: RunInputs, guard: Watchdog) -> None:
        self._config, self._inputs, self._guard = config, inputs, guard
        self._directory = planned_initial_policy(config, inputs.filtered_directory)
        self._layout = stage_layout(config, inputs.filtered_directory)
        self._untaught = self._layout.run_dir / UNTRAINED
        self._open = ExitStack()
        self.training: SupervisedTraining | None = None

    def make(self) -> InitialPolicy:
        """Make the model of step 0, unless it is there. A warm start resumes from its newest checkpoint.

        Raises:
            StopRequestedError: a stop was asked for; the last finished step is saved.
        """
        config, guard = self._config, self._guard
        if config.model.path is not None:
            ensure_configured_model(config)
        if (known := known_initial_policy(config, self._inputs)) is not None:
            return known
        if not config.warm_start.enabled:
            with published_directory(self._directory, {FINGERPRINT: self._directory.name}) as folder:
                build_model(config, folder)
            return InitialPolicy(self._directory, cached=False)
        self._open.enter_context(locked_run(self._layout.run_dir, guard.report, guard.stop, math.inf))
        known = known_initial_policy(config, self._inputs)
        if known is not None:  # made by another run while this one waited for the lock
            self.close(failed=False)
            return known
        self.training = self._has_begun()
        self._publish(self.training, self._train(self.training))
        gc.collect()
        release_cached_memory()  # the workers that follow may be other processes
        return InitialPolicy.of(self._directory, read_finished_or_set_aside(self._directory), cached=False)

    def close(self, *, failed: bool, is_over: bool = False) -> None:
        """End the workers and release the folder."""
        training, self.training = self.training, None
        with self._open:
            if training is not None:
                training.record.finish(failed=failed, is_over=is_over)

    def _train(self, training: SupervisedTraining) -> CheckpointInfo:
        """The checkpoint with which the training ends."""
        store, end = training.record.store, training.record.config.trainer.total_steps
        newest = store.latest()
        if newest is None or not self._has_ended(training.record, newest):
            training.train_to(end)
            newest = store.latest()
            assert newest is not None, "training has committed one"
        return newest

    def _has_begun(self) -> SupervisedTraining:
        lessons = Demonstrations.read(self._config, self._inputs)
        settings = stage_settings(self._config, len(lessons.shown))
        if lessons.num_dropped:
            limit = f"longer than warm_start.max_tokens={self._config.warm_start.max_tokens}"
            text = f"{lessons.num_dropped:,} demonstrations are {limit}, and left out"
            self._guard.report({"event": "note", "text": text})
        Origin(settings).write(self._layout.run_dir)
        record = RunRecord(settings, self._layout, self._guard, tags={"stage": "warm-start"})
        workers = self._open.enter_context(SupervisedWorkers(record, self._inputs, lessons, self._source()))
        return SupervisedTraining(record, workers)

    def _source(self) -> Path:
        """Folder of the model that is trained."""
        if self._config.model.path is not None:
            return configured_model(self._config)
        if read_finished_or_set_aside(self._untaught) is None:
            with published_directory(self._untaught, {"kind": "model"}) as made:
                build_model(self._config, made)
        return self._untaught

    def _has_ended(self, record: RunRecord, newest: CheckpointInfo) -> bool:
        best = record.store.load_state(newest).best_step
        is_last = newest.step >= record.config.trainer.total_steps
        return is_last or has_learned(record.config, newest.step, best, newest.metrics)

    def _publish(self, training: SupervisedTraining, newest: CheckpointInfo) -> None:
        """The checkpoint with the lowest held-out loss as a model's folder, the last where a reward was wanted."""
        record, workers = training.record, training.workers
        training.settle_save()
        wants_reward = self._config.warm_start.stop_at_reward is not None
        taken = newest if wants_reward else record.store.best() or newest
        workers.load(taken.name)
        facts: dict[str, JsonValue] = {
            FINGERPRINT: self._directory.name,
            "steps": taken.step,
            "steps_taken": newest.step,
        }
        facts |= {name.partition("/")[2]: taken.metrics[name] for name in METRICS if name in taken.metrics}
        workers.export(self._directory, "start_model", facts=facts)
        self.close(failed=False, is_over=True)
        remove_checkpoints(self._layout)


def build_model(config: RunConfig, folder: Path) -> None:
    """Write a model made from nothing, with its tokenizer, into a folder."""
    build_scratch_tokenizer(config.model.scratch, folder)
    tokenizer = load_tokenizer(folder)
    build_scratch_model(
        config.model.scratch,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=config.seed,
        directory=folder,
    )
