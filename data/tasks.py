"""From settings to a published dataset: which task makes the rows, and where they lie."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.reads import digests_of, keep_reads, known_reads, noted_reads
from data.rows import TaskRows
from data.stage import StageResult, source_digest
from rlcore.config.data import (
    CountdownData,
    CustomData,
    DataConfig,
    Gsm8kData,
    MappedData,
    MixtureData,
    ParquetData,
    TaskData,
)
from rlcore.config.fingerprint import fingerprint
from rlcore.storage.finished import finished_or_set_aside
from rlcore.storage.manifest import part_directories, read_manifest
from rlcore.storage.publish import published_directory

DATASET_FORMAT = 1
"""Raise it when the layout of the dataset's files changes."""

_WRITERS = ("data.cards", "data.rows", "data.schema", "data.write")


@dataclass(frozen=True, slots=True)
class Task:
    """How one kind of settings becomes rows.

    `modules` are the source files that the rows depend on; `inputs` digests the files that they are made from, in whose
    stead `places`, the settings that say where they lie, do not count. `sources`: paths of the code of a build
    that may read any file, its module first.
    """

    build: Callable[[Any, int], TaskRows]
    modules: tuple[str, ...]
    inputs: Callable[[Any], Mapping[str, str]]
    places: tuple[str, ...]
    is_random: bool
    sources: Callable[[Any], tuple[str, ...]] | None = None


def _countdown() -> Task:
    from data import countdown

    parts = ("countdown", "countdown_problems", "countdown_draws", "countdown_solver", "arithmetic")
    modules = tuple(f"data.{part}" for part in parts)
    return Task(countdown.build, modules, inputs=lambda _: {}, places=(), is_random=True)


def _gsm8k() -> Task:
    from data import gsm8k

    modules, places = ("data.gsm8k", "data.sources"), ("source", "revision")
    return Task(gsm8k.build, modules, inputs=gsm8k.source_digests, places=places, is_random=False)


def _parquet() -> Task:
    from data import as_is

    places = ("train_file", "validation_file")
    return Task(as_is.build, ("data.as_is",), inputs=as_is.source_digests, places=places, is_random=False)


def _mapped() -> Task:
    from data import mapped

    # Not the source: where no other name is given, rows are called by it.
    modules, places = ("data.mapped", "data.sources"), ("revision",)
    return Task(mapped.build, modules, inputs=mapped.source_digests, places=places, is_random=False)


def _custom() -> Task:
    from data import custom

    modules = ("data.custom",)
    return Task(custom.build, modules, custom.source_digests, places=(), is_random=True, sources=custom.sources_of)


_TASKS: Mapping[type, Callable[[], Task]] = {
    CountdownData: _countdown,
    Gsm8kData: _gsm8k,
    ParquetData: _parquet,
    MappedData: _mapped,
    CustomData: _custom,
}


def task_of(config: TaskData) -> Task:
    """How these settings become rows."""
    return _TASKS[type(config)]()


def _settings(config: TaskData, task: Task) -> dict[str, Any]:
    """The settings that a row depends on."""
    return config.model_dump(mode="json", exclude={"scorer", *task.places})


def input_digests(config: DataConfig, root: Path) -> dict[str, str]:
    """Digests of the files that the dataset is made of, as they are now; of a mixture by part.

    Raises:
        DataError: one that the settings name is missing.
    """
    if isinstance(config, MixtureData):
        by_part = [input_digests(part.data, root) for part in config.parts]
        return {f"part {n}: {name}": digest for n, inputs in enumerate(by_part) for name, digest in inputs.items()}
    task = task_of(config)
    named = dict(task.inputs(config))
    if task.sources is None:
        return named
    return (
        dict(digests_of(known_reads(root, _build_print(config, task, named)), Path(task.sources(config)[0]).parent))
        | named
    )


def inputs_of(dataset: Path) -> dict[str, str]:
    """The same of a finished dataset, as they were when it was made; nothing where it does not say."""
    manifests = [read_manifest(part) for part in part_directories(dataset)]
    inputs = [{} if manifest is None else manifest.values.get("inputs", {}) for manifest in manifests]
    if len(inputs) == 1:
        return dict(inputs[0])
    return {f"part {n}: {name}": digest for n, part in enumerate(inputs) for name, digest in part.items()}


def _build_print(config: TaskData, task: Task, named: Mapping[str, str]) -> str:
    return fingerprint("build", {"settings": _settings(config, task), "inputs": named})


def dataset_fingerprint(config: DataConfig, seed: int, root: Path) -> str:
    """What the dataset depends on: settings, seed, the generator's source, and the digests of its input files.

    The seed counts only for tasks that draw their rows. The scorer does not change a row, so it does not count.
    A mixture's is that of its parts' fingerprints. What a build of one's own reads is known once it has run.
    """
    if isinstance(config, MixtureData):
        from data.mixture import mixture_fingerprint

        return mixture_fingerprint("dataset", (dataset_fingerprint(part.data, seed, root) for part in config.parts))
    task = task_of(config)
    payload = {
        "format": DATASET_FORMAT,
        "settings": _settings(config, task),
        "seed": seed if task.is_random else None,
        "source": source_digest(*_WRITERS, *task.modules),
        "inputs": input_digests(config, root),
    }
    return fingerprint("dataset", payload)


def dataset_directory(fingerprint: str, root: Path) -> Path:
    """Where the dataset lies under `paths.root`."""
    return root / "datasets" / fingerprint


def build_dataset(config: DataConfig, *, seed: int, root: Path) -> StageResult:
    """Make the dataset and publish it, unless it is there; a mixture part by part.

    Raises:
        DataError: settings or source files that give no sound dataset; nothing is left behind.
        DiskSpaceError: no room.
    """
    digest = dataset_fingerprint(config, seed, root)
    directory = dataset_directory(digest, root)
    if isinstance(config, MixtureData):
        from data.mixture import publish_mixture

        parts = [build_dataset(part.data, seed=seed, root=root) for part in config.parts]
        return publish_mixture("dataset", directory, parts)
    if (manifest := finished_or_set_aside(directory)) is not None:
        return StageResult(directory, digest, cached=True, counts=manifest.values["counts"])
    try:
        return _made(config, seed, root, directory)
    except _FurtherInputsError:  # known from here on, and part of the name
        directory = dataset_directory(dataset_fingerprint(config, seed, root), root)
        return _made(config, seed, root, directory, last=True)


class _FurtherInputsError(Exception):
    """A build of one's own has read files that the dataset's name does not know of."""


def _made(config: TaskData, seed: int, root: Path, directory: Path, *, last: bool = False) -> StageResult:
    """Make the dataset. Raises _FurtherInputsError, and nothing is left of it; but not the `last` time."""
    from data.cards import write_dataset_card
    from data.write import write_splits

    task = task_of(config)
    inputs = input_digests(config, root)
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
        with noted_reads([] if task.sources is None else task.sources(config)) as read:
            facts["counts"] = write_splits(folder, task.build(config, seed), document)
        if task.sources is not None and _are_news(config, task, root, read) and not last:
            raise _FurtherInputsError
        write_dataset_card(folder)
    return StageResult(directory, directory.name, cached=False, counts=facts["counts"])


def _are_news(config: TaskData, task: Task, root: Path, read: set[Path]) -> bool:
    """Whether a build has read files besides those known; they are known from here on."""
    build = _build_print(config, task, task.inputs(config))
    known = known_reads(root, build)
    found = {path for path in read if not path.is_relative_to(root.resolve())}
    if found <= known:
        return False
    keep_reads(root, build, known | found)
    return True
