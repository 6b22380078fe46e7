"""The tokenization filter. It tokenizes each prompt once, and drops, truncates or refuses overlong prompts.

The result adds the columns `prompt_ids`, `solution_ids`, `distractor_ids` and `ground_truth_json`. The ids of a prompt
include the chat template, and the ids of a solution include the end token. `solution_ids` is [] if the chat template
changes the solution."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.rows import SPLITS
from data.schema import (
    ground_truth_json,
    open_parquet,
    parquet_writer,
    provenance,
    provenance_metadata,
    read_batches,
)
from data.tasks import StageResult, publish_mixture
from data.tokenizer import ID_BYTES, FastPathError, PromptTokenizer, tokenizer_fingerprint
from rlcore.config import FilterConfig, RunConfig
from rlcore.config.fingerprint import fingerprint
from rlcore.errors import DataError
from rlcore.rollout.tools import tool_schemas
from rlcore.storage.manifest import part_directories, read_finished, read_finished_or_set_aside
from rlcore.storage.publish import published_directory

VERSION = 1  # increase it when the same rows give other columns, token ids or selections

_IDS = pa.list_(pa.int32())
_ADDED = [("prompt_ids", _IDS), ("solution_ids", _IDS), ("distractor_ids", _IDS), ("ground_truth_json", pa.string())]
Multiset = tuple[int, ...]
log = logging.getLogger(__name__)
# called after each batch with the split, the number of finished rows and the number of all rows
Progress = Callable[[str, int, int], None]


def filtered_directory(dataset: str, tokenizer_dir: Path, config: RunConfig) -> Path:
    """Return the folder for the filtered rows of a dataset. `dataset` is the dataset's fingerprint."""
    payload = {
        "version": VERSION,
        "dataset": dataset,
        "tokenizer": tokenizer_fingerprint(tokenizer_dir),
        "settings": config.filter,
        "tools": tool_schemas(config.episode.tools) if config.episode.tools else [],
        "chat_template_kwargs": config.data.chat_template_kwargs,
    }
    return Path(config.paths.root).resolve() / "filtered" / fingerprint("filter", payload)


def filter_dataset(
    dataset_dir: Path, tokenizer_dir: Path, config: RunConfig, on_progress: Progress | None = None
) -> StageResult:
    """Tokenize and filter a published dataset, or reuse a stored result. Each part of a mixture is filtered separately.

    The result counts the rows of `train` and `validation`, and the omitted rows, such as `train/overlong` and
    `train/duplicate`. Raises DataError if a row breaks the schema or the settings, no row is left, or the splits
    overlap. Raises DiskSpaceError if the disk is full. No partial result remains after an error."""
    dataset = read_finished(dataset_dir)
    if dataset is None:
        raise DataError(f"{dataset_dir}: is no finished dataset (no manifest.json); make it with `millrace run`")
    directory = filtered_directory(dataset.values["fingerprint"], tokenizer_dir, config)
    if (parts := part_directories(dataset_dir)) != (dataset_dir,):
        results = [filter_dataset(part, tokenizer_dir, config, on_progress) for part in parts]
        if read_finished_or_set_aside(directory) is None:
            _require_no_leak([part.directory for part in results])
        return publish_mixture("filtered", directory, results)
    if (manifest := read_finished_or_set_aside(directory)) is not None:
        return StageResult(directory, cached=True, counts=manifest.values["counts"])
    document = {
        "fingerprint": directory.name,
        "dataset": dataset.values["fingerprint"],
        "tokenizer": tokenizer_fingerprint(tokenizer_dir),
        "settings": config.filter.model_dump(mode="json"),
    }
    facts: dict[str, Any] = {"kind": "filtered", **document}
    options: dict[str, Any] = {
        "chat": provenance(dataset_dir / "validation.parquet")["prompt_form"] == "chat",
        "tools": tool_schemas(config.episode.tools),
        "chat_template_kwargs": config.data.chat_template_kwargs,
    }
    with published_directory(directory, facts) as folder:

        def run(*, fast_path: bool) -> _Filter:
            tokenizer = PromptTokenizer(tokenizer_dir, fast_path=fast_path, **options)
            work = _Filter(config.filter, tokenizer, on_progress)
            for split in ("validation", "train"):  # training rows are compared with held-out rows
                source = dataset_dir / f"{split}.parquet"
                if split == "validation" or source.is_file():  # a suite has no training split
                    work.write(split, source, folder / source.name, {**document, "format_version": VERSION})
            return work

        try:
            work = run(fast_path=True)
        except FastPathError as difference:
            log.warning(
                "%s: the fast path gives another text or other tokens; starting again without the fast path",
                tokenizer_dir,
            )
            log.debug("the text: %r", difference.args)
            work = run(fast_path=False)
        if work.num_unknown:
            log.warning(
                f"{tokenizer_dir}: does not know a word of {work.num_unknown:,} of "
                f"{sum(work.counts[split] for split in SPLITS):,} prompts, such as {work.unknown_example[:200]!r}: all "
                "such words are one token to the model. Take another model, or other prompts (a randomly initialized "
                "model reads arithmetic alone)"
            )
        if work.unwritten:
            why, example = work.unwritten[0]
            log.warning(
                f"{tokenizer_dir}: a warm start cannot show {len(work.unwritten):,} solutions, such as "
                f"{example[:200]!r}: the chat template {why}"
            )
            facts["unwritten_solutions"] = {"rows": len(work.unwritten), "why": why}
        facts["counts"] = dict(sorted(work.counts.items()))
    return StageResult(directory, cached=False, counts=facts["counts"])


