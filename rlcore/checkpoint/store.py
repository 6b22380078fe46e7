"""The store of a run's checkpoints, which publishes, verifies, finds and deletes them. This module imports no torch."""

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rlcore.checkpoint.catalog import (
    KIND,
    STATE,
    CheckpointInfo,
    TrainerState,
    by_score,
    journal_problem,
    move_out_of_the_way,
    name_of,
    prunable,
    scan,
)
from rlcore.config import CheckpointConfig, RunConfig
from rlcore.config.fingerprint import fixed_settings, settings_fingerprint
from rlcore.errors import CheckpointError
from rlcore.storage.disk import is_out_of_room
from rlcore.storage.documents import first_problem, read_ordinary, temporary_sibling
from rlcore.storage.manifest import LEFT, set_aside, verify_directory
from rlcore.storage.publish import published_directory, remove_stale_temporaries, remove_tree

SETTINGS = "settings.json"  # name in a checkpoint
SHOWN_DIFFERENCES = 10
_SETTINGS = TypeAdapter(dict[str, Any])

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """The newest usable checkpoint, and the newer checkpoints that were refused. `journal_problem`: the reason why the
    checkpoint does not match the journal, or '' if it matches."""

    checkpoint: CheckpointInfo | None
    refusals: tuple[CheckpointInfo, ...]
    journal_problem: str = ""


