"""The initial policy, its tokenizer, and the folder and settings of the warm start, which is the supervised training
that creates the initial policy. This module imports no torch."""

import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from pydantic import JsonValue

from rlcore.checkpoint.catalog import HELD_OUT_LOSS
from rlcore.config import DataConfig, MixtureData, RolloutConfig, RunConfig
from rlcore.config.fingerprint import changed_settings, fingerprint
from rlcore.config.model import INSTALL_SMOLLM2, SMOLLM2, SMOLLM2_SHA256, smollm2_file
from rlcore.errors import ConfigError, MillraceError, ModelError
from rlcore.run.layout import RunInputs, RunLayout, configured_model, generation_payload
from rlcore.runtime.interpreter import run_module, trainer_environment
from rlcore.storage.documents import content_digest
from rlcore.storage.locks import RunLock
from rlcore.storage.manifest import (
    FINGERPRINT,
    MANIFEST,
    Manifest,
    in_threads,
    read_finished,
    read_finished_or_set_aside,
)
from rlcore.storage.publish import published_directory, write_json_atomically

MODEL_FORMAT = 4
"""The version of the code that builds models and tokenizers, as a part of their fingerprints. Increase it if a change
of the code gives a different model or tokenizer for the same settings."""
MODEL_SUFFIXES = frozenset({".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"})
"""The suffixes of the model files that `digests_in` includes."""

REWARD = "sft/reward"
METRICS = ("sft/loss", "sft/accuracy", HELD_OUT_LOSS, "sft/held_out_accuracy", REWARD)
"""The metrics of a warm start. In the model's manifest, their names lack the prefix `sft/`."""
SHOWN = ("reward", "held_out_loss")  # the metrics in the display line of a warm start
REFERENCE = "reference"
"""The subfolder of a warm start's folder that stores the reference log-probabilities of preference pairs."""


def require_smollm2(folder: Path, has: Callable[[str], object] = find_spec) -> None:
    """Raise an error if `folder` does not exist and SmolLM2 cannot be converted into this folder: ConfigError if the
    GGUF file of SmolLM2 or the package gguf is missing, and ModelError if the file has the wrong SHA-256 digest.
    `has(name)`: a function that returns whether a package is installed."""
    if folder.is_dir():
        return
    file = smollm2_file()
    if file is None or not has("gguf"):
        what = "the package gguf, with which it is read, is" if file else "it is"
        raise ConfigError(
            f"model.path: must be on this machine; got {SMOLLM2}, and {what} not installed. {INSTALL_SMOLLM2}"
        )
    if (digest := content_digest(file)) != SMOLLM2_SHA256:
        rule = f"{file} must have the sha256 {SMOLLM2_SHA256[:16]}..."
        raise ModelError(f"model.path: {rule}; got {digest[:16]}.... {INSTALL_SMOLLM2}")


def ensure_configured_model(config: RunConfig) -> Path:
    """Return the folder of the model at `model.path`. Convert SmolLM2 if needed. Raises ModelError if this fails."""
    folder = configured_model(config)
    if config.model.path != SMOLLM2 or read_finished_or_set_aside(folder, error=ModelError) is not None:
        return folder
    file, python = smollm2_file(), config.runtime.python
    require_smollm2(folder, find_spec if python is None else trainer_environment(python).has)
    assert file is not None
    facts: dict[str, JsonValue] = {
        "kind": "model", "source": SMOLLM2, "reward": 0.0, "steps": 0, FINGERPRINT: folder.name,
    }  # fmt: skip
    with published_directory(folder, facts, error=ModelError) as temporary:
        # transformers prints a progress bar, and torch would stay in the memory of this process.
        run_module(python, "rlcore.models.load", str(file), str(temporary), error=ModelError)
    return folder


def planned_tokenizer(config: RunConfig) -> Path:
    """Return the tokenizer's folder. For a local model, it is the model's folder. Otherwise, it is the folder that
    `ensure_tokenizer` writes."""
    path = config.model.path
    if path == SMOLLM2 or (path is not None and Path(path).is_dir()):
        return configured_model(config)
    payload: dict[str, object] = {"format": MODEL_FORMAT}
    if path is not None:
        payload["hub_id"] = path
    else:
        scratch = config.model.scratch
        payload |= {"max_integer": scratch.max_integer, "max_position_embeddings": scratch.max_position_embeddings}
    return Path(config.paths.root).resolve() / "tokenizers" / fingerprint("tokenizer", payload)


def ensure_tokenizer(config: RunConfig) -> Path:
    """Return the tokenizer's folder. Build or download the tokenizer if needed. Raises ModelError if this fails."""
    path = config.model.path
    if path == SMOLLM2:
        return ensure_configured_model(config)
    directory = planned_tokenizer(config)
    if (path is not None and Path(path).is_dir()) or read_finished_or_set_aside(directory) is not None:
        return directory
    from rlcore.models.hub import MODEL_FILES
    from rlcore.models.tokenizer import build_scratch_tokenizer, end_of_text_ids, load_tokenizer

    with published_directory(directory, {"kind": "tokenizer", "hub_id": path, FINGERPRINT: directory.name}) as folder:
        if path is None:
            build_scratch_tokenizer(config.model.scratch, folder)
        else:
            load_tokenizer(path).save_pretrained(folder)
            stops: list[JsonValue] = [*sorted(end_of_text_ids(path))]
            write_json_atomically(folder / MODEL_FILES[0], {"eos_token_id": stops})
    return directory


