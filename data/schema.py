"""The row schema as Arrow types, and functions for parquet files, their provenance and dataset cards.

The task determines the type of the ground truth. The schema's fields `style`, `index` and `split` are ignored in the
user's files. Files are written in bounded memory, and the same rows always give the same bytes."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.rows import SPLITS, Row, TaskRows
from rlcore.errors import DataError

PROVENANCE_KEY = b"millrace"  # metadata key of the JSON document about the origin of a file's rows
ROWS_PER_GROUP = 8_192  # in a parquet row group, and in a batch in memory
PROMPT_TYPE = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
EXTRA_INFO_TYPE = pa.struct(
    [
        ("split", pa.string()),
        ("index", pa.int64()),
        ("difficulty", pa.int64()),
        ("solution", pa.string()),
        ("distractor", pa.string()),
    ]
)
CARD = "README.md"  # a page about the rows and their origin
Check = Callable[[pa.DataType], bool]
_encode = json.JSONEncoder(ensure_ascii=False, sort_keys=True).encode
# A missing value as Python, NumPy, pandas and JSON write it.
_NO_VALUE = re.compile(r"[-+]?(?:nan|NaN|NAN|inf|Inf|[iI]nfinity)|None|null|NULL|NaT|<NA>")


def row_schema(ground_truth: pa.DataType) -> pa.Schema:
    """Return the schema of written rows for a type of ground truth."""
    return pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", PROMPT_TYPE),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", ground_truth)])),
            ("extra_info", EXTRA_INFO_TYPE),
        ]
    )


def ground_truth_type(example: object) -> pa.DataType:
    """Infer the Arrow type of a ground truth. Raises DataError if the value has no supported type."""
    if isinstance(example, Mapping):
        return pa.struct([(str(name), ground_truth_type(value)) for name, value in example.items()])
    if isinstance(example, list | tuple) and example:
        return pa.list_(ground_truth_type(example[0]))
    for kind, arrow in ((bool, pa.bool_()), (int, pa.int64()), (float, pa.float64()), (str, pa.string())):
        if isinstance(example, kind):
            return arrow
    raise DataError(
        f"ground_truth: must be a string, a number, a non-empty list or a mapping of these, got {example!r}. "
        "Change the ground truth of the task's rows."
    )


def _any_of(*names: str) -> Check:
    return lambda found: any(getattr(pa.types, f"is_{name}")(found) for name in names)


_is_text, _is_list = _any_of("string", "large_string"), _any_of("list", "large_list")
_is_ground_truth = _any_of("integer", "floating", "boolean", "string", "large_string", "list", "large_list", "struct")


# Path in the row, rule in words, rule; "[]" steps into a list. Foreign files may use the large or shorter Arrow types.
_RULES: tuple[tuple[str, str, Check], ...] = (
    ("data_source", "string", _is_text),
    ("prompt", "list of {role: string, content: string}", _is_list),
    ("prompt.[].role", "string", _is_text),
    ("prompt.[].content", "string", _is_text),
    ("reward_model", "struct {ground_truth}", pa.types.is_struct),
    ("reward_model.ground_truth", "string, number, list or struct", _is_ground_truth),
    ("ability", "string", _is_text),
    ("extra_info", "struct", pa.types.is_struct),
    ("extra_info.difficulty", "integer", pa.types.is_integer),
    ("extra_info.solution", "string", _is_text),
    ("extra_info.distractor", "string", _is_text),
)


def require_row_schema(schema: pa.Schema, path: Path) -> None:
    """Raise DataError with the expected and actual types of all missing and mistyped columns of a file."""
    problems = []
    for name, expected, check in _RULES:
        found = find_type(schema, name)
        if name.startswith(("ability", "extra_info")) and (found is None or pa.types.is_null(found)):
            continue  # optional
        if found is None or not check(found):
            problems.append((name, expected, "nothing" if found is None else str(found)))
    # Fields of a missing parent are not reported.
    missing = {name for name, _, got in problems if got == "nothing"}
    reported = [p for p in problems if not any(p[0].startswith(f"{parent}.") for parent in missing)]
    if reported:
        lines = "".join(f"\n  column {name}: expected {expected}, got {got}" for name, expected, got in reported)
        raise DataError(
            f"{path}: does not have the row schema:{lines}\n"
            "Rename or cast these columns (docs/data.md has the schema), or read the file by data=mapped, whose "
            "data.question and data.answer may be fields such as prompt.0.content and reward_model.ground_truth."
        )


def find_type(schema: pa.Schema, name: str) -> pa.DataType | None:
    """Return the type at a dotted path, or None if the path does not exist."""
    head, *rest = name.split(".")
    if schema.get_field_index(head) < 0:
        return None
    found: pa.DataType = schema.field(head).type
    for part in rest:
        if part == "[]" and _is_list(found):
            found = found.value_type
        elif pa.types.is_struct(found) and found.get_field_index(part) >= 0:
            found = found.field(part).type
        else:
            return None
    return found


def has_non_finite(ground_truth: object) -> bool:
    """Return whether a ground truth contains NaN or an infinity, or is a text for a missing value, such as `null`."""
    if isinstance(ground_truth, str):
        return _NO_VALUE.fullmatch(ground_truth.strip()) is not None
    return _has_non_finite(ground_truth)


def _has_non_finite(ground_truth: object) -> bool:
    if isinstance(ground_truth, Mapping):
        return any(map(_has_non_finite, ground_truth.values()))
    if isinstance(ground_truth, list | tuple):
        return any(map(_has_non_finite, ground_truth))
    return isinstance(ground_truth, float) and not math.isfinite(ground_truth)


def ground_truth_json(ground_truth: object) -> str:
    """Return a ground truth as JSON for the scoring pool. A value that is not a mapping becomes `{"answer": ...}`."""
    value = ground_truth if isinstance(ground_truth, Mapping) else {"answer": ground_truth}
    if has_non_finite(value):
        raise DataError(f"ground_truth: NaN and infinity are no references, got {ground_truth}; repair the task's rows")
    return _encode(value)


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a parquet file. Raises DataError if the file is missing, truncated or damaged."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; a dataset is a folder with train.parquet and validation.parquet")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: cannot be read as parquet ({error}); it is damaged or cut short. Delete it and make it again"
        ) from error


def read_batches(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Read the rows in batches of at most `ROWS_PER_GROUP`. Raises DataError if a page is damaged."""
    done = 0
    batches = open_parquet(path).iter_batches(batch_size=ROWS_PER_GROUP, columns=columns)
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: damaged after row {done} ({error}). Delete the file and make it again") from error
        if batch is None:
            return
        yield batch
        done += batch.num_rows


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row after a text that locates the row in messages, such as `train.parquet: row 3`."""
    rows = (values for batch in read_batches(path, columns) for values in batch.to_pylist())
    yield from ((f"{path}: row {number}", values) for number, values in enumerate(rows))


def provenance(path: Path) -> dict[str, Any]:
    """Return a file's provenance document, or {} if none is valid. Raises DataError if the file cannot be read."""
    raw = (open_parquet(path).metadata.metadata or {}).get(PROVENANCE_KEY)
    try:
        found = json.loads(raw) if raw else {}
    except ValueError:  # another program wrote it
        found = {}
    return found if isinstance(found, dict) else {}


