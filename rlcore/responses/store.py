"""The responses of a run as parquet files (parts) in one folder. This module does not import torch.

`train-000001-000020.parquet` contains training steps 1 to 20. `validation-step-000020.parquet` contains one validation.
A training part is written before the checkpoint of its last step. When a run is resumed from a checkpoint, the
responses of later steps are deleted.
"""

import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
"""The columns for selection and sorting. `validation`: null for training. `score`: may be null. `advantage` and
`logprob`: means over tokens. `gap`: the largest absolute difference of a token's log-probability between engine and
trainer, or null."""
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
"""The text columns and score parts. `said`: the answer that the scorer extracted. `failure`: why there is no score."""
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
"""The columns with one entry per token. `is_sampled`: null if the model wrote all tokens. `policy_logprobs`: the
trainer's log-probabilities before the update, or null. `ref_logprobs`: may be null. `advantages`: null if all tokens
have the value `advantage`."""
SCHEMA = pa.schema([*LIGHT, *TEXTS, *TOKENS])
PART_BYTES = 32 * 2**20  # larger tables are written even before a chunk ends
ROWS_PER_GROUP = 256  # few, so that one response is read without many others
_PART = re.compile(r"(train-(?P<first>\d{6,})-|validation-step-)(?P<last>\d{6,})\.parquet")
_HEAVY = [name for name in TOKENS.names if name not in ("token_ids", "is_sampled")]


def parts_of(folder: Path) -> list[Path]:
    """Return the files with a run's stored responses: training files first, sorted by step."""
    return sorted(files_of(folder, "*.parquet"))


def write_part(path: Path, table: pa.Table) -> None:
    """Write one file of responses atomically. Raises DiskSpaceError or UnwritableError."""
    # dictionaries for repeated values, byte-stream split for log-probabilities
    plain = [f"{name}.list.element" for name in _HEAVY]
    repeats = [name for name in SCHEMA.names if name not in (*_HEAVY, "answer", "parts", "token_ids")]
    coding: dict[str, Any] = {"use_dictionary": [*repeats, "token_ids.list.element"], "use_byte_stream_split": plain}
    with replaced_file(path) as file:
        pq.write_table(table, file, row_group_size=ROWS_PER_GROUP, compression="zstd", **coding)


class ResponseWriter:
    """A writer that collects the responses of a run step by step, and writes them to files in another thread."""

    def __init__(self, folder: Path, settings: AnswersConfig) -> None:
        self._folder, self._settings = folder, settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._tables: list[pa.Table] = []
        self._part: pa.Table | None = None
        self._written: Future[None] | None = None

    def stores_step(self, step: int) -> bool:
        """Return whether the responses of this training step are stored."""
        every = self._settings.every_steps
        return bool(every) and step % every == 0

    def add(self, table: pa.Table) -> None:
        """Collect the responses of the next training step. If the collected responses reach 32 MiB, start to write them
        to a file."""
        self._tables.append(table)
        if sum(each.nbytes for each in self._tables) >= PART_BYTES:
            self.start_part()

    def start_part(self) -> None:
        """Wait until the previous file is written, then start to write the collected responses."""
        self.wait()
        if self._tables:
            self._part, self._tables = pa.concat_tables(self._tables), []
            self._written = self._thread.submit(self._write, self._part)

    def wait(self) -> None:
        """Wait until the file that `start_part` began is written. Raises DiskSpaceError or UnwritableError. After
        an error, the next call writes the file again."""
        written, self._written = self._written, None
        if written is not None:
            written.result()
        elif self._part is not None:
            self._write(self._part)
        self._part = None

    def write_validation(self, name: str, table: pa.Table) -> None:
        """Write the responses of a validation if the run stores responses. Raises DiskSpaceError or UnwritableError."""
        if self._settings.every_steps:
            write_part(self._folder / f"validation-{name}.parquet", table)

    def truncate(self, step: int) -> None:
        """Discard all responses of steps after `step`, in memory and on disk."""
        self._tables = []
        if self._written is not None:
            self._written.exception()
        self._part, self._written = None, None
        remove_stale_temporaries(self._folder)
        for path in parts_of(self._folder):
            first, last = steps_of(path)
            if last <= step:
                continue
            if first <= step:  # the checkpoint is inside a part: others were deleted, or chunks had other ends
                table = pq.read_table(path)
                kept = table.filter(pc.field("step") <= step)
                write_part(self._folder / _training_name(kept), kept)
            path.unlink()

    def _write(self, table: pa.Table) -> None:
        write_part(self._folder / _training_name(table), table)
        self._delete_oldest()

    def _delete_oldest(self) -> None:
        """Delete old training files until all files fit into `answers.max_gb`. The newest training file is kept."""
        sizes = {path: path.stat().st_size for path in parts_of(self._folder)}
        too_many = sum(sizes.values()) - self._settings.max_gb * BYTES_PER_GB
        for path in [path for path in sizes if path.name.startswith("train-")][:-1]:  # sorted by step
            if too_many <= 0:
                return
            path.unlink()
            too_many -= sizes[path]


def _training_name(table: pa.Table) -> str:
    steps = pc.min_max(table["step"]).as_py()
    return f"train-{steps['min']:06d}-{steps['max']:06d}.parquet"


def steps_of(path: Path) -> tuple[int, int]:
    """Return the first and last step in a response file's name, or (-1, -1) if the name has no step. A file without
    steps in its name has the responses of a validation that a command requested."""
    found = _PART.fullmatch(path.name)
    return (int(found["first"] or found["last"]), int(found["last"])) if found else (-1, -1)
