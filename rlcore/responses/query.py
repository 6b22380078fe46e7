"""Search of a run's stored responses. Texts and tokens are read on demand. This module does not import torch."""

import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic_core import to_jsonable_python

from rlcore.config.problems import format_value
from rlcore.errors import ConfigError, DataError
from rlcore.responses.store import LIGHT, ROWS_PER_GROUP, TEXTS, TOKENS, parts_of

KINDS = ("all", "training", "validation")
EACH = ("answer", "prompt")
SORTS = ("step", "score", "advantage", "num_tokens", "logprob", "gap", "prompt_id", "change")
"""The sort columns. `change` is the rise of a prompt's mean score from the first validation to the last. The mean is
taken over the prompt's sampled responses, without greedy responses."""
READABLE = [*LIGHT.names, *TEXTS.names]
ALL_COLUMNS = [*READABLE, *TOKENS.names]
_PROMPT = ["data_source", "prompt_id"]
Decode = Callable[[Sequence[int]], str]
_REPLACEMENT = "\ufffd"  # a decoder returns it for an incomplete character
_MAX_TOKENS_PER_CHARACTER = 4
MAX_PROMPT_ID = 2**63 - 1
MAX_DIGITS = 19  # a longer text is not parsed as a number: Python itself limits numbers to 4,300 digits
Range = tuple[float | None, float | None]
"""The lowest and the highest value, both inclusive. None means no bound."""


@dataclass(frozen=True, slots=True)
class Query:
    """The selection and order of responses. With `each="prompt"`, only the first response to each prompt is kept.

    Responses that are equal in the sort column are ordered by step: ascending, or descending with `each="prompt"`."""

    step: Range = (None, None)
    score: Range = (None, None)
    prompt: int | None = None
    search: str = ""  # in responses, regardless of case
    kind: str = "all"
    sort: str = "step"  # one of `SORTS`, with `-` for descending order
    in_prompts: bool = False  # search prompts too
    each: str = "answer"

    @classmethod
    def parse(cls, step: str = "", score: str = "", **others: Any) -> "Query":
        """Parse a query whose ranges are texts such as `3..5`. Raises ConfigError if a value is invalid."""
        query = cls(parse_range("step", step), parse_range("score", score), **others)
        if query.prompt is not None and not 0 <= query.prompt <= MAX_PROMPT_ID:
            raise ConfigError(f"prompt: must be from 0 to {MAX_PROMPT_ID}, got {format_value(query.prompt)}")
        if query.search != query.search.encode(errors="ignore").decode():
            raise ConfigError(f"search: must be UTF-8 text, got {query.search!r}")
        for name, value, allowed in (("each", query.each, EACH), ("kind", query.kind, KINDS)):
            if value not in allowed:
                raise ConfigError(f"{name}: must be {', '.join(allowed[:-1])} or {allowed[-1]}, got {value!r}")
        if query.sort.removeprefix("-") not in SORTS:
            raise ConfigError(
                f"sort: must be one of {', '.join(SORTS)}, optionally with a leading -, got {query.sort!r}"
            )
        return query


def parse_range(name: str, text: str) -> Range:
    """Parse a range `LOW..HIGH`, where both bounds are optional, or a single number.

    >>> parse_range("step", "3"), parse_range("step", "3..5"), parse_range("score", "..0.5"), parse_range("score", "")
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


to_finite_json = partial(to_jsonable_python, inf_nan_mode="null")


@dataclass(frozen=True)
class SearchResult:
    """The sorted responses that match a search. `light`: a row for each response, with the columns in `LIGHT`, the
    column `change`, the index of the response's file in `parts`, and the row in this file."""

    parts: tuple[Path, ...]
    light: pa.Table

    def __len__(self) -> int:
        """Return the number of responses."""
        return int(self.light.num_rows)

    def rows(self, numbers: Sequence[int], columns: Sequence[str] = READABLE) -> list[dict[str, Any]]:
        """Return the key and the `columns` of each response at the positions `numbers` in the search result. Raises
        DataError if a file is unreadable."""
        chosen = self.light.take(pa.array(numbers, pa.int64()))
        parts, places = chosen["part"].to_numpy(), chosen["place"].to_numpy()
        known = [name for name in columns if name in chosen.column_names]
        names = [name for name in columns if name not in chosen.column_names]
        found: list[dict[str, Any]] = chosen.select(known).to_pylist()
        for part in np.unique(parts):
            mine, path = np.flatnonzero(parts == part), self.parts[part]
            read = _read_rows(path, places[mine], names) if names else [{}] * len(mine)
            for at, values in zip(mine, read, strict=True):
                found[at] = {"key": f"{path.name}:{places[at]}", **found[at], **values}
        return found


