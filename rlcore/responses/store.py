"""Every answer of a run as parquet parts in one folder: what stands in a part, how parts are written, cut and let go.

    train-000001-000020.parquet        answers that steps 1 to 20 learned from
    validation-step-000020.parquet     answers of one validation

A training part is on the disk before the checkpoint of its last step is published, and going back to a checkpoint
deletes the parts of later steps. So a run that was killed and started again has each answer once. A part is written
beside its place, flushed and renamed: it is whole or absent. No torch.
"""

import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlcore.config import AnswersConfig
from rlcore.storage.disk import BYTES_PER_GB
from rlcore.storage.documents import files_of
from rlcore.storage.publish import remove_stale_temporaries, replaced_file

LIGHT = pa.schema(
    [
        ("step", pa.int32()),
        ("validation", pa.string()),
        ("greedy", pa.bool_()),
        ("prompt_id", pa.int64()),
        ("sample_index", pa.int32()),
        ("data_source", pa.string()),
        ("score", pa.float64()),
        ("advantage", pa.float32()),
        ("num_tokens", pa.int32()),
        ("finish_reason", pa.string()),
        ("policy_version", pa.int32()),
        ("logprob", pa.float32()),
        ("gap", pa.float32()),
    ]
)
"""What answers are chosen and sorted by. `validation`: its name, null for an answer of training. `score`: null without
one. `advantage`: mean over the tokens learned from. `logprob`: mean over the sampled tokens as they were drawn, nats.
`gap`: largest absolute difference between that and the trainer's own, null where the trainer has computed none."""

TEXTS = pa.schema(
    [
        ("prompt", pa.string()),
        ("ground_truth", pa.string()),
        ("answer", pa.string()),
        ("said", pa.string()),
        ("parts", pa.map_(pa.string(), pa.float64())),
        ("failure", pa.string()),
    ]
)
"""What a person reads. `said`: the answer that the scorer found in the text. `failure`: why there is no score."""

TOKENS = pa.schema(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("is_sampled", pa.list_(pa.bool_())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("policy_logprobs", pa.list_(pa.float32())),
        ("ref_logprobs", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
    ]
)
"""One entry a token of the answer. `is_sampled`: null where the model wrote all of them. `policy_logprobs`: the
trainer's before the update; null, as `ref_logprobs`, where none were computed. `advantages`: null where all tokens
have `advantage`."""

SCHEMA = pa.schema([*LIGHT, *TEXTS, *TOKENS])

PART_BYTES = 32 * 2**20
"""Answers in memory are written when they reach this size, even before a chunk ends."""
ROWS_PER_GROUP = 256
"""Few, so that one answer is read without many others."""
_PART = re.compile(r"(train-(?P<first>\d{6,})-|validation-step-)(?P<last>\d{6,})\.parquet")
_HEAVY = [name for name in TOKENS.names if name not in ("token_ids", "is_sampled")]


def parts_of(folder: Path) -> list[Path]:
    """The parts of a run, training first, each kind in the order of its steps."""
    return sorted(files_of(folder, "*.parquet"))


def training_parts(folder: Path) -> list[Path]:
    """The files of training, in the order of their steps."""
    return [path for path in parts_of(folder) if path.name.startswith("train-")]


def write_part(path: Path, table: pa.Table) -> None:
    """Write one part in place of what has its name.

    Raises:
        DiskSpaceError: no room; nothing is left of it.
        UnwritableError: the folder cannot be written.
    """
    # Dictionaries for what repeats; log-probabilities hardly do, and are split by bytes instead, which packs them.
    plain = [f"{name}.list.element" for name in _HEAVY]
    repeats = [name for name in SCHEMA.names if name not in _HEAVY and name not in ("answer", "parts", "token_ids")]
    with replaced_file(path) as file:
        pq.write_table(
            table,
            file,
            row_group_size=ROWS_PER_GROUP,
            compression="zstd",
            use_dictionary=[*repeats, "token_ids.list.element"],
            use_byte_stream_split=plain,
        )


class ResponseWriter:
    """Takes a run's answers step by step, and writes them in a thread."""

    def __init__(self, folder: Path, settings: AnswersConfig) -> None:
        self._folder, self._settings = folder, settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._tables: list[pa.Table] = []
        self._part: pa.Table | None = None
        self._written: Future[None] | None = None

    def stores_step(self, step: int) -> bool:
        """Whether the answers of this training step are kept."""
        every = self._settings.every_steps
        return bool(every) and step % every == 0

    def add(self, table: pa.Table) -> None:
        """Keep the answers of the next training step in memory."""
        self._tables.append(table)

    @property
    def is_full(self) -> bool:
        """Whether it is time for `start_part`, before the chunk's end."""
        return bool(sum(table.nbytes for table in self._tables) >= PART_BYTES)

    def start_part(self) -> None:
        """Begin to write what was added since the last call, once the part before it is written.

        Raises:
            DiskSpaceError: there was no room for the part before; call again.
        """
        self.wait()
        if self._tables:
            self._part, self._tables = pa.concat_tables(self._tables), []
            self._written = self._thread.submit(self._write, self._part)

    def wait(self) -> None:
        """Wait for the part under way.

        Raises:
            DiskSpaceError: there was no room for it; call again.
        """
        if self._part is None:
            return
        written, self._written = self._written, None
        if written is None:
            self._write(self._part)
        else:
            written.result()
        self._part = None

    def write_validation(self, name: str, table: pa.Table) -> None:
        """Write the answers of a validation, in place of those of its name, unless none are kept. Raises as
        `write_part` does."""
        if self._settings.every_steps:
            write_part(self._folder / f"validation-{name}.parquet", table)

    def truncate(self, step: int) -> None:
        """Go back to the end of this step: later answers are forgotten, in memory and on the disk."""
        self._tables = []
        if self._written is not None:
            self._written.exception()
        self._part, self._written = None, None
        remove_stale_temporaries(self._folder)
        for path in parts_of(self._folder):
            first, last = steps_of(path)
            if last <= step:
                continue
            if first <= step:  # a checkpoint inside a part: older ones were deleted, or other steps ended chunks then
                table = pq.read_table(path)
                kept = table.filter(pc.field("step") <= step)
                write_part(self._folder / _training_name(kept), kept)
            path.unlink()

    def _write(self, table: pa.Table) -> None:
        write_part(self._folder / _training_name(table), table)
        self._delete_oldest()

    def _delete_oldest(self) -> None:
        """Delete the oldest training parts, but never the newest, while all parts are larger than they may be."""
        sizes = {path: path.stat().st_size for path in parts_of(self._folder)}
        too_many = sum(sizes.values()) - self._settings.max_gb * BYTES_PER_GB
        for path in training_parts(self._folder)[:-1]:
            if too_many <= 0:
                return
            path.unlink()
            too_many -= sizes[path]


def _training_name(table: pa.Table) -> str:
    steps = pc.min_max(table["step"]).as_py()
    return f"train-{steps['min']:06d}-{steps['max']:06d}.parquet"


def steps_of(path: Path) -> tuple[int, int]:
    """First and last step of a part; twice -1 of a validation that was asked for, which no cut concerns."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return -1, -1
    return int(found["first"] or found["last"]), int(found["last"])
