"""The trainer's state, the search for checkpoints in a folder, and the retention rule. This module imports no torch."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from rlcore.config import CheckpointConfig
from rlcore.errors import CheckpointError
from rlcore.score import HELD_OUT_REWARD
from rlcore.storage.documents import first_problem, parse_json, read_ordinary, sha256_of
from rlcore.storage.manifest import (
    MANIFEST,
    newer_format,
    read_finished_or_set_aside,
    read_manifest,
    set_aside,
    verify_directory,
)

STATE_VERSION = 2
STATE = "state.json"  # name in a checkpoint

Count = Annotated[int, Field(ge=0)]

NAME = re.compile(r"^step-(?P<step>\d{6,})$")
HELD_OUT_LOSS = "sft/held_out_loss"
KIND = "checkpoint"


@dataclass(frozen=True, slots=True)
class LoopState:
    """The state of the training loop between two steps. `num_prompts_drawn`: the position in the stream of prompts."""

    step: Count
    policy_version: Count  # the number of weight syncs
    num_prompts_drawn: Count  # from the endless stream, with prompts that dynamic sampling dropped
    num_tokens: Count  # the number of prompt and response tokens that were trained on
    kl_coef: float  # the adaptive coefficient of the KL term
    best_metric: float = float("-inf")  # the best held-out score, or -inf before the first one
    best_step: Count = 0
    entropy_added: float = 0.0  # what the entropy target has added to the weight of the entropy bonus
    pass_counts: str = ""  # correct and scored responses of each training row, as base64 of float32 (`PassCounts`)
    carried: str = ""  # groups of responses that the next step continues, as JSON (`rlcore.rollout.engine`)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState(LoopState):
    """The content of `state.json`: the loop's state, the journal's size and hash, and a fingerprint of the settings."""

    __pydantic_config__ = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    format_version: int = STATE_VERSION
    journal_bytes: Count = 0  # size of metrics.jsonl at the end of this step's line
    journal_sha256: str = ""  # of these bytes
    settings_fingerprint: str

    def to_json(self) -> str:
        """Return the state as JSON text with exact floats."""
        return _STATE.dump_json(self, indent=1).decode() + "\n"

    @staticmethod
    def read(path: Path) -> "TrainerState":
        """Read `state.json`. Raises CheckpointError if it is missing, damaged, or of another format version."""
        remedy = f"Delete {path.parent}; the checkpoint before it will be used."
        try:
            document = parse_json(read_ordinary(path))
            version = document["format_version"]
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing. {remedy}") from None
        except (OSError, ValueError, KeyError, TypeError) as reason:
            raise CheckpointError(f"{path}: is damaged ({reason!r}). {remedy}") from reason
        if version != STATE_VERSION:
            raise CheckpointError(
                f"{path}: format_version must be {STATE_VERSION}, got {version!r}. Resume with the version of "
                "Millrace that wrote it."
            )
        try:
            return _STATE.validate_python(document)
        except ValidationError as reason:
            value = reason.errors()[0]["input"]
            raise CheckpointError(f"{path}: {first_problem(reason)}, got {value!r}. {remedy}") from reason


_STATE = TypeAdapter(TrainerState)
Verdict = Literal["verified", "not verified", "broken"]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint as described by its manifest. `created`: UTC in ISO 8601. `metrics`: the finite metrics of the step.
    An unusable folder has the verdict `broken` and a `reason`, and no size, metrics, time and fingerprint."""

    step: int
    path: Path
    size_bytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    created: str = ""
    settings_fingerprint: str = ""
    verdict: Verdict = "not verified"
    reason: str = ""

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder, such as `step-000020`."""
        return self.path.name

    @property
    def score(self) -> float | None:
        """The held-out reward, or the negative held-out loss of a supervised step. None if neither was measured."""
        loss = self.metrics.get(HELD_OUT_LOSS)
        return self.metrics.get(HELD_OUT_REWARD) if loss is None else -loss


@dataclass(frozen=True, slots=True)
class Catalog:
    """The checkpoints of a folder, sorted by step, and the unusable folders with their reasons."""

    checkpoints: tuple[CheckpointInfo, ...]
    refusals: tuple[CheckpointInfo, ...]


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint folder, such as `step-000020`."""
    return f"step-{step:06d}"


def scan(directory: Path) -> Catalog:
    """Read all manifests of a folder without verifying files. Raises CheckpointError if the folder cannot be read."""
    checkpoints, refusals = [], []
    try:
        paths = sorted(directory.iterdir())
    except FileNotFoundError:
        paths = []
    except OSError as reason:
        raise CheckpointError(
            f"{directory}: cannot be read ({reason}), so it is unknown whether the run has checkpoints. Restore it as "
            "a readable folder."
        ) from reason
    for path in paths:
        match = NAME.match(path.name)
        if match is None:
            continue
        step = int(match["step"])
        try:
            checkpoints.append(_info(path, step))
        except CheckpointError as reason:
            refusals.append(CheckpointInfo(step, path, verdict="broken", reason=str(reason)))
    return Catalog(tuple(sorted(checkpoints, key=lambda info: info.step)), tuple(refusals))


