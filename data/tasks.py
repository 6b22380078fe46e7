"""The dataset stage, and the tasks that read the user's rows. The stage publishes a dataset under a fingerprint.

The folder of a mixture has no rows. Its manifest names the folders of the mixture's parts, which are built and filtered
separately. Each task has a module `data.<task>`, except the three tasks in this module: `parquet` reads parquet files
in the row schema, `mapped` reads columns of any dataset, and `custom` calls the user's function.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pyarrow.compute as pc

from data.records import Record, digests, format_names, records
from data.rows import SPLITS, Message, PromptForm, Row, TaskRows
from data.schema import (
    find_type,
    has_non_finite,
    open_parquet,
    provenance,
    read_batches,
    read_rows,
    require_row_schema,
    write_dataset_card,
    write_splits,
)
from rlcore.config.base import expand_path, leaves
from rlcore.config.data import CustomData, DataConfig, MappedData, MixtureData, ParquetData, TaskData, scorer_of_row
from rlcore.config.fingerprint import fingerprint
from rlcore.config.problems import Problem, did_you_mean, format_value, settings_error
from rlcore.errors import MODULE_REMEDY, ConfigError, DataError
from rlcore.storage.documents import sha256_of
from rlcore.storage.manifest import PARTS_KEY, part_directories, read_finished_or_set_aside, read_manifest
from rlcore.storage.publish import published_directory
from rlcore.user_code import code_for

DATASET_FORMAT = 1  # version of the file layout
_PLACES: Mapping[str, tuple[str, ...]] = {
    "gsm8k": ("source", "revision"),
    "parquet": ("train_file", "validation_file"),
    "mapped": ("revision",),  # `source` counts, because it may name the rows
}
"""The settings of each task that name files or a revision. The fingerprint contains the files' digests instead."""
_GENERATED = ("countdown", "reasoning_gym", "verifiers", "custom")  # tasks whose rows depend on the seed


@dataclass(frozen=True, slots=True)
class Task:
    """The functions of a task. `build` returns the task's rows. `inputs` returns the digests of its input files.

    `version` is increased when the functions return different rows for the same settings and files.
    """

    build: Callable[[Any, int], TaskRows]
    inputs: Callable[[Any], Mapping[str, str]]
    version: int = 1


@dataclass(frozen=True, slots=True)
class StageResult:
    """The result of a stage. `directory`: the published folder, whose name is the fingerprint. `cached`: True if an
    earlier result was reused.

    `counts`: the number of rows in each split, and of rows omitted for each reason. `warning`: a remark about the rows,
    or ''."""

    directory: Path
    cached: bool
    counts: Mapping[str, int]
    warning: str = ""


def task_of(config: TaskData) -> Task:
    """Return the task that the settings select."""
    if config.task in _TASKS:
        return _TASKS[config.task]
    module = import_module(f"data.{config.task}")
    return Task(module.build, module.inputs, module.VERSION)


def _origin(config: TaskData, seed: int) -> dict[str, Any]:
    """Return everything that determines the rows. The settings of scorers, environments and chat templates are omitted,
    because they do not change the rows."""
    left_out = {"scorer", "environment", "chat_template_kwargs", "seed", *_PLACES.get(config.task, ())}
    return {
        "format_version": DATASET_FORMAT,
        "task": config.task,
        "task_version": task_of(config).version,
        "seed": seed if config.task in _GENERATED else None,
        "settings": config.model_dump(mode="json", exclude=left_out),
        "inputs": input_digests(config),
    }


def input_digests(config: DataConfig) -> dict[str, str]:
    """Return the digests of the input files (of all parts of a mixture). Raises DataError if a file is missing."""
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


def dataset_directory(config: DataConfig, seed: int, root: Path, splits: Sequence[str] = SPLITS) -> Path:
    """Return the folder of a dataset below `root` (`paths.root`). The folder need not exist yet. Its name is the
    dataset's fingerprint. The fingerprint of a mixture combines the fingerprints of its parts."""
    if isinstance(config, MixtureData):
        parts = [dataset_directory(part.data, seed, root).name for part in config.parts]
        return root / "datasets" / fingerprint("dataset-mixture", parts)
    return root / "datasets" / fingerprint("dataset", {**_origin(config, seed), "splits": splits})


