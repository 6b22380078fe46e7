"""Readers of filtered rows, whose text the filter has already converted to token ids."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlcore.errors import DataError
from rlcore.prompt import Prompt

_INTEGERS = "list of integers"
_REMEDY = "Give a file that the filter has written (filtered/<fingerprint>/<split>.parquet), or run the filter again."


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A whole conversation as tokens. `is_target`: True for each token to learn, with the end token of each response.

    `misdirected`: the same prompt with a response to another problem, or None. `rejected`: the rejected response of a
    pair, or None. `reference`: the initial policy's log-probability of each target, first of the chosen response. The
    values are NaN until `SupervisedTrainer.fill_reference` computes them."""

    token_ids: Sequence[int]
    is_target: Sequence[bool]
    misdirected: "Demonstration | None" = None
    rejected: "Demonstration | None" = None
    reference: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.float32), compare=False)

    @classmethod
    def of(cls, prompt: list[int], response: list[int], distractor: list[int] | None = None) -> "Demonstration":
        """Create a demonstration from the token ids of a prompt, its response and optionally a distractor."""
        wrong = cls.of(prompt, distractor) if distractor else None
        return cls(prompt + response, [False] * len(prompt) + [True] * len(response), wrong)

    def without_targets(self) -> "Demonstration":
        """Return the same tokens without a loss."""
        rejected = None if self.rejected is None else self.rejected.without_targets()
        return Demonstration(self.token_ids, [False] * len(self.token_ids), rejected=rejected)


def read_prompts(parquet: Path) -> list[Prompt]:
    """Read all prompts of a filtered file in order. `prompt_id` is the row's index in the dataset. Raises DataError if
    the file is missing, damaged, or lacks a column."""
    kinds = {"prompt_ids": _INTEGERS, "ground_truth_json": "string", "data_source": "string", "extra_info": "struct"}
    table = _read(parquet, kinds)
    extra = table.column("extra_info").combine_chunks()
    indices = _field(extra, "index", parquet)
    has_difficulty = extra.type.get_field_index("difficulty") >= 0
    difficulties = _field(extra, "difficulty", parquet) if has_difficulty else [0] * len(indices)
    columns = (
        indices,
        table.column("prompt_ids").to_pylist(),
        table.column("data_source").to_pylist(),
        table.column("ground_truth_json").to_pylist(),
        difficulties,
    )
    return [
        Prompt(index, tuple(ids), source, truth, difficulty or 0)
        for index, ids, source, truth, difficulty in zip(*columns, strict=True)
    ]


def is_chat(parquet: Path) -> bool:
    """Return whether the filter rendered the prompts with the tokenizer's chat template."""
    document = json.loads((pq.read_metadata(parquet).metadata or {}).get(b"millrace", b"{}"))
    return bool(document.get("origin", {}).get("prompt_form") != "text")


def read_solutions(parquet: Path) -> list[Demonstration]:
    """Read all rows of a filtered file that have a solution. Raises DataError if the file is missing or invalid."""
    names = ("prompt_ids", "solution_ids", "distractor_ids")
    table = _read(parquet, dict.fromkeys(names, _INTEGERS))
    columns = (table.column(name).to_pylist() for name in names)
    return [Demonstration.of(*row) for row in zip(*columns, strict=True) if row[1]]


def read_demonstrations(parquet: Path) -> list[Demonstration]:
    """Read all rows of a file of tokenized demonstrations. Raises DataError if the file is missing or invalid."""
    return _read_demonstrations(parquet, "token_ids", "answer_lengths")


def read_pairs(parquet: Path) -> list[Demonstration]:
    """Read all rows of a file of tokenized preference pairs. Raises DataError if the file is missing or invalid."""
    rejected = _read_demonstrations(parquet, "rejected_ids", "rejected_lengths")
    return [
        replace(one, rejected=other, reference=np.full(sum(one.is_target) + sum(other.is_target), np.nan, np.float32))
        for one, other in zip(read_demonstrations(parquet), rejected, strict=True)
    ]


def _read_demonstrations(parquet: Path, ids: str, lengths: str) -> list[Demonstration]:
    table = _read(parquet, {ids: _INTEGERS, lengths: _INTEGERS})
    rows = zip(table.column(ids).to_pylist(), table.column(lengths).to_pylist(), strict=True)
    return [Demonstration(ids, _alternating_mask(lengths)) for ids, lengths in rows]


def _alternating_mask(lengths: list[int]) -> list[bool]:
    """Return a mask of alternating runs of False and True with these lengths."""
    return [bool(place % 2) for place, length in enumerate(lengths) for _ in range(length)]


def _read(parquet: Path, expected: dict[str, str]) -> pa.Table:
    if not parquet.is_file():
        raise DataError(f"{parquet}: no such file. {_REMEDY}")
    try:
        schema = pq.read_schema(parquet)
        for name, kind in expected.items():
            found = schema.field(name).type if name in schema.names else None
            if found is None or not _matches_type(found, kind):
                raise DataError(
                    f"{parquet}: column {name}: expected {kind}, got {'nothing' if found is None else found}. {_REMEDY}"
                )
        return pq.read_table(parquet, columns=[*expected])
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{parquet}: cannot be read as parquet ({error}); it is damaged or cut short. {_REMEDY}"
        ) from error


def _matches_type(found: pa.DataType, kind: str) -> bool:
    if kind == _INTEGERS:
        is_list = pa.types.is_list(found) or pa.types.is_large_list(found)
        return bool(is_list and pa.types.is_integer(found.value_type))
    if kind == "struct":
        return bool(pa.types.is_struct(found))
    return bool(pa.types.is_string(found) or pa.types.is_large_string(found))


def _field(extra: pa.StructArray, name: str, parquet: Path) -> list[Any]:
    """Return a field of `extra_info` for each row, or None for a row without this field."""
    if extra.type.get_field_index(name) < 0:
        raise DataError(f"{parquet}: column extra_info.{name}: expected integer, got nothing. {_REMEDY}")
    return list(extra.field(name).to_pylist())
