"""The trainer's handle of the process that delivers its run to MLflow."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

from rlcore.config import TrackingConfig
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
    """The process `python -m rlcore.tracking`, started and awaited; none where tracking is off."""

    def __init__(self, run_dir: Path, settings: TrackingConfig) -> None:
        self._run_dir, self._settings = run_dir, settings
        self._process: subprocess.Popen[str] | None = None
        self._num_starts = 0

    def ensure_running(self) -> None:
        """Start the process, or start it again if it has died. Never raises."""
        is_running = self._process is not None and self._process.poll() is None
        if is_running or not self._settings.enabled or self._num_starts >= MAX_STARTS:
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
            [*command, "--parent", str(os.getpid()), "--every-s", str(self._settings.ship_every_s)],
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

    def finish(self, timeout_s: float | None) -> bool:
        """Wait until the process has delivered everything, at most so long, then end it; whether it had.

        None: do not wait; the process outlives the trainer.
        """
        self.ensure_running()
        if timeout_s is None or not self._settings.enabled:
            return False
        delivered = False
        if self._process is not None:
            try:
                delivered = self._process.wait(timeout_s) == 0
            except subprocess.TimeoutExpired:
                # Safe at any moment: what was sent and not noted is sent again.
                self._process.kill()
                self._process.wait()
        if not delivered:
            log.warning("MLflow has not got all of this run yet. To deliver it: millrace sync %s", self._run_dir)
        return delivered
