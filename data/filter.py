"""The tokenization filter: each prompt is tokenized once, here, and overlong ones are dropped, cut or refused.

Row batch by row batch, so memory does not grow with the dataset. The result has all columns of the dataset and

    prompt_ids       list<int32>   the prompt as the engine takes it, chat template included
    solution_ids     list<int32>   the solution with the end-of-sequence token; [] where there is none
    distractor_ids   list<int32>   the same of the distractor
    ground_truth_json   string     what the scorer takes
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.cards import write_filter_card
from data.leakage import Place, SplitWatch, multisets
from data.lengths import as_svg, summarize
from data.pieces import ID_BYTES
from data.schema import (
    ground_truths_json,
    open_parquet,
    provenance,
    read_batches,
    require_row_schema,
)
from data.stage import StageResult, source_digest
from data.tokenizer import PromptTokenizer, ShortWayError, tokenizer_fingerprint
from data.write import ROWS_PER_GROUP, SPLITS, RowWriter
from rlcore.config.data import FilterConfig
from rlcore.config.fingerprint import fingerprint
from rlcore.errors import DataError
from rlcore.storage.finished import finished, finished_or_set_aside
from rlcore.storage.manifest import part_directories
from rlcore.storage.publish import published_directory

__all__ = ["filter_dataset", "filter_fingerprint", "filtered_directory", "tokenizer_fingerprint"]

FILTER_FORMAT = 1
"""Raise it when the columns of a filtered dataset change."""

_IDS = pa.list_(pa.int32())
_ADDED = [("prompt_ids", _IDS), ("solution_ids", _IDS), ("distractor_ids", _IDS), ("ground_truth_json", pa.string())]
_SOURCE = (
    "data.cards",
    "data.chat_frame",
    "data.filter",
    "data.leakage",
    "data.lengths",
    "data.pieces",
    "data.schema",
    "data.tokenizer",
)

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called after each batch of rows with the split, the rows done and all its rows."""


def filter_fingerprint(dataset: str, tokenizer: str, config: FilterConfig, *, chat: bool | None = None) -> str:
    """What the filtered rows depend on; `dataset` and `tokenizer` are fingerprints."""
    payload = {
        "format": FILTER_FORMAT,
        "dataset": dataset,
        "tokenizer": tokenizer,
        "settings": config,
        "chat": chat,
        "source": source_digest(*_SOURCE),
    }
    return fingerprint("filter", payload)


def filtered_directory(fingerprint: str, root: Path) -> Path:
    """Where the filtered dataset lies under `paths.root`."""
    return root / "filtered" / fingerprint


def filter_dataset(
    dataset_dir: Path,
    tokenizer_dir: Path,
    config: FilterConfig,
    *,
    root: Path,
    chat: bool | None = None,
    on_progress: Progress | None = None,
) -> StageResult:
    """Tokenize and filter a published dataset, unless that has been done; a mixture part by part.

    `chat` says whether the tokenizer's chat template is applied; None: as the dataset says of its prompts.
    Counts are rows of `train` and `validation`, and of what was left out: `train/overlong`, `train/duplicate`, ...

    Raises:
        DataError: a row that breaks the schema or the settings, no row left, or splits that overlap.
        DiskSpaceError: no room. Nothing is left behind.
    """
    dataset = finished(dataset_dir)
    if dataset is None:
        raise DataError(f"{dataset_dir}: is no finished dataset (no manifest.json); make it with `millrace run`")
    tokenizer_print = tokenizer_fingerprint(tokenizer_dir)
    digest = filter_fingerprint(dataset.values["fingerprint"], tokenizer_print, config, chat=chat)
    directory = filtered_directory(digest, root)
    if (parts := part_directories(dataset_dir)) != (dataset_dir,):
        from data.mixture import publish_mixture

        found = [
            filter_dataset(part, tokenizer_dir, config, root=root, chat=chat, on_progress=on_progress) for part in parts
        ]
        return publish_mixture("filtered", directory, found)
    if (manifest := finished_or_set_aside(directory)) is not None:
        return StageResult(directory, digest, cached=True, counts=manifest.values["counts"])
    document = {
        "fingerprint": digest,
        "dataset": dataset.values["fingerprint"],
        "tokenizer": tokenizer_print,
        "settings": config.model_dump(mode="json"),
    }
    facts: dict[str, Any] = {"kind": "filtered", **document}
    job = _Job(dataset_dir, tokenizer_dir, config, chat, on_progress or (lambda split, done, total: None))
    with published_directory(directory, facts) as folder:
        try:
            tally = job.run(folder, {**document, "format_version": FILTER_FORMAT}, short_way=True)
        except ShortWayError as difference:
            log.warning("%s: tokenized word by word, a prompt comes out differently; starting again", tokenizer_dir)
            log.debug("the prompt: %r", difference.args)
            tally = job.run(folder, {**document, "format_version": FILTER_FORMAT}, short_way=False)
        if tally.num_unknown:
            log.warning(
                "%s: does not know a word of %s prompts, such as %r: all such words are one token to the model. Take "
                "another model, or other prompts (a model made from nothing reads arithmetic alone)",
                tokenizer_dir,
                f"{tally.num_unknown:,} of {sum(tally.counts[split] for split in SPLITS):,}",
                tally.example[:200],
            )
        facts["counts"] = dict(sorted(tally.counts.items()))
        facts["lengths"] = tally.write_lengths(folder, config.max_prompt_tokens)
        write_filter_card(folder, facts)
    return StageResult(directory, digest, cached=False, counts=facts["counts"])


