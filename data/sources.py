"""Records from local jsonl or parquet files, or from a dataset of the hub."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.hub import commit_of, snapshot
from rlcore.errors import DataError
from rlcore.storage.documents import sha256_of

_HUB_ID = re.compile(r"[A-Za-z0-9_.\-]+/[A-Za-z0-9_.\-]+")


@dataclass(frozen=True, slots=True)
class Record:
    """One record; `where` says which (file and line or row), for messages."""

    where: str
    values: Mapping[str, Any]

    def text(self, column: str) -> str:
        """A column as text; `a.b` is field b of column a. Raises DataError where it is missing, empty or no text."""
        found: Any = self.values
        for part in column.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if isinstance(found, int | float) and not isinstance(found, bool):
            found = str(found)
        if not isinstance(found, str) or not found.strip():
            has = ", ".join(map(str, self.values))
            raise DataError(
                f"{self.where}: column {column}: must be a text that is not empty, got {found!r} (columns: {has}); "
                "repair or remove it, or name another column"
            )
        return found


def local_files(source: str, splits: Sequence[str]) -> dict[str, tuple[Path, ...]] | None:
    """Files of each split; None where `source` is a hub id.

    A split is `<split>.jsonl`, `<split>.parquet`, or the hub's own layout `<split>-00000-of-00001.parquet`.
    Raises DataError where `source` is neither a folder with these files nor a hub id.
    """
    folder = Path(source).expanduser()
    if not source or not folder.is_dir():
        if _HUB_ID.fullmatch(source) and not folder.exists():
            return None
        raise DataError(
            f"data.source: must be a folder or a hub id (owner/name), got {source!r}, which is neither. Give the "
            f"folder that holds {' and '.join(splits)} as .jsonl or .parquet"
        )
    found = {split: _files_of(folder, split) for split in splits}
    if missing := [split for split, files in found.items() if not files]:
        raise DataError(
            f"data.source: {folder} lacks {' and '.join(f'{split}.jsonl or {split}.parquet' for split in missing)}. "
            "Put the files there, or give the folder that has them"
        )
    return found


def _files_of(folder: Path, split: str) -> tuple[Path, ...]:
    for pattern in (f"{split}.jsonl", f"{split}.parquet", f"{split}-*.parquet"):
        if files := sorted(folder.glob(pattern)):
            return tuple(files)
    return ()


def digests(source: str, splits: Sequence[str], subset: str = "", revision: str = "") -> dict[str, str]:
    """What the records depend on: sha256 of each local file; of a hub dataset its name and commit."""
    files = local_files(source, splits)
    if files is None:
        return {"hub": f"{source}/{subset}" if subset else source, "commit": commit_of(source, revision)}
    return {path.name: sha256_of(path) for paths in files.values() for path in paths}


def records(source: str, split: str, subset: str = "", revision: str = "") -> Iterator[Record]:
    """All records of a split, in order.

    Raises:
        DataError: a file, line or row that cannot be read, or a hub dataset that cannot be had.
    """
    files = local_files(source, [split])
    if files is None:
        yield from _from_hub(source, subset, split, revision)
        return
    for path in files[split]:
        yield from _from_jsonl(path) if path.suffix == ".jsonl" else _from_parquet(path)


def _from_jsonl(path: Path) -> Iterator[Record]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}: line {number}"
            try:
                values = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where}: is no JSON ({error}); repair or remove the line") from error
            if not isinstance(values, dict):
                raise DataError(f"{where}: must be a JSON object, got {str(values)[:80]}; repair or remove the line")
            yield Record(where, values)


def _from_parquet(path: Path) -> Iterator[Record]:
    from data.schema import open_parquet, read_batches

    row = 0
    for batch in read_batches(open_parquet(path), path, num_rows=8_192):
        for values in batch.to_pylist():
            yield Record(f"{path}: row {row}", values)
            row += 1


def _from_hub(source: str, subset: str, split: str, revision: str) -> Iterator[Record]:
    import datasets

    folder = snapshot(source, revision)
    try:
        found = datasets.load_dataset(str(folder), subset or None, split=split)
    except Exception as error:  # the library raises OSError, ValueError and its own classes
        raise DataError(
            f"data.source: the hub dataset {source}{'/' + subset if subset else ''}, split {split}, cannot be read "
            f"({type(error).__name__}: {error}). Check the names of subset and split, or give a folder with local files"
        ) from error
    for row, values in enumerate(found):
        yield Record(f"{source}: {split} row {row}", values)
