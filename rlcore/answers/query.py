"""Finds kept answers: filters and order over the light columns of all parts, in memory; texts and tokens are read for
the rows that are asked for. No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlcore.answers.store import LIGHT, ROWS_PER_GROUP, TEXTS, TOKENS, parts_of
from rlcore.errors import DataError

Kind = Literal["all", "training", "validation"]
SORTS = ("step", "score", "advantage", "num_tokens", "logprob", "gap", "prompt_id")
"""Columns to sort by."""
READABLE = [*LIGHT.names, *TEXTS.names]
"""Columns without those of tokens."""
EVERYTHING = [*READABLE, *TOKENS.names]
Range = tuple[float | None, float | None]
"""Lowest and highest value, both included; None: no bound."""


@dataclass(frozen=True, slots=True)
class Query:
    """Which answers, in which order. `text`: a part of the answer, in small or capital letters alike. `sort`: one of
    `SORTS`, the highest first with `descending`; answers that are equal in it stay in the order of steps."""

    kind: Kind = "all"
    steps: Range = (None, None)
    prompt_id: int | None = None
    scores: Range = (None, None)
    text: str = ""
    sort: str = "step"
    descending: bool = False


class KeptAnswers:
    """The answers that a run has kept so far; parts that come or go are seen by the next search."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: dict[Path, tuple[int, int]] = {}
        self._index = _EMPTY
        self._found: tuple[Query, pa.Array] | None = None

    def find(self, query: Query) -> pa.Array:
        """Numbers of the rows, for `rows`, in the order asked for.

        Raises:
            DataError: a part cannot be read, or `sort` is no column of `SORTS`.
        """
        if query.sort not in SORTS:
            raise DataError(f"sort: must be one of {', '.join(SORTS)}, got {query.sort!r}")
        self._refresh()
        if self._found is None or self._found[0] != query:
            self._found = (query, self._search(query))
        return self._found[1]

    def rows(self, numbers: Sequence[int], columns: Sequence[str] = READABLE) -> list[dict[str, Any]]:
        """These columns of these rows of the last search, each with its `row` number."""
        parts = list(self._parts)
        places = [self._place(number) for number in numbers]
        groups = {(part, row // ROWS_PER_GROUP) for part, row in places}
        read = {(part, group): _read(parts[part], list(columns), group) for part, group in sorted(groups)}
        found = []
        for number, (part, row) in zip(numbers, places, strict=True):
            (values,) = read[part, row // ROWS_PER_GROUP].slice(row % ROWS_PER_GROUP, 1).to_pylist()
            found.append({"row": number, **values})
        return found

    def light(self, numbers: pa.Array | None = None) -> pa.Table:
        """The light columns, see `rlcore.answers.store.LIGHT`; of all rows without `numbers`."""
        self._refresh()
        table = self._index.select(LIGHT.names)
        return table if numbers is None else table.take(numbers)

    def _place(self, number: int) -> tuple[int, int]:
        if not 0 <= number < self._index.num_rows:
            raise DataError(f"row {number}: there are {self._index.num_rows}, from 0")
        return self._index["part"][number].as_py(), self._index["place"][number].as_py()

    def _refresh(self) -> None:
        parts = {}
        for path in parts_of(self._folder):
            found = path.stat()
            parts[path] = (found.st_mtime_ns, found.st_size)
        if parts == self._parts:
            return
        tables = []
        for number, path in enumerate(parts):
            table = _read(path, LIGHT.names)
            table = table.append_column("part", pa.array(np.full(table.num_rows, number, dtype=np.int32)))
            tables.append(table.append_column("place", pa.array(np.arange(table.num_rows))))
        self._index = pa.concat_tables(tables).combine_chunks() if tables else _EMPTY
        self._parts, self._found = parts, None

    def _search(self, query: Query) -> pa.Array:
        index = self._index
        conditions = [pc.scalar(True)]
        if query.kind != "all":
            is_validation = pc.field("validation").is_valid()
            conditions.append(is_validation if query.kind == "validation" else ~is_validation)
        if query.prompt_id is not None:
            conditions.append(pc.field("prompt_id") == query.prompt_id)
        for name, (low, high) in (("step", query.steps), ("score", query.scores)):
            if low is not None:
                conditions.append(pc.field(name) >= low)
            if high is not None:
                conditions.append(pc.field(name) <= high)
        numbered = index.append_column("number", pa.array(np.arange(index.num_rows)))
        chosen = numbered.filter(reduce(lambda a, b: a & b, conditions))
        if query.text:
            chosen = chosen.filter(self._with_text(chosen, query.text))
        order = "descending" if query.descending else "ascending"
        keys = [(query.sort, order), ("step", "ascending"), ("number", "ascending")]
        keys = [key for place, key in enumerate(keys) if key[0] not in [name for name, _ in keys[:place]]]
        return chosen["number"].combine_chunks().take(pc.sort_indices(chosen, sort_keys=keys))

    def _with_text(self, chosen: pa.Table, text: str) -> pa.Array:
        """Bool of each row: only parts that have a chosen row are read."""
        masks = []
        parts, places = chosen["part"].to_numpy(), chosen["place"].to_numpy()
        for number, path in enumerate(self._parts):
            mine = places[parts == number]  # a part's rows lie together, in order
            if len(mine):
                answers = _read(path, ["answer"])["answer"]
                masks.append(pc.match_substring(answers, text, ignore_case=True).to_numpy()[mine])
        return pa.array(np.concatenate([np.zeros(0, dtype=bool), *masks]))


_EMPTY = pa.table(
    {**{field.name: pa.nulls(0, field.type) for field in LIGHT}, "part": pa.nulls(0, pa.int32()),
     "place": pa.nulls(0, pa.int64())}
)  # fmt: skip


def _read(path: Path, columns: list[str], group: int | None = None) -> pa.Table:
    try:
        if group is None:
            return pq.read_table(path, columns=columns)
        with pq.ParquetFile(path) as file:
            return file.read_row_group(group, columns=columns)
    except (OSError, pa.ArrowException) as reason:
        raise DataError(
            f"{path}: cannot be read as kept answers ({reason}). If the run is going on, ask again; else delete the "
            "file, and the rest can be read."
        ) from reason