class CheckpointStore:
    """The checkpoints of one run. All state is on disk, except for the list of verified checkpoints."""

    def __init__(
        self, directory: Path, config: CheckpointConfig, settings: RunConfig, *, journal: Path | None = None
    ) -> None:
        """Use a folder of checkpoints. `find_latest` compares the checkpoints with `journal`, the run's journal."""
        self.directory = directory
        self._journal = journal
        self._config = config
        self._settings = fixed_settings(settings)
        self._fingerprint = settings_fingerprint(settings)
        # (path, creation): hashing a large checkpoint takes minutes.
        self._verified: set[tuple[Path, str]] = set()

    def path_of(self, step: int) -> Path:
        """Return the folder of the checkpoint that is saved when `step` is finished."""
        return self.directory / name_of(step)

    @contextmanager
    def writing(
        self, state: TrainerState, metrics: Mapping[str, float], at: Callable[[str], None] = lambda what: None
    ) -> Iterator[Path]:
        """Publish a checkpoint. Yield a folder for the ranks' shards, and rename the folder at the end of the block.
        Metrics that are not finite are left out. `at` receives the name of each stage. Raises DiskSpaceError if the
        disk is full, and CheckpointError if the folder cannot be written. Errors leave older checkpoints unchanged."""
        target = self.path_of(state.step)
        created = datetime.now(UTC).isoformat("T", "microseconds")
        manifest: dict[str, Any] = {
            "kind": KIND,
            "step": state.step,
            "created": created,
            "settings_fingerprint": self._fingerprint,
            "metrics": {name: float(value) for name, value in sorted(metrics.items()) if math.isfinite(value)},
        }
        remove_stale_temporaries(self.directory)
        replaces = os.path.lexists(target)
        with published_directory(target, manifest, replace=replaces, error=CheckpointError, at=at) as folder:
            move_out_of_the_way(target)
            yield folder
            try:
                (folder / STATE).write_text(state.to_json(), encoding="utf-8")
                (folder / SETTINGS).write_text(json.dumps(self._settings, indent=1), encoding="utf-8")
            except OSError as reason:
                if is_out_of_room(reason):
                    raise
                raise CheckpointError(
                    f"{folder}: cannot be written ({reason}). Was the run's folder removed or made read-only during "
                    "the run? Older checkpoints in it were not changed."
                ) from reason
        self._verified.add((target, created))

    def prune(self) -> tuple[Path, ...]:
        """Delete the checkpoints that the run's settings do not keep, and return their paths. The newest checkpoint
        whose files match their hashes is always kept. If there is no such checkpoint, nothing is deleted."""
        remove_stale_temporaries(self.directory)
        checkpoints = scan(self.directory).checkpoints
        candidates = prunable(checkpoints, self._config)
        good = self._search(checkpoints, hashes=True).checkpoint
        deleted: list[Path] = []
        for path in (info.path for info in candidates if good is not None and info.step != good.step):
            aside = temporary_sibling(path)
            try:
                path.rename(aside)  # a crash leaves no half checkpoint under its name
            except OSError as reason:
                log.warning("%s: cannot be deleted (%s); it still uses disk space", path, reason)
                continue
            remove_tree(aside)
            deleted.append(path)
        return tuple(deleted)

    def set_aside_later(self, step: int) -> None:
        """Rename the intact checkpoints of steps after `step`, because the run continues from `step`. Otherwise,
        pruning would keep these checkpoints as the newest ones."""
        for info in scan(self.directory).checkpoints:
            if info.step > step and self._search([info], hashes=True).checkpoint is not None:
                set_aside(info.path, LEFT, f"{info.path}: the run continues from step {step}", error=CheckpointError)

    def list(self) -> Sequence[CheckpointInfo]:
        """Return all checkpoints with a readable manifest, sorted by step. Their files are not verified."""
        return scan(self.directory).checkpoints

    def latest(self, *, verify: bool = True) -> CheckpointInfo | None:
        """Return the checkpoint from which the run resumes, or None. See `find_latest`."""
        return self.find_latest(verify=verify).checkpoint

    def find(self, name: str, *, verify: bool = True) -> CheckpointInfo | None:
        """Find a checkpoint by `last`, `best` or its folder name. Return None for `start`, the policy before training.
        Raises CheckpointError if no checkpoint matches."""
        if name == "start":
            return None
        if name in ("last", "best"):
            found = self.latest(verify=verify) if name == "last" else self.best()
        else:
            found = next((info for info in self.list() if info.name == name), None)
        if found is None:
            names = ", ".join(info.name for info in self.list())
            existing = f"there is start, {names}. Name one of these" if names else "there is none yet. Name start"
            lacks = "no checkpoint with a held-out score" if names and name == "best" else "no such checkpoint"
            raise CheckpointError(
                f"checkpoint={name}: run {self.directory.parent.name} has {lacks}; {existing}, or train first: "
                "millrace train with these settings"
            )
        return found

    def step_of(self, name: str, *, verify: bool = True) -> int:
        """Return the step of a checkpoint, or 0 for `start` (the policy before training). See `find`."""
        found = self.find(name, verify=verify)
        return 0 if found is None else found.step

    def find_latest(self, *, verify: bool = True) -> FoundCheckpoint:
        """Find the newest intact checkpoint that fits the journal. If none fits, find the newest intact checkpoint.
        Refused checkpoints are logged. If `verify` is false, only file sizes are checked. Raises CheckpointError if all
        checkpoints are broken, or if the found checkpoint has other settings."""
        found = self._find(verify=verify)
        while not all(os.path.lexists(refusal.path) for refusal in found.refusals):  # pruned meanwhile
            found = self._find(verify=verify)
        refusals = found.refusals
        if found.checkpoint is None and refusals:
            reasons = "\n".join(f"  {refusal.reason}" for refusal in refusals)
            raise CheckpointError(
                f"{self.directory}: none of its {len(refusals)} checkpoints can be used:\n{reasons}\nRestore one, or "
                "delete the folder to start the run from step 0."
            )
        if found.checkpoint is not None:
            for refusal in refusals:
                _warn_once(f"checkpoint refused, using {found.checkpoint.name}: {refusal.reason}")
            if found.journal_problem:
                _warn_once(f"{found.journal_problem}; {found.checkpoint.name} is used nevertheless")
            require_same_settings(found.checkpoint, self._settings, self._fingerprint)
        return found

    def best(self) -> CheckpointInfo | None:
        """Return the intact checkpoint with the highest score, or None. If scores are equal, return the latest."""
        found = self._search(by_score(self.list()), hashes=True)
        for refusal in found.refusals:
            log.warning("checkpoint refused: %s", refusal.reason)
        return found.checkpoint

    def verify(self, info: CheckpointInfo, *, hashes: bool = True) -> None:
        """Check the file sizes of a checkpoint. If `hashes` is true, also check every byte, unless this store has
        already done so. Raises CheckpointError if a file is missing or damaged."""
        known = (info.path, info.created)
        verify_directory(info.path, hashes=hashes and known not in self._verified, error=CheckpointError)
        if hashes:
            self._verified.add(known)

    def load_state(self, info: CheckpointInfo) -> TrainerState:
        """Read the state of a checkpoint. Raises CheckpointError if it is damaged or belongs to other settings."""
        self.verify(info)
        require_same_settings(info, self._settings, self._fingerprint)
        return TrainerState.read(info.path / STATE)

    def _find(self, *, verify: bool) -> FoundCheckpoint:
        catalog = scan(self.directory)
        found = self._search(catalog.checkpoints, hashes=verify, journal=True)
        if found.checkpoint is None:
            found = self._search(catalog.checkpoints, hashes=verify)
        refusals = found.refusals + tuple(
            refusal for refusal in catalog.refusals if found.checkpoint is None or refusal.step > found.checkpoint.step
        )
        return replace(found, refusals=refusals)

    def _search(self, candidates: Sequence[CheckpointInfo], *, hashes: bool, journal: bool = False) -> FoundCheckpoint:
        """Return the last candidate that is intact and, if `journal` is true, fits the journal."""
        refusals: tuple[CheckpointInfo, ...] = ()
        for info in reversed(candidates):
            try:
                self.verify(info, hashes=hashes)
                problem = journal_problem(TrainerState.read(info.path / STATE), self._journal)
                if problem and journal:
                    raise CheckpointError(f"{info.path}: does not fit the journal. {problem}")
                return FoundCheckpoint(info, refusals, problem)
            except CheckpointError as reason:
                refusals += (CheckpointInfo(info.step, info.path, verdict="broken", reason=str(reason)),)
        return FoundCheckpoint(None, refusals)


