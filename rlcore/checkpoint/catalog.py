"""Which checkpoints lie in a folder. Needs neither settings nor torch: the command line reads it too."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rlcore.errors import CheckpointError
from rlcore.storage.documents import read_ordinary
from rlcore.storage.finished import set_aside
from rlcore.storage.manifest import MANIFEST, newer_format
from rlcore.storage.publish import Manifest, read_manifest, verify_directory

log = logging.getLogger(__name__)

NAME = re.compile(r"^step-(?P<step>\d{6,})$")
VALIDATION_SCORE = re.compile(r"^val-core/(?!all/).+/reward/mean@\d+$")
"""Of each data source; `all`, over the problems of several, is none of them."""
KIND = "checkpoint"


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint as its manifest describes it. `created`: UTC, ISO 8601. `metrics`: of its step, finite ones."""

    step: int
    path: Path
    size_bytes: int
    metrics: Mapping[str, float]
    created: str
    settings_fingerprint: str

    @property
    def name(self) -> str:
        """`step-000020`."""
        return self.path.name

    def score(self, metric_key: str | None = None) -> float | None:
        """The metric by which it is compared, higher is better; None where it was not measured at this step.

        Without a name: the mean of the held-out rewards `val-core/<data_source>/reward/mean@k`.
        """
        if metric_key is not None:
            return self.metrics.get(metric_key)
        scores = [value for name, value in sorted(self.metrics.items()) if VALIDATION_SCORE.match(name)]
        return sum(scores) / len(scores) if scores else None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A checkpoint folder that cannot be used, and why."""

    path: Path
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Catalog:
    """Checkpoints of a folder by step, and what looks like one and is none."""

    checkpoints: tuple[CheckpointInfo, ...]
    refusals: tuple[Refusal, ...]


def name_of(step: int) -> str:
    """`step-000020`."""
    return f"step-{step:06d}"


def checkpoint_path(directory: Path, step: int) -> Path:
    """Folder of the checkpoint after `step`."""
    return directory / name_of(step)


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
            refusals.append(Refusal(path, step, str(reason)))
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


def make_way(path: Path) -> None:
    """Give what lies at a checkpoint's place another name, where a checkpoint of ours must not or cannot replace it.

    That is one that a newer Millrace has written, one that cannot be read just now, and what is no folder. It is no
    candidate and is never pruned under that name; renamed back, it is read again.
    """
    if not os.path.lexists(path):
        return
    version = newer_format(path)
    if version is not None:
        _rename(path, f"format-{version}", f"is of format version {version}, newer than ours")
    elif path.is_symlink() or not path.is_dir() or _is_unreadable(path):
        _rename(path, "unreadable", "is no folder, or cannot be read")


def keep_off_the_way(path: Path, why: str) -> None:
    """Give a checkpoint that the run does not go on from another name: it is kept, and no candidate any more."""
    _rename(path, "left", why)


def _rename(path: Path, label: str, why: str) -> None:
    try:
        aside = set_aside(path, label)
    except OSError as reason:
        raise CheckpointError(f"{path}: {why}, and cannot be renamed ({reason}). Move it away, then go on.") from reason
    log.warning("%s: %s: it is kept as %s", path, why, aside.name)


def _is_unreadable(path: Path) -> bool:
    """Whether its manifest cannot be read at all, as against one that says something wrong, or is missing."""
    try:
        read_ordinary(path / MANIFEST)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def verify(info: CheckpointInfo, *, hashes: bool = True) -> Manifest:
    """Check size and (with `hashes`) content of every file.

    Raises:
        CheckpointError: names file, rule, value and remedy.
    """
    return verify_directory(info.path, hashes=hashes, error=CheckpointError)
