"""Mixtures: several datasets, each made and filtered on its own and found by its own fingerprint, bound by a folder.

The folder holds no rows. Its manifest names the folders of the parts beside it, in their order; weights, names and
scorers stay in the settings, so that another weight makes nothing anew.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from data.cards import CARD
from data.leakage import Multiset, multisets
from data.schema import open_parquet, read_batches
from data.stage import StageResult
from data.write import ROWS_PER_GROUP
from rlcore.config.fingerprint import fingerprint
from rlcore.errors import DataError
from rlcore.storage.finished import finished_or_set_aside
from rlcore.storage.manifest import PARTS_KEY
from rlcore.storage.publish import published_directory


def mixture_fingerprint(kind: str, parts: Iterable[str]) -> str:
    """What a mixture depends on: the fingerprints of its parts."""
    return fingerprint(f"{kind}-mixture", list(parts))


def publish_mixture(kind: str, directory: Path, parts: Sequence[StageResult]) -> StageResult:
    """Bind the parts, unless that has been done; `kind` is `dataset` or `filtered`. Counts are sums over the parts.

    Raises:
        DataError: a training row of filtered rows is held out in another part.
        DiskSpaceError: no room.
    """
    counts = dict(sorted(sum((Counter(part.counts) for part in parts), Counter()).items()))
    if finished_or_set_aside(directory) is not None:
        return StageResult(directory, directory.name, cached=all(part.cached for part in parts), counts=counts)
    if kind == "filtered":
        _require_no_leak([part.directory for part in parts])
    facts: dict[str, Any] = {
        "kind": f"{kind}-mixture",
        "fingerprint": directory.name,
        PARTS_KEY: [part.directory.name for part in parts],
        "counts": counts,
    }
    with published_directory(directory, facts) as folder:
        rows = (f"| [{part.fingerprint}](../{part.fingerprint}) | {_told(part)} |" for part in parts)
        lines = [f"# Mixture of {len(parts)} datasets", "", "| part | rows |", "| --- | --- |", *rows]
        (folder / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return StageResult(directory, directory.name, cached=False, counts=counts)


def _told(part: StageResult) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in part.counts.items())


def _require_no_leak(directories: Sequence[Path]) -> None:
    """No part trains on what another one holds out. (Within a part the filter has looked.)"""
    prompts: dict[bytes, Path] = {}
    numbers: dict[Multiset, Path] = {}
    for directory in directories:
        for _, keys, found in _rows(directory / "validation.parquet"):
            prompts |= dict.fromkeys(keys, directory)
            numbers |= dict.fromkeys(found, directory)
    for directory in directories:
        path = directory / "train.parquet"
        for start, keys, found in _rows(path):
            _refuse(path, start, keys, prompts, "prompt")
            _refuse(path, start, found, numbers, "multiset of numbers")


def _rows(path: Path) -> Iterator[tuple[int, list[bytes], list[Multiset]]]:
    """First row, prompts (their token ids as bytes) and multisets of numbers of each batch."""
    start = 0
    for batch in read_batches(open_parquet(path), path, ROWS_PER_GROUP):
        ids = batch.column("prompt_ids")
        flat = ids.flatten().cast(pa.int32()).to_numpy(zero_copy_only=False)
        ends = pc.list_value_length(ids).to_numpy(zero_copy_only=False).cumsum().tolist()
        keys = [flat[first:last].tobytes() for first, last in zip([0, *ends], ends, strict=False)]
        yield start, keys, multisets(pc.struct_field(batch.column("reward_model"), "ground_truth"))
        start += batch.num_rows


def _refuse(path: Path, start: int, keys: Sequence[Any], held_out: dict[Any, Path], what: str) -> None:
    if held_out.keys().isdisjoint(keys):
        return
    position = next(position for position, key in enumerate(keys) if key in held_out)
    other = held_out[keys[position]]
    raise DataError(
        f"{path}: row {start + position}: has the same {what} as a held-out row of {other}, another part of the "
        "mixture, so validation would not measure what is new to the model. Choose parts that do not overlap (other "
        "numbers, other sources), or remove the row"
    )
