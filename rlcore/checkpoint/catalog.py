"""Which checkpoints lie in a folder, and which of them are whole, best and kept. No torch, no settings of a run."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from rlcore.checkpoint.state import FORMAT_VERSION as STATE_VERSION
from rlcore.checkpoint.state import STATE
from rlcore.config import CheckpointConfig
from rlcore.errors import CheckpointError
from rlcore.storage.documents import read_ordinary
from rlcore.storage.finished import read_finished_or_set_aside, set_aside
from rlcore.storage.manifest import MANIFEST, newer_format, read_manifest, verify_directory

NAME = re.compile(r"^step-(?P<step>\d{6,})$")
VALIDATION_SCORE = re.compile(r"^val-core/(?!all/).+/reward/mean@\d+$")
"""Of each data source; `all`, over the problems of several, is none of them."""
HELD_OUT_LOSS = "sft/held_out_loss"
KIND = "checkpoint"
Verdict = Literal["verified", "not verified", "broken"]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint as its manifest describes it. `created`: UTC, ISO 8601. `metrics`: of its step, finite ones. Of
    a folder that cannot be used (`verdict` broken) step, path and `reason` are known, the rest where it can be read.
    """

    step: int
    path: Path
    size_bytes: int
    metrics: Mapping[str, float]
    created: str
    settings_fingerprint: str
    verdict: Verdict = "not verified"
    reason: str = ""

    @classmethod
    def refused(cls, path: Path, step: int, reason: str) -> "CheckpointInfo":
        """A folder that cannot be used."""
        return cls(step, path, 0, {}, "", "", "broken", reason)

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder, `step-000020`."""
        return self.path.name

    @property
    def score(self) -> float | None:
        """The mean of the held-out rewards `val-core/<data_source>/reward/mean@k`, or of a supervised step the held-out
        loss, negative; None where none was measured."""
        if (loss := self.metrics.get(HELD_OUT_LOSS)) is not None:
            return -loss
        scores = [value for name, value in sorted(self.metrics.items()) if VALIDATION_SCORE.match(name)]
        return sum(scores) / len(scores) if scores else None


@dataclass(frozen=True, slots=True)
class Catalog:
    """Checkpoints of a folder by step, and unusable folders with the reason."""

    checkpoints: tuple[CheckpointInfo, ...]
    refusals: tuple[CheckpointInfo, ...]


def name_of(step: int) -> str:
    """Name of a step's checkpoint folder, `step-000020`."""
    return f"step-{step:06d}"


def scan(directory: Path) -> Catalog:
    """Read all manifests. Nothing is verified beyond them.

    Raises:
        CheckpointError: the folder itself cannot be read.
    """
    checkpoints, refusals = [], []
    try:
        paths = sorted(directory.iterdir())
    except FileNotFoundError:
        paths = []
    except OSError as reason:
        raise CheckpointError(
            f"{directory}: cannot be read ({reason}), so nobody knows whether the run has checkpoints. Give it back as "
            "a folder that may be read."
        ) from reason
    for path in paths:
        match = NAME.match(path.name)
        if match is None:
            continue
        step = int(match["step"])
        try:
            checkpoints.append(_info(path, step))
        except CheckpointError as reason:
            refusals.append(CheckpointInfo.refused(path, step, str(reason)))
    return Catalog(tuple(sorted(checkpoints, key=lambda info: info.step)), tuple(refusals))


def _info(path: Path, step: int) -> CheckpointInfo:
    manifest = read_manifest(path, error=CheckpointError)
    if manifest is None:
        raise CheckpointError(f"{path}: missing: manifest.json, so it was never finished. Delete the folder.")
    values = manifest.values
    if values.get("kind") != KIND or values.get("step") != step:
        raise CheckpointError(
            f"{path}: its manifest is of {values.get('kind')} {values.get('step')}, not of checkpoint {step}. Was the "
            "folder renamed? Give it its name back, or delete it."
        )
    try:
        metrics = MappingProxyType({str(name): float(value) for name, value in values["metrics"].items()})
        created, settings = str(values["created"]), str(values["settings_fingerprint"])
    except (KeyError, TypeError, ValueError, AttributeError) as reason:
        raise CheckpointError(
            f"{path}: its manifest lacks what a checkpoint's says ({reason!r}). Restore it, or delete the folder."
        ) from None
    return CheckpointInfo(step, path, manifest.size_bytes, metrics, created, settings)


