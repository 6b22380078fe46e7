"""The saving of checkpoints while training continues.

    training             copy to the host | next step ...................... | next step | poll: committed
    thread of a rank                      | write files |
    thread of the driver                                | hash, flush, rename, delete old ones |

If a thread fails, the next `poll` or `settle` raises the error. The incomplete checkpoint is removed."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from rlcore.checkpoint.shards import RankSaver, start_thread
from rlcore.checkpoint.state import TrainerState
from rlcore.checkpoint.store import CheckpointStore
from rlcore.errors import MillraceError
from rlcore.storage.disk import CHECKPOINT_SLACK_BYTES, CHECKPOINT_SLACK_SHARE

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)


class SavingRanks(Protocol):
    """The ranks of a run, which write a checkpoint together."""

    def each(self, verb: Callable[Concatenate[RankSaver, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call the method on every rank and return the results. Raises the error of a rank."""
        ...


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is completely saved."""

    step: int
    path: Path
    metrics: Mapping[str, float]


@dataclass
class _Save:
    step: int
    ranks: SavingRanks
    metrics: Mapping[str, float]
    folder: ExitStack
    publication: Future[None] | None = None


class CheckpointSaver:
    """The object that saves a run's checkpoints, one at a time. `wait_for_room(num_bytes, step)` waits until the disk
    has room. `phase()` limits the time of all other waits for the disk."""

    def __init__(
        self,
        store: CheckpointStore,
        wait_for_room: Callable[[int, int], None],
        phase: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.store, self.wait_for_room, self.phase = store, wait_for_room, phase
        self.at = ""  # The stage of the current save with its path, or '' between saves. Any thread may read it.
        self._save: _Save | None = None

    def begin(
        self, step: int, record: Callable[[], TrainerState], metrics: Mapping[str, float], ranks: SavingRanks
    ) -> Saved | None:
        """Wait for room, copy the state of every rank and begin to write the copy. Training may then continue. If a
        rank has no memory for its copy, complete the checkpoint before returning, and return it. `record`: a function
        that returns the trainer's state. Raises CheckpointError if the folder cannot be written, and the errors of
        `wait_for_room`."""
        assert self._save is None, "settle or abandon the save before this one first"
        sizes = ranks.each(RankSaver.copy)
        num_bytes = sum(size.num_bytes for size in sizes)
        needed_bytes = int(num_bytes * (1 + CHECKPOINT_SLACK_SHARE)) + CHECKPOINT_SLACK_BYTES
        self.wait_for_room(needed_bytes, step)

        def at(what: str) -> None:
            self.at = f"checkpoint of step {step}: {what}"

        at(f"opening a folder for {self.store.path_of(step)}")
        with self.phase(), ExitStack() as opened:
            opened.callback(self._set_idle)
            folder = opened.enter_context(self.store.writing(record(), metrics, at))
            at(f"writing shards to {folder}")
            ranks.each(RankSaver.write, str(folder))
            self._save = _Save(step, ranks, metrics, opened.pop_all())
        return None if all(size.is_copied for size in sizes) else self.settle()

    def poll(self) -> Saved | None:
        """Return the checkpoint if its save has completed since the last call, otherwise None. See `settle`."""
        return self._advance(wait=False)

    def settle(self) -> Saved | None:
        """Wait until the current save is complete. Return its checkpoint. Raises DiskSpaceError or CheckpointError."""
        return self._advance(wait=True)

    def abandon(self) -> None:
        """Cancel the current save and remove its files. If the save is already being published, complete it instead."""
        save, self._save = self._save, None
        if save is None:
            return
        with self.phase():
            if save.publication is not None:
                save.publication.exception()
                return
            try:
                save.folder.__exit__(_AbandonedError, _AbandonedError(), None)
            except _AbandonedError:
                pass
            except Exception:
                log.exception("an abandoned checkpoint could not be removed; the next save removes it")

    def _advance(self, *, wait: bool) -> Saved | None:
        save = self._save
        if save is None:
            return None
        with self.phase() if wait else nullcontext():
            if save.publication is None and self._is_written(save, wait=wait):
                save.publication = start_thread(partial(self._publish, save.folder), "checkpoint-publish")
            if save.publication is None or not (wait or save.publication.done()):
                return None
            self._save = None
            save.publication.result()
        save.ranks.each(RankSaver.drop)
        return Saved(save.step, self.store.path_of(save.step), save.metrics)

    def _is_written(self, save: _Save, *, wait: bool) -> bool:
        try:
            return all(save.ranks.each(RankSaver.is_written, wait=wait))
        except BaseException as reason:
            try:
                if isinstance(reason, MillraceError):
                    save.ranks.each(RankSaver.abandon)  # no rank may write any more; a lost one raises here too
            finally:
                self.abandon()
            raise

    def _publish(self, folder: ExitStack) -> None:
        folder.close()
        self.at = f"deleting old checkpoints in {self.store.directory}"
        try:
            prune(self.store)
        finally:
            self._set_idle()

    def _set_idle(self) -> None:
        self.at = ""


class _AbandonedError(Exception):
    """The error that makes the folder's context manager remove the folder of an abandoned save."""


def prune(store: CheckpointStore) -> None:
    """Delete checkpoints by the retention rule. An error is logged instead of raised."""
    try:
        store.prune()
    except MillraceError as reason:
        log.warning("old checkpoints were not deleted: %s", reason)
