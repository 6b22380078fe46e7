"""A checkpoint in the making: copied in a moment, written while training goes on, published when every rank is done."""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlcore.checkpoint.background import BackgroundCommit, UnderWay
from rlcore.checkpoint.state import TrainerState
from rlcore.checkpoint.store import CheckpointStore
from rlcore.errors import DiskSpaceError, MillraceError
from rlcore.run.room import Room
from rlcore.storage.disk import CHECKPOINT_SLACK_BYTES, CHECKPOINT_SLACK_SHARE
from rlcore.workers.group import WorkerGroup
from rlcore.workers.worker import Worker

R = TypeVar("R")

log = logging.getLogger("rlcore.run.saver")


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint and the metrics of its step."""

    step: int
    path: Path
    metrics: Mapping[str, float]


class RankCopies:
    """The copies of all ranks at one moment. They live until `drop`, so that a failed write can be done again.

    `are_copied`: False where a host lacks the memory; then the weights themselves are written, and training must wait.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        sizes = group.each(Worker.copy_for_save)
        self.num_bytes = sum(size.num_bytes for size in sizes)
        self.are_copied = all(size.is_copied for size in sizes)

    def write(self, folder: Path) -> None:
        """Every rank begins to write below `folder`."""
        self._group.each(Worker.write_copy, str(folder))

    def are_written(self) -> bool:
        """Whether all ranks are done, at once.

        Raises:
            DiskSpaceError, CheckpointError: of a rank; no other rank writes any more then.
        """
        return self._ask(lambda: all(self._group.each(Worker.copy_is_written)))

    def wait(self) -> bool:
        """Until all ranks are done; raises as `are_written` does."""
        return self._ask(lambda: bool(self._group.each(Worker.wait_for_copy)))

    def drop(self) -> None:
        """Free the memory."""
        self._group.each(Worker.drop_copy)

    def _ask(self, question: Callable[[], bool]) -> bool:
        try:
            return question()
        except MillraceError:
            self._group.each(Worker.give_up_copy)  # lost ranks raise here too
            raise


class Saver:
    """Saves of one run, one at a time.

    Args:
        committed: called after each publication with its step.
        phase: wraps whatever waits for a disk and not for room on it: it has a deadline.
    """

    def __init__(
        self,
        store: CheckpointStore,
        room: Room,
        committed: Callable[[int], None],
        phase: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._store = store
        self._room = room
        self._committed = committed
        self._phase = phase
        self._commit = BackgroundCommit(store, self._are_written, self.prune)
        self._copies: RankCopies | None = None
        self._record: TrainerState | None = None
        self._metrics: Mapping[str, float] = {}

    @property
    def at(self) -> UnderWay | None:
        """What is being done for the save under way, in whichever thread; None where nothing is."""
        return self._commit.at

    @property
    def is_under_way(self) -> bool:
        """Whether a save has been begun and is neither committed nor given up."""
        return self._copies is not None

    def begin(
        self, step: int, record: Callable[[], TrainerState], metrics: Mapping[str, float], group: WorkerGroup
    ) -> Saved | None:
        """Copy every rank's state and begin to write it. Returns when training may go on; waits for room before.

        Where a host has no memory for a copy, the checkpoint is committed when this returns, and is the result.
        `record` makes what the checkpoint says besides tensors; a `DiskSpaceError` of it counts as a full disk.

        Raises:
            as `settle` does, and what `CheckpointStore.writing` raises.
        """
        assert not self.is_under_way, "settle the save before this one first"
        self._copies, self._metrics, self._record = RankCopies(group), metrics, None

        def start() -> None:
            self._record = record()
            self._start()

        self._hold(start, step=step)
        return None if self._copies.are_copied else self.settle()

    def poll(self) -> Saved | None:
        """The checkpoint, once, when it has been committed. Does not wait, unless a disk has become full."""
        return self._or_again(self._commit.poll)

    def settle(self) -> Saved | None:
        """Wait for what is under way; None where nothing is.

        Raises:
            DiskSpaceError: there was no room, and none came in `checkpoint.wait_for_room_s`.
            StopRequestedError: a stop was asked for while it waited for room.
            CheckpointError: the folder cannot be written.
        """
        return self._or_again(self._finish)

    def settle_now(self) -> Saved | None:
        """As `settle`, without waiting for room: for the end of a run that cannot wait."""
        path = self._finish()
        return None if path is None else self._done(path)

    def abandon(self) -> None:
        """Give up what is under way: its ranks are lost."""
        with self._phase():
            self._commit.abandon()
        self._copies = None

    # ------------------------------------------------------------------ parts

    def _are_written(self) -> bool:
        assert self._copies is not None
        return self._copies.are_written()

    def _start(self) -> None:
        assert self._copies is not None
        assert self._record is not None
        with self._phase():
            self._commit.start(self._record, self._metrics, self._copies.write)

    def _finish(self) -> Path | None:
        if not self._commit.is_under_way:
            return None
        with self._phase():
            return self._commit.finish(lambda: self._copies is not None and self._copies.wait())

    def _or_again(self, advance: Callable[[], Path | None]) -> Saved | None:
        try:
            path = advance()
        except DiskSpaceError as reason:
            shortage = reason
        else:
            return None if path is None else self._done(path)
        # Not while it is handled: an error of another kind would have the full disk as its context, and count as one.
        return self._again(shortage)

    def _again(self, shortage: DiskSpaceError) -> Saved:
        """The write has failed in the background: wait for room, and write the same copies again."""
        assert self._record is not None
        log.warning("%s", shortage)

        def write() -> Path | None:
            self._start()
            return self._finish()

        path = self._hold(write, step=self._record.step)
        assert path is not None
        return self._done(path)

    def _hold(self, do: Callable[[], R], *, step: int) -> R:
        assert self._copies is not None
        needed = int(self._copies.num_bytes * (1 + CHECKPOINT_SLACK_SHARE)) + CHECKPOINT_SLACK_BYTES
        return self._room.hold(do, step=step, path=self._store.directory, needed_bytes=needed)

    def _done(self, path: Path) -> Saved:
        copies, self._copies = self._copies, None
        assert copies is not None
        assert self._record is not None
        self._committed(self._record.step)
        copies.drop()
        return Saved(self._record.step, path, self._metrics)

    def prune(self) -> None:
        """Delete what the retention rule does not keep; not while a save is under way.

        After a save the publishing thread does it: deleting many gigabytes takes its time.
        """
        try:
            self._store.prune()
        except MillraceError as reason:
            log.warning("old checkpoints were not deleted: %s", reason)