def move_out_of_the_way(path: Path) -> None:
    """Give what lies at a checkpoint's place another name, where a checkpoint of ours must not or cannot replace it.

    That is one that a newer Millrace has written, one that cannot be read just now, and what is no folder. It is no
    candidate and is never pruned under that name; renamed back, it is read again.
    """
    if not os.path.lexists(path):
        return
    version = newer_format(path) or newer_format(path, STATE, STATE_VERSION)
    if version is not None:
        why = f"{path}: is of format version {version}, newer than ours"
        set_aside(path, f"format-{version}", why, error=CheckpointError)
    elif path.is_symlink() or not path.is_dir() or _is_unreadable(path):
        set_aside(path, "unreadable", f"{path}: is no folder, or cannot be read", error=CheckpointError)


def _is_unreadable(path: Path) -> bool:
    """Whether its manifest cannot be read at all, as against one that says something wrong, or is missing."""
    try:
        read_ordinary(path / MANIFEST)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """Checkpoints that pruning would keep and delete now."""

    kept: tuple[CheckpointInfo, ...]
    deleted: tuple[CheckpointInfo, ...]

    @property
    def freed_bytes(self) -> int:
        """Bytes of the checkpoints to delete."""
        return sum(info.size_bytes for info in self.deleted)


def list_checkpoints(directory: Path, *, verify_hashes: bool = False) -> tuple[CheckpointInfo, ...]:
    """Every checkpoint folder by step, broken ones too. Without `verify_hashes` presence and size of files alone."""
    catalog = scan(directory)
    judged = [_verified(info, verify_hashes) for info in catalog.checkpoints]
    return tuple(sorted([*judged, *catalog.refusals], key=lambda info: info.step))


def _verified(info: CheckpointInfo, hashes: bool) -> CheckpointInfo:
    try:
        verify_directory(info.path, hashes=hashes, error=CheckpointError)
    except CheckpointError as error:
        return replace(info, verdict="broken", reason=str(error))
    return replace(info, verdict="verified" if hashes else "not verified")


def by_score(checkpoints: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """The checkpoints that have a score, the best last; of equal ones the later."""
    scored = (info for info in checkpoints if info.score is not None)
    return sorted(scored, key=lambda info: (info.score, info.step))


def find_checkpoint(directory: Path, name: str) -> CheckpointInfo:
    """A checkpoint by its step (`20`), its folder's name (`step-000020`), `last` or `best`. Not verified.

    Raises:
        CheckpointError: there is none of that name; lists those there are. Or it cannot be read; says why.
    """
    catalog = scan(directory)
    known = catalog.checkpoints
    if name == "last" and known:
        return known[-1]
    if name == "best" and (scored := by_score(known)):
        return scored[-1]
    wanted = name_of(int(name)) if name.isdecimal() else name
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


def plan_prune(directory: Path, config: CheckpointConfig) -> PrunePlan:
    """What `CheckpointStore.prune` would delete now, if the newest that stays is whole."""
    known = scan(directory).checkpoints
    doomed = prunable(known, config)
    return PrunePlan(tuple(info for info in known if info not in doomed), tuple(doomed))


def prunable(checkpoints: Sequence[CheckpointInfo], config: CheckpointConfig) -> list[CheckpointInfo]:
    """Those that the retention rule does not keep. One whose files are not all there has no place in it, and stays."""
    whole = [info for info in checkpoints if not _verified(info, hashes=False).reason]
    kept = kept_steps(whole, config)
    return [info for info in whole if info.step not in kept]


def kept_steps(checkpoints: Sequence[CheckpointInfo], config: CheckpointConfig) -> frozenset[int]:
    """Steps that stay: the newest `keep_last`, the best `keep_best`, and every multiple of `keep_every_steps`.

    Best is the highest score; of equal ones the later. One without a score is not among the best.
    """
    newest_first = sorted(checkpoints, key=lambda info: info.step, reverse=True)
    kept = {info.step for info in newest_first[: config.keep_last]}
    best_first = reversed(by_score(checkpoints))
    kept |= {info.step for info in islice(best_first, config.keep_best)}
    if config.keep_every_steps:
        kept |= {info.step for info in checkpoints if info.step % config.keep_every_steps == 0}
    return frozenset(kept)


def is_exported(target: Path, step: int) -> bool:
    """Whether `target` holds the exported weights of `step` already. A damaged folder is set aside.

    Raises:
        CheckpointError: it is of a newer format, or cannot be renamed.
    """
    manifest = read_finished_or_set_aside(target, error=CheckpointError)
    return manifest is not None and manifest.values.get("step") == step
