"""Writes rows as parquet and dataset cards beside them.

Memory is bounded, and equal rows give equal bytes. A card is a README.md with what the rows are and where they come
from; the card of a filtered dataset sums up the lengths of its prompts.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.rows import Row, TaskRows
from data.schema import ROWS_PER_GROUP, ground_truth_type, open_parquet, provenance, provenance_metadata, row_schema
from data.stage import CARD, SPLITS
from rlcore.errors import DataError


def parquet_writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """A writer of row groups. Values hardly repeat, and rows are not selected by value: dictionaries and statistics
    would be wasted."""
    return pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False, write_statistics=False)


def write_splits(
    directory: Path, task: TaskRows, document: Mapping[str, Any], splits: Sequence[str] = SPLITS
) -> dict[str, int]:
    """Write `<split>.parquet` for each of these splits, with `document` as provenance. Returns the rows of each.

    Raises:
        DataError: a split is missing or has no row.
    """
    if missing := [split for split in splits if split not in task.splits]:
        raise DataError(
            f"{task.data_source}: the task's rows have no split {missing}; give both {' and '.join(SPLITS)}"
        )
    return {split: _write(directory, task, split, document) for split in splits}


def _write(directory: Path, task: TaskRows, split: str, document: Mapping[str, Any]) -> int:
    rows = iter(task.splits[split])
    first = next(rows, None)
    if first is None:
        raise DataError(
            f"{task.data_source}: the {split} split has no row; raise data.{split}_size or check the source"
        )
    kind = task.ground_truth_type
    schema = row_schema(ground_truth_type(first.ground_truth) if kind is None else kind)
    known = first.ground_truth if kind is None else None
    difficulties: Counter[int] = Counter()  # of the rows that are written
    with parquet_writer(directory / f"{split}.parquet", schema) as writer:
        rows = chain([first], rows)
        while batch := list(islice(rows, ROWS_PER_GROUP)):
            writer.write_batch(_record_batch(batch, task, split, difficulties.total(), schema, known))
            difficulties.update(row.difficulty for row in batch)
        facts = {"split": split, "data_source": task.data_source, "prompt_form": task.prompt_form}
        by_difficulty = {str(difficulty): difficulties[difficulty] for difficulty in sorted(difficulties)}
        num_rows = difficulties.total()
        counts = {"rows": num_rows, "by_difficulty": by_difficulty}
        writer.add_key_value_metadata(provenance_metadata({**document, **facts, "counts": counts}))
    return num_rows


def _record_batch(
    rows: list[Row], task: TaskRows, split: str, start: int, schema: pa.Schema, first: object
) -> pa.RecordBatch:
    """Rows as columns. `first`: the ground truth of the split's first row, where all have its type."""
    columns = {
        "data_source": [row.data_source or task.data_source for row in rows],
        "prompt": [[{"role": m.role, "content": m.content} for m in row.prompt] for row in rows],
        "ability": [row.ability or task.ability for row in rows],
        "reward_model": [{"style": "rule", "ground_truth": row.ground_truth} for row in rows],
        "extra_info": [
            {
                "split": split,
                "index": index,
                "difficulty": row.difficulty,
                "solution": row.solution,
                "distractor": row.distractor,
            }
            for index, row in enumerate(rows, start=start)
        ],
    }
    try:
        for index, row in enumerate(rows, start=start):
            for name in _further_fields(row.ground_truth, first):  # Arrow would leave it out
                raise ValueError(f"row {index} has the field {name!r}, which the first row has not")
        return pa.RecordBatch.from_arrays([pa.array(columns[f.name], type=f.type) for f in schema], schema=schema)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{task.data_source}: rows {start} to {start + len(rows) - 1} of {split} do not all have the types of the "
            f"first row ({error}); give every row the same kind of ground truth, and whole numbers at most 64 bits"
        ) from error


