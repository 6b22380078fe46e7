"""The trainer's side: the journal it writes to, and the process that delivers it. Nothing here waits for MLflow."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from rlcore.config import RunConfig
from rlcore.errors import TrackingError
from rlcore.storage.locks import Holder
from rlcore.tracking.attempts import ATTEMPTS_FILE, Attempt, AttemptLog, End, FinalStatus, read_attempts
from rlcore.tracking.delivery import destination_of
from rlcore.tracking.journal import JOURNAL_FILE, Journal
from rlcore.tracking.lineage import SOURCE_FOLDER

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
"""Seconds that the end of a run waits for its last values to reach MLflow. The first use of a store takes some."""


PREFIX = "tracking: "
"""Begins the lines for the trainer's log; MLflow and its libraries write on the same stream."""

MAX_STARTS = 3
"""A process that dies so often would die again."""

REQUEST_LIMITS = {
    # The process tries again itself, with pauses; a second try inside the client could make a run twice.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


class Companion:
    """The trainer's handle of the process that delivers its run: `python -m rlcore.tracking`."""

    def __init__(self, run_dir: Path, *, every_s: float) -> None:
        self._run_dir = run_dir
        self._every_s = every_s
        self._process: subprocess.Popen[str] | None = None
        self._num_starts = 0

    def ensure_running(self) -> None:
        """Start the process, or start it again if it has died. Never raises."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._num_starts >= MAX_STARTS:
            return
        if self._process is not None:
            log.warning(
                "the process that carries values to MLflow ended with code %d; starting it again",
                self._process.returncode,
            )
        self._num_starts += 1
        try:
            self._start()
        except OSError as error:
            log.warning("MLflow gets no values for now: its process cannot be started: %s", error)

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", "rlcore.tracking", str(self._run_dir)]
        path = os.pathsep.join(filter(None, [str(SOURCE_FOLDER), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [*command, "--parent", str(os.getpid()), "--every-s", str(self._every_s)],
            env={**os.environ, **REQUEST_LIMITS, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            # Not the trainer's own: a reader of its output must not wait for this process too.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._relay, args=(self._process,), name="tracking", daemon=True).start()

    def _relay(self, process: "subprocess.Popen[str]") -> None:
        """Copy the process's messages to the trainer's log until it ends."""
        if process.stderr is not None:
            with process.stderr:
                for line in process.stderr:
                    level = logging.WARNING if line.startswith(PREFIX) else logging.DEBUG
                    log.log(level, "%s", line.removeprefix(PREFIX).rstrip())
        process.wait()

    def close(self, timeout_s: float) -> bool:
        """Wait until the process has delivered everything, at most so long; then end it. Whether it had."""
        process = self._process
        if process is None:
            return False
        try:
            return process.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            # Safe at any moment: what was sent and not noted is sent again.
            process.kill()
            process.wait()
            return False


class Tracker:
    """The journal of a run and, beside it, the process that delivers it to MLflow.

    Values go to a local file: only `finish` waits for MLflow. A trainer calls, in this order, `resume_at` (with 0, 0 on
    a fresh start), then `log_step` and `log_event`, at each checkpoint `journal_bytes` (which it stores in the
    checkpoint), and in the end `finish`. Lines logged after `journal_bytes` are cut off by a resume from the
    checkpoint.
    """

    def __init__(self, run_dir: Path, config: RunConfig, *, tags: Mapping[str, str]) -> None:
        """`tags` are set on the MLflow run, besides those of lineage (`lineage_tags`), which they override."""
        self._run_dir = run_dir
        self._config = config
        self._tags = dict(tags)
        self.journal = Journal(run_dir / JOURNAL_FILE)
        self._attempts = AttemptLog(run_dir / ATTEMPTS_FILE)
        self._companion = Companion(run_dir, every_s=config.tracking.ship_every_s) if config.tracking.enabled else None
        self._begun = False

    def resume_at(self, step: int, journal_bytes: int) -> None:
        """Go back to a checkpoint: what the journal has after it is cut off (and kept beside).

        Where something is cut, a new attempt begins. A journal that is shorter than the checkpoint says was changed
        from outside; training goes on with what there is.
        """
        try:
            if self.journal.truncate(journal_bytes) is not None:
                self._begun = False
        except TrackingError as error:
            log.warning("%s", error)
        self._begin(step)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step. May be called again for the same step with other metrics."""
        self._begin(step)
        self.journal.append_step(step, metrics)

    def log_event(self, name: str, step: int, data: Mapping[str, object]) -> None:
        """Write something that happened and is no number."""
        self._begin(step)
        self.journal.append_event(name, step, data)

    def journal_bytes(self) -> int:
        """Size of the journal, after forcing it to the disk: a checkpoint stores it.

        Raises:
            DiskSpaceError: values are still in memory because the disk is full.
        """
        if self._companion is not None:
            self._companion.ensure_running()
        return self.journal.sync()

    def finish(self, status: FinalStatus, timeout_s: float | None = CLOSE_TIMEOUT_S) -> bool:
        """End the attempt. The only call that waits, at most so long, for MLflow to have everything. None: it does not,
        and the delivery goes on beside the trainer.

        Returns:
            Whether MLflow has everything. If not, nothing is lost: `millrace sync` delivers it later.
        """
        if not self._begun:
            attempts = read_attempts(self._run_dir)
            # Without an attempt there is no run. One that has ended can only become FINISHED by a process that trains
            # nothing.
            if not attempts or (attempts[-1][1] is not None and status != "FINISHED"):
                return True
        self.journal.close()
        self._attempts.add(End(status, round(time.time(), 3)))
        self._attempts.close()
        if self._companion is None:
            return False
        self._companion.ensure_running()
        if timeout_s is None:
            return False
        delivered = self._companion.close(timeout_s)
        if not delivered:
            log.warning("MLflow has not got all of this run yet. To deliver it: millrace sync %s", self._run_dir)
        return delivered

    def _begin(self, step: int) -> None:
        """Record, once an attempt, which process writes from which byte on, and start the delivery."""
        if self._begun:
            return
        self._begun = True
        now, size = round(time.time(), 3), self.journal.size_bytes
        where = destination_of(self._run_dir, self._config, self._tags)
        self._attempts.add(Attempt(step, size, now, Holder.me(), where))
        if self._companion is not None:
            self._companion.ensure_running()
