"""The row schema as Arrow types, and the check of a parquet file against it.

A row is what the field writes: `data_source`, `prompt` (chat messages), `ability`, `reward_model{style, ground_truth}`,
`extra_info{split, index, ...}`. The ground truth is the task's own: a struct, or a plain string. What nothing reads
(style, index and split of a file from elsewhere) may be of any type, or missing.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlcore.errors import DataError

PROVENANCE_KEY = b"millrace"
"""Key of the JSON document in a parquet file's metadata with the origin of its rows."""

ROWS_PER_GROUP = 8_192
"""Rows of a parquet row group: what is in memory at one time."""

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

Check = Callable[[pa.DataType], bool]


def row_schema(ground_truth: pa.DataType) -> pa.Schema:
    """Schema of the rows that Millrace writes, for a task's type of ground truth."""
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
    """Arrow type of a task's ground truth, from an example of it. Raises DataError where there is none."""
    if isinstance(example, Mapping):
        return pa.struct([(str(name), ground_truth_type(value)) for name, value in example.items()])
    if isinstance(example, list | tuple) and example:
        return pa.list_(ground_truth_type(example[0]))
    for kind, arrow in ((bool, pa.bool_()), (int, pa.int64()), (float, pa.float64()), (str, pa.string())):
        if isinstance(example, kind):
            return arrow
    raise DataError(
        f"ground_truth: must be a string, a number, a non-empty list or a mapping of these, got {example!r}. "
        "Change what the task's rows give as ground truth."
    )


def _is_text(found: pa.DataType) -> bool:
    return bool(pa.types.is_string(found) or pa.types.is_large_string(found))


def _is_list(found: pa.DataType) -> bool:
    return bool(pa.types.is_list(found) or pa.types.is_large_list(found))


def _is_ground_truth(found: pa.DataType) -> bool:
    is_number = pa.types.is_integer(found) or pa.types.is_floating(found) or pa.types.is_boolean(found)
    return is_number or _is_text(found) or _is_list(found) or bool(pa.types.is_struct(found))


# Path in the row, rule in words, rule; "[]" steps into a list. Foreign files may use the large or shorter Arrow types.
_RULES: tuple[tuple[str, str, Check], ...] = (
    ("data_source", "string", _is_text),
    ("prompt", "list of {role: string, content: string}", _is_list),
    ("prompt.[].role", "string", _is_text),
    ("prompt.[].content", "string", _is_text),
    ("reward_model", "struct {ground_truth}", pa.types.is_struct),
    ("reward_model.ground_truth", "string, number, list or struct", _is_ground_truth),
)
_OPTIONAL: tuple[tuple[str, str, Check], ...] = (
    ("ability", "string", _is_text),
    ("extra_info", "struct", pa.types.is_struct),
    ("extra_info.difficulty", "integer", pa.types.is_integer),
    ("extra_info.solution", "string", _is_text),
    ("extra_info.distractor", "string", _is_text),
)


def require_row_schema(schema: pa.Schema, path: Path) -> None:
    """Check the columns of a file.

    Raises:
        DataError: every missing or mistyped column at once: file, column, expected, got, remedy.
    """
    problems = []
    for name, expected, check in _RULES:
        found = find_type(schema, name)
        if found is None or not check(found):
            problems.append((name, expected, "nothing" if found is None else str(found)))
    for name, expected, check in _OPTIONAL:
        found = find_type(schema, name)
        if found is not None and not pa.types.is_null(found) and not check(found):
            problems.append((name, expected, str(found)))
    # The fields of a missing parent need no lines of their own.
    missing = {name for name, _, got in problems if got == "nothing"}
    told = [p for p in problems if not any(p[0].startswith(f"{parent}.") for parent in missing)]
    if told:
        lines = "".join(f"\n  column {name}: expected {expected}, got {got}" for name, expected, got in told)
        raise DataError(
            f"{path}: does not have the row schema:{lines}\n"
            "Rename or cast these columns (docs/data.md has the schema), or read the file by data=mapped, whose "
            "data.question and data.answer may be fields such as prompt.0.content and reward_model.ground_truth."
        )


def find_type(schema: pa.Schema, name: str) -> pa.DataType | None:
    """Type at a dotted path, None where there is no such column or field."""
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


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a parquet file. Raises DataError where it is missing, cut short or damaged."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; a dataset is a folder with train.parquet and validation.parquet")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: cannot be read as parquet ({error}); it is damaged or cut short. Delete it and make it again"
        ) from error


def read_batches(
    file: pq.ParquetFile, path: Path, num_rows: int, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows (of some columns), at most `num_rows` at a time. Raises DataError where a page is damaged, naming the
    rows before it."""
    done = 0
    batches = file.iter_batches(batch_size=num_rows, columns=columns)
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: damaged after row {done} ({error}). Delete the file and make it again") from error
        if batch is None:
            return
        yield batch
        done += batch.num_rows


def provenance(path: Path) -> dict[str, Any]:
    """The provenance document of a file, {} where it has none. Raises DataError where the file cannot be read."""
    raw = (open_parquet(path).metadata.metadata or {}).get(PROVENANCE_KEY)
    try:
        found = json.loads(raw) if raw else {}
    except ValueError:  # of another writer
        found = {}
    return found if isinstance(found, dict) else {}


def provenance_metadata(document: Mapping[str, Any]) -> dict[bytes, bytes]:
    """A provenance document as a parquet file's metadata."""
    return {PROVENANCE_KEY: json.dumps(document, sort_keys=True, ensure_ascii=False, allow_nan=False).encode()}


_encode = json.JSONEncoder(ensure_ascii=False, sort_keys=True).encode


def has_non_finite(ground_truth: object) -> bool:
    """Whether NaN or an infinity stands somewhere in a ground truth, or it is the text that a missing value leaves.

    >>> has_non_finite({"numbers": [1, 2.5, float("nan")]}), has_non_finite(["nan", 3]), has_non_finite("NaN")
    (True, False, True)
    """
    if isinstance(ground_truth, str):
        return _NO_VALUE.fullmatch(ground_truth.strip()) is not None
    return _has_non_finite(ground_truth)


# As Python, NumPy, pandas and JSON write them.
_NO_VALUE = re.compile(r"[-+]?(?:nan|NaN|NAN|inf|Inf|[iI]nfinity)|None|null|NULL|NaT|<NA>")


def _has_non_finite(ground_truth: object) -> bool:
    if isinstance(ground_truth, Mapping):
        return any(map(_has_non_finite, ground_truth.values()))
    if isinstance(ground_truth, list | tuple):
        return any(map(_has_non_finite, ground_truth))
    return isinstance(ground_truth, float) and not math.isfinite(ground_truth)


def ground_truth_json(ground_truth: object) -> str:
    """A row's ground truth as the scoring pool carries it: a plain string becomes `{"answer": ...}`."""
    value = ground_truth if isinstance(ground_truth, Mapping) else {"answer": ground_truth}
    if has_non_finite(value):
        raise DataError(f"ground_truth: NaN and infinity are no references, got {ground_truth}; repair the task's rows")
    return _encode(value)