def _further_fields(value: object, first: object) -> Iterator[str]:
    """Names of fields of a ground truth that the first one, or the first entry of a list in it, has not."""
    if isinstance(value, Mapping) and isinstance(first, Mapping):
        for name, inner in value.items():
            yield from _further_fields(inner, first[name]) if name in first else (name,)
    elif isinstance(value, list | tuple) and isinstance(first, list | tuple) and first:
        for inner in value:
            yield from _further_fields(inner, first[0])


# ---------------------------------------------------------------------- lengths of prompts


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Token counts of the prompts of one split."""

    num_prompts: int
    min_tokens: int
    mean_tokens: float
    p50_tokens: int
    p95_tokens: int
    max_tokens: int


def summarize(lengths: Counter[int]) -> LengthSummary | None:
    """Summary of counts by length; None where there are none. A quantile is the smallest length that at least this
    share of the prompts does not exceed."""
    every = np.repeat(*(np.fromiter(part, dtype=np.int64) for part in (lengths.keys(), lengths.values())))
    if not len(every):
        return None
    p50, p95 = np.quantile(every, [0.5, 0.95], method="inverted_cdf").tolist()
    low, high = int(every.min()), int(every.max())
    return LengthSummary(len(every), low, round(float(every.mean()), 3), p50, p95, high)


# ---------------------------------------------------------------------- cards


def write_dataset_card(folder: Path) -> None:
    """Write the card of a dataset, from the provenance and the first row of each split."""
    files = {split: path for split in SPLITS if (path := folder / f"{split}.parquet").is_file()}
    documents = {split: provenance(path) for split, path in files.items()}
    examples = {split: open_parquet(path).read_row_group(0).slice(0, 1).to_pylist()[0] for split, path in files.items()}
    any_split = next(iter(documents.values()))
    settings = json.dumps(any_split["settings"], indent=2, ensure_ascii=False)
    lines = [
        f"# {any_split['data_source']}",
        "",
        f"Fingerprint `{any_split['fingerprint']}`, task `{any_split['task']}`, seed {any_split['seed']}, "
        f"version `{any_split['task_version']}`, prompts as {any_split['prompt_form']}.",
        "",
        "| split | rows | by difficulty |",
        "| --- | ---: | --- |",
    ]
    for split, document in documents.items():
        counts = document["counts"]
        by_difficulty = ", ".join(f"{key}: {value:,}" for key, value in counts["by_difficulty"].items())
        lines.append(f"| {split} | {counts['rows']:,} | {by_difficulty} |")
    if any_split["inputs"]:
        lines += ["", "Made from these files (sha256):", ""]
        lines += [f"- `{name}` {digest}" for name, digest in any_split["inputs"].items()]
    lines += ["", "## Settings", "", "```json", settings, "```"]
    for split, row in examples.items():
        lines += ["", f"## First row of {split}", "", "```json", json.dumps(row, indent=2, ensure_ascii=False), "```"]
    (folder / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_filter_card(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the card of a filtered dataset, from the facts of its manifest."""
    settings = facts["settings"]
    lines = [
        "# Filtered dataset",
        "",
        f"Fingerprint `{facts['fingerprint']}`: dataset `{facts['dataset']}` tokenized by `{facts['tokenizer']}`, at "
        f"most {settings['max_prompt_tokens']} tokens a prompt (overlong: {settings['overlong']}, duplicates: "
        f"{settings['duplicates']}, rows of suites: {settings['decontaminate']}).",
        "",
        "| what | rows |",
        "| --- | ---: |",
        *(f"| {name} | {count:,} |" for name, count in facts["counts"].items()),
    ]
    lines += ["", "| prompts before the filter | number | mean | median | p95 | longest (tokens) |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for split, summary in facts["lengths"].items():
        found = LengthSummary(**summary)
        figures = f"{found.mean_tokens:.1f} | {found.p50_tokens} | {found.p95_tokens} | {found.max_tokens}"
        lines.append(f"| {split} | {found.num_prompts:,} | {figures} |")
    (folder / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")