class _Filter:
    """A filter for the splits of one dataset. The held-out split is filtered first, so that training rows can be
    compared with it. Prompts are compared by 64-bit hashes."""

    def __init__(self, config: FilterConfig, tokenizer: PromptTokenizer, on_progress: Progress | None) -> None:
        self._config, self._tokenizer, self._on_progress = config, tokenizer, on_progress
        self.counts: Counter[str] = Counter()
        self.num_unknown, self.unknown_example = 0, ""
        self.unwritten: list[tuple[str, str]] = []  # reason and solution, for each solution without token ids
        self._held_out = _HeldOut("row {} of the validation split", "Remove it from one of the two files")

    def write(self, split: str, source: Path, target: Path, document: Mapping[str, Any]) -> None:
        file, origin = open_parquet(source), provenance(source)
        self._split, self._source = split, source
        self._seen: dict[int, int] = {}  # hash of a prompt -> row
        schema = pa.schema([*file.schema_arrow, *_ADDED])
        total, done = file.metadata.num_rows, 0
        with parquet_writer(target, schema) as writer:
            for batch in read_batches(source):
                writer.write_batch(self._filtered(batch, done, schema))
                done += batch.num_rows
                if self._on_progress is not None:
                    self._on_progress(split, done, total)
            counts = {name: n for name, n in sorted(self.counts.items()) if name.partition("/")[0] == split}
            if not counts.get(split):
                reasons = ", ".join(f"{n:,} {name.partition('/')[2]}" for name, n in counts.items() if n)
                raise DataError(
                    f"{source}: no row is left after the filter ({reasons}). Raise "
                    f"filter.max_prompt_tokens (now {self._config.max_prompt_tokens}), or check the dataset"
                )
            facts = {"split": split, "origin": origin, "counts": counts}
            writer.add_key_value_metadata(provenance_metadata({**document, **facts}))

    def _filtered(self, batch: pa.RecordBatch, start: int, schema: pa.Schema) -> pa.RecordBatch:
        """Return the rows of a batch that pass the filter, with their token ids. `start`: the index of the batch's
        first row in the file."""
        prompts = self._prompts(batch, start)
        texts = self._tokenizer.texts(prompts, lambda place: f"{self._source}: row {start + place}: ")
        truths = pc.struct_field(batch.column("reward_model"), "ground_truth")
        unique = self._without_duplicates(texts, multisets(truths), start)
        ids = self._tokenizer.encode_prompts([texts[row] for row in unique])
        fitting = self._rows_that_fit(unique, ids, start)
        rows, ids = [unique[place] for place in fitting], [ids[place] for place in fitting]
        if unknown := self._tokenizer.with_unknown_words(ids):
            self.num_unknown += len(unknown)
            self.unknown_example = self.unknown_example or texts[rows[unknown[0]]]
        self.counts[self._split] += len(rows)
        if len(rows) < batch.num_rows:
            chosen = pa.array(rows, pa.int64())
            batch, truths = batch.take(chosen), truths.take(chosen)
        prompts, texts = [prompts[row] for row in rows], [texts[row] for row in rows]
        extra = batch.column("extra_info")
        solutions = _text_field(extra, "solution")
        if self._tokenizer.chat:
            for row, prompt, solution, truth in zip(rows, prompts, solutions, truths, strict=True):
                if prompt[-1]["role"] == "assistant":
                    _refuse_answer(f"{self._source}: row {start + row}", prompt[-1]["content"], solution, truth.as_py())
        solution_ids, unwritten = self._tokenizer.encode_responses(prompts, texts, solutions)
        self.unwritten += [(why, solutions[place]) for place, why in unwritten.items()]
        distractors = _text_field(extra, "distractor")
        added = {
            "prompt_ids": _as_lists([prompt[-self._config.max_prompt_tokens * ID_BYTES :] for prompt in ids]),
            "solution_ids": _as_lists(solution_ids),
            "distractor_ids": _as_lists(self._tokenizer.encode_responses(prompts, texts, distractors)[0]),
            "ground_truth_json": pa.array([ground_truth_json(truth) for truth in truths.to_pylist()], pa.string()),
        }
        return pa.RecordBatch.from_arrays([*batch.columns, *added.values()], schema=schema)

    def _prompts(self, batch: pa.RecordBatch, start: int) -> list[list[dict[str, str]]]:
        prompts: list[list[dict[str, str]]] = batch.column("prompt").to_pylist()
        for row, prompt in enumerate(prompts, start=start):
            if not prompt or any(message is None or None in message.values() for message in prompt):
                raise DataError(
                    f"{self._source}: row {row}: prompt must be a list of messages with role and content, got "
                    f"{prompt!r}; repair or remove the row"
                )
            if not self._tokenizer.chat and len(prompt) != 1:
                raise DataError(
                    f"{self._source}: row {row}: a prompt that is plain text must be one message, got {len(prompt)}; "
                    "join them, or apply the chat template (prompt_form chat)"
                )
        return prompts

    def _without_duplicates(self, texts: Sequence[str], numbers: Sequence[Multiset], start: int) -> list[int]:
        keys = [hash(text) for text in texts]
        if self._split == "validation":
            self._held_out.add(keys, range(start, start + len(keys)))
            self._held_out.add(numbers, range(start, start + len(keys)))
        else:
            self._held_out.refuse(self._source, start, keys, numbers)
        rows = []
        for row, key in enumerate(keys, start=start):
            first = self._seen.setdefault(key, row)
            if first == row or self._config.duplicates == "keep":
                rows.append(row - start)
            elif self._config.duplicates == "drop":
                self.counts[f"{self._split}/duplicate"] += 1
            else:
                raise DataError(
                    f"{self._source}: row {row}: the same prompt as row {first}. Remove one of them, or set "
                    "filter.duplicates to drop or keep"
                )
        return rows

    def _rows_that_fit(self, rows: list[int], ids: list[bytes], start: int) -> list[int]:
        limit = self._config.max_prompt_tokens
        lengths = np.array([len(prompt) for prompt in ids], dtype=np.int64) // ID_BYTES
        fits = (lengths > 0) & (lengths <= limit)
        if fits.all():
            return list(range(len(rows)))
        if self._config.overlong == "error" and (lengths > limit).any():
            first = int(np.argmax(lengths > limit))
            raise DataError(
                f"{self._source}: row {start + rows[first]}: filter.max_prompt_tokens is {limit}, the prompt has "
                f"{lengths[first]} tokens. Raise the limit, or set filter.overlong to drop or truncate_left"
            )
        self.counts[f"{self._split}/empty"] += int((lengths == 0).sum())
        is_cut = self._config.overlong == "truncate_left"
        self.counts[f"{self._split}/{'truncated' if is_cut else 'overlong'}"] += int((lengths > limit).sum())
        return list[int](np.flatnonzero(lengths > 0 if is_cut else fits).tolist())


