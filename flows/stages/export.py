"""The stages that export the weights of checkpoints as transformers directories."""

from dataclasses import dataclass, replace
from pathlib import Path

from flows.progress import skipped_suffix
from flows.stages.inputs import call_trainer, last_step
from flows.stages.stage import Stage, StageStatus, remake_note
from flows.work.open_run import OpenRun
from rlcore.checkpoint.catalog import by_score, is_exported, scan
from rlcore.config import RunConfig
from rlcore.errors import CheckpointError
from rlcore.run.layout import RunLayout
from rlcore.storage.manifest import read_finished_or_reason


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """The exported weights of a step. `is_best` is true if they have the best score and are not the last weights."""

    directory: Path
    step: int
    cached: bool
    is_best: bool = False

    def __str__(self) -> str:
        return f"step {self.step}{skipped_suffix(self.cached)} ({self.directory})"


@dataclass(frozen=True)
class Export(Stage[ExportedWeights]):
    """The stage that exports the weights of the newest checkpoint, unless they are already exported."""

    name = "export"
    in_trainer = True

    def status(self, run: OpenRun) -> StageStatus:
        return _status(self.name, run, run.layout.exported_model, last_step(run))

    def asset(self, run: OpenRun) -> Path | None:
        return run.layout.exported_model

    def find(self, run: OpenRun) -> ExportedWeights | None:
        return find_weights(run.layout.exported_model, last_step(run))

    def make(self, run: OpenRun) -> ExportedWeights:
        return _export(run, "last")

    def describe(self, result: ExportedWeights) -> str:
        return f"weights: {result}"


@dataclass(frozen=True)
class ExportBest(Stage[ExportedWeights]):
    """The stage that exports the weights with the best held-out score, unless they are already exported.

    If the last checkpoint is the best one or `tracking.log_best` is off, the result is the export of the last
    checkpoint.
    """

    name = "export-best"
    in_trainer = True

    def title(self, run: OpenRun) -> str:
        return f"export {run.title} best"

    def status(self, run: OpenRun) -> StageStatus:
        step = best_step_to_export(run.config, run.layout, last_step(run))
        if step is None:
            return _status(self.name, run, run.layout.exported_model, last_step(run))
        return _status(self.name, run, run.layout.exported_best, step)

    def find(self, run: OpenRun) -> ExportedWeights | None:
        last = last_step(run)
        step = best_step_to_export(run.config, run.layout, last)
        if step is None:
            return find_weights(run.layout.exported_model, last)
        found = find_weights(run.layout.exported_best, step)
        return found and replace(found, is_best=True)

    def make(self, run: OpenRun) -> ExportedWeights:
        return replace(_export(run, "best"), is_best=True)

    def describe(self, result: ExportedWeights) -> str:
        return f"best weights: {result}" if result.is_best else ""


def _export(run: OpenRun, checkpoint: str) -> ExportedWeights:
    result = call_trainer(run, "export", checkpoint=checkpoint)
    return ExportedWeights(Path(result["directory"]), int(result["step"]), cached=False)


def _status(name: str, run: OpenRun, place: Path, step: int) -> StageStatus:
    exported, damage = read_finished_or_reason(place, error=CheckpointError)
    is_done = exported is not None and exported.values.get("step") == step and run.is_trained
    return StageStatus(name, run.settings_fingerprint, place, is_done, remake_note(damage))


def find_weights(directory: Path, step: int) -> ExportedWeights | None:
    """Return the exported weights of a step, or None if they do not exist. A damaged folder is set aside."""
    return ExportedWeights(directory, step, cached=True) if is_exported(directory, step) else None


def best_step_to_export(config: RunConfig, layout: RunLayout, last_step: int) -> int | None:
    """Return the step with the best score, or None if it is the last step or `tracking.log_best` is off."""
    if not (config.tracking.enabled and config.tracking.log_best):
        return None
    scored = by_score(scan(layout.checkpoints).checkpoints)
    return scored[-1].step if scored and scored[-1].step != last_step else None
