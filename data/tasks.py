"""From settings to a published dataset.

`data.task` names a module of this package. Its `build(settings, seed)` gives rows, `data.write` writes them as parquet
with a card, and the folder is published under the fingerprint of what the rows depend on.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from data.rows import TaskRows
from data.stage import SPLITS, StageResult, publish_mixture
from rlcore.config.data import CountdownData, DataConfig, MixtureData, TaskData
from rlcore.config.fingerprint import fingerprint
from rlcore.storage.manifest import part_directories, read_finished_or_set_aside, read_manifest
from rlcore.storage.publish import published_directory

DATASET_FORMAT = 1
"""Raise it when the layout of the dataset's files changes."""

_PLACES: Mapping[str, tuple[str, ...]] = {
    "gsm8k": ("source", "revision"),
    "parquet": ("train_file", "validation_file"),
    "mapped": ("revision",),  # not the source: rows are named after it unless the settings give a name
}
"""Settings that say where the files are. The files' digests count in place of them."""
_GENERATED = ("countdown", "reasoning_gym", "custom")
"""Tasks whose rows depend on the seed."""


class Task(Protocol):
    """A module `data.<task>`."""

    VERSION: int
    """Raised when the rows of equal settings and files change."""

    def build(self, settings: Any, seed: int) -> TaskRows:
        """The rows."""

    def inputs(self, settings: Any) -> Mapping[str, str]:
        """Digests of the files that the rows are made from."""


def task_of(config: TaskData) -> Task:
    """The module that makes rows of these settings."""
    return cast(Task, import_module(f"data.{config.task}"))


def _origin(config: TaskData, seed: int) -> dict[str, Any]:
    """What the rows depend on. The scorer changes no row, nor does an environment whose turns no solution shows."""
    left_out = {"scorer", "environment", "chat_template_kwargs", "seed", *_PLACES.get(config.task, ())}
    if isinstance(config, CountdownData) and config.template == "bare" and config.search_tries is not None:
        left_out.remove("environment")  # solutions show the turns of data.calculator's
    return {
        "format_version": DATASET_FORMAT,
        "task": config.task,
        "task_version": task_of(config).VERSION,
        "seed": seed if config.task in _GENERATED else None,
        "settings": config.model_dump(mode="json", exclude=left_out),
        "inputs": input_digests(config),
    }


def input_digests(config: DataConfig) -> dict[str, str]:
    """Digests of the files that the dataset is made of, as they are now; of a mixture by part.

    Raises:
        DataError: one that the settings name is missing.
    """
    if isinstance(config, MixtureData):
        by_part = [input_digests(part.data) for part in config.parts]
        return {f"part {n}: {name}": digest for n, inputs in enumerate(by_part) for name, digest in inputs.items()}
    return dict(task_of(config).inputs(config))


def inputs_of(dataset: Path) -> dict[str, str]:
    """`input_digests` of a finished dataset as they were when it was made; empty where its manifest has none."""
    manifests = [read_manifest(part) for part in part_directories(dataset)]
    inputs = [{} if manifest is None else manifest.values.get("inputs", {}) for manifest in manifests]
    if len(inputs) == 1:
        return dict(inputs[0])
    return {f"part {n}: {name}": digest for n, part in enumerate(inputs) for name, digest in part.items()}


def dataset_fingerprint(config: DataConfig, seed: int, splits: Sequence[str] = SPLITS) -> str:
    """Fingerprint of task version, settings, seed (where rows are drawn) and digests of the input files.

    That of a mixture is made of its parts' fingerprints. `splits`: those that are written.
    """
    if isinstance(config, MixtureData):
        return fingerprint("dataset-mixture", [dataset_fingerprint(part.data, seed) for part in config.parts])
    return fingerprint("dataset", {**_origin(config, seed), "splits": splits})


def dataset_directory(fingerprint: str, root: Path) -> Path:
    """Folder of the dataset under `paths.root`."""
    return root / "datasets" / fingerprint


def build_dataset(config: DataConfig, *, seed: int, root: Path, splits: Sequence[str] = SPLITS) -> StageResult:
    """Make the dataset and publish it, unless it is there; a mixture part by part. `splits`: those that are written; a
    suite has `validation` alone.

    Raises:
        DataError: settings or source files that give no sound dataset; nothing is left behind.
        DiskSpaceError: no room.
    """
    if isinstance(config, MixtureData):
        parts = [build_dataset(part.data, seed=seed, root=root) for part in config.parts]
        return publish_mixture("dataset", dataset_directory(dataset_fingerprint(config, seed), root), parts)
    digest = dataset_fingerprint(config, seed, splits)
    directory = dataset_directory(digest, root)
    if (manifest := read_finished_or_set_aside(directory)) is not None:
        return StageResult(directory, digest, cached=True, counts=manifest.values["counts"])
    return _build(config, seed, directory, splits)


def _build(config: TaskData, seed: int, directory: Path, splits: Sequence[str]) -> StageResult:
    from data.write import write_dataset_card, write_splits

    origin = {**_origin(config, seed), "fingerprint": directory.name}
    facts = {"kind": "dataset", **{name: origin[name] for name in ("fingerprint", "task", "inputs")}}
    with published_directory(directory, facts) as folder:
        facts["counts"] = write_splits(folder, task_of(config).build(config, seed), origin, splits)
        write_dataset_card(folder)
    return StageResult(directory, directory.name, cached=False, counts=facts["counts"])
