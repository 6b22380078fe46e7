"""What `millrace checkpoints` shows and does: list, verify, prune. No torch; export is in `export`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlcore.checkpoint.catalog import CheckpointInfo, checkpoint_path, scan, verify
from rlcore.checkpoint.retention import kept_steps
from rlcore.config import CheckpointConfig
from rlcore.errors import CheckpointError

Verdict = Literal["verified", "not verified", "broken"]


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One line of the list. Of a folder whose manifest cannot be read only step, path and reason are known."""

    step: int
    path: Path
    verdict: Verdict
    reason: str
    size_bytes: int
    created: str
    score: float | None
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What pruning would do now."""

    kept: tuple[CheckpointInfo, ...]
    deleted: tuple[CheckpointInfo, ...]

    @property
    def freed_bytes(self) -> int:
        """Bytes of the checkpoints to delete."""
        return sum(info.size_bytes for info in self.deleted)


def list_checkpoints(
    directory: Path, *, verify_hashes: bool = False, metric_key: str | None = None
) -> tuple[CheckpointRow, ...]:
    """Every checkpoint folder by step, broken ones too. Without `verify_hashes` presence and size of files alone."""
    catalog = scan(directory)
    rows = [_row(info, verify_hashes, metric_key) for info in catalog.checkpoints]
    rows += [
        CheckpointRow(refusal.step, refusal.path, "broken", refusal.reason, 0, "", None, {})
        for refusal in catalog.refusals
    ]
    return tuple(sorted(rows, key=lambda row: row.step))


def _row(info: CheckpointInfo, hashes: bool, metric_key: str | None) -> CheckpointRow:
    verdict: Verdict = "verified" if hashes else "not verified"
    reason = ""
    try:
        verify(info, hashes=hashes)
    except CheckpointError as error:
        verdict, reason = "broken", str(error)
    score = info.score(metric_key)
    return CheckpointRow(info.step, info.path, verdict, reason, info.size_bytes, info.created, score, info.metrics)


def find_checkpoint(directory: Path, name: str, metric_key: str | None = None) -> CheckpointInfo:
    """A checkpoint by its step (`20`), its folder's name (`step-000020`), `last` or `best`. Not verified.

    Raises:
        CheckpointError: there is none of that name; lists those there are. Or it cannot be read; says why.
    """
    catalog = scan(directory)
    known = catalog.checkpoints
    scored = [(score, info.step, info) for info in known if (score := info.score(metric_key)) is not None]
    if name == "last" and known:
        return known[-1]
    if name == "best" and scored:
        return max(scored, key=lambda one: one[:2])[2]
    wanted = checkpoint_path(directory, int(name)).name if name.isdecimal() else name
    for info in known:
        if info.name == wanted:
            return info
    for refusal in catalog.refusals:
        if refusal.path.name == wanted:
            raise CheckpointError(refusal.reason)
    there = ", ".join(info.name for info in known) or "none"
    raise CheckpointError(
        f"{directory}: has no checkpoint {name!r}; there are: {there}. Name a step, a folder, last, or best (where "
        "validation was measured)."
    )


def plan_prune(directory: Path, config: CheckpointConfig, metric_key: str | None = None) -> PrunePlan:
    """What `CheckpointStore.prune` would delete now, if the newest that stays is whole."""
    known = scan(directory).checkpoints
    kept = kept_steps(known, config, metric_key)
    return PrunePlan(
        tuple(info for info in known if info.step in kept), tuple(info for info in known if info.step not in kept)
    )
