"""The process beside the trainer that carries its journal to MLflow: `python -m rlcore.tracking RUN_DIR ...`.

A process, not a thread: MLflow's client takes about 0.1 ms of Python for each value, twice a step, and the first use of
a store takes seconds. In the trainer's process that would be taken from the training, since Python runs one thread at
a time. A process also outlives its trainer by a moment and can tell MLflow that it was killed.
"""

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path

from rlcore.errors import TrackingError
from rlcore.storage.locks import HeldLock
from rlcore.storage.publish import remove_stale_temporaries
from rlcore.tracking.companion import PREFIX
from rlcore.tracking.failures import explain
from rlcore.tracking.shipper import ReplacedError, Shipper, open_shipper

log = logging.getLogger(__name__)

LOCK_FILE = "shipper.lock"
"""Held in a run's folder by whoever delivers it."""

POLL_S = 0.1
"""Seconds between two looks at whether the trainer has finished or is gone."""

LONGEST_PAUSE_S = 60.0
"""Seconds between two tries while MLflow does not answer, at most."""

MOST_DOUBLINGS = 16
"""Of the pause, which has its longest by then; 2.0 ** 1024 is an error."""

ORPHAN_GRACE_S = 30.0
"""Seconds in which the values of a trainer that is gone, and its status, can still be delivered."""


class Carrier:
    """Delivers until the attempt has ended. `parent_pid` is the trainer's process."""

    def __init__(self, shipper: Shipper, *, parent_pid: int, every_s: float) -> None:
        self._shipper = shipper
        self._parent_pid = parent_pid
        self._every_s = every_s
        self._num_failures = 0

    def run(self) -> None:
        """Deliver and wait in turn, until the trainer has ended and MLflow knows, or is gone and time is up.

        Raises:
            ReplacedError: a newer attempt of the run has begun.
        """
        deadline = float("inf")
        while True:
            gone = self._trainer_is_gone()
            if gone:
                deadline = min(deadline, time.monotonic() + ORPHAN_GRACE_S)
            if (self._turn(gone) and self._shipper.state.settled) or time.monotonic() > deadline:
                return
            self._wait(hurry=gone)

    def _trainer_is_gone(self) -> bool:
        return os.getppid() != self._parent_pid

    def _turn(self, gone: bool) -> bool:
        """Deliver once; whether that went well. One warning when MLflow begins to fail, one when it works again."""
        try:
            self._shipper.deliver()
            state = self._shipper.state
            if state.final_status is not None:
                self._shipper.settle(state.final_status, state.final_time or time.time())
            elif gone:
                self._shipper.settle("KILLED", time.time())
        except ReplacedError:
            raise
        except Exception as error:
            # Whatever MLflow, its database or the network threw: training must not notice.
            if self._num_failures == 0:
                log.warning(
                    "MLflow does not take the values: %s. Training goes on, the journal keeps them; "
                    "trying again, at most %d s apart.",
                    explain(error, self._shipper.state.uri),
                    LONGEST_PAUSE_S,
                )
            self._num_failures += 1
            return False
        if self._num_failures:
            log.warning("MLflow takes the values again; tries that failed: %d.", self._num_failures)
            self._num_failures = 0
        return True

    def _wait(self, *, hurry: bool) -> None:
        """Until the next turn is due: at once when the trainer ends, later and later while MLflow fails."""
        until = time.monotonic() + pause_s(self._every_s, self._num_failures)
        ended = hurry
        while time.monotonic() < until:
            if not ended and (self._trainer_is_gone() or self._shipper.has_news_of_the_end()):
                ended = True
                # The trainer waits for us now: no more long pauses.
                until = time.monotonic() if self._num_failures == 0 else min(until, time.monotonic() + 1.0)
            time.sleep(POLL_S)


def pause_s(every_s: float, num_failures: int) -> float:
    """Seconds from one turn to the next, after so many failures in a row: days of an outage are thousands.

    >>> [pause_s(5.0, failures) for failures in (0, 1, 2, 9, 5_000)]
    [5.0, 10.0, 20.0, 60.0, 60.0]
    """
    return min(LONGEST_PAUSE_S, every_s * 2.0 ** min(num_failures, MOST_DOUBLINGS))


def main(arguments: list[str] | None = None) -> None:
    """Deliver the newest attempt of a run for as long as its trainer lives."""
    parser = argparse.ArgumentParser(prog="python -m rlcore.tracking", description=main.__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--parent", type=int, required=True, help="process id of the trainer")
    parser.add_argument("--every-s", type=float, required=True, help="seconds between two deliveries")
    options = parser.parse_args(arguments)
    # The trainer's end is the signal to end; a Ctrl-C or a TERM to the whole group must not cut off the last values.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Where training and delivery want the same core, training has it.
    os.nice(5)
    logging.basicConfig(stream=sys.stderr, format=f"{PREFIX}%(message)s", level=logging.ERROR)
    logging.getLogger("rlcore").setLevel(logging.WARNING)
    # The trainer that reads our warnings may be gone.
    logging.raiseExceptions = False
    try:
        _carry(options.run_dir, options.parent, options.every_s)
    except TrackingError as error:
        log.warning("MLflow gets no values: %s", error)
        sys.exit(1)


def delivery_lock(run_dir: Path, wait_s: float = 0.0) -> HeldLock:
    """One process at a time delivers a run; a crash frees the lock."""
    return HeldLock(run_dir / LOCK_FILE, what=f"the delivery of run {run_dir.name}", wait_s=wait_s, error=TrackingError)


def _carry(run_dir: Path, parent_pid: int, every_s: float) -> None:
    # The shipper of an attempt that was killed may still be about its last values.
    with delivery_lock(run_dir, wait_s=2 * ORPHAN_GRACE_S):
        remove_stale_temporaries(run_dir)  # of one that was killed while it wrote the state
        shipper = open_shipper(run_dir)
        if shipper is None:
            return
        try:
            Carrier(shipper, parent_pid=parent_pid, every_s=every_s).run()
        except ReplacedError:
            return
        finally:
            shipper.close()
