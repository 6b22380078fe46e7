"""The inputs of a training: folders of earlier stages, named by fingerprints, and the digests of models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from pydantic import JsonValue

from rlcore.config import RunConfig, SuiteConfig
from rlcore.config.check import suite_settings
from rlcore.config.data import scorers_of
from rlcore.config.fingerprint import changed_settings, fingerprint
from rlcore.config.model import INSTALL_SMOLLM2, SMOLLM2, SMOLLM2_SHA256, smollm2_file
from rlcore.errors import DataError, ModelError
from rlcore.run.layout import RunLayout
from rlcore.runtime.interpreter import run_module, trainer_environment
from rlcore.storage.documents import content_digest
from rlcore.storage.manifest import (
    FINGERPRINT,
    MANIFEST,
    Manifest,
    in_threads,
    part_directories,
    read_finished,
    read_finished_or_set_aside,
)
from rlcore.storage.publish import published_directory, write_json_atomically
from rlcore.tracking.lineage import Origin, read_origin, stage_of
from rlcore.user_code import code_for

MODEL_FORMAT = 4
"""The version in fingerprints of models and tokenizers. Increase it when the same settings give a new result."""
MODEL_SUFFIXES = frozenset({".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"})
"""The files that a model's digests include."""
_SUITE = "suite "  # prefix of a suite's stage in the run's record


@dataclass(frozen=True, slots=True)
class RunInputs:
    """The folders that the stages before training have published."""

    filtered_directory: Path
    tokenizer_directory: Path
    dataset_directory: Path | None = None
    demonstrations_directory: Path | None = None  # tokenized demonstrations, or None to use the solutions in the rows
    suites: Mapping[str, Path] = field(default_factory=dict)  # filtered rows of each suite

    @property
    def folders(self) -> dict[str, Path]:
        """The folder of each stage by the stage's name in the run's record. Stages without a folder are left out."""
        named = {"dataset": self.dataset_directory, "filtered": self.filtered_directory}
        named |= {"tokenizer": self.tokenizer_directory, "demonstrations": self.demonstrations_directory}
        named |= {f"{_SUITE}{name}": path for name, path in self.suites.items()}
        return {name: path for name, path in named.items() if path is not None}

    def write(self, config: RunConfig, layout: RunLayout) -> None:
        """Write the settings and these inputs to the run's record."""
        Origin(config, stages=tuple(stage_of(*each) for each in self.folders.items())).write(layout.run_dir)

    @classmethod
    def of(cls, origin: Origin) -> "RunInputs | None":
        """Return the inputs in a run's record, or None if the record has no inputs yet."""
        found = {stage.name: Path(stage.path) for stage in origin.stages}
        if not {"filtered", "tokenizer"} <= found.keys():
            return None
        suites = {name.removeprefix(_SUITE): path for name, path in found.items() if name.startswith(_SUITE)}
        return cls(found["filtered"], found["tokenizer"], found.get("dataset"), found.get("demonstrations"), suites)

    @classmethod
    def read(cls, layout: RunLayout) -> "RunInputs":
        """Read the inputs from the run's record. Raises DataError if the record has no inputs."""
        origin = read_origin(layout.run_dir)
        found = None if origin is None else cls.of(origin)
        if found is None:
            raise DataError(
                f"{layout.run_json}: has no inputs of the run; start it by `millrace run` or `millrace train`, which "
                "make them"
            )
        return found

    @property
    def has_training_rows(self) -> bool:
        """True if there are training rows. An evaluation has only held-out rows."""
        return all(file.is_file() for file in self.train_parquets)

    def for_suite(self, name: str) -> "RunInputs":
        """Return these inputs with the rows of a suite. Raises DataError if the suite's rows do not exist yet."""
        if name not in self.suites:
            raise DataError(
                f"validation.suites: the rows of {name} are not made; start the run again, which makes them"
            )
        return replace(self, filtered_directory=self.suites[name], demonstrations_directory=None)

    @property
    def parts(self) -> tuple[Path, ...]:
        """The folders of filtered rows: one for each data source of a mixture, in the order of the settings."""
        return part_directories(self.filtered_directory)

    @property
    def train_parquets(self) -> tuple[Path, ...]:
        """The files of filtered training rows, one for each data source."""
        return tuple(part / "train.parquet" for part in self.parts)

    @property
    def validation_parquets(self) -> tuple[Path, ...]:
        """The files of filtered held-out rows, one for each data source."""
        return tuple(part / "validation.parquet" for part in self.parts)


