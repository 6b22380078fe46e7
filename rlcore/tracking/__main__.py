"""`python -m rlcore.tracking RUN_DIR ...`: the process beside the trainer that delivers its journal to MLflow.

It outlives its trainer by a moment and can give the MLflow run the status KILLED. Why a process:
docs/decisions/0004-tracking-in-a-separate-process.md.
"""

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path

from rlcore.errors import RunInUseError, TrackingError
from rlcore.start import tune_garbage_collection
from rlcore.tracking.companion import PREFIX
from rlcore.tracking.connection import explain_error
from rlcore.tracking.delivery import Delivery, delivery_lock

log = logging.getLogger("rlcore.tracking")  # run as a program, this module is named `__main__`

POLL_S = 0.1
"""Seconds between two checks whether the trainer has finished or is gone."""

ORPHAN_GRACE_S = 30.0
"""Seconds in which the values of a trainer that is gone, and its status, can still be delivered."""


def deliver_until_end(delivery: Delivery, *, parent_pid: int, every_s: float) -> None:
    """Deliver and wait in turn, until the trainer (process `parent_pid`) has ended and MLflow has its end, or it is
    gone and MLflow has all or time is up. One warning when MLflow begins to fail, one when it takes values again.
    """
    deadline, num_failures = float("inf"), 0
    while True:
        gone = os.getppid() != parent_pid
        if gone:
            deadline = min(deadline, time.monotonic() + ORPHAN_GRACE_S)
        try:
            status = delivery.catch_up()
        except Exception as error:
            # Whatever MLflow, its database or the network raises: the training goes on.
            if num_failures == 0:
                log.warning(
                    "MLflow does not take the values: %s. Training goes on, the journal keeps them; "
                    "trying again every %g s.",
                    explain_error(error, delivery.state.uri),
                    every_s,
                )
            num_failures += 1
        else:
            if num_failures:
                log.warning("MLflow takes the values again; tries that failed: %d.", num_failures)
            num_failures = 0
            if status is not None or gone:  # without a status another trainer works on the run by now
                return
        if time.monotonic() > deadline:
            return
        wait_until_due(delivery, parent_pid, every_s)


def wait_until_due(delivery: Delivery, parent_pid: int, seconds: float) -> None:
    """Wait until the next turn is due: at once when the trainer goes back, ends or is gone."""
    until, was_gone = time.monotonic() + seconds, os.getppid() != parent_pid
    while time.monotonic() < until:
        if delivery.has_changes() or was_gone != (os.getppid() != parent_pid):
            return
        time.sleep(POLL_S)


def main(arguments: list[str] | None = None) -> None:
    """Deliver a run for as long as its trainer lives."""
    parser = argparse.ArgumentParser(prog="python -m rlcore.tracking", description=main.__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--parent", type=int, required=True, help="process id of the trainer")
    parser.add_argument("--every-s", type=float, required=True, help="seconds between two deliveries")
    options = parser.parse_args(arguments)
    tune_garbage_collection()
    # The trainer's end is the signal to end; a Ctrl-C or a TERM to the whole group must not cut off the last values.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Where training and delivery want the same core, training has it.
    os.nice(5)
    logging.basicConfig(stream=sys.stderr, format=f"{PREFIX}%(message)s", level=logging.ERROR)
    logging.getLogger("rlcore").setLevel(logging.WARNING)
    # The trainer that reads these warnings may be gone.
    logging.raiseExceptions = False
    try:
        # The process of an attempt that was killed may still deliver its last values.
        with delivery_lock(options.run_dir, wait_s=2 * ORPHAN_GRACE_S):
            deliver_until_end(Delivery(options.run_dir), parent_pid=options.parent, every_s=options.every_s)
    except (RunInUseError, TrackingError) as error:
        log.warning("MLflow gets no values: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
