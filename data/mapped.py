"""Questions and answers from columns of any dataset (`data=mapped`)."""

from collections.abc import Iterator
from pathlib import Path

from data.records import digests, records
from data.rows import Message, Row, TaskRows
from data.schema import has_non_finite
from rlcore.config.data import MappedData
from rlcore.errors import DataError

VERSION = 1
"""Raise it when the rows of equal settings change."""


def build(settings: MappedData, seed: int) -> TaskRows:
    """Questions and answers from columns of any dataset. Raises DataError where a record lacks a column."""
    return TaskRows(
        data_source=settings.data_source or Path(settings.source).resolve().name,  # `.` has a name then
        ability="math",
        prompt_form=settings.template,
        splits={
            "train": _rows(settings, settings.train_split),
            "validation": _rows(settings, settings.validation_split),
        },
    )


def inputs(settings: MappedData) -> dict[str, str]:
    """Digests of the files, or the commit, that the rows are made from."""
    return digests(
        settings.source, (settings.train_split, settings.validation_split), settings.subset, settings.revision
    )


def _rows(settings: MappedData, split: str) -> Iterator[Row]:
    for record in records(settings.source, split, settings.subset, settings.revision):
        question, answer = record.text(settings.question), record.text(settings.answer)
        if has_non_finite(answer):
            raise DataError(
                f"{record.where}: column {settings.answer}: must be a reference, got the text {answer!r} of a missing "
                "value; repair or remove it, or name another column"
            )
        yield Row(
            prompt=(Message("user", f"{question} {settings.instruction}".strip()),),
            ground_truth=answer,
            solution=record.text(settings.solution) if settings.solution else "",
            where=record.where,
        )
