"""Saving while training goes on: a rank writes its copy in a thread, the driver publishes in another.

    training          copy to the host | next step ...................... | next step | poll: published
    thread of a rank                   | write files |
    thread of the driver                             | hash, flush, rename |

An error in a thread surfaces at the next `poll`, `is_done` or `finish`, as if the call itself had failed.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rlcore.checkpoint.shards import HostCopy
from rlcore.checkpoint.state import TrainerState
from rlcore.checkpoint.store import CheckpointStore

log = logging.getLogger(__name__)


def _in_thread(do: Callable[[], None], name: str) -> "Future[None]":
    """Run in a thread that does not keep a dying process alive: what it leaves is a temporary, which is known."""
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


class BackgroundWriter:
    """One rank's writer. One save is under way at a time."""

    def __init__(self) -> None:
        self._writing: Future[None] | None = None

    def start(self, copies: Sequence[HostCopy]) -> None:
        """Write the copies in a thread; waits for the save before this one.

        Raises:
            whatever the save before this one raised, if nobody has asked for it.
        """
        self.finish()

        def write() -> None:
            for copy in copies:
                copy.write()

        self._writing = _in_thread(write, "checkpoint-shards")

    def is_done(self) -> bool:
        """Whether all is written, at once.

        Raises:
            DiskSpaceError, CheckpointError: the write failed. Raised once.
        """
        if self._writing is None:
            return True
        if not self._writing.done():
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Wait until all is written; raises as `is_done` does."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def give_up(self) -> None:
        """Wait for a save that nobody wants any more, whatever became of it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.exception()


@dataclass(frozen=True, slots=True)
class UnderWay:
    """What a thread is doing, with the path that it does it to, and since when its save goes on (monotonic seconds)."""

    what: str
    begun: float


class BackgroundCommit:
    """The driver's side: a checkpoint between its start and its publication. One at a time.

    `begin` has every rank copy its shards and start its writer; `ranks_are_done` asks all writers, and must not wait.
    `after` is called in the publishing thread when the checkpoint lies in its place; it must not raise.
    """

    def __init__(
        self, store: CheckpointStore, ranks_are_done: Callable[[], bool], after: Callable[[], None] = lambda: None
    ) -> None:
        self._store = store
        self._ranks_are_done = ranks_are_done
        self._after = after
        self._open: ExitStack | None = None
        self._publishing: Future[None] | None = None
        self._path = Path()
        self._at: UnderWay | None = None

    @property
    def at(self) -> "UnderWay | None":
        """What is being done for the checkpoint under way; None where none is. May be asked by any thread."""
        return self._at

    @property
    def is_under_way(self) -> bool:
        """Whether a checkpoint has been started and is neither published nor failed."""
        return self._open is not None

    def start(self, state: TrainerState, metrics: Mapping[str, float], begin: Callable[[Path], object]) -> None:
        """Open a temporary folder and have the ranks write into it.

        Raises:
            what `CheckpointStore.writing` and `begin` raise; nothing is left then.
        """
        assert not self.is_under_way, "finish or abandon the checkpoint before this one first"
        begun, self._path = time.monotonic(), self._store.path_of(state.step)

        def at(what: str) -> None:
            self._at = UnderWay(f"checkpoint of step {state.step}: {what}", begun)

        at(f"opening a folder beside {self._path}")
        with ExitStack() as opened:
            opened.callback(self._at_nothing)
            folder = opened.enter_context(self._store.writing(state, metrics, at))
            at(f"writing shards to {folder}")
            begin(folder)
            # From here on the folder stays open until it is published or given up.
            self._open = opened.pop_all()

    def poll(self) -> Path | None:
        """Go on without waiting; the path, once, when the checkpoint has been published.

        Raises:
            DiskSpaceError, CheckpointError: a rank or the publication failed; nothing is left of the checkpoint.
        """
        return self._advance(wait=False)

    def finish(self, wait_for_ranks: Callable[[], object]) -> Path | None:
        """Wait for the publication of what is under way. `wait_for_ranks` returns when all writers are done.

        Raises:
            as `poll` does.
        """
        if self._open is not None and self._publishing is None:
            self._or_give_up(wait_for_ranks)
        return self._advance(wait=True)

    def abandon(self) -> None:
        """Give up what is under way; call it when ranks are lost. Nothing is left of the checkpoint."""
        opened, self._open = self._open, None
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            publishing.exception()  # too late to give up: wait, so that no thread works on after this
        elif opened is not None:
            _close_as_failed(opened)

    def _advance(self, *, wait: bool) -> Path | None:
        opened = self._open
        if opened is None:
            return None
        if self._publishing is None:
            if not self._or_give_up(self._ranks_are_done):
                assert not wait, "`wait_for_ranks` must return only when all writers are done"
                return None
            self._publishing = _in_thread(lambda: self._publish(opened), "checkpoint-publish")
        if not wait and not self._publishing.done():
            return None
        publishing, self._publishing, self._open = self._publishing, None, None
        publishing.result()
        return self._path

    def _publish(self, opened: ExitStack) -> None:
        begun = time.monotonic()
        opened.close()
        self._at = UnderWay(f"deleting checkpoints beside {self._path} that are not kept", begun)
        try:
            self._after()
        finally:
            self._at_nothing()

    def _at_nothing(self) -> None:
        self._at = None

    def _or_give_up(self, ask: Callable[[], object]) -> object:
        try:
            return ask()
        except BaseException:
            self.abandon()
            raise


class _GivenUpError(Exception):
    """Tells the open folder to remove itself."""


def _close_as_failed(opened: ExitStack) -> None:
    reason = _GivenUpError()
    try:
        opened.__exit__(_GivenUpError, reason, None)
    except _GivenUpError:
        pass
    except Exception:
        log.exception("what is left of an abandoned checkpoint is removed by the next one")
