"""The process `python -m rlcore.tracking RUN_DIR ...`, which delivers a trainer's journal to MLflow and outlives the
trainer (docs/decisions/0004-tracking-in-a-separate-process.md)."""

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path

from rlcore.errors import RunInUseError, TrackingError
from rlcore.tracking.attempts import PREFIX
from rlcore.tracking.connection import explain_error
from rlcore.tracking.delivery import Delivery, delivery_lock

log = logging.getLogger("rlcore.tracking")  # the module's name is `__main__`
POLL_S = 0.1  # the seconds between two checks of the trainer's state
ORPHAN_GRACE_S = 30.0  # seconds for the last values and the status after the trainer is gone


def deliver_until_end(delivery: Delivery, *, parent_pid: int, every_s: float) -> None:
    """Deliver the journal every `every_s` seconds until the trainer's final status is delivered. If the trainer's
    process has disappeared, stop after the next successful delivery, at the latest after `ORPHAN_GRACE_S` seconds."""
    deadline, num_failures = float("inf"), 0
    while True:
        gone = os.getppid() != parent_pid
        if gone:
            deadline = min(deadline, time.monotonic() + ORPHAN_GRACE_S)
        try:
            status = delivery.catch_up()
        except Exception as error:  # any error of MLflow, its database or the network
            if num_failures == 0:
                text = "MLflow rejects the values: %s. Training continues with the journal; retrying every %g s."
                log.warning(text, explain_error(error, delivery.state.uri), every_s)
            num_failures += 1
        else:
            if num_failures:
                log.warning("MLflow accepts the values again; failed attempts: %d.", num_failures)
            num_failures = 0
            if status is not None or gone:  # without a status, another trainer uses the run
                return
        if time.monotonic() > deadline:
            return
        wait_until_due(delivery, parent_pid, every_s)


def wait_until_due(delivery: Delivery, parent_pid: int, seconds: float) -> None:
    """Wait for `seconds`, the time between two deliveries, or until the trainer starts, resumes, ends or disappears."""
    until, was_gone = time.monotonic() + seconds, os.getppid() != parent_pid
    while time.monotonic() < until:
        if delivery.has_changes() or was_gone != (os.getppid() != parent_pid):
            return
        time.sleep(POLL_S)


def main(arguments: list[str] | None = None) -> None:
    """Deliver the journal of a run to MLflow until its trainer has ended and its last values are delivered."""
    parser = argparse.ArgumentParser(prog="python -m rlcore.tracking", description=main.__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--parent", type=int, required=True, help="process id of the trainer")
    parser.add_argument("--every-s", type=float, required=True, help="seconds between two deliveries")
    options = parser.parse_args(arguments)
    # The trainer's end is the signal to end; a Ctrl-C or TERM to the group must not drop the last values.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(5)  # training has priority
    logging.basicConfig(stream=sys.stderr, format=f"{PREFIX}%(message)s", level=logging.ERROR)
    logging.getLogger("rlcore").setLevel(logging.WARNING)
    logging.raiseExceptions = False  # the reader of these warnings may be gone
    try:
        # The process of a killed attempt may still deliver its last values.
        with delivery_lock(options.run_dir, wait_s=2 * ORPHAN_GRACE_S):
            delivery = Delivery(options.run_dir)
            deliver_until_end(delivery, parent_pid=options.parent, every_s=options.every_s)
            delivery.close()
    except (RunInUseError, TrackingError) as error:
        log.warning("nothing is delivered to MLflow: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
