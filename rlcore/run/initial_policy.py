"""The initial policy (the model of step 0), and the folder and settings of its warm start. Imports no torch."""

import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlcore.checkpoint.catalog import HELD_OUT_LOSS
from rlcore.config import DataConfig, MixtureData, RolloutConfig, RunConfig
from rlcore.errors import MillraceError
from rlcore.run.inputs import RunInputs, find_initial_policy, has_configured_model, planned_initial_policy
from rlcore.run.layout import RunLayout
from rlcore.storage.locks import RunLock
from rlcore.storage.manifest import Manifest

REWARD = "sft/reward"
METRICS = ("sft/loss", "sft/accuracy", HELD_OUT_LOSS, "sft/held_out_accuracy", REWARD)
"""The metrics in the model's manifest, without the prefix `sft/`."""
SHOWN = ("reward", "held_out_loss")  # the metrics in the display line of a warm start
REFERENCE = "reference"
"""The subfolder of a warm start's folder that stores the reference log-probabilities of preference pairs."""


@dataclass(frozen=True, slots=True)
class InitialPolicy:
    """The initial policy, its metrics and the number of supervised steps. `cached`: the policy already existed."""

    directory: Path
    cached: bool
    steps: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path, manifest: Manifest | None, *, cached: bool) -> "InitialPolicy":
        """Return the initial policy in a folder. The folder's manifest, if there is one, has the metrics."""
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
    """Return the initial policy if it exists and is intact, otherwise None."""
    manifest = find_initial_policy(config, inputs.filtered_directory)
    if manifest is None and not has_configured_model(config):
        return None
    return InitialPolicy.of(planned_initial_policy(config, inputs.filtered_directory), manifest, cached=True)


def remove_leftovers(config: RunConfig, inputs: RunInputs) -> None:
    """Remove checkpoints that a killed warm start left after it published its model. Skip a locked folder."""
    stage = stage_layout(config, inputs.filtered_directory)
    if not config.warm_start.enabled or not any(folder.is_dir() for folder in _temporary_folders(stage)):
        return
    if known_initial_policy(config, inputs) is not None:
        with suppress(MillraceError), RunLock(stage.run_dir):
            remove_checkpoints(stage)


def remove_checkpoints(stage: RunLayout) -> None:
    """Remove a warm start's checkpoints and stored DPO reference, but keep its journal."""
    for folder in _temporary_folders(stage):
        shutil.rmtree(folder, ignore_errors=True)


def _temporary_folders(stage: RunLayout) -> tuple[Path, ...]:
    return stage.checkpoints, stage.run_dir / REFERENCE


def stage_layout(config: RunConfig, filtered_directory: Path) -> RunLayout:
    """Return the layout of the warm start's folder. Runs with the same settings share this folder."""
    root = Path(config.paths.root).resolve()
    name = planned_initial_policy(config, filtered_directory).name
    return RunLayout(root, root / "warm-starts" / f"warm-start-{name}")


def stage_settings(config: RunConfig, num_demonstrations: int | None = None) -> RunConfig:
    """Return the settings of the warm start. All other settings get defaults, so runs can share a warm start."""
    usual, warm, data = RunConfig(), config.warm_start, config.data
    samples, is_dpo = warm.stop_at_reward is not None, warm.loss == "dpo"
    total, most_tokens = warm.max_steps, warm.max_tokens * (2 if is_dpo else 1)  # a pair is in one micro-batch
    if warm.epochs is not None and num_demonstrations is not None:
        total = min(total, math.ceil(warm.epochs * num_demonstrations / warm.batch_size))
    if isinstance(data, MixtureData):  # all demonstrations are shown, so weights are unused
        data = data.model_copy(update={"parts": tuple(part.model_copy(update={"weight": 1.0}) for part in data.parts)})
    if not samples:
        data = _without_responses(data)
    filtered = config.filter
    if samples and warm.demonstrations is not None:  # memory is planned by the sum of prompt and response lengths
        longest = max(filtered.max_prompt_tokens, most_tokens - config.rollout.max_response_tokens)
        filtered = filtered.model_copy(update={"max_prompt_tokens": longest})
    trainer = config.trainer.model_copy(
        update={
            "total_steps": total,
            "steps_per_chunk": warm.steps_per_chunk,
            "batch_size": warm.batch_size,
            "mini_batch_size": warm.batch_size,
            "epochs_per_batch": 1,
            "old_logprobs": "auto",
        }
    )
    length = config.rollout.max_response_tokens if samples else max(1, most_tokens - filtered.max_prompt_tokens)
    rollout = RolloutConfig(engine="none", samples_per_prompt=1, max_response_tokens=length)
    if samples:
        names = ("sampling", "skip_special_tokens", "max_num_seqs", "dtype")
        rollout = rollout.model_copy(update={"engine": "hf", **{name: getattr(config.rollout, name) for name in names}})
    scratch = config.model.scratch if config.model.path is None else usual.model.scratch
    lora = config.model.lora if config.is_supervised else None  # before other steps, all weights are trained
    is_alone = config.runtime.num_workers == 1 and config.runtime.ray_address is None
    unused = ["run_id", "tags", "algo", "critic", "pass_rates", "episode", "validation"]
    unused += [] if samples else ["reward", "sandbox"]
    changes: dict[str, object] = {
        **{name: getattr(usual, name) for name in unused},
        "name": "warm-start",
        "data": data,
        "filter": filtered,
        "model": config.model.model_copy(update={"lora": lora, "share_prompts": is_dpo, "scratch": scratch}),
        "optim": warm.optim,
        "rollout": rollout,
        "trainer": trainer,
        "checkpoint": config.checkpoint.model_copy(update={"keep_best": 1, "keep_every_steps": 0}),
        "warm_start": warm.model_copy(update={"demonstrations": None}),  # the fingerprint includes the content
        "runtime": config.runtime.model_copy(update={"backend": "local"}) if is_alone else config.runtime,
        "tracking": config.tracking.model_copy(update={"log_best": False, "registered_model": None}),
    }
    return config.model_copy(update=changes)


def _without_responses(data: DataConfig) -> DataConfig:
    changes: dict[str, object] = {"environment": "", "scorer": type(data).model_fields["scorer"].default}
    if isinstance(data, MixtureData):
        parts = (part.model_copy(update={"data": _without_responses(part.data)}) for part in data.parts)
        changes["parts"] = tuple(parts)
    return data.model_copy(update=changes)
