"""The dataset stage, which turns settings into a published dataset under a fingerprint.

The folder of a mixture has no rows: its manifest names the folders of its parts, which are built and filtered
separately.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from data.rows import SPLITS, TaskRows
from rlcore.config.data import DataConfig, MixtureData, TaskData
from rlcore.config.fingerprint import fingerprint
from rlcore.storage.manifest import PARTS_KEY, part_directories, read_finished_or_set_aside, read_manifest
from rlcore.storage.publish import published_directory

DATASET_FORMAT = 1  # version of the file layout
_PLACES: Mapping[str, tuple[str, ...]] = {
    "gsm8k": ("source", "revision"),
    "parquet": ("train_file", "validation_file"),
    "mapped": ("revision",),  # `source` counts, because it may name the rows
}
"""The settings that are paths of files. The fingerprint contains the digests of the files instead."""
_GENERATED = ("countdown", "reasoning_gym", "verifiers", "custom")  # tasks whose rows depend on the seed


class Task(Protocol):
    """The interface of a task: a module `data.<task>`, or an entry of `data.sources.TASKS`."""

    VERSION: int  # changes when the same settings and files give other rows

    def build(self, settings: Any, seed: int, /) -> TaskRows:
        """Return the rows of the task."""

    def inputs(self, settings: Any, /) -> Mapping[str, str]:
        """Return the digests of the input files."""


@dataclass(frozen=True, slots=True)
class StageResult:
    """The published directory of a stage. `cached`: it was reused. `warning`: a remark about the rows, or ''.

    `counts` has the rows of each split, and the omitted rows by reason."""

    directory: Path
    fingerprint: str
    cached: bool
    counts: Mapping[str, int]
    warning: str = ""


def task_of(config: TaskData) -> Task:
    """Return the task that the settings select."""
    if config.task in ("custom", "mapped", "parquet"):
        from data.sources import TASKS

        return TASKS[config.task]
    return cast(Task, import_module(f"data.{config.task}"))


def _origin(config: TaskData, seed: int) -> dict[str, Any]:
    """Return everything that the rows depend on, without the settings of scorers and environments."""
    left_out = {"scorer", "environment", "chat_template_kwargs", "seed", *_PLACES.get(config.task, ())}
    return {
        "format_version": DATASET_FORMAT,
        "task": config.task,
        "task_version": task_of(config).VERSION,
        "seed": seed if config.task in _GENERATED else None,
        "settings": config.model_dump(mode="json", exclude=left_out),
        "inputs": input_digests(config),
    }


def input_digests(config: DataConfig) -> dict[str, str]:
    """Return the digests of the input files, in a mixture by part. Raises DataError if a file is missing."""
    if isinstance(config, MixtureData):
        return _by_part([input_digests(part.data) for part in config.parts])
    return dict(task_of(config).inputs(config))


def inputs_of(dataset: Path) -> dict[str, str]:
    """Return the input digests in the manifest of a finished dataset, or {} if the manifest has none."""
    manifests = [read_manifest(part) for part in part_directories(dataset)]
    inputs = [{} if manifest is None else manifest.values.get("inputs", {}) for manifest in manifests]
    return dict(inputs[0]) if len(inputs) == 1 else _by_part(inputs)


def _by_part(inputs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {f"part {n}: {name}": digest for n, part in enumerate(inputs) for name, digest in part.items()}


def dataset_fingerprint(config: DataConfig, seed: int, splits: Sequence[str] = SPLITS) -> str:
    """Return the fingerprint of a dataset, before it is built. For a mixture, combine the fingerprints of its parts."""
    if isinstance(config, MixtureData):
        return fingerprint("dataset-mixture", [dataset_fingerprint(part.data, seed) for part in config.parts])
    return fingerprint("dataset", {**_origin(config, seed), "splits": splits})


def dataset_directory(fingerprint: str, root: Path) -> Path:
    """Return the folder of a dataset below `root` (`paths.root`)."""
    return root / "datasets" / fingerprint


def build_dataset(config: DataConfig, *, seed: int, root: Path, splits: Sequence[str] = SPLITS) -> StageResult:
    """Build and publish a dataset unless it exists. `splits`: the splits to build (for a suite only `validation`).

    Raises DataError if the settings or source files give no valid dataset, and DiskSpaceError if the disk is full."""
    if isinstance(config, MixtureData):
        parts = [build_dataset(part.data, seed=seed, root=root) for part in config.parts]
        return publish_mixture("dataset", dataset_directory(dataset_fingerprint(config, seed), root), parts)
    digest = dataset_fingerprint(config, seed, splits)
    directory = dataset_directory(digest, root)
    if (manifest := read_finished_or_set_aside(directory)) is not None:
        return StageResult(directory, digest, cached=True, counts=manifest.values["counts"])
    from data.schema import write_dataset_card, write_splits

    origin = {**_origin(config, seed), "fingerprint": digest}
    facts = {"kind": "dataset", **{name: origin[name] for name in ("fingerprint", "task", "inputs")}}
    with published_directory(directory, facts) as folder:
        facts["counts"] = write_splits(folder, task_of(config).build(config, seed), origin, splits)
        write_dataset_card(folder)
    return StageResult(directory, digest, cached=False, counts=facts["counts"])


def publish_mixture(kind: str, directory: Path, parts: Sequence[StageResult]) -> StageResult:
    """Publish the folder of a mixture unless it exists. `kind`: `dataset` or `filtered`. The counts are the sums of all
    parts."""
    counts = dict(sorted(sum((Counter(part.counts) for part in parts), Counter()).items()))
    if read_finished_or_set_aside(directory) is not None:
        return StageResult(directory, directory.name, cached=all(part.cached for part in parts), counts=counts)
    facts: dict[str, Any] = {"kind": f"{kind}-mixture", "fingerprint": directory.name, "counts": counts}
    facts[PARTS_KEY] = [part.directory.name for part in parts]
    with published_directory(directory, facts) as folder:
        lines = [f"# Mixture of {len(parts)} datasets", "", "| part | rows |", "| --- | --- |"]
        for part in parts:
            rows = ", ".join(f"{count:,} {name}" for name, count in part.counts.items())
            lines.append(f"| [{part.fingerprint}](../{part.fingerprint}) | {rows} |")
        (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return StageResult(directory, directory.name, cached=False, counts=counts)
