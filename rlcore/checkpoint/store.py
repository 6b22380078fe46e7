"""The folder that keeps a run's checkpoints: written whole, verified before use, pruned by rule. No torch."""

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

from rlcore.checkpoint.catalog import (
    KIND,
    CheckpointInfo,
    by_score,
    move_out_of_the_way,
    name_of,
    prunable,
    scan,
)
from rlcore.checkpoint.state import STATE, TrainerState, journal_problem
from rlcore.config import CheckpointConfig, RunConfig
from rlcore.config.fingerprint import fixed_settings, settings_fingerprint
from rlcore.errors import CheckpointError
from rlcore.storage.disk import is_out_of_room
from rlcore.storage.documents import parse_json, read_ordinary
from rlcore.storage.finished import LEFT, set_aside
from rlcore.storage.manifest import verify_directory
from rlcore.storage.publish import published_directory, remove_stale_temporaries, remove_tree, temporary_beside

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """The newest checkpoint that can be used (None where the folder has none), and those refused before it.

    `journal_problem`: what the journal lacks for it, where no checkpoint fits the journal; '' where it fits.
    """

    checkpoint: CheckpointInfo | None
    refusals: tuple[CheckpointInfo, ...]
    journal_problem: str = ""


class CheckpointStore:
    """Checkpoints of one run. What lies on disk is the truth; the object only remembers what it has verified."""

    def __init__(
        self, directory: Path, config: CheckpointConfig, settings: RunConfig, *, journal: Path | None = None
    ) -> None:
        """`journal`: of the run, which a checkpoint to go on from has to fit."""
        self.directory = directory
        self._journal = journal
        self._config = config
        self._settings = fixed_settings(settings)
        self._fingerprint = settings_fingerprint(settings)
        # (path, creation): hashing a large checkpoint takes minutes, once a process is enough.
        self._verified: set[tuple[Path, str]] = set()

    def path_of(self, step: int) -> Path:
        """Folder of the checkpoint after `step`."""
        return self.directory / name_of(step)

    # ---------------------------------------------------------------- write

    @contextmanager
    def writing(
        self, state: TrainerState, metrics: Mapping[str, float], at: Callable[[str], None] = lambda what: None
    ) -> Iterator[Path]:
        """Publish a checkpoint: yields a folder for the ranks' shards, and renames it into place at the block's end.

        One that lies there for the same step is replaced in one operation, or given another name (`move_out_of_the_way`). Metrics
        that are not finite are left out. `at` is called with what is begun, and its path.

        Raises:
            DiskSpaceError: no room. Older checkpoints are untouched, nothing is left of this one.
            CheckpointError: the folder cannot be written.
            RunInUseError: another process writes checkpoints here.
        """
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
        is_there = os.path.lexists(target)
        with published_directory(target, manifest, replace=is_there, error=CheckpointError, at=at) as folder:
            move_out_of_the_way(target)
            yield folder
            self._write_records(folder, state)
        self._verified.add((target, created))  # its hashes were taken from what was read back a moment ago

    def _write_records(self, folder: Path, state: TrainerState) -> None:
        try:
            (folder / STATE).write_text(state.to_json(), encoding="utf-8")
            (folder / SETTINGS).write_text(json.dumps(self._settings, indent=1), encoding="utf-8")
        except OSError as reason:
            if is_out_of_room(reason):
                raise
            raise CheckpointError(
                f"{folder}: cannot be written ({reason}). Was the run's folder removed or made read-only while the run "
                "was going on? Older checkpoints in it were not touched."
            ) from reason

    def prune(self) -> tuple[Path, ...]:
        """Delete what the retention rule does not keep; the paths deleted.

        Nothing is deleted unless a checkpoint that stays has been verified byte for byte. Broken folders are left for
        people to look at.
        """
        remove_stale_temporaries(self.directory)
        checkpoints = scan(self.directory).checkpoints
        doomed = prunable(checkpoints, self._config)
        good = self._search(checkpoints, hashes=True).checkpoint
        if good is None:
            return ()
        return tuple(info.path for info in doomed if info.step != good.step and self._delete(info.path))

    def set_aside_later(self, step: int) -> None:
        """Rename the whole checkpoints of later steps: the journal does not fit them, and the run goes on from `step`.

        They would count as the newest ones where old ones are deleted. Broken ones stay, as ever.
        """
        for info in scan(self.directory).checkpoints:
            if info.step > step and self._search([info], hashes=True).checkpoint is not None:
                set_aside(info.path, LEFT, f"{info.path}: the run goes on from step {step}", error=CheckpointError)

    def _delete(self, path: Path) -> bool:
        """Out of sight by one rename first: a crash in the middle leaves no half checkpoint under its name."""
        aside = temporary_beside(path)
        try:
            path.rename(aside)
        except OSError as reason:
            log.warning("%s: cannot be deleted (%s); it goes on taking room", path, reason)
            return False
        remove_tree(aside)
        return True

    # ---------------------------------------------------------------- read

    def list(self) -> Sequence[CheckpointInfo]:
        """All checkpoints with a readable manifest, by step. Not verified."""
        return scan(self.directory).checkpoints

    def latest(self, *, verify: bool = True) -> CheckpointInfo | None:
        """The checkpoint to go on from, see `find_latest`."""
        return self.find_latest(verify=verify).checkpoint

    def find(self, name: str, *, verify: bool = True) -> CheckpointInfo | None:
        """The checkpoint called `last` (see `find_latest`), `best` or by its folder; None for `start`.

        Raises:
            CheckpointError: there is none of that name.
        """
        if name == "start":
            return None
        if name in ("last", "best"):
            found = self.latest(verify=verify) if name == "last" else self.best()
        else:
            found = next((info for info in self.list() if info.name == name), None)
        if found is None:
            names = ", ".join(info.name for info in self.list())
            there = f"there is start, {names}. Name one that is there" if names else "there is none yet. Name start"
            lacks = "no checkpoint with a held-out score" if names and name == "best" else "no such checkpoint"
            raise CheckpointError(
                f"checkpoint={name}: run {self.directory.parent.name} has {lacks}; {there}, or train first: millrace "
                "train with these settings"
            )
        return found

    def step_of(self, name: str, *, verify: bool = True) -> int:
        """Step of a checkpoint, see `find`; 0 for `start`."""
        found = self.find(name, verify=verify)
        return 0 if found is None else found.step

    def find_latest(self, *, verify: bool = True) -> FoundCheckpoint:
        """The newest checkpoint that is whole and fits the journal; others are refused, said so, and the one before is
        taken. Where none fits the journal, the newest whole one is taken.

        Without `verify` sizes are checked and hashes are not.

        Raises:
            CheckpointError: every checkpoint there is broken, or the newest whole one is of other settings.
        """
        found = self._find(verify=verify)
        while not all(os.path.lexists(refusal.path) for refusal in found.refusals):  # pruned meanwhile, for newer ones
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
                _warn_once(f"checkpoint refused, taking {found.checkpoint.name}: {refusal.reason}")
            if found.journal_problem:
                _warn_once(f"{found.journal_problem}; {found.checkpoint.name} is taken all the same")
            require_same_settings(found.checkpoint, self._settings, self._fingerprint)
        return found

    def best(self) -> CheckpointInfo | None:
        """The whole checkpoint with the highest score, of equal ones the later; None where none has a score."""
        found = self._search(by_score(self.list()), hashes=True)
        for refusal in found.refusals:
            log.warning("checkpoint refused: %s", refusal.reason)
        return found.checkpoint

    def verify(self, info: CheckpointInfo, *, hashes: bool = True) -> None:
        """Check the size and, with `hashes`, every byte of each file, unless this process has done so.

        Raises:
            CheckpointError: names file, rule, value and remedy.
        """
        known = (info.path, info.created)
        verify_directory(info.path, hashes=hashes and known not in self._verified, error=CheckpointError)
        if hashes:
            self._verified.add(known)

    def load_state(self, info: CheckpointInfo) -> TrainerState:
        """What the checkpoint says besides its tensors. Raises as `verify` and `require_same_settings`."""
        self.verify(info)
        require_same_settings(info, self._settings, self._fingerprint)
        return TrainerState.read(info.path / STATE)

    def measured_bytes(self) -> int | None:
        """Size of the newest checkpoint: what the next one will need. None before the first."""
        known = self.list()
        return known[-1].size_bytes if known else None

    def _find(self, *, verify: bool) -> FoundCheckpoint:
        catalog = scan(self.directory)
        found = self._search(catalog.checkpoints, hashes=verify, journal=True)
        if found.checkpoint is None:
            found = self._search(catalog.checkpoints, hashes=verify)
            if found.checkpoint is not None:
                state = TrainerState.read(found.checkpoint.path / STATE)
                found = replace(found, journal_problem=self._journal_problem(state))
        refusals = found.refusals + tuple(
            refusal for refusal in catalog.refusals if found.checkpoint is None or refusal.step > found.checkpoint.step
        )
        return replace(found, refusals=refusals)

    def _search(self, candidates: Sequence[CheckpointInfo], *, hashes: bool, journal: bool = False) -> FoundCheckpoint:
        """The last candidate that is whole; with `journal` the last that fits it too."""
        refusals: tuple[CheckpointInfo, ...] = ()
        for info in reversed(candidates):
            try:
                self.verify(info, hashes=hashes)
                state = TrainerState.read(info.path / STATE)
                if journal and (problem := self._journal_problem(state)):
                    raise CheckpointError(f"{info.path}: does not fit the journal. {problem}")
                return FoundCheckpoint(info, refusals)
            except CheckpointError as reason:
                refusals += (CheckpointInfo.refused(info.path, info.step, str(reason)),)
        return FoundCheckpoint(None, refusals)

    def _journal_problem(self, state: TrainerState) -> str:
        return "" if self._journal is None else journal_problem(state, self._journal)


