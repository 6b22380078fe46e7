"""Which checkpoints lie in a folder. Needs neither settings nor torch: the command line reads it too."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType

from rlcore.errors import CheckpointError
from rlcore.storage.manifest import newer_format
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
    """Read all manifests. Nothing is verified beyond them."""
    checkpoints, refusals = [], []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
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
    metrics = MappingProxyType({name: float(value) for name, value in values["metrics"].items()})
    return CheckpointInfo(step, path, manifest.size_bytes, metrics, values["created"], values["settings_fingerprint"])


def set_newer_aside(path: Path) -> None:
    """Give a checkpoint that a newer Millrace has written another name, so that one of ours can have its place.

    It is no candidate and is never pruned under that name; renamed back, the newer Millrace reads it.
    """
    version = newer_format(path)
    if version is None:
        return
    names = (path.with_name(f"{path.name}.format-{version}.{number}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    log.warning("%s: is of format version %s, newer than ours: it is kept as %s", path, version, aside.name)


def verify(info: CheckpointInfo, *, hashes: bool = True) -> Manifest:
    """Check size and (with `hashes`) content of every file.

    Raises:
        CheckpointError: names file, rule, value and remedy.
    """
    return verify_directory(info.path, hashes=hashes, error=CheckpointError)
