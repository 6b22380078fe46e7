"""The contents of a dataset for `millrace data inspect PATH`, as tables for a terminal or as JSON."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations, starmap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from data.filter import multisets
from data.rows import SPLITS
from data.schema import (
    ROWS_PER_GROUP,
    LengthSummary,
    find_type,
    open_parquet,
    provenance,
    read_batches,
    require_row_schema,
    summarize,
)
from rlcore.errors import DataError
from rlcore.storage.manifest import part_directories

LONGEST_SHOWN_CHARS = 600
"""The maximum length of a text in tables. Longer texts are truncated there. JSON contains the full texts."""
_TOKEN_IDS = ("prompt_ids", "solution_ids", "distractor_ids")


@dataclass(frozen=True, slots=True)
class SplitReport:
    """The contents of one parquet file.

    `lengths`: prompt lengths in tokens for filtered files, otherwise in characters (`length_unit`). `num_duplicates`:
    the rows that repeat the prompt of an earlier row. `problem`: the violation of the row schema, or None.
    """

    name: str
    path: str
    num_rows: int
    size_bytes: int
    columns: tuple[tuple[str, str], ...]
    problem: str | None
    provenance: Mapping[str, Any]
    length_unit: str
    lengths: LengthSummary | None
    difficulty: Mapping[str, int]
    data_sources: Mapping[str, int]
    num_with_solution: int
    num_duplicates: int
    rows: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Leakage:
    """The overlap of two splits: rows of `first` with a prompt or a multiset of numbers that occurs in `second`."""

    first: str
    second: str
    num_prompts: int
    num_multisets: int

    def __str__(self) -> str:
        return f"{self.first} and {self.second} share {self.num_prompts:,} prompts, {self.num_multisets:,} multisets"


@dataclass(frozen=True, slots=True)
class DatasetReport:
    """The contents of all splits of a dataset, and the overlaps between the splits."""

    path: str
    splits: tuple[SplitReport, ...]
    leakage: tuple[Leakage, ...]

    def as_json(self) -> str:
        """Return the whole report as JSON text."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, default=str)


def inspect_dataset(path: Path, *, num_rows: int = 3, seed: int = 0) -> DatasetReport:
    """Read a parquet file, or every parquet file of a folder. `seed` selects `num_rows` random rows of each file.

    Raises DataError if there is no parquet file, or if a file cannot be read.
    """
    scans = [_scan(file, name, num_rows, seed) for name, file in _files(path)]
    leakage = tuple(starmap(_leakage, combinations(scans, 2)))
    return DatasetReport(str(path), tuple(report for report, _, _ in scans), leakage)


def _files(path: Path) -> list[tuple[str, Path]]:
    """Return the name and file of each split. In a mixture, a name is `<folder of the data source>/<split>`."""
    if path.is_file() and path.suffix == ".parquet":
        return [(path.stem, path)]
    parts = part_directories(path)
    if parts != (path,):
        return [(f"{part.name[:8]}/{name}", file) for part in parts for name, file in _files(part)]
    found = sorted(path.glob("*.parquet"), key=lambda file: (file.stem not in SPLITS, file.name))
    if not found:
        raise DataError(
            f"{path}: no parquet file there. Give a parquet file, or a folder such as artifacts/datasets/<fingerprint>"
        )
    return [(file.stem, file) for file in found]


_Scan = tuple[SplitReport, Counter[str], Counter[tuple[int, ...]]]
"""A report, the number of rows by prompt, and the number of rows by multiset of numbers."""


