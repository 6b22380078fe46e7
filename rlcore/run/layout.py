"""The folders of a run, the fingerprints of its inputs, and its need for disk space. This module imports no torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlcore.config import RunConfig, SuiteConfig
from rlcore.config.check import suite_settings
from rlcore.config.data import scorers_of
from rlcore.config.fingerprint import RUN_FILE, changed_settings, fingerprint, run_directory
from rlcore.config.model import SMOLLM2, SMOLLM2_SHA256
from rlcore.errors import DataError
from rlcore.runtime.cluster import ray_folder, spilled_bytes
from rlcore.storage.disk import BYTES_PER_GB, DiskNeed, checkpoint_bytes, max_num_checkpoints
from rlcore.storage.manifest import part_directories
from rlcore.tracking.lineage import Origin, read_origin, stage_of
from rlcore.user_code import code_for

FILE_SUFFIXES = frozenset({".json", ".jsonl", ".yaml", ".diff", ".lock", ".id"})
"""The suffixes of files in a run's folder. A path with such a suffix must be an ordinary file."""
BYTES_PER_WEIGHT = 4  # the size of one exported weight, which is a float32 master weight
BYTES_PER_TOKEN = 20
"""The number of compressed bytes for one stored response token: id, text, three log-probabilities and advantage."""
BYTES_PER_RESPONSE = 500  # the size of a stored response without its tokens
_SUITE = "suite "  # prefix of a suite's stage in the run's record


class _PathInRun:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, layout: "RunLayout", owner: type | None = None) -> Path:
        return layout.run_dir / self._name


@dataclass(frozen=True, slots=True)
class RunLayout:
    """The folders and files of one run."""

    root: Path
    run_dir: Path

    run_json = _PathInRun(RUN_FILE)
    """The record of the run's origin: settings, inputs and models. See `rlcore.tracking.lineage.Origin`."""
    code = _PathInRun("code")  # the copies of the source files that the settings name as `module:function`
    journal = _PathInRun("metrics.jsonl")  # the journal, with the metrics of each step and the events as JSON lines
    checkpoints = _PathInRun("checkpoints")
    answers = _PathInRun("answers")  # The responses of training and validations. See `rlcore.responses.store`.
    validation = _PathInRun("validation")  # the validation results, with one file for each validation
    suites = _PathInRun("suites")  # the validation results of suites, with one folder for each suite
    failures = _PathInRun("failures")  # the batches and stacks that are saved when something goes wrong
    profile = _PathInRun("profile")  # the traces of profiled steps
    logs = _PathInRun("logs")  # the output of the trainer process
    exported_model = _PathInRun("model")  # the trained weights in the transformers format
    exported_best = _PathInRun("model-best")  # the weights of the best checkpoint, if it is not the last one

    @classmethod
    def of(cls, config: RunConfig) -> "RunLayout":
        """Return the layout of the run that the settings describe."""
        return cls(Path(config.paths.root).resolve(), run_directory(config).resolve())

    def require_kinds(self) -> None:
        """Raise DataError if a path in the run's folder is of the wrong kind, such as a FIFO, which blocks readers."""
        folders = [self.run_dir, self.checkpoints, self.answers, self.validation, self.suites, self.failures]
        folders += [self.profile, self.logs, self.exported_model, self.exported_best, self.run_dir / "report"]
        problems = [f"{path}: must be a folder" for path in folders if os.path.lexists(path) and not path.is_dir()]
        files = sorted(self.run_dir.glob("*.*")) if self.run_dir.is_dir() else []
        problems += [
            f"{path}: must be an ordinary file" for path in files if path.suffix in FILE_SUFFIXES and not path.is_file()
        ]
        if problems:
            raise DataError(f"{'; '.join(problems)}. Move these away, then start again.")


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
        """Return these inputs with the rows of a suite instead of the run's own rows. Raises DataError if the suite's
        rows do not exist yet."""
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


def disk_needs(
    config: RunConfig,
    layout: RunLayout,
    *,
    checkpoints_bytes: int,
    num_weights: int,
    steps_left: int,
    has_initial_policy: bool,
) -> tuple[DiskNeed, ...]:
    """Return the disk space that each large output of the run still needs. Small outputs are left out, because
    `checkpoint.reserve_gb` covers them. `checkpoints_bytes`: the number of bytes that future checkpoints add."""
    weights = BYTES_PER_WEIGHT * num_weights
    needs = [
        DiskNeed("checkpoints", layout.checkpoints, checkpoints_bytes),
        DiskNeed("weights for others", layout.exported_model, weights),
        DiskNeed("answers", layout.answers, _response_bytes(config, steps_left)),
    ]
    warm, path = config.warm_start, config.model.path
    if not has_initial_policy and (warm.enabled or path is None):
        needs.append(DiskNeed("initial policy", layout.root / "models", weights))
    if path == SMOLLM2 and not configured_model(config).is_dir():
        needs.append(DiskNeed("SmolLM2's weights", layout.root / "models", weights))
    if not has_initial_policy and warm.enabled:
        number = max_num_checkpoints(
            config.checkpoint, total_steps=warm.max_steps, steps_per_chunk=warm.steps_per_chunk
        )
        taken = number * checkpoint_bytes(num_weights)
        needs.append(DiskNeed("checkpoints of the warm start", layout.root / "warm-starts", taken))
    if config.tracking.enabled:
        needs.append(DiskNeed("MLflow's artifacts", layout.root, weights))
    if config.runtime.backend == "ray" and config.runtime.ray_address is None:
        needs.append(DiskNeed("Ray's object store", ray_folder(), spilled_bytes(config)))
    return tuple(needs)


def _response_bytes(config: RunConfig, steps_left: int) -> int:
    settings = config.answers
    if not settings.every_steps:
        return 0
    longest = config.filter.max_prompt_tokens + config.rollout.max_response_tokens
    count = steps_left // settings.every_steps * config.trainer.batch_size * config.rollout.samples_per_prompt
    return min(int(settings.max_gb * BYTES_PER_GB), count * (BYTES_PER_RESPONSE + BYTES_PER_TOKEN * longest))