def find_responses(folder: Path, query: Query) -> SearchResult:
    """Search the responses that a run has stored so far. Raises DataError if a file cannot be read."""
    known = {}
    for path in parts_of(folder):
        with suppress(FileNotFoundError):  # a running trainer removes its oldest parts
            known[path] = path.stat()
    parts = tuple((path, state.st_mtime_ns, state.st_size) for path, state in known.items())
    table, conditions = _read_light(parts), [pc.scalar(True)]
    if query.kind != "all":
        is_validation = pc.field("validation").is_valid()
        conditions.append(is_validation if query.kind == "validation" else ~is_validation)
    if query.prompt is not None:
        conditions.append(pc.field("prompt_id") == query.prompt)
    for name, (low, high) in (("step", query.step), ("score", query.score)):
        if low is not None:
            conditions.append(pc.field(name) >= low)
        if high is not None:
            conditions.append(pc.field(name) <= high)
    table = table.filter(reduce(operator.and_, conditions))
    if query.search:
        at = table["part"].to_numpy()
        columns = ["answer", "prompt"] if query.in_prompts else ["answer"]
        masks = [
            _match_text(path, table["place"].to_numpy()[at == part], query.search, columns)
            for part, path in enumerate(known)
        ]
        table = table.filter(pa.array(np.concatenate([np.zeros(0, dtype=bool), *masks])))
    keys = {query.sort.removeprefix("-"): "descending" if query.sort.startswith("-") else "ascending"}
    keys.setdefault("step", "ascending" if query.each == "answer" else "descending")
    table = table.sort_by([*keys.items(), ("part", "ascending"), ("place", "ascending")])
    if query.each == "prompt":
        table = table.filter(pa.array(~table.select(_PROMPT).to_pandas().duplicated()))
    return SearchResult(tuple(known), table)


def count_responses(folder: Path) -> int:
    """Return the number of stored responses of a run. Raises DataError if there are none or a file is unreadable."""
    if not (total := len(find_responses(folder, Query()))):
        raise DataError(
            f"{folder}: run {folder.parent.name} has no stored responses, either not yet or because of its settings "
            "(answers.every_steps=0)"
        )
    return total


def read_response(folder: Path, key: str) -> dict[str, Any]:
    """Return all columns of a response by its key. Raises DataError if the response or its file cannot be read."""
    name, _, place = key.rpartition(":")
    path = next((path for path in parts_of(folder) if path.name == name), None)
    if path is not None and place.isdecimal() and len(place) <= MAX_DIGITS and int(place) < _count_rows(path):
        return {"key": key, **_read_rows(path, np.array([int(place)]), ALL_COLUMNS)[0]}
    raise _missing_response(key)


def _missing_response(key: str) -> DataError:
    return DataError(f"{key}: no such response; perhaps the run resumed from an earlier step: search again")


