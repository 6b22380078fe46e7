"""What is known of a run: its journal, its tracker, its checkpoints, and the state that ties them together.

Order matters. A step's line is in the journal before the checkpoint that contains the step is published; the tracker is
told that steps are final after that. Going back to a checkpoint cuts the journal to the length that it had then.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from rlcore.checkpoint.background import UnderWay
from rlcore.checkpoint.catalog import CheckpointInfo, Refusal
from rlcore.checkpoint.state import TrainerState
from rlcore.checkpoint.store import CheckpointStore
from rlcore.config import RunConfig
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.errors import CheckpointError
from rlcore.evaluation.result import ValidationResult
from rlcore.run.layout import RunLayout
from rlcore.run.room import Room
from rlcore.run.saver import Saved, Saver
from rlcore.storage.disk import checkpoint_bytes
from rlcore.storage.documents import sha256_of_start
from rlcore.storage.finished import finished_or_set_aside
from rlcore.tracking.tracker import Tracker
from rlcore.trainer.step import LoopState
from rlcore.workers.group import WorkerGroup

R = TypeVar("R")

log = logging.getLogger("rlcore.run.ledger")


@dataclass(frozen=True, slots=True)
class TrackedState:
    """The loop's state and the best held-out score so far (-inf before the first)."""

    loop: LoopState
    best_score: float
    best_step: int

    def advanced(self, loop: LoopState) -> "TrackedState":
        """The state after a step."""
        return replace(self, loop=loop)


