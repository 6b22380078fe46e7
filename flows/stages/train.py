"""Training, a chunk of steps at a time, and the record of where the run comes from."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from data.references import check_parts
from data.stage import SPLITS
from flows.progress import skipped
from flows.stages.rows import inputs_of, planned_dataset
from flows.stages.stage import Stage, StageStatus
from flows.stages.trainer import call_trainer
from flows.stages.trials import Trial
from flows.work.checkpoints import checkpoint_store, committed_step
from flows.work.open_run import OpenRun
from rlcore.config import RunConfig
from rlcore.config.suite import suite_settings
from rlcore.run.inputs import planned_start_model
from rlcore.run.pass_rates import planned_pass_rates
from rlcore.storage.publish import write_text_atomically
from rlcore.tracking.lineage import (
    PASS_RATES_STAGE,
    Lineage,
    code_diff,
    code_revision,
    environment_facts,
    stage_of,
)
from rlcore.tracking.lineage import Stage as Origin
from rlcore.user_code import code_of

log = logging.getLogger(__name__)

DIFF_FILE = "code.diff"
"""What the source had changed since its commit when the run was last started."""
MAX_DIFF_CHARACTERS = 1_000_000


@dataclass(frozen=True, slots=True)
class Chunk:
    """Training from the checkpoint at `start` to the one at `stop`; `skipped`: it was committed already."""

    start: int
    stop: int
    checkpoint: Path
    skipped: bool
    metrics: Mapping[str, float]

    def __str__(self) -> str:
        reward = self.metrics.get("critic/score/mean")
        score = "" if reward is None else f", reward {reward:.3f}"
        return f"step {self.start}-{self.stop}{score}{skipped(self.skipped)}"


@dataclass(frozen=True)
class Train(Stage[Chunk]):
    """Train from the newest checkpoint to `stop`, unless that is committed.

    The checkpoint is written while the next chunk is trained; the last one is waited for (`is_last`).
    """

    name = "train"
    in_trainer = True
    start: int
    stop: int
    is_last: bool

    @classmethod
    def chunks(cls, config: RunConfig, to_step: int | None = None) -> "list[Train]":
        """The chunks: their ends are multiples of `trainer.steps_per_chunk`, and the run's end (or `to_step`)."""
        size, total = config.trainer.steps_per_chunk, to_step or config.trainer.total_steps
        return [cls(start, min(start + size, total), start + size >= total) for start in range(0, total, size)]

    def title(self, run: OpenRun) -> str:
        return f"train/{run.title} step {self.start}-{self.stop}"

    def status(self, run: OpenRun) -> StageStatus:
        place = run.layout.checkpoints
        is_done = self.stop <= run.committed
        return StageStatus(self.name, run.settings_fingerprint, place, is_done, f"step {self.start}-{self.stop}")

    def check(self, trial: Trial) -> list[str]:
        if self.start > trial.run.committed:  # the first chunk that is not done has checked the same
            return []
        trial.try_scorers()
        trial.try_functions()
        config = trial.config
        suites = (suite_settings(config, suite) for suite in config.validation.suites)
        return [check_parts(config, keep=False), *(check_parts(suite, SPLITS[1:], keep=False) for suite in suites)]

    def known(self, run: OpenRun) -> Chunk | None:
        if committed_step(run.config) < self.stop:
            return None
        return Chunk(self.start, self.stop, checkpoint_store(run.config).path_of(self.stop), skipped=True, metrics={})

    def make(self, run: OpenRun) -> Chunk:
        record_lineage(run)
        result = call_trainer(run, "train", to_step=self.stop, settle=self.is_last)
        return Chunk(self.start, self.stop, Path(result["checkpoint"]), skipped=False, metrics=result["metrics"])

    def describe(self, result: Chunk) -> str:
        return f"train: {result}"


def record_lineage(run: OpenRun) -> None:
    """Write `lineage.json` and `code.diff` into the run's folder, once for each start; a lack of room ends no run."""
    if run.has_lineage:
        return
    run.has_lineage = True
    try:
        commit, dirty = code_revision()
        lineage = Lineage(
            stages=_origins(run),
            command=run.command,
            git_commit=commit,
            git_dirty=dirty,
            environment=environment_facts(),
        )
        lineage.write(run.layout.run_dir)
        write_text_atomically(run.layout.run_dir / DIFF_FILE, code_diff()[:MAX_DIFF_CHARACTERS])
    except OSError as error:
        log.warning("%s: where the run comes from was not noted: %s", run.layout.run_dir, error)


def _origins(run: OpenRun) -> tuple[Origin, ...]:
    inputs = inputs_of(run)
    folders = {
        "dataset": planned_dataset(run.config),
        "filtered": inputs.filtered_directory,
        "tokenizer": inputs.tokenizer_directory,
        "start model": planned_start_model(run.config, inputs.filtered_directory),
    }
    if run.config.pass_rates.is_wanted:
        folders[PASS_RATES_STAGE] = planned_pass_rates(run.config, inputs.filtered_directory)
    code = code_of(run.config)
    kept = Origin("code", code.fingerprint, str(run.layout.code), {"files": ", ".join(code.sources)})
    return (kept, *(stage_of(name, folder) for name, folder in folders.items()))