def _info(path: Path, step: int) -> CheckpointInfo:
    manifest = read_manifest(path, error=CheckpointError)
    if manifest is None:
        raise CheckpointError(f"{path}: missing: manifest.json, so it was never finished. Delete the folder.")
    values = manifest.values
    if values.get("kind") != KIND or values.get("step") != step:
        raise CheckpointError(
            f"{path}: its manifest is of {values.get('kind')} {values.get('step')}, not of checkpoint {step}. Was the "
            "folder renamed? Rename it back, or delete it."
        )
    try:
        metrics = MappingProxyType({str(name): float(value) for name, value in values["metrics"].items()})
        created, settings = str(values["created"]), str(values["settings_fingerprint"])
    except (KeyError, TypeError, ValueError, AttributeError) as reason:
        raise CheckpointError(
            f"{path}: its manifest lacks values of a checkpoint ({reason!r}). Restore it, or delete the folder."
        ) from None
    return CheckpointInfo(step, path, manifest.size_bytes, metrics, created, settings)


def move_out_of_the_way(path: Path) -> None:
    """Rename `path` if it is a file, is unreadable or has a newer format, so that a new checkpoint can take its
    place."""
    if not os.path.lexists(path):
        return
    version = newer_format(path) or newer_format(path, STATE, STATE_VERSION)
    if version is not None:
        why = f"{path}: is of format version {version}, newer than ours"
        set_aside(path, f"format-{version}", why, error=CheckpointError)
    elif path.is_symlink() or not path.is_dir() or _is_unreadable(path / MANIFEST):
        set_aside(path, "unreadable", f"{path}: is no folder, or cannot be read", error=CheckpointError)


def _is_unreadable(file: Path) -> bool:
    try:
        read_ordinary(file)
    except OSError as reason:
        return not isinstance(reason, FileNotFoundError)
    return False


def list_checkpoints(directory: Path, *, verify_hashes: bool = False) -> tuple[CheckpointInfo, ...]:
    """Return all checkpoint folders, including broken ones, sorted by step. Check file sizes, and optionally hashes."""
    catalog = scan(directory)
    verified = [_verified(info, verify_hashes) for info in catalog.checkpoints]
    return tuple(sorted([*verified, *catalog.refusals], key=lambda info: info.step))


def _verified(info: CheckpointInfo, hashes: bool) -> CheckpointInfo:
    try:
        verify_directory(info.path, hashes=hashes, error=CheckpointError)
    except CheckpointError as error:
        return replace(info, verdict="broken", reason=str(error))
    return replace(info, verdict="verified" if hashes else "not verified")


def by_score(checkpoints: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return the checkpoints that have a score, sorted by score and then by step."""
    scored = (info for info in checkpoints if info.score is not None)
    return sorted(scored, key=lambda info: (info.score, info.step))


def find_checkpoint(directory: Path, name: str) -> CheckpointInfo:
    """Find a checkpoint by its step (`20`), folder name, `last` or `best`. Raises CheckpointError if there is none."""
    catalog = scan(directory)
    known = catalog.checkpoints
    if name == "last" and known:
        return known[-1]
    if name == "best" and (scored := by_score(known)):
        return scored[-1]
    wanted = name_of(int(name)) if name.isdecimal() else name
    for info in (*known, *catalog.refusals):
        if info.name == wanted:
            if info.reason:
                raise CheckpointError(info.reason)
            return info
    existing = ", ".join(info.name for info in known) or "none"
    raise CheckpointError(
        f"{directory}: has no checkpoint {name!r}; there are: {existing}. Name a step, a folder, last, or best (where "
        "validation was measured)."
    )


def prunable(checkpoints: Sequence[CheckpointInfo], config: CheckpointConfig) -> list[CheckpointInfo]:
    """Return the checkpoints that the retention rule deletes. Checkpoints with missing files are excluded."""
    whole = [info for info in checkpoints if not _verified(info, hashes=False).reason]
    kept = kept_steps(whole, config)
    return [info for info in whole if info.step not in kept]


def kept_steps(checkpoints: Sequence[CheckpointInfo], config: CheckpointConfig) -> frozenset[int]:
    """Return the steps to keep: the newest `keep_last`, the `keep_best` with the highest scores, and multiples of
    `keep_every_steps`. If scores are equal, the later step is preferred."""
    newest_first = sorted(checkpoints, key=lambda info: info.step, reverse=True)
    kept = {info.step for info in newest_first[: config.keep_last]}
    best_first = reversed(by_score(checkpoints))
    kept |= {info.step for info in islice(best_first, config.keep_best)}
    if config.keep_every_steps:
        kept |= {info.step for info in checkpoints if info.step % config.keep_every_steps == 0}
    return frozenset(kept)


def is_exported(target: Path, step: int) -> bool:
    """Return whether `target` has the exported weights of `step`. If `target` is damaged, rename it."""
    manifest = read_finished_or_set_aside(target, error=CheckpointError)
    return manifest is not None and manifest.values.get("step") == step


def journal_problem(state: TrainerState, journal: Path | None) -> str:
    """Return the reason why the journal on disk does not match a checkpoint, or '' if it matches."""
    wanted = state.journal_bytes
    if journal is None or not wanted:
        return ""
    try:
        size = journal.stat().st_size
        if size < wanted:
            return f"{journal}: was cut: it has {size} of the {wanted} bytes that it had at step {state.step}"
        if state.journal_sha256 != sha256_of(journal, wanted):
            return f"{journal}: was changed: its first {wanted} bytes are not those that it had at step {state.step}"
    except FileNotFoundError:
        return f"{journal}: is lost: it had {wanted} bytes at step {state.step}"
    except OSError as reason:
        return f"{journal}: cannot be read ({reason})"
    return ""