def provenance_metadata(document: Mapping[str, Any]) -> dict[bytes, bytes]:
    """Return a provenance document as metadata of a parquet file."""
    return {PROVENANCE_KEY: json.dumps(document, sort_keys=True, ensure_ascii=False, allow_nan=False).encode()}


def parquet_writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """Return a writer of parquet files without dictionary encoding and column statistics. Readers do not need them,
    because they never filter rows by value."""
    return pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False, write_statistics=False)


def write_splits(
    directory: Path, task: TaskRows, document: Mapping[str, Any], splits: Sequence[str] = SPLITS
) -> dict[str, int]:
    """Write `<split>.parquet` for each split with `document` as provenance. Return the number of rows in each split."""
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
    example = first.ground_truth if kind is None else None
    difficulties: Counter[int] = Counter()
    with parquet_writer(directory / f"{split}.parquet", schema) as writer:
        rows = chain([first], rows)
        while batch := list(islice(rows, ROWS_PER_GROUP)):
            writer.write_batch(_record_batch(batch, task, split, difficulties.total(), schema, example))
            difficulties.update(row.difficulty for row in batch)
        by_difficulty = {str(key): difficulties[key] for key in sorted(difficulties)}
        counts = {"rows": difficulties.total(), "by_difficulty": by_difficulty}
        facts = {"split": split, "data_source": task.data_source, "prompt_form": task.prompt_form, "counts": counts}
        writer.add_key_value_metadata(provenance_metadata({**document, **facts}))
    return difficulties.total()


def _record_batch(
    rows: list[Row], task: TaskRows, split: str, start: int, schema: pa.Schema, example: object
) -> pa.RecordBatch:
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
            for name in _extra_fields(row.ground_truth, example):  # Arrow would drop the field
                raise ValueError(f"row {index} has the field {name!r}, which the first row has not")
        return pa.RecordBatch.from_arrays([pa.array(columns[f.name], type=f.type) for f in schema], schema=schema)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{task.data_source}: rows {start} to {start + len(rows) - 1} of {split} do not all have the types of the "
            f"first row ({error}); give every row the same kind of ground truth, and whole numbers at most 64 bits"
        ) from error


def _extra_fields(value: object, example: object) -> Iterator[str]:
    """Yield the names of the fields that a ground truth has and `example` lacks. If `example` contains a list, all
    entries of the ground truth's list are compared with the first entry of this list."""
    if isinstance(value, Mapping) and isinstance(example, Mapping):
        for name, inner in value.items():
            yield from _extra_fields(inner, example[name]) if name in example else (name,)
    elif isinstance(value, list | tuple) and isinstance(example, list | tuple) and example:
        for inner in value:
            yield from _extra_fields(inner, example[0])


def write_dataset_card(folder: Path) -> None:
    """Write the card of a dataset, from the provenance and the first row of each split."""
    files = {split: path for split in SPLITS if (path := folder / f"{split}.parquet").is_file()}
    documents = {split: provenance(path) for split, path in files.items()}
    any_split = next(iter(documents.values()))
    lines = [
        f"# {any_split['data_source']}\n",
        f"Fingerprint `{any_split['fingerprint']}`, task `{any_split['task']}`, seed {any_split['seed']}, "
        f"version `{any_split['task_version']}`, prompts as {any_split['prompt_form']}.\n",
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
    lines += ["", "## Settings", *_json_block(any_split["settings"])]
    for split, path in files.items():
        row = open_parquet(path).read_row_group(0).slice(0, 1).to_pylist()[0]
        lines += ["", f"## First row of {split}", *_json_block(row)]
    (folder / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _json_block(value: object) -> tuple[str, ...]:
    return "", "```json", json.dumps(value, indent=2, ensure_ascii=False), "```"
