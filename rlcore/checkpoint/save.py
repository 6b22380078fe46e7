"""The saving of checkpoints while training continues.

    training             copy to the host | next step ...................... | next step | poll: committed
    thread of a rank                      | write files |
    thread of the driver                                | hash, flush, rename, delete old ones |

If a thread fails, the next `poll` or `settle` raises the error. The incomplete checkpoint is removed."""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from rlcore.checkpoint.catalog import TrainerState
from rlcore.checkpoint.shards import RankShards, num_bytes, rank_shards
from rlcore.checkpoint.store import CheckpointStore
from rlcore.errors import MillraceError
from rlcore.storage.disk import CHECKPOINT_SLACK_BYTES, CHECKPOINT_SLACK_SHARE

SPARE_SHARE = 0.25  # host memory that must stay free next to a copy, as a share of the copy
SavedModels = Mapping[str, tuple[nn.Module, torch.optim.Optimizer]]  # by their folder in the checkpoint

EachRank = Callable[..., list[Any]]
"""A function that calls a method of `RankSaver` on every rank, and returns the results or raises a rank's error."""

log = logging.getLogger(__name__)


class RankSaver:
    """A rank's part of a save: it copies the rank's shards, writes the copy in a thread and frees the copy.
    `num_ranks`: the number of ranks that may share this host's memory."""

    def __init__(self, models: Callable[[], SavedModels], *, num_ranks: int) -> None:
        self._models = models
        self._num_ranks = num_ranks
        self._buffers: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        self._copies: Mapping[str, RankShards] = {}
        self._writing: Future[None] | None = None

    def _shards(self) -> dict[str, RankShards]:
        return {name: rank_shards(model, optimizer) for name, (model, optimizer) in self._models().items()}

    def copy(self) -> tuple[int, bool]:
        """Copy this rank's shards to the host if the host has enough memory. Return the number of bytes of the shards,
        and whether the shards were copied."""
        shards = self._shards()
        size = sum(num_bytes(one.parts) for one in shards.values())
        more = size - sum(buffer.nbytes for buffers in self._buffers.values() for buffer in buffers.values())
        needed = more * self._num_ranks * (1 + SPARE_SHARE)
        is_copied = psutil.virtual_memory().available > needed
        self._copies = {name: one.copied(self._buffers[name]) for name, one in shards.items()} if is_copied else {}
        return size, is_copied

    def write(self, directory: str) -> None:
        """Wait for the thread of an earlier call, and ignore its result. Then start a thread that writes the copy below
        `directory`. If there is no copy, write the shards before returning."""
        self.abandon()
        copies = self._copies

        def write(shards: Mapping[str, RankShards]) -> None:
            for name, one in shards.items():
                one.write(Path(directory) / name)

        if copies:
            self._writing = start_thread(lambda: write(copies), "checkpoint-shards")
        else:
            write(self._shards())

    def is_written(self, *, wait: bool) -> bool:
        """Return whether the shards are written. If `wait` is true, wait for the thread first. Raises the
        thread's DiskSpaceError or CheckpointError if the write failed."""
        if self._writing is None:
            return True
        if not wait and not self._writing.done():
            return False
        writing, self._writing = self._writing, None
        writing.result()
        return True

    def abandon(self) -> None:
        """Wait until the writing thread ends, and ignore its result. The folder can then be removed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.exception()

    def drop(self) -> None:
        """Free the memory of the copy. The buffers of GPU tensors are kept."""
        self._copies = {}


@dataclass
class _Save:
    step: int
    each: EachRank
    folder: ExitStack
    publication: Future[None] | None = None


class CheckpointSaver:
    """A saver of a run's checkpoints, one at a time. `wait_for_room(num_bytes, step)` waits until `num_bytes` bytes are
    free on the disk. `phase()` returns a context manager that limits the time of all other disk operations that
    training waits for."""

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
        self, step: int, record: Callable[[], TrainerState], metrics: Mapping[str, float], each: EachRank
    ) -> int | None:
        """Copy the state of every rank, wait for disk space and begin to write the copies. Then return None, and
        training may continue. If a rank has no memory for its copy, complete the checkpoint before returning, and
        return the checkpoint's step. `record`: a function that returns the trainer's state. Raises CheckpointError if
        the folder cannot be written, and the errors of `wait_for_room`."""
        assert self._save is None, "settle or abandon the save before this one first"
        copies = each(RankSaver.copy)
        needed_bytes = int(sum(size for size, _ in copies) * (1 + CHECKPOINT_SLACK_SHARE)) + CHECKPOINT_SLACK_BYTES
        self.wait_for_room(needed_bytes, step)

        def at(what: str) -> None:
            self.at = f"checkpoint of step {step}: {what}"

        at(f"opening a folder for {self.store.path_of(step)}")
        with self.phase(), ExitStack() as opened:
            opened.callback(setattr, self, "at", "")
            folder = opened.enter_context(self.store.writing(record(), metrics, at))
            at(f"writing shards to {folder}")
            each(RankSaver.write, str(folder))
            self._save = _Save(step, each, opened.pop_all())
        return None if all(is_copied for _, is_copied in copies) else self.settle()

    def poll(self) -> int | None:
        """Return the checkpoint's step if a save has completed since the last call, otherwise None. Raises the
        errors of `settle`."""
        return self._advance(wait=False)

    def settle(self) -> int | None:
        """Wait for the current save and return its step. Raises DiskSpaceError or CheckpointError if it failed."""
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
                save.folder.__exit__(CancelledError, CancelledError(), None)  # removes the folder
            except Exception:
                log.exception("an abandoned checkpoint could not be removed; the next save removes it")

    def _advance(self, *, wait: bool) -> int | None:
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
        save.each(RankSaver.drop)
        return save.step

    def _is_written(self, save: _Save, *, wait: bool) -> bool:
        try:
            return all(save.each(RankSaver.is_written, wait=wait))
        except BaseException as reason:
            try:
                if isinstance(reason, MillraceError):
                    save.each(RankSaver.abandon)  # no rank may write any more; a lost one raises here too
            finally:
                self.abandon()
            raise

    def _publish(self, folder: ExitStack) -> None:
        folder.close()
        self.at = f"deleting old checkpoints in {self.store.directory}"
        try:
            prune(self.store)
        finally:
            self.at = ""


def prune(store: CheckpointStore) -> None:
    """Delete checkpoints by the retention rule. An error is logged instead of raised."""
    try:
        store.prune()
    except MillraceError as reason:
        log.warning("old checkpoints were not deleted: %s", reason)


def start_thread(do: Callable[[], None], name: str) -> "Future[None]":
    """Call `do` in a daemon thread, which does not delay the exit of the process, and return a future of the call."""
    result: Future[None] = Future()

    def run() -> None:
        try:
            do()
        except BaseException as reason:
            result.set_exception(reason)
        else:
            result.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
