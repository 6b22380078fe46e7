"""Rows of parquet files in the row schema (`data=parquet`)."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from data.records import format_names
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
from rlcore.config.data import ParquetData, scorer_of_row
from rlcore.errors import DataError
from rlcore.storage.documents import sha256_of

VERSION = 1
"""Raise it when the rows of equal settings change."""
_COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


def build(settings: ParquetData, seed: int) -> TaskRows:
    """The rows of two parquet files. Columns outside the schema are left out.

    Raises:
        DataError: a file that cannot be read, breaks the schema or has an unusable row, or two files that differ in
            their type of ground truth or form of prompt.
    """
    files = _files(settings)
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
        data_source=_name(settings),
        ability="math",
        prompt_form=form,
        splits={split: _rows(path) for split, path in files.items()},
        ground_truth_type=types.pop(),
    )


def inputs(settings: ParquetData) -> dict[str, str]:
    """sha256 of both files."""
    return {split: sha256_of(path) for split, path in _files(settings).items()}


def _name(settings: ParquetData) -> str:
    """What rows without a data source are called."""
    return Path(settings.train_file).stem


def require_scorers(settings: ParquetData, splits: Sequence[str]) -> None:
    """Require that a scorer is known for every row of these splits.

    Raises:
        DataError: none is for the data source of some rows; or a file that cannot be read.
    """
    for path in (path for split, path in _files(settings).items() if split in splits):
        file = open_parquet(path)
        require_row_schema(file.schema_arrow, path)
        sources: set[str | None] = set()
        for batch in read_batches(file, path, ROWS_PER_GROUP, ["data_source"]):
            sources.update(pc.unique(batch.column(0)).to_pylist())
        named = {source or _name(settings) for source in sources}
        if unknown := [source for source in named if scorer_of_row(settings, source) is None]:
            raise DataError(
                f"data.scorer: must be given for {path}: its rows have the data_source {format_names(sorted(unknown))}, for "
                "which no scorer is known. Set data.scorer, such as data.math:score or a function of your own, or "
                "take rows of one kind (docs/data.md)"
            )


def _files(settings: ParquetData) -> dict[str, Path]:
    named = {"train": settings.train_file, "validation": settings.validation_file}
    for split, name in named.items():
        if not name or not expand_path(name).is_file():
            raise DataError(f"data.{split}_file: must be a parquet file that exists, got {name!r}; give its path")
    return {split: expand_path(name) for split, name in named.items()}


def _rows(path: Path) -> Iterator[Row]:
    file = open_parquet(path)
    columns = [name for name in _COLUMNS if name in file.schema_arrow.names]
    batches = read_batches(file, path, ROWS_PER_GROUP, columns)
    rows = (values for batch in batches for values in batch.to_pylist())
    yield from (_row(values, f"{path}: row {number}") for number, values in enumerate(rows))


def _row(values: Mapping[str, Any], where: str) -> Row:
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
