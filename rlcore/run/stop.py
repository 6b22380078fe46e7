"""Stop requests by signal, and the wait for a run's lock. A stop request ends this wait.

The rules (docs/operations.md):

- The first SIGTERM or SIGINT is a stop request: the step is finished and saved.
- A second SIGINT (Ctrl-C again) ends the process immediately.
- A second SIGTERM ends the process immediately only if it comes more than `SAME_REQUEST_S` seconds after the first
  signal. A supervisor may signal the process and then its group, and both signals belong to one request.
- The kernel sends a signal when the parent process ends (`flows.server.launch`). This signal never counts as a second
  request, because a flow that is canceled may end while this process still saves the last finished step.
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

SAME_REQUEST_S = 5.0  # seconds within which a second SIGTERM belongs to the first one
LOCK_WAIT_S = 90.0  # seconds that a trainer may save after its flow has ended
POLL_S = 0.2

log = logging.getLogger("rlcore.run.stop")


class StopFlag:
    """A flag that the first SIGTERM or SIGINT sets. `end_now`: a function that ends the process immediately."""

    def __init__(self, end_now: Callable[[], None]) -> None:
        self._end_now = end_now
        self._requested_at: float | None = None
        self._parent = os.getppid()

    def install(self) -> None:
        """Install the signal handlers. Call this again after `ray.init`, which replaces the handler of SIGTERM."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        parent, self._parent = self._parent, os.getppid()
        if self._requested_at is None:
            self._requested_at = now
        elif number == signal.SIGINT or (now - self._requested_at > SAME_REQUEST_S and parent == self._parent):
            self._end_now()

    def __call__(self) -> bool:
        """Return whether a stop was requested."""
        return self._requested_at is not None

    def seconds_since_request(self) -> float | None:
        """Return the seconds since the stop request, or None if no stop was requested."""
        return None if self._requested_at is None else time.monotonic() - self._requested_at


@contextmanager
def locked_run(
    run_dir: Path,
    report: Callable[[Mapping[str, object]], None],
    stop: Callable[[], bool],
    wait_s: float = LOCK_WAIT_S,
    *,
    waits_for_holder: bool = True,
) -> "Iterator[RunLock]":
    """Hold the run's lock inside the `with` block, and remove temporary files of killed processes. If another process
    holds the lock, report this and wait. Raises RunInUseError after `wait_s` seconds, or immediately if the lock's
    holder is alive and `waits_for_holder` is false. Raises StopRequestedError if a stop is requested meanwhile."""
    # The command line imports this module before it reads settings.
    from rlcore.storage.locks import RUN_LOCK, RunLock, read_holder
    from rlcore.storage.publish import remove_stale_temporaries

    deadline = time.monotonic() + wait_s
    is_reported = False
    with ExitStack() as held:
        while True:
            try:
                lock = held.enter_context(RunLock(run_dir))
                break
            except RunInUseError as reason:
                is_alive = (holder := read_holder(run_dir / RUN_LOCK)) is not None and holder.process() is not None
                if time.monotonic() >= deadline or (is_alive and not waits_for_holder):
                    raise
                if not is_reported:
                    is_reported = True
                    how_long = "until it ends" if math.isinf(wait_s) else f"up to {wait_s:g} s: it may be saving"
                    text = f"{reason}. Waiting {how_long}"
                    log.warning("%s", text)
                    report({"event": "note", "text": text})
            if stop():
                raise StopRequestedError("stopped while waiting for the run's lock; nothing was started")
            time.sleep(POLL_S)
        remove_stale_temporaries(run_dir)
        yield lock
