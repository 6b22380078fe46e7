"""The stages that create the initial policy, measure its pass rates and train it.

`call_trainer` sends their commands to the trainer process.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flows.progress import skipped_suffix
from flows.stages.dataset import has_tokenizer, inputs_of, planned_rows
from flows.stages.stage import Stage, StageStatus, Trial, remake_note
from flows.work.open_run import OpenRun, committed_step, require_same_inputs
from flows.work.protocol import Note
from rlcore.config import MappedData, RunConfig, WarmStartConfig
from rlcore.errors import ConfigError
from rlcore.run.initial_policy import (
    InitialPolicy,
    has_configured_model,
    known_initial_policy,
    planned_initial_policy,
    planned_tokenizer,
)
from rlcore.run.layout import RunInputs, configured_model
from rlcore.run.pass_rates import find_pass_rates, planned_pass_rates
from rlcore.runtime.interpreter import run_versions
from rlcore.storage.manifest import read_finished_or_reason
from rlcore.storage.publish import write_text_atomically
from rlcore.tracking import lineage
from rlcore.user_code import code_for_run

log = logging.getLogger(__name__)

DIFF_FILE = "code.diff"  # changes of the source since its commit at the last start of the run
MAX_DIFF_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class WarmStart(Stage[InitialPolicy]):
    """The stage that creates the initial policy, unless the policy already exists."""

    name, label = "warm-start", "warm start"
    in_trainer = True

    def status(self, run: OpenRun) -> StageStatus:
        config = run.config
        if has_configured_model(config):
            detail = f"off: starts from {config.model.path}"
            return StageStatus(self.name, None, configured_model(config), True, detail)
        if not has_tokenizer(run.planning_config):
            return StageStatus(self.name, None, None, False, "after the filter")
        rows = planned_rows(run.planning_config)
        place = planned_initial_policy(config, rows)
        manifest, damage = read_finished_or_reason(place)
        detail = remake_note(damage) or (
            _stop_rule(config.warm_start) if config.warm_start.enabled else "off: the model only"
        )
        return StageStatus(self.name, place.name, place, manifest is not None, detail)

    def check(self, trial: Trial) -> None:
        warm = trial.config.warm_start
        # The rows of other tasks may have solutions, which are counted when the trainer starts.
        has_none = all(isinstance(task, MappedData) and not task.solution for task in trial.tasks)
        if warm.enabled and warm.demonstrations is None and has_none:
            raise ConfigError(
                "warm_start.enabled: must be false without demonstrations; got true with an empty data.solution. Name "
                "the column data.solution or a file (warm_start.demonstrations), or set warm_start.enabled=false"
            )

    def find(self, run: OpenRun) -> InitialPolicy | None:
        return known_initial_policy(run.config, inputs_of(run))

    def make(self, run: OpenRun) -> InitialPolicy:
        made = call_trainer(run, "warm_start")
        return InitialPolicy(**{**made, "directory": Path(made["directory"])})


def _stop_rule(warm: WarmStartConfig) -> str:
    ends = [] if warm.epochs is None else [f"{warm.epochs:g} epochs"]
    ends += [] if warm.stop_at_reward is None else [f"reward {warm.stop_at_reward:g}"]
    ends += [] if warm.patience is None else [f"{warm.patience} measurements without a lower held-out loss"]
    return f"to {' or '.join(ends)}, at most {warm.max_steps} steps" if ends else f"{warm.max_steps} steps"


@dataclass(frozen=True, slots=True)
class PassRateTable:
    """The pass rates of the initial policy on `rows` training rows. The training uses `kept` of these rows."""

    directory: Path
    rows: int
    kept: int
    spread: str
    cached: bool

    def __str__(self) -> str:
        return f"{self.counts}; {self.spread}{skipped_suffix(self.cached)} ({self.directory})"

    @property
    def counts(self) -> str:
        return f"kept {self.kept:,} of {self.rows:,} rows"


@dataclass(frozen=True)
class PassRates(Stage[PassRateTable]):
    """The stage that measures how often the initial policy solves each training row, unless the result exists."""

    name, label = "pass-rates", "pass rates"
    in_trainer = True

    def status(self, run: OpenRun) -> StageStatus:
        source = f"{run.config.pass_rates.samples} responses to each training row"
        rows = planned_rows(run.planning_config) if has_tokenizer(run.planning_config) else None
        if rows is None or read_finished_or_reason(rows)[0] is None:
            return StageStatus(self.name, None, None, False, f"{source}, after the filter")
        place = planned_pass_rates(run.config, rows)
        _, damage = read_finished_or_reason(place)
        known = None if damage else read_pass_rates(run.config, RunInputs(rows, planned_tokenizer(run.config)))
        detail = source if known is None else known.counts
        return StageStatus(self.name, place.name, place, known is not None, remake_note(damage) or detail)

    def find(self, run: OpenRun) -> PassRateTable | None:
        return read_pass_rates(run.config, inputs_of(run))

    def make(self, run: OpenRun) -> PassRateTable:
        call_trainer(run, "measure_pass_rates")
        made = self.find(run)
        assert made is not None
        return replace(made, cached=False)


def read_pass_rates(config: RunConfig, inputs: RunInputs) -> PassRateTable | None:
    """Return the run's table of pass rates, or None if it does not exist. Raises DataError if too few rows are kept."""
    found = find_pass_rates(config, inputs)
    if found is None:
        return None
    found.require_enough(config.trainer.batch_size)
    kept = sum(int(part.sum()) for part in found.selected)
    return PassRateTable(found.directory, sum(found.part_sizes), kept, f"pass rates {found.spread()}", cached=True)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The training between the checkpoints at `start` and `stop`, with the metrics of its last step.

    `cached` is true if the chunk existed before.
    """

    start: int
    stop: int
    cached: bool
    metrics: Mapping[str, float]

    def __str__(self) -> str:
        reward = self.metrics.get("critic/score/mean")
        score = "" if reward is None else f", reward at step {self.stop}: {reward:.3f}"
        return f"step {self.start}-{self.stop}{score}{skipped_suffix(self.cached)}"


@dataclass(frozen=True)
class Train(Stage[Chunk]):
    """The stage that trains from step `start` to step `stop` and saves a checkpoint.

    Only the last such stage of a run waits until its checkpoint is written. The checkpoint of any other stage is
    written while the next stage trains.
    """

    name = "train"
    in_trainer = True
    start: int
    stop: int
    is_last: bool

    @classmethod
    def chunks(cls, config: RunConfig, to_step: int | None = None) -> "list[Train]":
        """Return the chunks of the training up to `to_step`. Each chunk has up to `trainer.steps_per_chunk` steps."""
        size, total = config.trainer.steps_per_chunk, to_step or config.trainer.total_steps
        return [cls(start, min(start + size, total), start + size >= total) for start in range(0, total, size)]

    def title(self, run: OpenRun) -> str:
        return f"train {run.title} step {self.start}-{self.stop}"

    def status(self, run: OpenRun) -> StageStatus:
        place = run.layout.checkpoints
        is_done = self.stop <= run.committed
        return StageStatus(self.name, run.settings_fingerprint, place, is_done, f"step {self.start}-{self.stop}")

    def check(self, trial: Trial) -> None:
        if self.start <= trial.run.committed:  # the first chunk that is not done
            trial.try_scorers()
            trial.try_functions()

    def find(self, run: OpenRun) -> Chunk | None:
        if committed_step(run.config) < self.stop:
            return None
        return Chunk(self.start, self.stop, cached=True, metrics={})

    def make(self, run: OpenRun) -> Chunk:
        record_start(run)
        result = call_trainer(run, "train", to_step=self.stop, settle=self.is_last)
        return Chunk(self.start, self.stop, cached=False, metrics=result["metrics"])


def record_start(run: OpenRun) -> None:
    """Record in the run's folder with which command, Git commit, source changes and machine the training starts.

    File errors are only logged.
    """
    if run.is_origin_complete:
        return
    run.is_origin_complete = True
    try:
        commit, is_dirty = lineage.code_revision()
        facts = lineage.environment_facts(run_versions(run.config.runtime.python))
        run.note(command=run.command, git_commit=commit, git_dirty=is_dirty, environment=facts)
        write_text_atomically(run.layout.run_dir / DIFF_FILE, lineage.code_diff()[:MAX_DIFF_CHARACTERS])
    except OSError as error:
        log.warning("%s: how the training was started is not recorded: %s", run.layout.run_dir, error)


def call_trainer(run: OpenRun, command: str, **arguments: str | int) -> Mapping[str, Any]:
    """Record the inputs, send a command to the trainer process, wait, and return the command's result.

    Raises CheckpointError if the run began with other rows.
    """
    record_inputs(run)
    if run.trainer.pid is None:
        run.trainer.on_event(Note("starting the trainer process"))
    return run.trainer.call(command, **arguments)


def record_inputs(run: OpenRun) -> None:
    """Record in `run.json` the folders and the code that the trainer process reads.

    Raises CheckpointError if the rows have changed since the run began.
    """
    inputs = inputs_of(run)
    folders = inputs.folders | {"start model": planned_initial_policy(run.config, inputs.filtered_directory)}
    if run.config.pass_rates.is_enabled:
        folders[lineage.PASS_RATES_STAGE] = planned_pass_rates(run.config, inputs.filtered_directory)
    code = code_for_run(run.config)
    kept = lineage.Stage("code", code.fingerprint, str(run.layout.code), {"files": ", ".join(code.sources)})
    stages = (kept, *(lineage.stage_of(name, folder) for name, folder in folders.items()))
    if stages != run.origin.stages:
        if not run.is_evaluation:  # the suites of an evaluation may change
            require_same_inputs(run.config, run.layout, inputs)
        run.note(stages=stages)
