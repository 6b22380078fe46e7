"""What the training takes from the stages before it, and where the model of step 0 comes from.

Fingerprints name folders under `paths.root`; none of these functions loads torch until something has to be built.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from rlcore.config import RunConfig
from rlcore.config.data import parts_of
from rlcore.config.fingerprint import fingerprint
from rlcore.errors import DataError, ModelError
from rlcore.run.layout import RunLayout
from rlcore.storage.documents import parse_json, read_ordinary
from rlcore.storage.finished import FINGERPRINT, finished, finished_or_set_aside
from rlcore.storage.manifest import Manifest, part_directories
from rlcore.storage.publish import published_directory, write_json_atomically
from rlcore.user_code import code_for

MODEL_FORMAT = 1
"""Raise it when a model made from nothing or its warm start changes for the same settings."""


@dataclass(frozen=True, slots=True)
class RunInputs:
    """Folders that the stages before the training have published."""

    filtered_directory: Path
    tokenizer_directory: Path
    dataset_directory: Path | None = None

    def write(self, layout: RunLayout) -> None:
        """Keep them with the run."""
        write_json_atomically(
            layout.inputs_json, {name: str(path) for name, path in asdict(self).items() if path is not None}
        )

    @classmethod
    def read(cls, layout: RunLayout) -> "RunInputs":
        """What `write` kept."""
        try:
            found = parse_json(read_ordinary(layout.inputs_json))
            return cls(**{name: Path(path) for name, path in found.items()})
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise DataError(
                f"{layout.inputs_json}: the run's inputs cannot be read ({error}); start it by `millrace run` or "
                "`millrace train`, which make them"
            ) from error

    def verify(self) -> None:
        """Read every byte of what Millrace has written of them. A flow has done so when it found them.

        Raises:
            DataError: names the file that is damaged.
        """
        for directory in dict.fromkeys((self.filtered_directory, *self.parts, self.tokenizer_directory)):
            finished(directory)

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


def planned_tokenizer(config: RunConfig) -> Path:
    """The tokenizer's folder: that of a model directory, or the one that `ensure_tokenizer` makes."""
    path = config.model.path
    if path is not None and Path(path).is_dir():
        return Path(path)
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
    directory = planned_tokenizer(config)
    path = config.model.path
    if (path is not None and Path(path).is_dir()) or finished_or_set_aside(directory) is not None:
        return directory
    from rlcore.models.load import load_tokenizer
    from rlcore.models.scratch import build_scratch_tokenizer

    with published_directory(directory, {"kind": "tokenizer", "hub_id": path, FINGERPRINT: directory.name}) as folder:
        if path is None:
            build_scratch_tokenizer(config.model.scratch, folder)
        else:
            load_tokenizer(path).save_pretrained(folder)
    return directory


def start_model_fingerprint(config: RunConfig, filtered_directory: Path) -> str:
    """Fingerprint of the model of step 0: its shape, the seed, the warm start and the data that it saw.

    A warm start ends at a sampled reward, so how answers are drawn and scored decides after how many steps.
    """
    payload: dict[str, object] = {"format": MODEL_FORMAT, "seed": config.seed, "path": config.model.path}
    if config.model.path is None:
        payload["scratch"] = config.model.scratch.model_dump(mode="json")
    if config.warm_start.enabled:
        payload["warm_start"] = config.warm_start.model_dump(mode="json")
        payload["filtered"] = filtered_directory.name
        payload["max_response_tokens"] = config.rollout.max_response_tokens
        payload["sampling"] = config.rollout.sampling.model_dump(mode="json")
        scorers = [part.data.scorer for part in parts_of(config.data)]
        payload["scorers"] = [
            {"name": scorer, "code": {source.name: source.sha256 for source in code_for(scorer)}} for scorer in scorers
        ]
        payload["dtype"] = config.model.dtype
    return fingerprint("start-model", payload)


def planned_start_model(config: RunConfig, filtered_directory: Path) -> Path:
    """Folder of the model of step 0."""
    if config.model.path is not None and not config.warm_start.enabled:
        return Path(config.model.path)
    return Path(config.paths.root).resolve() / "models" / start_model_fingerprint(config, filtered_directory)


def find_start_model(config: RunConfig, filtered_directory: Path) -> Manifest | None:
    """The manifest of the model of step 0, where one of ours is there and whole; a damaged one is set aside.

    Raises:
        ModelError: `model.path` is a model that Millrace has written, and is damaged.
    """
    if is_given(config):
        return require_whole_model("model.path", config.model.path)
    return finished_or_set_aside(planned_start_model(config, filtered_directory))


def is_given(config: RunConfig) -> bool:
    """Whether training starts from a model as it is, so nothing has to be built before step 1."""
    return config.model.path is not None and not config.warm_start.enabled


def require_whole_model(key: str, path: str | None) -> Manifest | None:
    """The manifest of the model that a setting names, if Millrace has written it, such as another run's export.

    Raises:
        ModelError: it is not as it was written.
    """
    try:
        return None if path is None else finished(Path(path), error=ModelError)
    except ModelError as damage:
        raise ModelError(f"{key}: {damage} If the change is yours, delete its manifest.json.") from damage