def responses_to_same_prompt(folder: Path, key: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return all responses to one prompt from one step or validation. `key` is the key of one of these responses. Also
    return the prompt's mean score in each step and validation. Raises DataError if a response or file cannot be read.
    """
    chosen = read_response(folder, key)
    found = find_responses(folder, Query(prompt=chosen["prompt_id"]))
    rows = found.rows(range(len(found)), LIGHT.names)
    visits: dict[tuple[Any, ...], list[int]] = {}
    for place, row in enumerate(rows):
        if row["data_source"] == chosen["data_source"]:
            visits.setdefault((row["step"], row["validation"]), []).append(place)
    if (chosen["step"], chosen["validation"]) not in visits:  # a running trainer has removed the part
        raise _missing_response(key)
    scores = [
        {"key": rows[places[0]]["key"], "step": step, "validation": validation,
         "score": _mean(rows[place]["score"] for place in places if not rows[place]["greedy"])}
        for (step, validation), places in visits.items()
    ]  # fmt: skip
    return found.rows(visits[chosen["step"], chosen["validation"]], ALL_COLUMNS), scores


def _mean(scores: Iterable[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known else None


@lru_cache(maxsize=8)
def _read_light(parts: tuple[tuple[Path, int, int], ...]) -> pa.Table:
    """Return a row for each response, with the columns in `LIGHT`, the column `change`, the index of the response's
    file in `parts`, and the row in this file. `parts`: the path of each file, with its modification time in nanoseconds
    and its size as further cache keys."""
    places = pa.schema([*LIGHT, ("part", pa.int32()), ("place", pa.int64())])
    tables = [places.empty_table()]
    for number, (path, _, _) in enumerate(parts):
        table = _read(path, LIGHT.names)
        at = pa.array(np.full(table.num_rows, number, dtype=np.int32)), pa.array(np.arange(table.num_rows))
        tables.append(pa.table([*table.columns, *at], schema=places))
    light = pa.concat_tables(tables)
    return light.append_column("change", _changes(light))


def _changes(light: pa.Table) -> pa.Array:
    """Return the column `change` (see `SORTS`). The value is null for prompts without a scored validation."""
    if not light.num_rows:
        return pa.nulls(0, pa.float64())
    frame = light.select([*_PROMPT, "step", "validation", "greedy", "score"]).to_pandas()
    scored = frame[frame.validation.notna() & ~frame.greedy & frame.score.notna()]
    means = scored.groupby([*_PROMPT, "step"], dropna=False).score.mean().groupby(_PROMPT, dropna=False)
    change = (means.last() - means.first()).rename("change")
    return pa.array(frame[_PROMPT].join(change, on=_PROMPT).change, pa.float64(), from_pandas=True)


def _match_text(path: Path, places: np.ndarray, text: str, columns: list[str]) -> np.ndarray:
    if not len(places):
        return np.zeros(0, dtype=bool)
    table = _read(path, columns)
    found = [np.asarray(pc.match_substring(table[name], text, ignore_case=True)) for name in columns]
    return np.asarray(np.logical_or.reduce(found)[places])


def _read_rows(path: Path, places: np.ndarray, columns: list[str]) -> list[dict[str, Any]]:
    groups, at = np.unique(places // ROWS_PER_GROUP, return_inverse=True)
    table = _read(path, columns, groups.tolist())
    sizes = np.minimum(ROWS_PER_GROUP, _count_rows(path) - groups * ROWS_PER_GROUP)
    starts = np.cumsum(sizes) - sizes
    found: list[dict[str, Any]] = table.take(pa.array(starts[at] + places % ROWS_PER_GROUP)).to_pylist()
    return found


def _count_rows(path: Path) -> int:
    with _translate_errors(path):
        return int(pq.read_metadata(path).num_rows)


def _read(path: Path, columns: list[str], groups: list[int] | None = None) -> pa.Table:
    with _translate_errors(path), pq.ParquetFile(path) as file:
        return file.read(columns) if groups is None else file.read_row_groups(groups, columns)


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as reason:
        raise DataError(
            f"{path}: cannot be read as stored responses ({reason}). If the run is active, try again; otherwise delete "
            "the file to read the rest."
        ) from reason


def load_decoder(run_json: Path) -> Decode | None:
    """Return the decoder of the tokenizer named in the run's `run.json`, or None if its `tokenizer.json` is missing."""
    try:
        stages = json.loads(run_json.read_text(encoding="utf-8"))["stages"]
        file = Path(next(stage["path"] for stage in stages if stage["name"] == "tokenizer")) / "tokenizer.json"
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None
    return _decoder(file) if file.is_file() else None


@lru_cache(maxsize=8)
def _decoder(file: Path) -> Decode:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def token_texts(decode: Decode, ids: Sequence[int]) -> list[str]:
    """Return the text of each token. If several tokens form one character, the first token gets the character, and
    the later tokens get ''.

    Each token is decoded together with the previous token, because many decoders drop leading white space.

    >>> words = {1: "a", 2: " b", 3: " c"}
    >>> token_texts(lambda ids: "".join(words[each] for each in ids).lstrip(), [1, 2, 3])
    ['a', ' b', ' c']
    """
    found: list[str] = []
    while (place := len(found)) < len(ids):
        before = list(ids[max(0, place - 1) : place])
        start = decode(before) if before else ""
        for count in range(1, _MAX_TOKENS_PER_CHARACTER + 1):
            whole = decode([*before, *ids[place : place + count]])
            piece = whole.removeprefix(start) if whole.startswith(start) else decode(ids[place : place + count])
            if not piece.endswith(_REPLACEMENT):
                break
        else:
            count, piece = 1, _REPLACEMENT
        found += [piece, *[""] * (min(count, len(ids) - place) - 1)]
    return found
