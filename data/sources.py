"""Rows from data that exists: parquet files in the row schema, columns of any file, datasets of the hub.

A hub dataset is taken at one commit, from the cache of this machine or fetched into it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from data.rows import Message, PromptForm, Row, TaskRows
from data.schema import ROWS_PER_GROUP, find_type, open_parquet, provenance, read_batches, require_row_schema
from rlcore.config.base import expanded
from rlcore.config.data import MappedData, ParquetData
from rlcore.errors import DataError
from rlcore.storage.documents import sha256_of

_HUB_ID = re.compile(r"[A-Za-z0-9_.\-]+/[A-Za-z0-9_.\-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Of one request to the hub; without an answer the cache decides.
_ANSWER_TIMEOUT_S = 10.0


# ---------------------------------------------------------------------- records of files and of the hub


@dataclass(frozen=True, slots=True)
class Record:
    """One record. `where` is its file and line or row, for messages."""

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
        try:
            found.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{self.where}: column {column}: must be UTF-8 ({error}); repair or remove it") from error
        return found


def local_files(source: str, splits: Sequence[str]) -> dict[str, tuple[Path, ...]] | None:
    """Files of each split; None where `source` is a hub id.

    A split is `<split>.jsonl`, `<split>.parquet`, or the hub's own layout `<split>-00000-of-00001.parquet`.
    Raises DataError where `source` is neither a folder with these files nor a hub id.
    """
    folder = expanded(source)
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
    """Digests of a source: sha256 of each local file, or name and commit of a hub dataset."""
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
        yield from records_of(path)


def records_of(path: Path) -> Iterator[Record]:
    """All records of a .jsonl or .parquet file, in order. Raises DataError where one cannot be read."""
    return _from_jsonl(path) if path.suffix == ".jsonl" else _from_parquet(path)


def _from_jsonl(path: Path) -> Iterator[Record]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}: line {number}"
            try:
                values = _parsed(line)
            except ValueError as error:
                raise DataError(f"{where}: is no JSON ({error}); repair or remove the line") from error
            if not isinstance(values, dict):
                raise DataError(f"{where}: must be a JSON object, got {str(values)[:80]!r}; repair or remove the line")
            yield Record(where, values)


def _parsed(line: bytes) -> Any:
    try:
        return from_json(line)  # five times as fast
    except ValueError:
        return json.loads(line)  # reads more (a byte-order mark, half a surrogate pair), and says what is wrong


def _from_parquet(path: Path) -> Iterator[Record]:
    batches = read_batches(open_parquet(path), path, ROWS_PER_GROUP)
    rows = (values for batch in batches for values in batch.to_pylist())
    yield from (Record(f"{path}: row {number}", values) for number, values in enumerate(rows))


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
    """The commit of a branch, a tag or '' (main): from the hub, or from the cache where the hub does not answer.

    Raises:
        DataError: neither has it.
    """
    if _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi

    try:
        found = HfApi().dataset_info(source, revision=revision or None, timeout=_ANSWER_TIMEOUT_S).sha
    except Exception as error:  # OSError, ValueError, the client's own classes and those of its HTTP library
        cached = _cached(source, revision or "main")
        if cached is None:
            raise _unavailable(source, revision, error) from error
        return cached.name
    if found is None:
        raise DataError(f"data.source: the hub names no commit of {source}; give one in data.revision")
    return found


@cache
def snapshot(source: str, revision: str) -> Path:
    """The folder with the dataset's files as of `commit_of`, fetched unless it is in the cache.

    Raises:
        DataError: it is not there and cannot be fetched.
        DiskSpaceError: no room.
    """
    from huggingface_hub import constants

    from rlcore.storage.disk import is_out_of_room, out_of_room

    commit = commit_of(source, revision)
    try:
        # A request by name lets the cache record the commit, so that a start without a network finds it.
        folder = _fetched(source, revision or "main")
        return folder if folder.name == commit else _fetched(source, commit)  # the branch has moved in between
    except Exception as error:
        if is_out_of_room(error):
            raise out_of_room(Path(constants.HF_HUB_CACHE), error) from error
        raise _unavailable(source, revision, error) from error


def _fetched(source: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, repo_type="dataset", revision=revision))


def _cached(source: str, revision: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, repo_type="dataset", revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        return None


def _unavailable(source: str, revision: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split())[:300]
    at, option = (f" at {revision}", f" --revision {revision}") if revision else ("", "")
    return DataError(
        f"data.source: there is no folder {source} here, and the hub dataset of that name{at} cannot be had "
        f"({type(error).__name__}: {reason}). Check the name and data.revision, fetch it where there is a network (hf "
        f"download {source} --repo-type dataset{option}), or give data.source a folder with local files"
    )


# ---------------------------------------------------------------------- rows by column names


def mapped_rows(settings: MappedData, seed: int) -> TaskRows:
    """Questions and answers from columns of any dataset. Raises DataError where a record lacks a column."""
    return TaskRows(
        data_source=settings.data_source or Path(settings.source).resolve().name,  # `.` has a name then
        ability="math",
        prompt_form=settings.template,
        splits={
            "train": _mapped(settings, settings.train_split),
            "validation": _mapped(settings, settings.validation_split),
        },
    )


def mapped_digests(settings: MappedData) -> dict[str, str]:
    """Digests of the source."""
    return digests(
        settings.source, (settings.train_split, settings.validation_split), settings.subset, settings.revision
    )


def _mapped(settings: MappedData, split: str) -> Iterator[Row]:
    for record in records(settings.source, split, settings.subset, settings.revision):
        question = record.text(settings.question)
        yield Row(
            prompt=(Message("user", f"{question} {settings.instruction}".strip()),),
            ground_truth=record.text(settings.answer),
            solution=record.text(settings.solution) if settings.solution else "",
        )


# ---------------------------------------------------------------------- rows in the row schema


def parquet_rows(settings: ParquetData, seed: int) -> TaskRows:
    """The rows of two parquet files. Columns outside the schema are left out.

    Raises:
        DataError: a file that cannot be read, breaks the schema or has an unusable row, or two files that differ in
            their type of ground truth or form of prompt.
    """
    files = _files(settings)
    types, forms = set(), set()
    for path in files.values():
        schema = open_parquet(path).schema_arrow
        require_row_schema(schema, path)
        types.add(find_type(schema, "reward_model.ground_truth"))
        forms.add(provenance(path).get("prompt_form", "chat"))
    if len(types) > 1 or len(forms) > 1:
        raise DataError(
            f"{files['train']} and {files['validation']}: must have one type of ground truth and one form of prompt, "
            f"got {' and '.join(sorted(map(str, types)))}, {' and '.join(sorted(forms))}; make both from one task"
        )
    form: PromptForm = forms.pop() if settings.template == "auto" else settings.template
    return TaskRows(
        data_source=Path(settings.train_file).stem,
        ability="math",
        prompt_form=form,
        splits={split: _rows(path) for split, path in files.items()},
        ground_truth_type=types.pop(),
    )


def parquet_digests(settings: ParquetData) -> dict[str, str]:
    """sha256 of both files."""
    return {split: sha256_of(path) for split, path in _files(settings).items()}


def _files(settings: ParquetData) -> dict[str, Path]:
    named = {"train": settings.train_file, "validation": settings.validation_file}
    for split, name in named.items():
        if not name or not expanded(name).is_file():
            raise DataError(f"data.{split}_file: must be a parquet file that exists, got {name!r}; give its path")
    return {split: expanded(name) for split, name in named.items()}


def _rows(path: Path) -> Iterator[Row]:
    columns = ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    batches = read_batches(open_parquet(path), path, ROWS_PER_GROUP)
    rows = (values for batch in batches for values in batch.select(columns).to_pylist())
    yield from (_row(values, f"{path}: row {number}") for number, values in enumerate(rows))


def _row(values: Mapping[str, Any], where: str) -> Row:
    prompt = values["prompt"] or ()
    if not prompt or any(not message or not message["role"] or message["content"] is None for message in prompt):
        raise DataError(f"{where}: prompt must be messages with role and content, got {values['prompt']!r}; repair it")
    truth = (values["reward_model"] or {}).get("ground_truth")
    if truth is None:
        raise DataError(f"{where}: reward_model.ground_truth must have a value, got nothing; repair or remove the row")
    extra = values["extra_info"] or {}
    return Row(
        prompt=tuple(Message(message["role"], message["content"]) for message in prompt),
        ground_truth=truth,
        difficulty=extra.get("difficulty") or 0,
        solution=extra.get("solution") or "",
        distractor=extra.get("distractor") or "",
        data_source=values["data_source"] or "",
        ability=values["ability"] or "",
    )
