"""Looks into a dataset: what `millrace data inspect PATH` shows, as a table, JSON or HTML."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.leakage import multisets
from data.lengths import LengthSummary, summarize
from data.schema import find_type, open_parquet, provenance, read_batches, require_row_schema
from data.write import ROWS_PER_GROUP, SPLITS
from rlcore.errors import DataError
from rlcore.storage.manifest import part_directories

if TYPE_CHECKING:
    from rich.console import RenderableType

LONGEST_SHOWN_CHARS = 600
"""Longer texts of a shown row are cut in tables; JSON has them whole."""


@dataclass(frozen=True, slots=True)
class SplitReport:
    """What one parquet file holds.

    `lengths` counts tokens where the filter has written them, else characters (`length_unit`). `duplicates` are rows
    whose prompt occurs before in the file. `problem` says how the file breaks the row schema, None where it keeps it.
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
    """What two splits share: rows of `first` whose prompt, or multiset of numbers, occurs in `second`."""

    first: str
    second: str
    num_prompts: int
    num_multisets: int


@dataclass(frozen=True, slots=True)
class DatasetReport:
    """What a dataset holds."""

    path: str
    splits: tuple[SplitReport, ...]
    leakage: tuple[Leakage, ...]

    def as_json(self) -> str:
        """Everything, as JSON text."""
        document = {
            "path": self.path,
            "splits": [
                {**asdict(split), "lengths": None if split.lengths is None else split.lengths.as_dict()}
                for split in self.splits
            ],
            "leakage": [asdict(pair) for pair in self.leakage],
        }
        return json.dumps(document, indent=2, ensure_ascii=False, default=str)

    def as_rich(self) -> "RenderableType":
        """Tables for a terminal."""
        from data.inspect_views import as_rich

        return as_rich(self)

    def as_html(self) -> str:
        """One self-contained page."""
        from data.inspect_views import as_html

        return as_html(self)


def inspect_dataset(path: Path, *, num_rows: int = 3, seed: int = 0) -> DatasetReport:
    """Read a parquet file, or every parquet file of a folder; `seed` chooses the `num_rows` random rows of each.

    Raises:
        DataError: nothing there, or a file that cannot be read.
    """
    scans = [_scan(file, name, num_rows, seed) for name, file in _files(path)]
    pairs = [(a, b) for index, a in enumerate(scans) for b in scans[index + 1 :]]
    return DatasetReport(str(path), tuple(scan.report for scan in scans), tuple(_leakage(a, b) for a, b in pairs))


def _files(path: Path) -> list[tuple[str, Path]]:
    """Name and file of each split; those of a mixture are named `<part's folder>/<split>`."""
    if path.is_file():
        return [(path.stem, path)]
    parts = part_directories(path)
    if parts != (path,):
        return [(f"{part.name[:8]}/{name}", file) for part in parts for name, file in _files(part)]
    found = list(path.glob("*.parquet"))
    if not found:
        raise DataError(
            f"{path}: no parquet file there. Give a parquet file, or a folder such as artifacts/datasets/<fingerprint>"
        )
    order = {split: index for index, split in enumerate(SPLITS)}
    found.sort(key=lambda file: (order.get(file.stem, len(SPLITS)), file.name))
    return [(file.stem, file) for file in found]


@dataclass(frozen=True, slots=True)
class _Scan:
    report: SplitReport
    prompts: Counter[int]  # hash of a prompt -> rows
    multisets: Counter[tuple[int, ...]]


def _scan(path: Path, name: str, num_rows: int, seed: int) -> _Scan:
    file = open_parquet(path)
    schema, total = file.schema_arrow, file.metadata.num_rows
    tally = _Tally(schema)
    chosen = set(np.random.default_rng(seed).permutation(total)[:num_rows].tolist())
    rows: list[Mapping[str, Any]] = []
    start = 0
    for batch in read_batches(file, path, ROWS_PER_GROUP):
        tally.add(batch)
        here = sorted(index - start for index in chosen if start <= index < start + batch.num_rows)
        rows += [{"row": start + index, **batch.slice(index, 1).to_pylist()[0]} for index in here]
        start += batch.num_rows
    report = SplitReport(
        name=name,
        path=str(path),
        num_rows=total,
        size_bytes=path.stat().st_size,
        columns=tuple((field.name, str(field.type)) for field in schema),
        problem=_schema_problem(schema, path),
        provenance=provenance(path),
        length_unit=tally.length_unit,
        lengths=summarize(tally.lengths),
        difficulty={str(key): tally.difficulty[key] for key in sorted(tally.difficulty)},
        data_sources=dict(tally.sources.most_common()),
        num_with_solution=tally.num_with_solution,
        num_duplicates=sum(tally.prompts.values()) - len(tally.prompts),
        rows=tuple(rows),
    )
    return _Scan(report, tally.prompts, tally.multisets)


def _schema_problem(schema: pa.Schema, path: Path) -> str | None:
    try:
        require_row_schema(schema, path)
    except DataError as error:
        return str(error)
    return None


class _Tally:
    """Counts over all rows of a file; columns that the file lacks count nothing."""

    def __init__(self, schema: pa.Schema) -> None:
        self._has = {
            name: find_type(schema, name) is not None
            for name in (
                "prompt_ids",
                "prompt.[].content",
                "data_source",
                "extra_info.difficulty",
                "extra_info.solution",
                "reward_model.ground_truth.numbers",
            )
        }
        self.length_unit = "tokens" if self._has["prompt_ids"] else "characters"
        self.lengths: Counter[int] = Counter()
        self.difficulty: Counter[int] = Counter()
        self.sources: Counter[str] = Counter()
        self.prompts: Counter[int] = Counter()
        self.multisets: Counter[tuple[int, ...]] = Counter()
        self.num_with_solution = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Count a batch."""
        if self._has["prompt.[].content"]:
            prompts = batch.column("prompt").to_pylist()
            texts = ["\n".join(f"{m['role']}: {m['content']}" for m in prompt or ()) for prompt in prompts]
            self.prompts.update(map(hash, texts))
            if not self._has["prompt_ids"]:
                self.lengths.update(sum(len(m["content"] or "") for m in prompt or ()) for prompt in prompts)
        if self._has["prompt_ids"]:
            self.lengths.update(pc.list_value_length(batch.column("prompt_ids")).to_pylist())
        if self._has["data_source"]:
            self.sources.update(batch.column("data_source").to_pylist())
        if self._has["extra_info.difficulty"]:
            found = pc.struct_field(batch.column("extra_info"), "difficulty").to_pylist()
            self.difficulty.update(value for value in found if value is not None)
        if self._has["extra_info.solution"]:
            found = pc.struct_field(batch.column("extra_info"), "solution").to_pylist()
            self.num_with_solution += sum(map(bool, found))
        if self._has["reward_model.ground_truth.numbers"]:
            self.multisets.update(multisets(pc.struct_field(batch.column("reward_model"), "ground_truth")))


def _leakage(first: _Scan, second: _Scan) -> Leakage:
    return Leakage(
        first.report.name,
        second.report.name,
        sum(count for key, count in first.prompts.items() if key in second.prompts),
        sum(count for key, count in first.multisets.items() if key in second.multisets),
    )
