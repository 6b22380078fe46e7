"""Finds kept answers: filters and order over the light columns of all parts, in memory; texts and tokens are read for
the rows that are asked for. No torch.
"""

import math
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
from rlcore.errors import ConfigError, DataError

Kind = Literal["all", "training", "validation"]
KINDS: dict[str, Kind] = {"all": "all", "training": "training", "validation": "validation"}
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

    @classmethod
    def read(
        cls,
        step: str = "",
        prompt: int | None = None,
        score: str = "",
        search: str = "",
        kind: str = "all",
        sort: str = "step",
    ) -> "Query":
        """A query as a person types it: ranges as `LOW..HIGH`, the order with `-` for the highest first.

        Raises:
            ConfigError: one cannot be read.
        """
        if kind not in KINDS:
            raise ConfigError(f"kind: must be all, training or validation, got {kind!r}")
        if sort.removeprefix("-") not in SORTS:
            raise ConfigError(f"sort: must be one of {', '.join(SORTS)}, each perhaps with - before it, got {sort!r}")
        return cls(
            kind=KINDS[kind],
            steps=range_of("step", step),
            prompt_id=prompt,
            scores=range_of("score", score),
            text=search,
            sort=sort.removeprefix("-"),
            descending=sort.startswith("-"),
        )


def range_of(name: str, text: str) -> Range:
    """The bounds that `LOW..HIGH`, either of which may be missing, or one number stands for.

    >>> range_of("step", "3"), range_of("step", "3..5"), range_of("score", "..0.5"), range_of("score", "")
    ((3.0, 3.0), (3.0, 5.0), (None, 0.5), (None, None))
    """
    low, dots, high = text.partition("..")
    try:
        bounds = (float(low) if low else None, float(high) if high else None)
    except ValueError:
        bounds = (math.nan, None)
    if any(bound is not None and math.isnan(bound) for bound in bounds):
        raise ConfigError(f"{name}: must be a number or LOW..HIGH, such as 3, 3..5, 3.. or ..5; got {text!r}")
    if bounds[0] is not None and bounds[1] is not None and bounds[0] > bounds[1]:
        raise ConfigError(f"{name}: must have the lower bound first, as in {high}..{low}; got {text!r}")
    return bounds if dots else (bounds[0], bounds[0])


def finite(value: Any) -> Any:
    """The value for JSON, which has no NaN and no infinity: null.

    >>> finite({"a": [1.0, float("nan")]})
    {'a': [1.0, None]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


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
            DataError: a part cannot be read.
        """
        self._refresh()
        if self._found is None or self._found[0] != query:
            self._found = (query, self._search(query))
        return self._found[1]

    def rows(self, numbers: Sequence[int], columns: Sequence[str] = READABLE) -> list[dict[str, Any]]:
        """These columns of these rows of the last search, each with a `key` for `one`."""
        chosen = self._index.take(pa.array(numbers, pa.int64()))
        parts, places = chosen["part"].to_numpy(), chosen["place"].to_numpy()
        found: list[dict[str, Any]] = chosen.select([n for n in columns if n in LIGHT.names]).to_pylist()
        names = [name for name in columns if name not in LIGHT.names]
        for number, path in enumerate(self._parts):
            mine = np.flatnonzero(parts == number)
            for at, values in zip(mine, _rows_of(path, places[mine], names) if len(mine) else (), strict=True):
                found[at] = {"key": f"{path.name}:{places[at]}", **found[at], **values}
        return found

    def one(self, key: str, columns: Sequence[str] = EVERYTHING) -> dict[str, Any]:
        """One answer by its key.

        Raises:
            DataError: there is none.
        """
        name, _, place = key.rpartition(":")
        path = next((path for path in parts_of(self._folder) if path.name == name), None)
        if path is not None and place.isdecimal() and int(place) < pq.read_metadata(path).num_rows:
            return {"key": key, **_rows_of(path, np.array([int(place)]), list(columns))[0]}
        raise DataError(f"{key}: there is no such answer; perhaps the run went back to an earlier step: search again")

    def light(self, numbers: pa.Array | None = None) -> pa.Table:
        """The light columns, see `rlcore.answers.store.LIGHT`; of all rows without `numbers`."""
        self._refresh()
        table = self._index.select(LIGHT.names)
        return table if numbers is None else table.take(numbers)

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


_EMPTY = LIGHT.append(pa.field("part", pa.int32())).append(pa.field("place", pa.int64())).empty_table()
"""The light columns of all parts, and where each row is: number of its part, and place in it."""


def _rows_of(path: Path, places: np.ndarray, columns: list[str]) -> list[dict[str, Any]]:
    """These columns of these rows of a part, whose other row groups are not read."""
    groups, at = np.unique(places // ROWS_PER_GROUP, return_inverse=True)
    table = _read(path, columns, groups.tolist())
    sizes = np.minimum(ROWS_PER_GROUP, pq.read_metadata(path).num_rows - groups * ROWS_PER_GROUP)
    starts = np.cumsum(sizes) - sizes
    found: list[dict[str, Any]] = table.take(pa.array(starts[at] + places % ROWS_PER_GROUP)).to_pylist()
    return found


def _read(path: Path, columns: list[str], groups: list[int] | None = None) -> pa.Table:
    try:
        if groups is None:
            return pq.read_table(path, columns=columns)
        with pq.ParquetFile(path) as file:
            return file.read_row_groups(groups, columns=columns)
    except (OSError, pa.ArrowException) as reason:
        raise DataError(
            f"{path}: cannot be read as kept answers ({reason}). If the run is going on, ask again; else delete the "
            "file, and the rest can be read."
        ) from reason