def build_dataset(config: DataConfig, *, seed: int, root: Path, splits: Sequence[str] = SPLITS) -> StageResult:
    """Build and publish a dataset unless it exists. `splits`: the splits to build (for a suite only `validation`).

    Raises DataError if the settings or source files give no valid dataset, and DiskSpaceError if the disk is full."""
    if isinstance(config, MixtureData):
        parts = [build_dataset(part.data, seed=seed, root=root) for part in config.parts]
        return publish_mixture("dataset", dataset_directory(config, seed, root), parts)
    directory = dataset_directory(config, seed, root, splits)
    if (manifest := read_finished_or_set_aside(directory)) is not None:
        return StageResult(directory, cached=True, counts=manifest.values["counts"])
    origin = {**_origin(config, seed), "fingerprint": directory.name}
    facts = {"kind": "dataset", **{name: origin[name] for name in ("fingerprint", "task", "inputs")}}
    with published_directory(directory, facts) as folder:
        facts["counts"] = write_splits(folder, task_of(config).build(config, seed), origin, splits)
        write_dataset_card(folder)
    return StageResult(directory, cached=False, counts=facts["counts"])


def publish_mixture(kind: str, directory: Path, parts: Sequence[StageResult]) -> StageResult:
    """Publish the folder of a mixture unless it exists. `kind`: `dataset` or `filtered`. The counts are summed over all
    parts."""
    counts = dict(sorted(sum((Counter(part.counts) for part in parts), Counter()).items()))
    if read_finished_or_set_aside(directory) is not None:
        return StageResult(directory, cached=all(part.cached for part in parts), counts=counts)
    facts: dict[str, Any] = {"kind": f"{kind}-mixture", "fingerprint": directory.name, "counts": counts}
    facts[PARTS_KEY] = [part.directory.name for part in parts]
    with published_directory(directory, facts) as folder:
        lines = [f"# Mixture of {len(parts)} datasets", "", "| part | rows |", "| --- | --- |"]
        for part in parts:
            rows = ", ".join(f"{count:,} {name}" for name, count in part.counts.items())
            lines.append(f"| [{part.directory.name}](../{part.directory.name}) | {rows} |")
        (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return StageResult(directory, cached=False, counts=counts)


_COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


def build_parquet(settings: ParquetData, seed: int) -> TaskRows:
    """Return the rows of two parquet files, with only the columns of the schema."""
    files = _parquet_files(settings)
    types, forms = set(), set()
    for path in files.values():
        schema = open_parquet(path).schema_arrow
        require_row_schema(schema, path)
        types.add(find_type(schema, "reward_model.ground_truth"))
        forms.add(provenance(path).get("prompt_form", "chat"))
    if len(types) > 1 or len(forms) > 1:
        raise DataError(
            f"{files['train']} and {files['validation']}: must have one type of ground truth and one form of prompt, "
            f"got {' and '.join(sorted(map(str, types)))}, {' and '.join(sorted(forms))}; make both from one task"
        )
    form: PromptForm = forms.pop() if settings.template == "auto" else settings.template
    return TaskRows(
        data_source=Path(settings.train_file).stem,
        ability="math",
        prompt_form=form,
        splits={split: _parquet_rows(path) for split, path in files.items()},
        ground_truth_type=types.pop(),
    )


def require_scorers(settings: ParquetData, splits: Sequence[str]) -> None:
    """Raise DataError if a data source of the rows has no known scorer, or if a file cannot be read."""
    for path in (path for split, path in _parquet_files(settings).items() if split in splits):
        require_row_schema(open_parquet(path).schema_arrow, path)
        batches = read_batches(path, ["data_source"])
        sources = {source for batch in batches for source in pc.unique(batch.column(0)).to_pylist()}
        names = {source or Path(settings.train_file).stem for source in sources}
        if unknown := [source for source in names if scorer_of_row(settings, source) is None]:
            raise DataError(
                f"data.scorer: must be given for {path}: its rows have the data_source "
                f"{format_names(sorted(unknown))}, for which no scorer is known. Set data.scorer, such as "
                "data.math:score or your own function, or take rows of one kind (docs/data.md)"
            )


def _parquet_files(settings: ParquetData) -> dict[str, Path]:
    names = {"train": settings.train_file, "validation": settings.validation_file}
    for split, name in names.items():
        if not name or not expand_path(name).is_file():
            raise DataError(f"data.{split}_file: must be a parquet file that exists, got {name!r}; give its path")
    return {split: expand_path(name) for split, name in names.items()}


def _parquet_rows(path: Path) -> Iterator[Row]:
    names = open_parquet(path).schema_arrow.names
    for where, values in read_rows(path, [name for name in _COLUMNS if name in names]):
        prompt = values["prompt"] or ()
        if not prompt or any(not message or not message["role"] or message["content"] is None for message in prompt):
            raise DataError(
                f"{where}: prompt must be messages with role and content, got {values['prompt']!r}; repair it"
            )
        truth = (values["reward_model"] or {}).get("ground_truth")
        if truth is None or has_non_finite(truth):
            got = "nothing" if truth is None else truth
            raise DataError(
                f"{where}: reward_model.ground_truth must have a value, got {got}; repair or remove the row"
            )
        extra = values.get("extra_info") or {}
        yield Row(
            prompt=tuple(Message(message["role"], message["content"]) for message in prompt),
            ground_truth=truth,
            difficulty=extra.get("difficulty") or 0,
            solution=extra.get("solution") or "",
            distractor=extra.get("distractor") or "",
            data_source=values["data_source"] or "",
            ability=values.get("ability") or "",
            where=where,
        )


def build_mapped(settings: MappedData, seed: int) -> TaskRows:
    """Return rows from the named columns of a dataset. Raises ConfigError if the first record lacks a column, and
    DataError if a later record does."""
    splits = {"train": settings.train_split, "validation": settings.validation_split}
    return TaskRows(
        data_source=settings.data_source or Path(settings.source).resolve().name,  # resolved: `.` has no name
        ability="math",
        prompt_form=settings.template,
        splits={split: _mapped_rows(settings, name) for split, name in splits.items()},
    )


def _mapped_rows(settings: MappedData, split: str) -> Iterator[Row]:
    for number, record in enumerate(records(settings.source, split, settings.subset, settings.revision)):
        if number == 0:
            _require_columns(settings, record)
        question, answer = record.text(settings.question), record.text(settings.answer)
        if has_non_finite(answer):
            raise DataError(
                f"{record.where}: column {settings.answer}: must be a reference, got the text {answer!r} of a missing "
                "value; repair or remove it, or name another column"
            )
        more = {name: record.text_or_json(name) for name in settings.columns}
        yield Row(
            prompt=(Message("user", f"{question} {settings.instruction}".strip()),),
            ground_truth=answer if not more else {**more, "answer": answer},
            solution=record.text(settings.solution) if settings.solution else "",
            where=record.where,
        )


def _require_columns(settings: MappedData, first: Record) -> None:
    """Raise ConfigError if the settings name columns that the first record lacks."""
    names = {"question": (settings.question,), "answer": (settings.answer,), "columns": settings.columns}
    names |= {"solution": (settings.solution,)} if settings.solution else {}
    problems = [
        Problem(
            f"data.{key}", f"must name a column of {first.where} ({has})", format_value(name),
            f"{did_you_mean(name, leaves(first.values))}Name another column, or repair the row",
        )
        for key, columns in names.items() for name in columns if (has := first.find(name)[1])
    ]  # fmt: skip
    if problems:
        raise settings_error(problems)


def build_function(settings: CustomData) -> Callable[[CustomData, int], object]:
    """Return the function that `data.build` names. Raises ConfigError if there is no such function."""
    try:
        function: object = resolve_name(settings.build)
        if not callable(function):
            raise TypeError(f"{type(function).__name__} is no function")
    except Exception as error:  # importing a user's module can raise anything
        raise ConfigError(
            f"data.build: must name a function as module:function, got {settings.build!r} "
            f"({type(error).__name__}: {error}). {MODULE_REMEDY}."
        ) from error
    return function


def build_custom(settings: CustomData, seed: int) -> TaskRows:
    """Call the user's function. Raises DataError if it does not return TaskRows."""
    rows = build_function(settings)(settings, seed)
    if not isinstance(rows, TaskRows):
        raise DataError(f"data.build: {settings.build} must return data.rows.TaskRows, got {type(rows).__name__}")
    return rows


def _custom_inputs(settings: CustomData) -> dict[str, str]:
    sources = code_for(settings.build)
    if not sources:
        raise ConfigError(
            f"data.build: must name a function in a module with a source file, got {settings.build!r}. {MODULE_REMEDY}."
        )
    inputs = {source.name: source.sha256 for source in sources}
    for option in map(expand_path, settings.options):
        for file in sorted(file for file in (option, *option.glob("*")) if file.is_file()):
            name = file.name if file == option else f"{option.name}/{file.name}"
            inputs[name] = " ".join(filter(None, (inputs.get(name), sha256_of(file))))  # two may share a name
    return inputs


_TASKS = {
    "custom": Task(build_custom, _custom_inputs),
    "mapped": Task(
        build_mapped,
        lambda data: digests(data.source, (data.train_split, data.validation_split), data.subset, data.revision),
    ),
    "parquet": Task(
        build_parquet, lambda data: {split: sha256_of(path) for split, path in _parquet_files(data).items()}
    ),
}