@dataclass(slots=True)
class _Tally:
    """Rows by split and reason, prompt lengths by split (before overlong ones are dropped), and prompts of both splits
    with a word that the tokenizer does not know.
    """

    counts: Counter[str] = field(default_factory=Counter)
    lengths: dict[str, Counter[int]] = field(default_factory=dict)
    num_unknown: int = 0
    example: str = ""

    def write_lengths(self, folder: Path, limit: int) -> dict[str, object]:
        """Plots beside the rows; returns the summaries."""
        found = {split: summary for split in SPLITS if (summary := summarize(self.lengths[split])) is not None}
        for split, summary in found.items():
            plot = as_svg(summary, f"Prompt lengths of {split}", limit)
            (folder / f"lengths-{split}.svg").write_text(plot, encoding="utf-8")
        return {split: summary.as_dict() for split, summary in found.items()}


@dataclass(frozen=True, slots=True)
class _Job:
    """The work on one dataset."""

    dataset_dir: Path
    tokenizer_dir: Path
    config: FilterConfig
    chat: bool | None
    on_progress: Progress

    def run(self, folder: Path, document: Mapping[str, Any], *, short_way: bool) -> _Tally:
        """Write both splits. The held-out one first: it is small, and the training rows are checked against it."""
        tally, watch = _Tally(), SplitWatch(self.config.duplicates)
        tokenizers: dict[bool, PromptTokenizer] = {}
        for split in ("validation", "train"):
            source = self.dataset_dir / f"{split}.parquet"
            origin = provenance(source)
            chat = origin.get("prompt_form") != "text" if self.chat is None else self.chat
            if chat not in tokenizers:
                tokenizers[chat] = PromptTokenizer(self.tokenizer_dir, chat=chat, short_way=short_way)
            work = _Split(source, split, self.config, tokenizers[chat], watch, tally)
            self._write(work, folder / source.name, {**document, "split": split, "origin": origin})
        return tally

    def _write(self, work: "_Split", target: Path, document: Mapping[str, Any]) -> None:
        file = open_parquet(work.source)
        require_row_schema(file.schema_arrow, work.source)
        kept = [column for column in file.schema_arrow if column.name not in dict(_ADDED)]
        schema = pa.schema([*kept, *_ADDED])
        total, done = file.metadata.num_rows, 0
        with RowWriter(target, schema) as writer:
            for batch in read_batches(file, work.source, ROWS_PER_GROUP):
                writer.write(work.filtered(batch, done, schema))
                done += batch.num_rows
                self.on_progress(work.split, done, total)
            counts = work.own_counts()
            if not counts.get(work.split):
                work.refuse_empty(counts)
            writer.describe({**document, "counts": counts})


