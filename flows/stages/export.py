"""The weights of a checkpoint as a transformers directory."""

from dataclasses import dataclass, replace
from pathlib import Path

from flows.progress import skipped
from flows.stages.stage import Stage, StageStatus, made_again
from flows.stages.trainer import call_trainer
from flows.work.checkpoints import committed_step
from flows.work.open_run import OpenRun
from rlcore.checkpoint.catalog import by_score, is_exported, scan
from rlcore.config import RunConfig
from rlcore.errors import CheckpointError
from rlcore.run.layout import RunLayout
from rlcore.storage.finished import finished_or_why


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a step in a transformers directory. `is_best`: of the best held-out score, and not the last."""

    directory: Path
    step: int
    cached: bool
    is_best: bool = False

    def __str__(self) -> str:
        return f"step {self.step}{skipped(self.cached)} ({self.directory})"


@dataclass(frozen=True)
class Export(Stage[Weights]):
    """Write the newest checkpoint's weights for others, or find them."""

    name = "export"
    in_trainer = True

    def status(self, run: OpenRun) -> StageStatus:
        return _status(self.name, run, run.layout.exported_model, run.committed)

    def known(self, run: OpenRun) -> Weights | None:
        return found_weights(run.layout.exported_model, committed_step(run.config))

    def make(self, run: OpenRun) -> Weights:
        return _written(run, "last")

    def describe(self, result: Weights) -> str:
        return f"weights: {result}"


@dataclass(frozen=True)
class ExportBest(Stage[Weights]):
    """Write the weights of the best held-out score, or find them; those of the last checkpoint where that has it, or
    where they are not wanted (`tracking.log_best`)."""

    name = "export-best"
    in_trainer = True

    def title(self, run: OpenRun) -> str:
        return f"export {run.title} best"

    def status(self, run: OpenRun) -> StageStatus:
        step = best_step_wanted(run.config, run.layout, run.committed)
        if step is None:
            return _status(self.name, run, run.layout.exported_model, run.committed)
        return _status(self.name, run, run.layout.exported_best, step)

    def known(self, run: OpenRun) -> Weights | None:
        last = committed_step(run.config)
        step = best_step_wanted(run.config, run.layout, last)
        if step is None:
            return found_weights(run.layout.exported_model, last)
        found = found_weights(run.layout.exported_best, step)
        return found and replace(found, is_best=True)

    def make(self, run: OpenRun) -> Weights:
        return replace(_written(run, "best"), is_best=True)

    def describe(self, result: Weights) -> str:
        return f"best weights: {result}" if result.is_best else ""


def _written(run: OpenRun, checkpoint: str) -> Weights:
    result = call_trainer(run, "export", checkpoint=checkpoint)
    return Weights(Path(result["directory"]), int(result["step"]), cached=False)


def _status(name: str, run: OpenRun, place: Path, step: int) -> StageStatus:
    exported, damage = finished_or_why(place, error=CheckpointError)
    is_done = exported is not None and exported.values.get("step") == step and run.is_trained
    return StageStatus(name, run.settings_fingerprint, place, is_done, made_again(damage))


def found_weights(directory: Path, step: int) -> Weights | None:
    """The weights of a step, if they are there; damaged ones are set aside."""
    return Weights(directory, step, cached=True) if is_exported(directory, step) else None


def best_step_wanted(config: RunConfig, layout: RunLayout, last_step: int) -> int | None:
    """Step of the checkpoint with the highest held-out score, if its weights are wanted and not those of the last."""
    if not (config.tracking.enabled and config.tracking.log_best):
        return None
    scored = by_score(scan(layout.checkpoints).checkpoints)
    return scored[-1].step if scored and scored[-1].step != last_step else None
