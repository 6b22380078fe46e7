"""The model of step 0: what is known of it, once it is there. No torch."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlcore.checkpoint.catalog import HELD_OUT_LOSS
from rlcore.config import RunConfig
from rlcore.errors import MillraceError
from rlcore.run.inputs import RunInputs, find_start_model, is_given, planned_start_model, stage_layout
from rlcore.run.layout import RunLayout
from rlcore.storage.locks import RunLock
from rlcore.storage.manifest import Manifest

REWARD = "sft/reward"
FIGURES = ("sft/loss", "sft/accuracy", HELD_OUT_LOSS, "sft/held_out_accuracy", REWARD)
"""Metrics that the model's manifest keeps, by what follows the slash."""
SHOWN = ("reward", "held_out_loss")
"""Figures of a warm start that stand in its line."""
UNTAUGHT = "untaught"
"""Folder of the model made from nothing, in that of a warm start."""


@dataclass(frozen=True, slots=True)
class StartModel:
    """The model of step 0. `figures` after `steps` supervised steps: `loss`, `accuracy`,
    `held_out_loss`, `held_out_accuracy`, and `reward` where it was sampled."""

    directory: Path
    cached: bool
    steps: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path, manifest: Manifest | None, *, cached: bool) -> "StartModel":
        """What a model's manifest records; a model from elsewhere has none."""
        values = {} if manifest is None else manifest.values
        names = [name.partition("/")[2] for name in FIGURES]
        found = {name: float(values[name]) for name in names if isinstance(values.get(name), int | float)}
        return cls(directory, cached, int(values.get("steps", 0)), found)

    def __str__(self) -> str:
        if not self.steps:
            return f"no supervised steps: training starts from {self.directory}"
        shown = [f"{name.replace('_', '-')} {self.figures[name]:.3f}" for name in SHOWN if name in self.figures]
        skipped = ", skipped: done before" if self.cached else ""
        return f"{', '.join(shown)} after {self.steps} steps{skipped} ({self.directory})"


def known_start_model(config: RunConfig, inputs: RunInputs) -> StartModel | None:
    """The model of step 0, if it is there and whole."""
    manifest = find_start_model(config, inputs.filtered_directory)
    if manifest is None and not is_given(config):
        return None
    return StartModel.of(planned_start_model(config, inputs.filtered_directory), manifest, cached=True)


def remove_left(config: RunConfig, inputs: RunInputs) -> None:
    """Remove what a warm start that was killed at its end has left, once its model is there; not while it is in use."""
    stage = stage_layout(config, inputs.filtered_directory)
    if not config.warm_start.enabled or not any(folder.is_dir() for folder in _passing(stage)):
        return
    if known_start_model(config, inputs) is not None:
        with suppress(MillraceError), RunLock(stage.run_dir):
            remove_passing(stage)


def remove_passing(stage: RunLayout) -> None:
    """Remove what a warm start needs only until its model is published; its journal stays."""
    for folder in _passing(stage):
        shutil.rmtree(folder, ignore_errors=True)


def _passing(stage: RunLayout) -> tuple[Path, Path]:
    return stage.checkpoints, stage.run_dir / UNTAUGHT