def suite_fingerprint(config: RunConfig, suite: SuiteConfig, filtered_directory: Path) -> str:
    """Return a fingerprint of a suite's rows, sampling and scoring."""
    settings = suite_settings(config, suite)
    functions = [name for name in (*scorers_of(suite.data), suite.data.environment, *settings.episode.tools) if name]
    payload = {
        "rows": filtered_directory.name,
        "seed": suite.seed,
        "max_response_tokens": settings.rollout.max_response_tokens,
        "judging": suite.evaluation.model_dump(mode="json", exclude={"every_steps"}),
        "code": {name: {source.name: source.sha256 for source in code_for(name)} for name in functions},
        **_scoring_payload(config),
    }
    return fingerprint("suite", payload)


def generation_payload(config: RunConfig) -> dict[str, object]:
    """Return the part of a fingerprint that covers sampling, scoring and the code of the scorers."""
    return {
        "max_response_tokens": config.rollout.max_response_tokens,
        "sampling": config.rollout.sampling.model_dump(mode="json"),
        "scorers": [code_payload(scorer) for scorer in scorers_of(config.data)],
        **_scoring_payload(config),
    }


def _scoring_payload(config: RunConfig) -> dict[str, object]:
    changed = changed_settings(config, "reward", "rollout.skip_special_tokens", "sandbox")
    payload: dict[str, object] = {"scoring": changed} if changed else {}
    if rules := config.reward.judge.rules:
        payload["rules"] = code_payload(rules)
    return payload


def code_payload(function: str) -> dict[str, object]:
    """Return the part of a fingerprint that covers the name and the source code of a function `module:function`."""
    return {"name": function, "code": {source.name: source.sha256 for source in code_for(function)}}


def configured_model(config: RunConfig) -> Path:
    """Return the folder of `model.path`, which must be set. For SmolLM2, it is the folder of the converted model."""
    assert config.model.path is not None
    if config.model.path != SMOLLM2:
        return Path(config.model.path)
    return Path(config.paths.root).resolve() / "models" / f"smollm2-{SMOLLM2_SHA256[:16]}"


def require_smollm2(folder: Path, has: Callable[[str], object] = find_spec) -> None:
    """Raise ModelError if SmolLM2 is missing and cannot be converted. `has`: whether a package is installed."""
    if folder.is_dir():
        return
    file = smollm2_file()
    if file is None or not has("gguf"):
        what = "the package gguf, with which it is read, is" if file else "it is"
        raise ModelError(
            f"model.path: must be on this machine; got {SMOLLM2}, and {what} not installed. {INSTALL_SMOLLM2}"
        )
    if (digest := content_digest(file)) != SMOLLM2_SHA256:
        rule = f"{file} must have the sha256 {SMOLLM2_SHA256[:16]}..."
        raise ModelError(f"model.path: {rule}; got {digest[:16]}.... {INSTALL_SMOLLM2}")


def ensure_configured_model(config: RunConfig) -> Path:
    """Return the folder of the model at `model.path`. Convert SmolLM2 first. Raises ModelError if this fails."""
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
        if python is None:
            from rlcore.models.load import write_smollm2

            write_smollm2(file, temporary)
        else:
            run_module(python, "rlcore.models.load", str(file), str(temporary), error=ModelError)
    return folder


def planned_tokenizer(config: RunConfig) -> Path:
    """Return the tokenizer's folder: a local model's folder, otherwise the folder that `ensure_tokenizer` writes."""
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


def find_initial_policy(config: RunConfig, filtered_directory: Path) -> Manifest | None:
    """Return the manifest of the initial policy, or None if Millrace has not built it. A damaged folder is renamed, but
    damage at `model.path` raises ModelError."""
    if has_configured_model(config):
        return require_whole_model("model.path", config.model.path)
    return read_finished_or_set_aside(planned_initial_policy(config, filtered_directory))


def has_configured_model(config: RunConfig) -> bool:
    """Return whether training uses the files at `model.path` directly, without a warm start or a conversion."""
    return config.model.path not in (None, SMOLLM2) and not config.warm_start.enabled


def require_whole_model(key: str, path: str | None) -> Manifest | None:
    """Return the manifest of the model at `path`, or None if Millrace has not written this model. `key`: the setting
    that names the model. Raises ModelError if the model is damaged."""
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
    """Return the SHA-256 digest of each file of a model by the file's name."""
    files = [file for file in sorted(folder.glob("*")) if file.suffix in MODEL_SUFFIXES and file.is_file()]
    counted = [file for file in files if file.name != MANIFEST]
    return dict(in_threads(lambda file: (file.name, content_digest(file)), counted))
