"""A checkpoint in the making: copied in a moment, written while training goes on, published when every rank is done.

    COPIED --begin to write--> WRITING --every rank is done--> PUBLISHING --renamed--> committed
       ^                          |                                 |
       +------ an error ----------+---------------------------------+        nothing is left

    training             copy to the host | next step ...................... | next step | poll: committed
    thread of a rank                      | write files |
    thread of the driver                                | hash, flush, rename, delete old ones |

An error in a thread surfaces at the next `poll` or `settle`, as if the call itself had failed.
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from rlcore.checkpoint.shards import RankSaver, in_thread
from rlcore.checkpoint.state import TrainerState
from rlcore.checkpoint.store import CheckpointStore
from rlcore.errors import MillraceError
from rlcore.storage.disk import CHECKPOINT_SLACK_BYTES, CHECKPOINT_SLACK_SHARE

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)


class SavingRanks(Protocol):
    """All ranks of a run, as those who write a checkpoint."""

    def each(self, verb: Callable[Concatenate[RankSaver, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call the verb on every rank; raises the error of a rank."""
        ...


class WaitsForRoom(Protocol):
    """See `rlcore.run.disk.Room`."""

    def wait(self, needed_bytes: int, *, step: int, path: Path) -> None:
        """Return when there is room for so many bytes."""
        ...


