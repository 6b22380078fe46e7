"""The model of step 0: what is known of it, once it is there. No torch."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlcore.checkpoint.catalog import HELD_OUT_LOSS
from rlcore.config import RunConfig
from rlcore.errors import MillraceError
from rlcore.run.inputs import RunInputs, find_initial_policy, has_configured_model, planned_initial_policy, stage_layout
from rlcore.run.layout import RunLayout
from rlcore.storage.locks import RunLock
from rlcore.storage.manifest import Manifest

REWARD = "sft/reward"
METRICS = ("sft/loss", "sft/accuracy", HELD_OUT_LOSS, "sft/held_out_accuracy", REWARD)
"""Metrics that the model's manifest keeps, by what follows the slash."""
SHOWN = ("reward", "held_out_loss")
"""Figures of a warm start that stand in its line."""
UNTRAINED = "untaught"
"""Folder of the model made from nothing, in that of a warm start."""


@dataclass(frozen=True, slots=True)
class InitialPolicy:
    """The model of step 0. `figures` after `steps` supervised steps: `loss`, `accuracy`,
    `held_out_loss`, `held_out_accuracy`, and `reward` where it was sampled."""

    directory: Path
    cached: bool
    steps: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path, manifest: Manifest | None, *, cached: bool) -> "InitialPolicy":
        """What a model's manifest records; a model from elsewhere has none."""
        values = {} if manifest is None else manifest.values
        names = [name.partition("/")[2] for name in METRICS]
        found = {name: float(values[name]) for name in names if isinstance(values.get(name), int | float)}
        return cls(directory, cached, int(values.get("steps", 0)), found)

    def __str__(self) -> str:
        if not self.steps:
            return f"no supervised steps: training starts from {self.directory}"
        shown = [f"{name.replace('_', '-')} {self.figures[name]:.3f}" for name in SHOWN if name in self.figures]
        skipped = ", skipped: done before" if self.cached else ""
        return f"{', '.join(shown)} after {self.steps} steps{skipped} ({self.directory})"


def known_initial_policy(config: RunConfig, inputs: RunInputs) -> InitialPolicy | None:
    """The model of step 0, if it is there and whole."""
    manifest = find_initial_policy(config, inputs.filtered_directory)
    if manifest is None and not has_configured_model(config):
        return None
    return InitialPolicy.of(planned_initial_policy(config, inputs.filtered_directory), manifest, cached=True)


def remove_leftovers(config: RunConfig, inputs: RunInputs) -> None:
    """Remove what a warm start that was killed at its end has left, once its model is there; not while it is in use."""
    stage = stage_layout(config, inputs.filtered_directory)
    if not config.warm_start.enabled or not any(folder.is_dir() for folder in _temporary_folders(stage)):
        return
    if known_initial_policy(config, inputs) is not None:
        with suppress(MillraceError), RunLock(stage.run_dir):
            remove_checkpoints(stage)


def remove_checkpoints(stage: RunLayout) -> None:
    """Remove what a warm start needs only until its model is published; its journal stays."""
    for folder in _temporary_folders(stage):
        shutil.rmtree(folder, ignore_errors=True)


def _temporary_folders(stage: RunLayout) -> tuple[Path, Path]:
    return stage.checkpoints, stage.run_dir / UNTRAINED
