"""Records of data files (one JSON object per line, one JSON array, or parquet) and of hub datasets."""

import codecs
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from itertools import chain, starmap
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from data.schema import read_rows
from rlcore.config.base import expand_path
from rlcore.config.data import DATA_FILE, KINDS_OF_FILES, Gsm8kData, MappedData, TaskData
from rlcore.errors import DataError, NotFoundError
from rlcore.storage.documents import sha256_of

_HUB_ID = re.compile(r"[A-Za-z0-9_.\-]+/[A-Za-z0-9_.\-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_TIMEOUT_S = 10.0  # for one request; without a reply the cache is used
_INDEX = re.compile(r"-?[0-9]+")
_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a dataset. `where` is the file and the line or row, for error messages."""

    where: str
    values: Mapping[str, Any]

    def text(self, column: str) -> str:
        """Return a column as text. `a.b` is field b of a, `a.0` is the first entry of a list, and `a.-1` is the last.

        Numbers are written without exponent (0.00001) and without `.0` (76). Raises DataError for any other value."""
        found = self._at(column)
        if isinstance(found, float) and math.isfinite(found):
            found = f"{Decimal(repr(found)):f}".removesuffix(".0")
        elif isinstance(found, int) and not isinstance(found, bool):
            found = str(found)
        if not isinstance(found, str) or not found.strip():
            remedy = "repair or remove it, or name another column"
            if isinstance(found, list | Mapping):
                part = "0" if isinstance(found, list) else next(iter(found), "field")
                remedy = f"name a part of it, such as {column}.{part}"
            raise DataError(
                f"{self.where}: column {column}: must be a text that is not empty or a number, got {found!r:.200} "
                f"(columns: {', '.join(map(str, self.values))}); {remedy}"
            )
        try:
            found.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{self.where}: column {column}: must be UTF-8 ({error}); repair or remove it") from error
        return found

    def text_or_json(self, column: str) -> str:
        """Return a list or an object as JSON text, and any other column as the method `text` does."""
        found = self._at(column)
        return json.dumps(found) if isinstance(found, list | Mapping) else self.text(column)

    def find(self, column: str) -> tuple[Any, str]:
        """Return a column's value and ''. If the column is missing, return None and a hint for the error message,
        such as a list of the columns."""
        if column in self.values:
            return self.values[column], ""
        found: Any = self.values
        parts = column.split(".")
        for depth, part in enumerate(parts):
            if isinstance(found, Mapping) and part in found:
                found = found[part]
            elif isinstance(found, list) and _INDEX.fullmatch(part) and -len(found) <= int(part) < len(found):
                found = found[int(part)]
            else:
                has = f"is {found!r:.80}"
                if isinstance(found, Mapping):
                    has = f"has {', '.join(map(str, found)) or 'nothing'}"
                elif isinstance(found, list):
                    has = f"has {len(found)} entries"
                return None, f"{'.'.join(parts[:depth])} {has}" if depth else f"columns: {', '.join(map(str, found))}"
        return found, ""

    def _at(self, column: str) -> Any:
        found, has = self.find(column)
        if has:
            raise DataError(f"{self.where}: there is no column {column} ({has}); name another, or repair the row")
        return found


def local_files(source: str, splits: Sequence[str]) -> dict[str, tuple[Path, ...]] | None:
    """Return the files of each split: one file, or all shards of a file. Return None if `source` is a hub id."""
    folder = expand_path(source)
    if not source or not folder.is_dir():
        if _HUB_ID.fullmatch(source) and not folder.exists():
            return None
        raise NotFoundError(
            f"data.source: must be a folder or a hub id (owner/name), got {source!r}, which is neither. Give the "
            f"folder that holds {' and '.join(dict.fromkeys(splits))} as {KINDS_OF_FILES}; split a single file first"
        )
    found = {split: _files_of(folder, split) for split in splits}
    if missing := [split for split, files in found.items() if not files]:
        inside = sorted(path for path in chain(folder.glob("*"), folder.glob("*/*")) if path.is_file())
        raise NotFoundError(
            f"data.source: {folder} lacks {' and '.join(missing)}, as {KINDS_OF_FILES}. Its files: "
            f"{format_names(str(path.relative_to(folder)) for path in inside) or 'none'}. Put the files there, "
            "rename them, give the folder that has them, or convert other kinds (docs/data.md)"
        )
    return found


def is_on_hub(config: TaskData) -> bool:
    """Return whether `data.source` is the id of a hub dataset. Raises NotFoundError if it is neither such an id nor a
    folder."""
    return isinstance(config, Gsm8kData | MappedData) and local_files(config.source, []) is None


def _files_of(folder: Path, split: str) -> tuple[Path, ...]:
    looks = re.compile(rf"{re.escape(split)}(?:[-. ].*|_?[0-9].*)?")
    names = (path.name for path in sorted(folder.iterdir()) if path.is_file())
    found = [name for name in names if (match := DATA_FILE.fullmatch(name)) and looks.fullmatch(match[1])]
    if not found or (len(found) == 1 and found[0].startswith(f"{split}.")):
        return tuple(folder / name for name in found)
    # The hub once wrote a digest after the count.
    shard = re.compile(rf"{re.escape(split)}-(?P<number>[0-9]+)-of-(?P<count>[0-9]+)(?:-[0-9a-f]{{16}})?(?P<kind>\..+)")
    shards = {int(match["number"]): match for match in map(shard.fullmatch, found) if match}
    of_one_kind = len({(match["count"], match["kind"]) for match in shards.values()}) == 1
    if of_one_kind and len(shards) == len(found):
        one = next(iter(shards.values()))
        count, first = int(one["count"]), 0 if 0 in shards else 1  # some writers count from 1
        wanted = range(first, first + count)
        if absent := [
            f"{split}-{number:0{len(one['number'])}}-of-{one['count']}{one['kind']}"
            for number in wanted
            if number not in shards
        ]:
            raise DataError(
                f"data.source: {folder} holds {count - len(absent)} of the {count} shards of {split}; missing: "
                f"{format_names(absent)}. Fetch them, or write the rows that shall count into one file "
                f"{split}{one['kind']}"
            )
        if len(shards) == count:
            return tuple(folder / shards[number][0] for number in wanted)
    raise DataError(
        f"data.source: {folder}: {split} must be one file, or all shards of one count and kind, got "
        f"{format_names(found)}. Move elsewhere what does not count, so that no file is ignored"
    )


def format_names(names: Iterable[str]) -> str:
    """Join names for a message. Names after the first `_MOST_SHOWN` are only counted."""
    found = list(names)
    more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    return ", ".join(found[:_MOST_SHOWN]) + more


def digests(source: str, splits: Sequence[str], subset: str = "", revision: str = "") -> dict[str, str]:
    """Return the sha256 of each local file, or the name and commit of a hub dataset."""
    files = local_files(source, splits)
    if files is None:
        return {"hub": f"{source}/{subset}" if subset else source, "commit": commit_of(source, revision)}
    folder, read = expand_path(source), {path for paths in files.values() for path in paths}
    named = re.compile(rf"(?:{'|'.join(map(re.escape, splits))})(?![a-zA-Z]).*|(?:data|part)-?[0-9].*")
    if passed := sorted(
        path.name
        for path in folder.iterdir()
        if path.is_file() and path not in read and DATA_FILE.fullmatch(path.name) and named.fullmatch(path.name)
    ):
        raise DataError(
            f"data.source: {folder}: {format_names(passed)} would be ignored next to the files of "
            f"{' and '.join(splits)}. Move elsewhere what does not count, or name it as a shard of a split"
        )
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in sorted(read)}


def records(source: str, split: str, subset: str = "", revision: str = "") -> Iterator[Record]:
    """Read all records of a split, in order."""
    files = local_files(source, [split])
    if files is None:
        yield from _from_hub(source, subset, split, revision)
        return
    for path in files[split]:
        yield from records_of(path)


def records_of(path: Path) -> Iterator[Record]:
    """Read all records of a file, in order."""
    match = DATA_FILE.fullmatch(path.name)
    if match is None:
        raise DataError(f"{path}: must be {KINDS_OF_FILES}, by its name; rename or convert it")
    return starmap(Record, read_rows(path)) if match[2] == "parquet" else _from_json(path)


def _from_json(path: Path) -> Iterator[Record]:
    is_first = True
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        if is_first and line.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
            yield from _from_array(path)
            return
        is_first = False
        where = f"{path}: line {number}"
        try:
            values = _parsed(line)
        except ValueError as error:
            raise DataError(f"{where}: is no JSON ({error}); repair or remove the line") from error
        yield _from_object(where, values)


def _from_array(path: Path) -> Iterator[Record]:
    try:
        entries = _parsed(b"".join(_lines(path)))
    except ValueError as error:
        raise DataError(f"{path}: begins as a JSON array and is none ({error}); repair it") from error
    yield from (_from_object(f"{path}: entry {number}", values) for number, values in enumerate(entries))


def _from_object(where: str, values: object) -> Record:
    if not isinstance(values, dict):
        raise DataError(f"{where}: must be a JSON object, got {str(values)[:80]!r}; repair or remove it")
    return Record(where, values)


def _parsed(text: bytes) -> Any:
    try:
        return from_json(text)  # five times faster
    except ValueError:
        return json.loads(text)  # also reads a byte-order mark and half a surrogate pair, and explains errors


def _lines(path: Path) -> Iterator[bytes]:
    number = 0
    try:
        with path.open("rb") as file:
            for line in file:
                number += 1
                yield line
    except OSError as error:
        raise DataError(f"{path}: cannot be read after line {number} ({error})") from error


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


@cache
def commit_of(source: str, revision: str) -> str:
    """Return the commit of a branch or tag. '' means the branch `main`.

    If the hub is unreachable, the commit is read from the local cache.
    """
    if _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = HfApi().dataset_info(source, revision=revision or None, timeout=_HUB_TIMEOUT_S).sha
    except Exception as error:  # OSError, ValueError, the client's own classes and those of its HTTP library
        try:
            return _download(source, revision or "main", is_cached=True).name
        except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
            raise _unavailable(source, revision, error) from error
    if found is None:
        raise DataError(f"data.source: the hub names no commit of {source}; give one in data.revision")
    return found


@cache
def snapshot(source: str, revision: str) -> Path:
    """Return the folder of the dataset at the commit of `revision`. Missing files are downloaded."""
    from huggingface_hub import constants

    from rlcore.storage.disk import is_out_of_room, out_of_room

    commit = commit_of(source, revision)
    try:
        # A request by name lets the cache record the commit for a start without a network.
        folder = _download(source, revision or "main")
        return folder if folder.name == commit else _download(source, commit)  # the branch has moved in between
    except Exception as error:
        if is_out_of_room(error):
            raise out_of_room(Path(constants.HF_HUB_CACHE), error) from error
        raise _unavailable(source, revision, error) from error


def _download(source: str, revision: str, *, is_cached: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, repo_type="dataset", revision=revision, local_files_only=is_cached))


def _unavailable(source: str, revision: str, error: Exception) -> NotFoundError:
    reason = " ".join(str(error).split())[:300]
    at, option = (f" at {revision}", f" --revision {revision}") if revision else ("", "")
    return NotFoundError(
        f"data.source: there is no folder {source} here, and the hub dataset of that name{at} cannot be had "
        f"({type(error).__name__}: {reason}). Check the name and data.revision, fetch it where there is a network (hf "
        f"download {source} --repo-type dataset{option}), or give data.source a folder with local files"
    )
