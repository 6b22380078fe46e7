"""Rows that exist already in the row schema, from two parquet files: checked, brought to one form, and published."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data.rows import Message, PromptForm, Row, TaskRows
from data.schema import find_type, open_parquet, provenance, read_batches, require_row_schema
from data.write import ROWS_PER_GROUP
from rlcore.config.data import ParquetData
from rlcore.errors import DataError
from rlcore.storage.documents import sha256_of


def build(settings: ParquetData, seed: int) -> TaskRows:
    """The rows of both files. Columns outside the schema are left out.

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
        data_source=Path(settings.train_file).stem,
        ability="math",
        prompt_form=form,
        splits={split: _rows(path) for split, path in files.items()},
        ground_truth_type=types.pop(),
    )


def source_digests(settings: ParquetData) -> dict[str, str]:
    """sha256 of both files."""
    return {split: sha256_of(path) for split, path in _files(settings).items()}


def _files(settings: ParquetData) -> dict[str, Path]:
    named = {"train": settings.train_file, "validation": settings.validation_file}
    for split, name in named.items():
        if not name or not Path(name).expanduser().is_file():
            raise DataError(f"data.{split}_file: must be a parquet file that exists, got {name!r}; give its path")
    return {split: Path(name).expanduser() for split, name in named.items()}


def _rows(path: Path) -> Iterator[Row]:
    file = open_parquet(path)
    columns = ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    number = 0
    for batch in read_batches(file, path, ROWS_PER_GROUP):
        for values in batch.select(columns).to_pylist():
            yield _row(values, f"{path}: row {number}")
            number += 1


def _row(values: Mapping[str, Any], where: str) -> Row:
    messages = [Message(message["role"], message["content"]) for message in values["prompt"] or ()]
    if not messages or any(not message.role or message.content is None for message in messages):
        raise DataError(f"{where}: prompt must be messages with role and content, got {values['prompt']!r}; repair it")
    truth = (values["reward_model"] or {}).get("ground_truth")
    if truth is None:
        raise DataError(f"{where}: reward_model.ground_truth must have a value, got nothing; repair or remove the row")
    extra = values["extra_info"] or {}
    return Row(
        prompt=tuple(messages),
        ground_truth=truth,
        difficulty=extra.get("difficulty") or 0,
        solution=extra.get("solution") or "",
        distractor=extra.get("distractor") or "",
        data_source=values["data_source"] or "",
        ability=values["ability"] or "",
    )