class SaveState(Enum):
    """The states of a save."""

    COPIED = "every rank holds a copy, and nothing of it lies on the disk"
    WRITING = "threads of the ranks write into a temporary folder"
    PUBLISHING = "a thread of the driver hashes, flushes and renames that folder"


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint and the metrics of its step."""

    step: int
    path: Path
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class UnderWay:
    """What a save is at, with the path in question, and since when it goes on (monotonic seconds)."""

    what: str
    begun: float


@dataclass
class CheckpointSaver:
    """The saves of one run, one at a time.

    Args:
        store: where checkpoints go.
        room: waits for room before a checkpoint.
        committed: called after each publication with its step.
        phase: wraps whatever waits for a disk and not for room on it, since that has a deadline.
    """

    store: CheckpointStore
    room: WaitsForRoom
    committed: Callable[[int], None] = lambda step: None
    phase: Callable[[], AbstractContextManager[None]] = nullcontext
    _save: "_Save | None" = field(default=None, init=False)

    @property
    def at(self) -> UnderWay | None:
        """What is being done for the save under way, in whichever thread; None where nothing is. For any thread."""
        save = self._save
        return None if save is None else save.at

    @property
    def state(self) -> SaveState | None:
        """None where no save is under way: none was begun, or the last one is committed or given up."""
        return None if self._save is None else self._save.state

    def begin(
        self, step: int, record: Callable[[], TrainerState], metrics: Mapping[str, float], ranks: SavingRanks
    ) -> Saved | None:
        """Copy every rank's state and begin to write it. Returns when training may go on; waits for room before.

        Where a host has no memory for a copy, the checkpoint is committed when this returns, and is the result.
        `record` makes what the checkpoint says besides tensors. Raises as `settle`, `Room.wait` and
        `CheckpointStore.writing` do.
        """
        assert self._save is None, "settle or abandon the save before this one first"
        self._save = save = _Save(self.store, self.phase, step, ranks, record, metrics)
        self.room.wait(save.needed_bytes, step=step, path=self.store.directory)
        save.start()
        return None if save.is_copied else self.settle()

    def poll(self) -> Saved | None:
        """The checkpoint, once, when it has been committed. Does not wait. Raises as `settle` does."""
        return self._advance(wait=False)

    def settle(self) -> Saved | None:
        """Wait for what is under way; None where nothing is.

        Raises:
            DiskSpaceError: there was no room.
            CheckpointError: the folder cannot be written.
        """
        return self._advance(wait=True)

    def abandon(self) -> None:
        """Give up what is under way: its ranks are lost. Nothing is left of it, unless it was being published."""
        save, self._save = self._save, None
        if save is not None:
            with self.phase():
                save.give_up()

    def _advance(self, *, wait: bool) -> Saved | None:
        save = self._save
        if save is None or save.state is SaveState.COPIED:
            return None
        return self._commit(save) if save.advance(wait=wait) else None

    def _commit(self, save: "_Save") -> Saved:
        self._save = None
        self.committed(save.step)
        save.ranks.each(RankSaver.drop)
        return Saved(save.step, self.store.path_of(save.step), save.metrics)


@dataclass
class _Save:
    """One save. It is `COPIED` at first and after an error."""

    store: CheckpointStore
    phase: Callable[[], AbstractContextManager[None]]
    step: int
    ranks: SavingRanks
    make_record: Callable[[], TrainerState]
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        self._record: TrainerState | None = None
        self._folder = ExitStack()
        self._publication: Future[None] = Future()
        self.at: UnderWay | None = None
        sizes = self.ranks.each(RankSaver.copy)
        num_bytes = sum(size.num_bytes for size in sizes)
        self.needed_bytes = int(num_bytes * (1 + CHECKPOINT_SLACK_SHARE)) + CHECKPOINT_SLACK_BYTES
        self.is_copied = all(size.is_copied for size in sizes)
        self.state = SaveState.COPIED

    def start(self) -> None:
        """Open a temporary folder and have the ranks begin to write into it; nothing is left of it after an error."""
        begun = time.monotonic()

        def at(what: str) -> None:
            self.at = UnderWay(f"checkpoint of step {self.step}: {what}", begun)

        at(f"opening a folder beside {self.store.path_of(self.step)}")
        with self.phase(), ExitStack() as opened:
            opened.callback(self._at_nothing)
            self._record = self._record or self.make_record()
            folder = opened.enter_context(self.store.writing(self._record, self.metrics, at))
            at(f"writing shards to {folder}")
            self.ranks.each(RankSaver.write, str(folder))
            self._folder = opened.pop_all()
        self.state = SaveState.WRITING

    def advance(self, *, wait: bool) -> bool:
        """Go on, to the end or as far as it goes without waiting; whether the checkpoint has been published.

        Raises:
            DiskSpaceError, CheckpointError: a rank or the publication failed; nothing is left of the checkpoint.
        """
        with self.phase() if wait else nullcontext():
            if self.state is SaveState.WRITING and self._is_written(wait=wait):
                self._publication = in_thread(self._publish, "checkpoint-publish")
                self.state = SaveState.PUBLISHING
            if self.state is not SaveState.PUBLISHING or not (wait or self._publication.done()):
                return False
            self.state = SaveState.COPIED
            self._publication.result()
            return True

    def give_up(self) -> None:
        """Leave nothing of it on the disk; what is being published is waited for, since it is too late for that."""
        state, self.state = self.state, SaveState.COPIED
        if state is SaveState.PUBLISHING:
            self._publication.exception()
        elif state is SaveState.WRITING:
            try:
                self._folder.__exit__(_GivenUpError, _GivenUpError(), None)
            except _GivenUpError:
                pass
            except Exception:
                log.exception("what is left of an abandoned checkpoint is removed by the next one")

    def _is_written(self, *, wait: bool) -> bool:
        try:
            return all(self.ranks.each(RankSaver.is_written, wait=wait))
        except BaseException as reason:
            try:
                if isinstance(reason, MillraceError):
                    self.ranks.each(RankSaver.give_up)  # no rank may write any more; a lost one raises here too
            finally:
                self.give_up()
            raise

    def _publish(self) -> None:
        begun = time.monotonic()
        self._folder.close()
        self.at = UnderWay(f"deleting checkpoints beside {self.store.directory} that are not kept", begun)
        try:
            prune(self.store)
        finally:
            self._at_nothing()

    def _at_nothing(self) -> None:
        self.at = None


class _GivenUpError(Exception):
    """Closes the open folder as a failed one, which removes it."""


def prune(store: CheckpointStore) -> None:
    """Delete what the retention rule does not keep, and log why where that fails."""
    try:
        store.prune()
    except MillraceError as reason:
        log.warning("old checkpoints were not deleted: %s", reason)
