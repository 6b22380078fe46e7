"""A prompt of training or validation. This module is separate from `rlcore.types`, so that a Prefect flow can use
prompts without loading torch."""

from dataclasses import dataclass
from typing import Any

ROWS_PER_SOURCE = 1_000_000_000
"""The number of prompt ids that are reserved for each data source of a mixture. Every source has fewer rows."""


class FastPickle:
    """A base class for dataclasses with slots. It halves the time that pickling a frozen dataclass takes."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), tuple([getattr(self, name) for name in self.__slots__])


@dataclass(frozen=True, slots=True)
class Prompt(FastPickle):
    """One tokenized row of a data set. `ground_truth_json`: the ground truth for the scorer. `difficulty`: the row's
    difficulty in the unit of the task, or 0 if the task defines none."""

    prompt_id: int
    token_ids: tuple[int, ...]
    data_source: str
    ground_truth_json: str
    difficulty: int = 0