def _scan(path: Path, name: str, num_rows: int, seed: int) -> _Scan:
    """Read one file. A column that is missing or has another type counts as empty."""
    file = open_parquet(path)
    schema = file.schema_arrow
    table = pa.Table.from_batches(read_batches(file, path, ROWS_PER_GROUP), schema=schema)
    chosen = sorted(np.random.default_rng(seed).permutation(table.num_rows)[:num_rows].tolist())

    def values(column: str) -> list[Any]:
        return _column(table, column).to_pylist() if find_type(schema, column) is not None else []

    has_messages = find_type(schema, "prompt.[].content") is not None
    prompts = [[m or {} for m in prompt or ()] for prompt in values("prompt")] if has_messages else []
    texts = Counter("\n".join(f"{m.get('role')}: {m.get('content')}" for m in prompt) for prompt in prompts)
    is_tokenized = find_type(schema, "prompt_ids.[]") is not None
    lengths = Counter(
        [len(ids) for ids in values("prompt_ids") if ids is not None]
        if is_tokenized
        else [sum(len(str(m.get("content") or "")) for m in prompt) for prompt in prompts]
    )
    difficulty = Counter(value for value in values("extra_info.difficulty") if value is not None)
    truths = "reward_model.ground_truth"
    has_numbers = find_type(schema, f"{truths}.numbers") is not None
    numbers = Counter(multisets(_column(table, truths).combine_chunks()) if has_numbers else ())
    report = SplitReport(
        name=name,
        path=str(path),
        num_rows=table.num_rows,
        size_bytes=path.stat().st_size,
        columns=tuple((field.name, str(field.type)) for field in schema),
        problem=_schema_problem(schema, path),
        provenance=provenance(path),
        length_unit="tokens" if is_tokenized else "characters",
        lengths=summarize(lengths),
        difficulty={str(key): difficulty[key] for key in sorted(difficulty)},
        data_sources=dict(Counter(map(str, values("data_source"))).most_common()),
        num_with_solution=sum(map(bool, values("extra_info.solution"))),
        num_duplicates=texts.total() - len(texts),
        rows=tuple({"row": row, **table.slice(row, 1).to_pylist()[0]} for row in chosen),
    )
    return report, texts, numbers


def _column(table: pa.Table, name: str) -> pa.ChunkedArray:
    """Return the column at a dotted path, such as `extra_info.difficulty`."""
    head, *rest = name.split(".")
    return pc.struct_field(table.column(head), rest) if rest else table.column(head)


def _schema_problem(schema: pa.Schema, path: Path) -> str | None:
    try:
        require_row_schema(schema, path)
    except DataError as error:
        return str(error)
    return None


def _leakage(first: _Scan, second: _Scan) -> Leakage:
    (report, prompts, numbers), (other, other_prompts, other_numbers) = first, second
    num_prompts = sum(prompts[key] for key in prompts.keys() & other_prompts.keys())
    num_multisets = sum(numbers[key] for key in numbers.keys() & other_numbers.keys())
    return Leakage(report.name, other.name, num_prompts, num_multisets)


def _facts(split: SplitReport) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each statistic of a split."""
    yield "rows", f"{split.num_rows:,} ({split.size_bytes / 1e6:.2f} MB)"
    yield "source", ", ".join(f"{name} ({count:,})" for name, count in split.data_sources.items()) or "none"
    if split.lengths is not None:
        found = split.lengths
        yield (
            f"prompt {split.length_unit}",
            f"{found.min_tokens} to {found.max_tokens}, mean {found.mean_tokens:.1f}, median {found.p50_tokens}, "
            f"p95 {found.p95_tokens}",
        )
    if split.difficulty:
        yield "difficulty", ", ".join(f"{key}: {count:,}" for key, count in split.difficulty.items())
    yield "with a solution", f"{split.num_with_solution:,}"
    yield "duplicate prompts", f"{split.num_duplicates:,}"
    if split.problem is not None:
        yield "schema", split.problem


def _shown_row(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each message, column and field of a row that has the row schema."""
    for message in row["prompt"] or ():
        role, content = (message or {}).get("role"), (message or {}).get("content")
        yield f"prompt ({role})", _text(content or "")
    for name, value in row.items():
        if name in _TOKEN_IDS:
            yield name, f"{len(value or ())} tokens: {_text(value)}"
        elif isinstance(value, Mapping):
            yield from ((field, _text(found)) for field, found in value.items() if found not in ("", None))
        elif name not in ("row", "prompt"):
            yield name, _text(value)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_SHOWN_CHARS else f"{text[:LONGEST_SHOWN_CHARS]} ... ({len(text):,} characters)"


def as_rich(report: DatasetReport) -> RenderableType:
    """Return the report as tables for a terminal."""
    tables = [_table(title, rows) for split in report.splits for title, rows in _sections(split)]
    leaks = (
        Text(str(pair), style="bold red" if pair.num_prompts or pair.num_multisets else "green")
        for pair in report.leakage
    )
    return Group(*tables, *leaks)


def _sections(split: SplitReport) -> Iterator[tuple[str, Iterable[tuple[str, str]]]]:
    yield split.path, _facts(split)
    yield f"{split.name}: columns", split.columns
    yield f"{split.name}: provenance", ((name, _text(value)) for name, value in split.provenance.items())
    for row in split.rows:
        shown = _shown_row(row) if split.problem is None else ((name, _text(row[name])) for name, _ in split.columns)
        yield f"{split.name}: row {row['row']}", shown


def _table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(title=Text(title, style="table.title"), title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table
