"""The training stage, which trains one chunk of steps at a time, and the record of each start of the training."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flows.progress import skipped_suffix
from flows.stages.inputs import call_trainer
from flows.stages.stage import Stage, StageStatus
from flows.stages.trials import Trial
from flows.work.open_run import OpenRun
from flows.work.origin import checkpoint_store, committed_step
from rlcore.config import RunConfig
from rlcore.runtime.interpreter import run_versions
from rlcore.storage.publish import write_text_atomically
from rlcore.tracking.lineage import code_diff, code_revision, environment_facts

log = logging.getLogger(__name__)

DIFF_FILE = "code.diff"  # changes of the source since its commit at the last start of the run
MAX_DIFF_CHARACTERS = 1_000_000


@dataclass(frozen=True, slots=True)
class Chunk:
    """The training between the checkpoints at `start` and `stop`. `cached` is true if it was already done."""

    start: int
    stop: int
    checkpoint: Path
    cached: bool
    metrics: Mapping[str, float]

    def __str__(self) -> str:
        reward = self.metrics.get("critic/score/mean")
        score = "" if reward is None else f", reward {reward:.3f}"
        return f"step {self.start}-{self.stop}{score}{skipped_suffix(self.cached)}"


@dataclass(frozen=True)
class Train(Stage[Chunk]):
    """The stage that trains from the newest checkpoint to step `stop`, unless the checkpoint of `stop` already exists.

    Each checkpoint is written during the next chunk. Only the last chunk (`is_last`) waits for its own checkpoint.
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
        return f"train/{run.title} step {self.start}-{self.stop}"

    def status(self, run: OpenRun) -> StageStatus:
        place = run.layout.checkpoints
        is_done = self.stop <= run.committed
        return StageStatus(self.name, run.settings_fingerprint, place, is_done, f"step {self.start}-{self.stop}")

    def check(self, trial: Trial) -> list[str]:
        if self.start > trial.run.committed:  # checked with the first chunk that is not done
            return []
        trial.try_scorers()
        trial.try_functions()
        return []

    def find(self, run: OpenRun) -> Chunk | None:
        if committed_step(run.config) < self.stop:
            return None
        return Chunk(self.start, self.stop, checkpoint_store(run.config).path_of(self.stop), cached=True, metrics={})

    def make(self, run: OpenRun) -> Chunk:
        record_start(run)
        result = call_trainer(run, "train", to_step=self.stop, settle=self.is_last)
        return Chunk(self.start, self.stop, Path(result["checkpoint"]), cached=False, metrics=result["metrics"])

    def describe(self, result: Chunk) -> str:
        return f"train: {result}"


def record_start(run: OpenRun) -> None:
    """Record the command, source and machine of a start in `run.json` and `code.diff`. File errors are only logged."""
    if run.is_origin_complete:
        return
    run.is_origin_complete = True
    try:
        commit, is_dirty = code_revision()
        facts = environment_facts(run_versions(run.config.runtime.python))
        run.note(command=run.command, git_commit=commit, git_dirty=is_dirty, environment=facts)
        write_text_atomically(run.layout.run_dir / DIFF_FILE, code_diff()[:MAX_DIFF_CHARACTERS])
    except OSError as error:
        log.warning("%s: how the training was started is not recorded: %s", run.layout.run_dir, error)