def _text_field(extra_info: pa.StructArray, name: str) -> list[str]:
    return [text or "" for text in pc.struct_field(extra_info, name).to_pylist()]


def _as_lists(rows: list[bytes]) -> pa.ListArray:
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(np.fromiter(map(len, rows), dtype=np.int32, count=len(rows)) // ID_BYTES, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.frombuffer(b"".join(rows), dtype=np.int32)))


def _refuse_answer(where: str, words: str, solution: str, ground_truth: object) -> None:
    for name, text in (("solution", solution), ("ground truth", str(ground_truth))):
        if text.strip() and re.search(rf"(?<!\w){re.escape(text.strip())}\W*\Z", words):
            raise DataError(
                f"{where}: the prompt's last message is the assistant's, which is continued, and must not end with the "
                f"row's {name} {text.strip()[:80]!r}, got {words[-80:]!r}. Remove the message, or the row"
            )


def multisets(ground_truths: pa.Array) -> list[Multiset]:
    """Return the sorted numbers of each countdown problem. Return [] for other tasks, or if a value is missing."""
    kind = ground_truths.type
    if not pa.types.is_struct(kind) or any(kind.get_field_index(name) < 0 for name in ("numbers", "target")):
        return []
    numbers = pc.struct_field(ground_truths, "numbers")
    if not pa.types.is_list(numbers.type) or not pa.types.is_integer(numbers.type.value_type):
        return []
    if numbers.flatten().null_count or numbers.null_count:
        return []
    flat, ends = numbers.flatten().to_numpy().tolist(), np.cumsum(pc.list_value_length(numbers)).tolist()
    return [tuple(sorted(flat[start:end])) for start, end in pairwise([0, *ends])]


class _HeldOut:
    """An index of held-out rows by prompt and by multiset of numbers. DataError is raised for a training row with the
    prompt or the multiset of a held-out row."""

    def __init__(self, named: str, remedy: str) -> None:
        self._named, self._remedy = named, remedy
        self._places: dict[Any, Any] = {}

    def add(self, keys: Sequence[Any], places: Iterable[Any]) -> None:
        for key, place in zip(keys, places, strict=False):
            self._places.setdefault(key, place)

    def refuse(self, path: Path, start: int, *keys_of_rows: Sequence[Any]) -> None:
        for keys in keys_of_rows:
            for position, key in enumerate(keys):
                if key in self._places:
                    what = f"multiset of numbers {list(key)}" if isinstance(key, tuple) else "prompt"
                    raise DataError(
                        f"{path}: row {start + position}: has the same {what} as "
                        f"{self._named.format(self._places[key])}, so validation would not measure what is new to the "
                        f"model. {self._remedy}"
                    )


def _require_no_leak(directories: Sequence[Path]) -> None:
    held_out = _HeldOut(
        "a held-out row of {}, another part of the mixture",
        "Choose parts that do not overlap (other numbers, other sources), or remove the row",
    )
    for directory in directories:
        for _, prompts, numbers in _keys(directory / "validation.parquet"):
            held_out.add([*prompts, *numbers], repeat(directory))
    for directory in directories:
        for start, prompts, numbers in _keys(path := directory / "train.parquet"):
            held_out.refuse(path, start, prompts, numbers)


def _keys(path: Path) -> Iterator[tuple[int, list[bytes], list[Multiset]]]:
    start = 0
    for batch in read_batches(path, ["prompt_ids", "reward_model"]):
        ids = batch.column("prompt_ids")
        flat = ids.flatten().cast(pa.int32()).to_numpy(zero_copy_only=False)
        ends = np.cumsum(pc.list_value_length(ids)).tolist()
        keys = [flat[first:last].tobytes() for first, last in pairwise([0, *ends])]
        yield start, keys, multisets(pc.struct_field(batch.column("reward_model"), "ground_truth"))
        start += batch.num_rows