@cache
def _warn_once(text: str) -> None:
    """Once a process: a flow searches for the newest checkpoint many times."""
    log.warning("%s", text)


SETTINGS = "settings.json"
"""Its name in a checkpoint's folder."""
SHOWN_DIFFERENCES = 10


def require_same_settings(info: CheckpointInfo, settings: Mapping[str, Any], fingerprint: str) -> None:
    """Refuse a checkpoint of another run; `settings` are those that numbers depend on, by key.

    Raises:
        CheckpointError: names the settings that differ, with both values.
    """
    if info.settings_fingerprint == fingerprint:
        return
    theirs = _read_settings(info.path / SETTINGS)
    keys = [
        key
        for key in sorted(theirs.keys() | settings.keys())
        if (key in theirs, theirs.get(key)) != (key in settings, settings.get(key))
    ]
    shown = [
        f"  {key}: {_setting_text(theirs, key)} in the checkpoint, {_setting_text(settings, key)} now"
        for key in keys[:SHOWN_DIFFERENCES]
    ]
    if len(keys) > SHOWN_DIFFERENCES:
        shown.append(f"  and {len(keys) - SHOWN_DIFFERENCES} more")
    listed = "\n".join(shown)
    folder, own = info.path.parents[1], "start a new run from these weights with settings of its own"
    remedy = f"{own}: --fork {folder.name}@{info.step} and another run_id"
    if folder.parent.name == "warm-starts":
        remedy = f"delete {folder}, and the warm start begins anew"
    raise CheckpointError(
        f"{info.path}: was made with other settings, so going on would be another run:\n{listed}\n"
        f"Set them back; or {remedy}."
    )


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = parse_json(read_ordinary(path))
    except (OSError, ValueError) as reason:
        raise CheckpointError(f"{path}: cannot be read ({reason}). Restore it, or delete {path.parent}.") from reason
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path}: holds no settings. Restore it, or delete {path.parent}.")
    return settings


def _setting_text(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key]) if key in settings else "absent"