@dataclass(frozen=True, slots=True)
class _Split:
    """Row batches of one split, in and out."""

    source: Path
    split: str
    config: FilterConfig
    tokenizer: PromptTokenizer
    watch: SplitWatch
    tally: _Tally

    def filtered(self, batch: pa.RecordBatch, start: int, schema: pa.Schema) -> pa.RecordBatch:
        """The rows of a batch that stay, with their token ids; `start` is the batch's first row in the file."""
        texts = self._texts(batch, start)
        truths = pc.struct_field(batch.column("reward_model"), "ground_truth")
        place = Place(self.split, self.source, start)
        unique = self.watch.keep(place, texts, multisets(truths), self.tally.counts)
        ids = self.tokenizer.encode_prompts([texts[row] for row in unique] if len(unique) < len(texts) else texts)
        rows, ids = self._fitting(unique, ids, start)
        if unknown := self.tokenizer.with_unknown_words(ids):
            self.tally.num_unknown += len(unknown)
            self.tally.example = self.tally.example or texts[rows[unknown[0]]]
        self.tally.counts[self.split] += len(rows)
        if len(rows) < batch.num_rows:
            chosen = pa.array(rows, pa.int64())
            batch, truths = batch.take(chosen), truths.take(chosen)
        extra = batch.column("extra_info")
        added = {
            "prompt_ids": _as_lists(ids),
            "solution_ids": _as_lists(self.tokenizer.encode_answers(_answers(extra, "solution"))),
            "distractor_ids": _as_lists(self.tokenizer.encode_answers(_answers(extra, "distractor"))),
            "ground_truth_json": ground_truths_json(truths),
        }
        arrays = [added[f.name] if f.name in added else batch.column(f.name) for f in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def own_counts(self) -> dict[str, int]:
        """The counts of this split."""
        return {
            name: count for name, count in sorted(self.tally.counts.items()) if name.partition("/")[0] == self.split
        }

    def refuse_empty(self, counts: Mapping[str, int]) -> None:
        """Raise the error of a split without rows."""
        reasons = ", ".join(f"{count:,} {name.partition('/')[2]}" for name, count in counts.items() if count)
        raise DataError(
            f"{self.source}: no row is left after the filter ({reasons or 'the file has no row'}). Raise "
            f"filter.max_prompt_tokens (now {self.config.max_prompt_tokens}), or check the dataset"
        )

    def _texts(self, batch: pa.RecordBatch, start: int) -> list[str]:
        column = batch.column("prompt")
        messages = column.flatten()
        roles, contents = messages.field("role"), messages.field("content")
        single = pc.all(pc.equal(pc.list_value_length(column), 1)).as_py()  # None where the batch is empty
        if single and not contents.null_count and pc.unique(roles).to_pylist() == ["user"]:
            return self.tokenizer.texts_of_user_messages(contents.to_pylist())
        prompts = column.to_pylist()
        for row, prompt in enumerate(prompts, start=start):
            self._require_messages(prompt, row)
        return self.tokenizer.texts(prompts)

    def _require_messages(self, prompt: Any, row: int) -> None:
        if not prompt or any(message is None or None in message.values() for message in prompt):
            raise DataError(
                f"{self.source}: row {row}: prompt must be a list of messages with role and content, got {prompt!r}; "
                "repair or remove the row"
            )
        if not self.tokenizer.chat and len(prompt) != 1:
            raise DataError(
                f"{self.source}: row {row}: a prompt that is plain text must be one message, got {len(prompt)}; join "
                "them, or apply the chat template (prompt_form chat)"
            )

    def _fitting(self, rows: list[int], ids: list[bytes], start: int) -> tuple[list[int], list[bytes]]:
        """Rows and ids within the limits; `rows` are positions in the batch."""
        limit, counts = self.config.max_prompt_tokens, self.tally.counts
        lengths = np.array([len(found) for found in ids], dtype=np.int64) // ID_BYTES
        for length, count in zip(*np.unique(lengths, return_counts=True), strict=True):
            self.tally.lengths.setdefault(self.split, Counter())[int(length)] += int(count)
        good = (lengths > 0) & (lengths <= limit)
        if good.all():
            return rows, ids
        if self.config.overlong == "error" and (lengths > limit).any():
            first = int(np.argmax(lengths > limit))
            raise DataError(
                f"{self.source}: row {start + rows[first]}: filter.max_prompt_tokens is {limit}, the prompt has "
                f"{lengths[first]} tokens. Raise the limit, or set filter.overlong to drop or truncate_left"
            )
        counts[f"{self.split}/empty"] += int((lengths == 0).sum())
        cut = self.config.overlong == "truncate_left"
        counts[f"{self.split}/{'truncated' if cut else 'overlong'}"] += int((lengths > limit).sum())
        kept = np.flatnonzero(lengths > 0 if cut else good).tolist()
        return [rows[index] for index in kept], [ids[index][-limit * ID_BYTES :] for index in kept]


def _answers(extra_info: pa.StructArray, name: str) -> list[str]:
    """A text field of extra_info; '' where the file has no such field or value."""
    if extra_info.type.get_field_index(name) < 0:
        return [""] * len(extra_info)
    return [text or "" for text in pc.struct_field(extra_info, name).to_pylist()]


def _as_lists(rows: list[bytes]) -> pa.ListArray:
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(np.fromiter(map(len, rows), dtype=np.int32, count=len(rows)) // ID_BYTES, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.frombuffer(b"".join(rows), dtype=np.int32)))
