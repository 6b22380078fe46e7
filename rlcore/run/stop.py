"""A stop that is asked for by signal, and the wait for a run's lock, which it ends.

The rule, which docs/operations.md explains to users:

- The first SIGTERM or SIGINT asks: the step is finished and saved.
- A second SIGINT ends the process at once: somebody pressed Ctrl-C again.
- A second SIGTERM ends it at once if it comes later than `SAME_REQUEST_S` after the first. Within that time it is the same
  wish, arriving twice: a supervisor signals the process and its group.
- The signal with which the kernel tells of our parent's end (`flows.server.launch`) is no second wish, whenever it
  comes: who cancels a flow signals us first and ends the flow later, in the middle of our save.
"""

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rlcore.errors import RunInUseError, StopRequestedError

if TYPE_CHECKING:
    from rlcore.storage.locks import RunLock

SAME_REQUEST_S = 5.0
"""Two SIGTERMs within this time are one."""
LOCK_WAIT_S = 90.0
"""A trainer whose flow has ended may still be saving: wait that long for it."""
POLL_S = 0.2

log = logging.getLogger("rlcore.run.stop")


class StopFlag:
    """Set by the first SIGTERM or SIGINT. `end_now` must not return."""

    def __init__(self, end_now: Callable[[], None]) -> None:
        self._end_now = end_now
        self._asked_at: float | None = None
        self._parent = os.getppid()

    def install(self) -> None:
        """Take the signals over. Call again after `ray.init`, which takes SIGTERM for itself."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        parent, self._parent = self._parent, os.getppid()
        if self._asked_at is None:
            self._asked_at = now
        elif number == signal.SIGINT or (now - self._asked_at > SAME_REQUEST_S and parent == self._parent):
            self._end_now()

    def __call__(self) -> bool:
        """Whether a stop was asked for."""
        return self._asked_at is not None

    def seconds_since_request(self) -> float | None:
        """Seconds since a stop was asked for; None while none was."""
        return None if self._asked_at is None else time.monotonic() - self._asked_at


@contextmanager
def locked_run(
    run_dir: Path,
    report: Callable[[Mapping[str, object]], None],
    stop: Callable[[], bool],
    wait_s: float = LOCK_WAIT_S,
    *,
    waits_for_holder: bool = True,
) -> "Iterator[RunLock]":
    """Hold the run's lock inside the block, without temporaries that a killed process has left. If another process has
    the lock, reports that immediately, and waits; for a holder that is alive only if `is_holder_waited_for`.

    Raises:
        RunInUseError: it is still held after `wait_s`; names process, host and since when.
        StopRequestedError: a stop was asked for meanwhile.
    """
    # The command line takes signals from here, and reads no settings for it.
    from rlcore.storage.locks import RUN_LOCK, RunLock, read_holder
    from rlcore.storage.publish import remove_stale_temporaries

    deadline = time.monotonic() + wait_s
    told = False
    with ExitStack() as held:
        while True:
            try:
                lock = held.enter_context(RunLock(run_dir))
                break
            except RunInUseError as reason:
                is_alive = (holder := read_holder(run_dir / RUN_LOCK)) is not None and holder.process() is not None
                if time.monotonic() >= deadline or (is_alive and not waits_for_holder):
                    raise
                if not told:
                    told = True
                    how_long = "until it ends" if math.isinf(wait_s) else f"up to {wait_s:g} s: it may be saving"
                    text = f"{reason}. Waiting {how_long}"
                    log.warning("%s", text)
                    report({"event": "note", "text": text})
            if stop():
                raise StopRequestedError("stopped while waiting for the run to be free; nothing was begun")
            time.sleep(POLL_S)
        remove_stale_temporaries(run_dir)
        yield lock