def initial_policy_fingerprint(config: RunConfig, filtered_directory: Path) -> str:
    """Return the fingerprint of the initial policy, which covers the model, the seed and the warm start."""
    path = config.model.path
    if path == SMOLLM2:
        path = configured_model(config).name
    payload: dict[str, object] = {"format": MODEL_FORMAT, "seed": config.seed, "path": path}
    if path is not None and config.model.path != SMOLLM2:
        payload["files"] = digests_in(Path(path).expanduser())
    if config.model.path is None:
        payload["scratch"] = config.model.scratch.model_dump(mode="json")
    warm = config.warm_start
    if warm.enabled:
        payload["warm_start"] = warm.model_dump(mode="json", exclude={"demonstrations": True, "optim": {"offload"}})
        payload["filtered"] = filtered_directory.name
        payload["dtype"] = config.model.dtype
        payload |= changed_settings(config, "data.seed")  # this seed splits demonstrations too
        if config.is_supervised and config.model.lora is not None:
            payload["lora"] = config.model.lora.model_dump(mode="json", exclude={"offload"})
    if warm.enabled and warm.demonstrations is not None:
        payload["demonstrations"] = content_digest(Path(warm.demonstrations))
    if warm.enabled and warm.stop_at_reward is not None:
        payload |= generation_payload(config) | changed_settings(config, "rollout.dtype")
    return fingerprint("start-model", payload)


def planned_initial_policy(config: RunConfig, filtered_directory: Path) -> Path:
    """Return the folder of the initial policy, which may not exist yet."""
    if config.model.path is not None and not config.warm_start.enabled:
        return configured_model(config)
    return Path(config.paths.root).resolve() / "models" / initial_policy_fingerprint(config, filtered_directory)


def has_configured_model(config: RunConfig) -> bool:
    """Return whether training uses the files at `model.path` directly, without a warm start or a conversion."""
    return config.model.path not in (None, SMOLLM2) and not config.warm_start.enabled


def require_whole_model(key: str, path: str | None) -> Manifest | None:
    """Return the manifest of the model at `path`, or None if Millrace has not written this model. `key`: the settings
    key of the model, for the error message. Raises ModelError if the model is damaged."""
    try:
        return None if path is None else read_finished(Path(path), error=ModelError)
    except ModelError as damage:
        raise ModelError(f"{key}: {damage} If the change is yours, delete its manifest.json.") from damage


def model_paths(config: RunConfig) -> dict[str, str | None]:
    """Return the path or hub id of each model by the model's settings key. The value is None if the key is not set."""
    critic, teacher = config.critic, config.algo.teacher
    others = teacher.by_source if teacher else {}
    return {
        "model.path": config.model.path,
        "critic.path": critic.path if critic else None,
        "algo.teacher.path": teacher.path if teacher else None,
        **{f"algo.teacher.by_source.{source}": path for source, path in others.items()},
    }


def model_digests(config: RunConfig) -> dict[str, dict[str, str]]:
    """Return the digests of the files of each local model, by the model's settings key."""
    named = {key: Path(path).expanduser() for key, path in model_paths(config).items() if path is not None}
    return {key: digests_in(folder) for key, folder in named.items() if folder.exists()}


def digests_in(folder: Path) -> dict[str, str]:
    """Return the SHA-256 digest of each model file in `folder`, by file name."""
    files = [file for file in sorted(folder.glob("*")) if file.suffix in MODEL_SUFFIXES and file.is_file()]
    counted = [file for file in files if file.name != MANIFEST]
    return dict(in_threads(lambda file: (file.name, content_digest(file)), counted))


@dataclass(frozen=True, slots=True)
class InitialPolicy:
    """The initial policy, its metrics and its number of supervised steps. `cached`: whether the model already existed
    when it was requested."""

    directory: Path
    cached: bool
    steps: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path, manifest: Manifest | None, *, cached: bool) -> "InitialPolicy":
        """Return the initial policy in a folder. The metrics are read from `manifest` if it is given."""
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
    """Return the initial policy if it exists and is intact, otherwise None. A damaged folder is renamed, but damage at
    `model.path` raises ModelError."""
    folder = planned_initial_policy(config, inputs.filtered_directory)
    if has_configured_model(config):
        return InitialPolicy.of(folder, require_whole_model("model.path", config.model.path), cached=True)
    manifest = read_finished_or_set_aside(folder)
    return None if manifest is None else InitialPolicy.of(folder, manifest, cached=True)


def remove_leftovers(config: RunConfig, inputs: RunInputs) -> None:
    """Remove the checkpoints of a warm start that was killed after it had published its model. Do nothing if another
    process has locked the warm start's folder."""
    stage = stage_layout(config, inputs.filtered_directory)
    if not config.warm_start.enabled or not any(folder.is_dir() for folder in _temporary_folders(stage)):
        return
    if known_initial_policy(config, inputs) is not None:
        with suppress(MillraceError), RunLock(stage.run_dir):
            remove_checkpoints(stage)


def remove_checkpoints(stage: RunLayout) -> None:
    """Remove a warm start's checkpoints and stored reference log-probabilities, but keep its journal."""
    for folder in _temporary_folders(stage):
        shutil.rmtree(folder, ignore_errors=True)


def _temporary_folders(stage: RunLayout) -> tuple[Path, ...]:
    return stage.checkpoints, stage.run_dir / REFERENCE


def stage_layout(config: RunConfig, filtered_directory: Path) -> RunLayout:
    """Return the layout of the warm start's folder. Runs with the same initial policy share this folder."""
    root = Path(config.paths.root).resolve()
    name = planned_initial_policy(config, filtered_directory).name
    return RunLayout(root, root / "warm-starts" / f"warm-start-{name}")


def stage_settings(config: RunConfig, num_demonstrations: int | None = None) -> RunConfig:
    """Return the settings of the warm start. Settings that it does not use get defaults, so that runs that differ
    only in these settings can share a warm start. `num_demonstrations`: the number of training demonstrations, which
    limits the number of steps if `warm_start.epochs` is set."""
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