class Ledger:
    """Journal, tracker and checkpoints of one run, kept consistent with each other."""

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        *,
        report: Callable[[Mapping[str, object]], None],
        stop: Callable[[], bool],
        phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        """`phase`: of the watch, around what waits for a disk."""
        self._config = config
        self._report = report
        self._checkpoints = layout.checkpoints
        self._store = CheckpointStore(layout.checkpoints, config.checkpoint, config, journal=layout.journal)
        self._tracker = Tracker(layout.run_dir, config, tags=config.tags)
        self._room = Room(config.checkpoint, happened=self.happened, stop=stop, prune=self._prune)
        # To go back to a checkpoint: the journal is cut before anything new is written to it.
        self._room_to_go_back = Room(config.checkpoint, happened=self._tell, stop=stop, prune=self._prune)
        self._saver = Saver(self._store, self._room, self._tracker.commit, partial(phase, "commit"))
        self._expected_bytes = 0
        self.refusals: tuple[Refusal, ...] = ()
        """Newer checkpoints that `newest` had to pass over, and why."""
        self.journal_problem = ""
        """What the journal lacks for the checkpoint that `newest` found; '' where it has all."""
        self._journal = layout.journal

    # ------------------------------------------------------------------ checkpoints

    def newest(self) -> CheckpointInfo | None:
        """The newest checkpoint that is whole, fits the journal and belongs to these settings. See `refusals` and
        `journal_problem`.
        """
        found = self._store.find_latest()
        self.refusals, self.journal_problem = found.refusals, found.journal_problem
        return found.checkpoint

    def find(self, name: str) -> CheckpointInfo | None:
        """The checkpoint called `last`, `best` or by its folder; None for `start`.

        Raises:
            CheckpointError: there is no such checkpoint.
        """
        if name == "start":
            return None
        known = {info.path.name: info for info in self._store.list()}
        if name == "last":
            found = self.newest()
        elif name == "best":
            found = self._store.best()
        else:
            found = known.get(name)
        if found is None:
            raise CheckpointError(
                f"checkpoint={name}: the run has no such checkpoint; it has start, {', '.join(known) or 'no other yet'}"
            )
        return found

    def step_of(self, name: str) -> int:
        """Step of a checkpoint; 0 for `start`."""
        found = self.find(name)
        return 0 if found is None else found.step

    def state_of(self, info: CheckpointInfo) -> TrainerState:
        """What a checkpoint says besides its tensors."""
        return self._store.load_state(info)

    def begin_save(self, state: TrackedState, metrics: Mapping[str, float], group: WorkerGroup) -> Saved | None:
        """Begin a checkpoint of `state`; none may be under way. Training may go on when this returns.

        The checkpoint itself is returned where training had to wait for it. Short of room it prunes, says so and waits
        up to `checkpoint.wait_for_room_s`; older checkpoints stay.

        Raises:
            DiskSpaceError: no room came in that time.
            StopRequestedError: a stop was asked for while it waited for room.
            CheckpointError: the folder cannot be written.
        """
        return self._saver.begin(state.loop.step, lambda: self._record_of(state), metrics, group)

    def poll_save(self) -> Saved | None:
        """The checkpoint that was begun, once, when it is committed. Raises as `begin_save` does."""
        return self._saver.poll()

    def settle_save(self) -> Saved | None:
        """Wait for the checkpoint that was begun; None where none was. Raises as `begin_save` does."""
        return self._saver.settle()

    def abandon_save(self) -> None:
        """Give up the checkpoint that was begun: ranks are lost."""
        self._saver.abandon()

    def saving(self) -> UnderWay | None:
        """What is being done for the checkpoint that was begun; for any thread."""
        return self._saver.at

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint was begun that is not committed yet."""
        return self._saver.is_under_way

    def _record_of(self, state: TrackedState) -> TrainerState:
        loop = state.loop
        journal_bytes = self._tracker.journal_bytes
        return TrainerState(
            step=loop.step,
            policy_version=loop.policy_version,
            num_prompts_drawn=loop.num_prompts_drawn,
            num_tokens=loop.num_tokens,
            kl_coef=loop.kl_coef,
            lr_factor=loop.lr_factor,
            num_roll_backs=loop.num_roll_backs,
            best_metric=state.best_score,
            best_step=state.best_step,
            journal_bytes=journal_bytes,
            journal_sha256=sha256_of_start(self._journal, journal_bytes),
            settings_fingerprint=settings_fingerprint(self._config),
        )

    # ------------------------------------------------------------------ room

    def expect(self, num_trained_parameters: int) -> None:
        """How large the first checkpoint will be; later ones are as large as those there are."""
        self._expected_bytes = checkpoint_bytes(num_trained_parameters)

    @property
    def next_save_bytes(self) -> int:
        """Room that the next checkpoint takes."""
        return self._store.measured_bytes() or self._expected_bytes

    def room_metrics(self) -> dict[str, float]:
        """`disk/free_gb`, `disk/needed_gb`: of the next checkpoint, with the reserve."""
        return self._room.look(self._checkpoints, self.next_save_bytes).metrics

    @property
    def has_room(self) -> bool:
        """Whether the next checkpoint has room now."""
        return self._room.look(self._checkpoints, self.next_save_bytes).enough

    def wait_for_room(self, step: int) -> None:
        """Until the next checkpoint has room. Raises as `begin_save` does."""
        self._room.hold(lambda: None, step=step, path=self._checkpoints, needed_bytes=self.next_save_bytes)

    def with_room(self, write: Callable[[], R], *, step: int, path: Path) -> R:
        """A small write, again and again until there is room for it. Raises as `begin_save` does."""
        return self._room.hold(write, step=step, path=path)

    def _prune(self) -> None:
        self._saver.prune()

    # ------------------------------------------------------------------ journal

    def restore(self, info: CheckpointInfo | None) -> TrackedState:
        """The state of a checkpoint, or of step 0; the journal is cut to it, and a save under way is given up.

        Whole checkpoints of later steps, which the journal does not fit, are renamed.
        """
        self._saver.abandon()
        self._store.leave_later(0 if info is None else info.step)
        if info is None:
            self._cut_journal(0, 0)
            loop = LoopState(0, 0, 0, 0, self._config.algo.kl.coef)
            return TrackedState(loop, best_score=float("-inf"), best_step=0)
        saved = self._store.load_state(info)
        self._cut_journal(saved.step, saved.journal_bytes)
        loop = LoopState(
            step=saved.step,
            policy_version=saved.policy_version,
            num_prompts_drawn=saved.num_prompts_drawn,
            num_tokens=saved.num_tokens,
            kl_coef=saved.kl_coef,
            lr_factor=saved.lr_factor,
            num_roll_backs=saved.num_roll_backs,
        )
        return TrackedState(loop, best_score=saved.best_metric, best_step=saved.best_step)

    def _cut_journal(self, step: int, to_bytes: int) -> None:
        """Waits for room for what is cut, which is kept. Raises as `begin_save` does."""
        cut = partial(self._tracker.resume_at, step, to_bytes)
        self._room_to_go_back.hold(cut, step=step, path=self._journal)

    def roll_back(self, loop: LoopState, lr_factor: float) -> tuple[TrackedState, CheckpointInfo | None]:
        """Go back to the checkpoint with the best validation (else to step 0) with a lower learning rate.

        `loop`: the last finished step. Its own checkpoint is none to go back to: from there the next step would be the
        same as the one that raised the alarm. Later checkpoints are deleted: they lie on a way that the run does not
        take. Killed at any moment of this or after it, the run meets the same alarm and comes to the same state.
        """
        self._saver.settle()
        found = self._store.best(below=loop.step)
        self._store.discard_after(0 if found is None else found.step)
        state = self.restore(found)
        lowered = replace(state.loop, lr_factor=loop.lr_factor * lr_factor, num_roll_backs=loop.num_roll_backs + 1)
        return replace(state, loop=lowered), found

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of the journal; waits for room for it. Raises as `begin_save` does."""
        self._tracker.log_step(step, metrics)
        self.with_room(self._tracker.require_written, step=step, path=self._journal)

    def log_event(self, name: str, step: int, data: Mapping[str, object]) -> None:
        """Something that happened and is no number."""
        self._tracker.log_event(name, step, data)

    def happened(self, name: str, step: int, data: Mapping[str, object]) -> None:
        """Something that people should see now: in the journal, in the log and at the flow. `text` is for people."""
        self.log_event(name, step, data)
        self._tell(name, step, data)

    def _tell(self, name: str, step: int, data: Mapping[str, object]) -> None:
        log.warning("%s", data["text"])
        self._report({"event": name, "step": step, **data})

    def with_score(self, state: TrackedState, result: ValidationResult) -> TrackedState:
        """The state with a validation's score, if that is the best so far; it has none if the scorer always failed."""
        score = result.summary().get(self.score_name(result))
        if score is None or score <= state.best_score:
            return state
        return replace(state, best_score=score, best_step=result.step)

    def score_name(self, result: ValidationResult) -> str:
        """The metric by which checkpoints are compared."""
        samples = self._config.validation.samples_per_problem
        return f"val-core/{result.data_source}/reward/mean@{samples}"

    def finish(self, *, failed: bool) -> None:
        """Commit what is under way, if that needs no waiting for room, and tell the tracker how the run ended."""
        try:
            self._saver.settle_now()
        except Exception as reason:
            log.warning("the checkpoint that was being written is given up: %s", reason)
        self._tracker.finish("FAILED" if failed else "FINISHED" if self._is_finished else "KILLED")

    @property
    def _is_finished(self) -> bool:
        """Whether the last step is committed: by this process, or by one that could not say so any more."""
        try:
            known = self._store.list()
        except (OSError, CheckpointError) as reason:
            log.warning("%s: cannot be read, so the run does not count as finished: %s", self._checkpoints, reason)
            return False
        return bool(known) and known[-1].step >= self._config.trainer.total_steps

    def is_exported(self, target: Path, step: int) -> bool:
        """Whether `target` holds the weights of `step` already. A damaged folder is set aside."""
        manifest = finished_or_set_aside(target, error=CheckpointError)
        return manifest is not None and manifest.values.get("step") == step
