"""From settings to a published dataset: which task makes the rows, and where they lie."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from data.rows import TaskRows
from data.stage import SPLITS, StageResult, publish_mixture, source_digest
from rlcore.config.data import CountdownData, DataConfig, MixtureData, TaskData
from rlcore.config.fingerprint import fingerprint
from rlcore.storage.finished import finished_or_set_aside
from rlcore.storage.manifest import part_directories, read_manifest
from rlcore.storage.publish import published_directory

DATASET_FORMAT = 1
"""Raise it when the layout of the dataset's files changes."""

_WRITERS = ("data.rows", "data.schema", "data.write")


@dataclass(frozen=True, slots=True)
class Task:
    """How one kind of settings becomes rows.

    `build` makes them. `modules` are the source files that the rows depend on. `inputs` digests the files that they are
    made from; the settings that name those files, `places`, do not count beside it.
    """

    build: Callable[[Any, int], TaskRows]
    modules: tuple[str, ...]
    inputs: Callable[[Any], Mapping[str, str]]
    places: tuple[str, ...] = ()
    is_random: bool = False


def task_of(config: TaskData) -> Task:
    """How these settings become rows. Imports the module of the task alone."""
    match config.task:
        case "countdown":
            module = import_module("data.countdown")
            modules = ("data.countdown", "data.countdown_problems", "data.arithmetic")
            return Task(module.build, modules, inputs=lambda _: {}, is_random=True)
        case "gsm8k":
            module = import_module("data.gsm8k")
            return Task(module.build, ("data.gsm8k", "data.sources"), module.source_digests, ("source", "revision"))
        case "parquet":
            module = import_module("data.sources")
            places = ("train_file", "validation_file")
            return Task(module.parquet_rows, ("data.sources",), module.parquet_digests, places)
        case "mapped":
            module = import_module("data.sources")
            # The source is no place: rows are named after it unless the settings give a name.
            return Task(module.mapped_rows, ("data.sources",), module.mapped_digests, ("revision",))
        case "reasoning_gym":
            module = import_module("data.reasoning_gym")
            return Task(module.build, ("data.reasoning_gym",), module.source_digests, is_random=True)
        case "custom":
            module = import_module("data.custom")
            return Task(module.build, ("data.custom",), module.source_digests, is_random=True)


def _settings(config: TaskData, task: Task) -> dict[str, Any]:
    """The settings that a row depends on."""
    left_out = {"scorer", "environment", "chat_template_kwargs", "seed", *task.places}
    if isinstance(config, CountdownData) and config.template == "bare" and config.search_tries is not None:
        left_out.remove("environment")  # solutions show the turns of data.calculator's
    if isinstance(config, CountdownData) and config.targets == "equation":
        left_out.add("targets")  # no part of earlier fingerprints
    return config.model_dump(mode="json", exclude=left_out)


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
    """What the dataset depends on: settings, seed, the generator's source, and the digests of its input files.

    The seed counts only for tasks that draw their rows. The scorer changes no row, so it does not count, nor does an
    environment whose turns no solution shows. That of a mixture is made of its parts' fingerprints. `splits`: those
    that are written.
    """
    if isinstance(config, MixtureData):
        return fingerprint("dataset-mixture", [dataset_fingerprint(part.data, seed) for part in config.parts])
    task = task_of(config)
    payload = {
        "format": DATASET_FORMAT,
        "settings": _settings(config, task),
        "seed": seed if task.is_random else None,
        "source": source_digest(*_WRITERS, *task.modules),
        "inputs": input_digests(config),
        **({} if tuple(splits) == SPLITS else {"splits": splits}),
    }
    return fingerprint("dataset", payload)


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
    if (manifest := finished_or_set_aside(directory)) is not None:
        return StageResult(directory, digest, cached=True, counts=manifest.values["counts"])
    return _made(config, seed, directory, splits)


def _made(config: TaskData, seed: int, directory: Path, splits: Sequence[str]) -> StageResult:
    from data.write import write_dataset_card, write_splits

    task = task_of(config)
    inputs = input_digests(config)
    document = {
        "format_version": DATASET_FORMAT,
        "task": config.task,
        "generator_version": source_digest(*_WRITERS, *task.modules),
        "fingerprint": directory.name,
        "seed": seed if task.is_random else None,
        "settings": _settings(config, task),
        "inputs": inputs,
    }
    facts: dict[str, Any] = {"kind": "dataset", "fingerprint": directory.name, "task": config.task, "inputs": inputs}
    with published_directory(directory, facts) as folder:
        facts["counts"] = write_splits(folder, task.build(config, seed), document, splits)
        write_dataset_card(folder)
    return StageResult(directory, directory.name, cached=False, counts=facts["counts"])