@cache
def _warn_once(text: str) -> None:
    """Log a warning only once per process, because a Prefect flow searches for the newest checkpoint many times."""
    log.warning("%s", text)


def require_same_settings(info: CheckpointInfo, settings: Mapping[str, Any], fingerprint: str) -> None:
    """Raise CheckpointError if a checkpoint was made with other settings than `settings`. The message lists the
    differences. `fingerprint`: the fingerprint of `settings`, which is compared with that of the checkpoint."""
    if info.settings_fingerprint == fingerprint:
        return
    both = (_read_settings(info.path / SETTINGS), settings)
    theirs, ours = ({key: json.dumps(value) for key, value in each.items()} for each in both)
    lines = [
        f"  {key}: {theirs.get(key, 'absent')} in the checkpoint, {ours.get(key, 'absent')} now"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key) != ours.get(key)
    ]
    if len(lines) > SHOWN_DIFFERENCES:
        lines[SHOWN_DIFFERENCES:] = [f"  and {len(lines) - SHOWN_DIFFERENCES} more"]
    differences = "\n".join(lines)
    folder = info.path.parents[1]
    remedy = f"start a new run from these weights: --fork {folder.name}@{info.step} and another run_id"
    if folder.parent.name == "warm-starts":
        remedy = f"delete {folder} to start the warm start again"
    raise CheckpointError(
        f"{info.path}: was made with other settings, so continuing would be another run:\n{differences}\n"
        f"Restore the settings; or {remedy}."
    )


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        return _SETTINGS.validate_json(read_ordinary(path))
    except (OSError, ValueError) as reason:
        problem = first_problem(reason)
        raise CheckpointError(f"{path}: cannot be read ({problem}). Restore it, or delete {path.parent}.") from reason
