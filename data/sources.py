"""Tasks whose rows come from the user: parquet files in the row schema, columns of any dataset, or a function."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pyarrow.compute as pc

from data.records import digests, format_names, records
from data.rows import Message, PromptForm, Row, TaskRows
from data.schema import (
    ROWS_PER_GROUP,
    find_type,
    has_non_finite,
    open_parquet,
    provenance,
    read_batches,
    require_row_schema,
)
from rlcore.config.base import expand_path
from rlcore.config.data import CustomData, MappedData, ParquetData, scorer_of_row
from rlcore.errors import MODULE_REMEDY, ConfigError, DataError
from rlcore.storage.documents import sha256_of
from rlcore.user_code import code_for

_COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


def build_parquet(settings: ParquetData, seed: int) -> TaskRows:
    """Return the rows of two parquet files, without columns outside the schema."""
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


def _parquet_inputs(settings: ParquetData) -> dict[str, str]:
    return {split: sha256_of(path) for split, path in _parquet_files(settings).items()}


def require_scorers(settings: ParquetData, splits: Sequence[str]) -> None:
    """Raise DataError if a data source of the rows has no known scorer, or if a file cannot be read."""
    for path in (path for split, path in _parquet_files(settings).items() if split in splits):
        file = open_parquet(path)
        require_row_schema(file.schema_arrow, path)
        sources: set[str | None] = set()
        for batch in read_batches(file, path, ROWS_PER_GROUP, ["data_source"]):
            sources.update(pc.unique(batch.column(0)).to_pylist())
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
    file = open_parquet(path)
    columns = [name for name in _COLUMNS if name in file.schema_arrow.names]
    batches = read_batches(file, path, ROWS_PER_GROUP, columns)
    rows = (values for batch in batches for values in batch.to_pylist())
    yield from (_parquet_row(values, f"{path}: row {number}") for number, values in enumerate(rows))


def _parquet_row(values: Mapping[str, Any], where: str) -> Row:
    prompt = values["prompt"] or ()
    if not prompt or any(not message or not message["role"] or message["content"] is None for message in prompt):
        raise DataError(f"{where}: prompt must be messages with role and content, got {values['prompt']!r}; repair it")
    truth = (values["reward_model"] or {}).get("ground_truth")
    if truth is None or has_non_finite(truth):
        got = "nothing" if truth is None else truth
        raise DataError(f"{where}: reward_model.ground_truth must have a value, got {got}; repair or remove the row")
    extra = values.get("extra_info") or {}
    return Row(
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
    """Return rows from the named columns of a dataset. Raises DataError if a record lacks a column."""
    splits = {"train": settings.train_split, "validation": settings.validation_split}
    return TaskRows(
        data_source=settings.data_source or Path(settings.source).resolve().name,  # resolved: `.` has no name
        ability="math",
        prompt_form=settings.template,
        splits={split: _mapped_rows(settings, name) for split, name in splits.items()},
    )


def _mapped_inputs(settings: MappedData) -> dict[str, str]:
    splits = (settings.train_split, settings.validation_split)
    return digests(settings.source, splits, settings.subset, settings.revision)


def _mapped_rows(settings: MappedData, split: str) -> Iterator[Row]:
    for record in records(settings.source, split, settings.subset, settings.revision):
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


@dataclass(slots=True)
class Source:
    """A task of this module. It has the interface `data.tasks.Task`."""

    build: Callable[[Any, int], TaskRows]
    inputs: Callable[[Any], Mapping[str, str]]
    VERSION: int = 1


TASKS = {
    "custom": Source(build_custom, _custom_inputs),
    "mapped": Source(build_mapped, _mapped_inputs),
    "parquet": Source(build_parquet, _parquet_inputs),
}
