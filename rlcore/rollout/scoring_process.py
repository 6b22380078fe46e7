"""A scoring process as the pool sees it: what it is at, until when, and how it is ended."""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from rlcore.config.rollout import RewardConfig
from rlcore.errors import EngineError
from rlcore.score import Score

_START_DEADLINE_S = 120.0
"""Importing a scorer's module, and what its first call imports, may be slow on a busy machine: no answer's fault."""
_SEND_DEADLINE_S = 10.0
"""An idle process takes answers in at once. One that does not (stopped from outside) would hold up the pool."""


@dataclass(slots=True)
class ScoringJob:
    """Answers on their way through the pool. Give it to `ScoringPool.collect`."""

    scores: list[Score]
    missing: int
    done: threading.Event = field(default_factory=threading.Event)
    failure: EngineError | None = None

    def put(self, index: int, score: Score) -> None:
        """Keep the score of one answer."""
        self.scores[index] = score
        self.missing -= 1
        if self.missing == 0:
            self.done.set()


@dataclass(slots=True)
class Answer:
    """One answer to be scored: `index` is its place in the job, `num_deaths` the processes that ended at it."""

    job: ScoringJob
    index: int
    response: str
    ground_truth_json: str
    num_deaths: int = 0


class ScoringProcess:
    """One scoring process and the answers that it has, the running one first."""

    def __init__(self, scorer: str, config: RewardConfig, *, first_call: bool) -> None:
        ours, theirs = socket.socketpair()
        whole, rest = divmod(_SEND_DEADLINE_S, 1)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(whole), int(1e6 * rest)))
        # No standard stream of ours goes in: a child that holds them keeps a dead run's log open.
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "rlcore.rollout.scoring_worker",
                    str(theirs.fileno()),
                    scorer,
                    str(config.deadline_s),
                    str(int(first_call)),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
                start_new_session=True,  # a Ctrl-C at the terminal is the trainer's to handle
            )
        self.connection: Connection = Connection(ours.detach())
        self.deadline_s = config.deadline_s
        self.ready = False
        self.warm = not first_call
        """Whether the scorer has been called on an empty answer; an answer's deadline holds only then."""
        self.answers: deque[Answer] = deque()
        self.overdue_at = time.monotonic() + _START_DEADLINE_S

    @property
    def is_idle(self) -> bool:
        """Whether it waits for answers."""
        return self.ready and not self.answers

    @property
    def is_stopped(self) -> bool:
        """Whether a signal from outside has stopped it: then the answer is not to blame."""
        try:
            return bool(psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def give(self, answers: Sequence[Answer]) -> None:
        """Send answers. Raises OSError where the process is gone, or takes nothing in."""
        self.answers.extend(answers)
        self.connection.send_bytes(
            json.dumps([(answer.response, answer.ground_truth_json) for answer in answers]).encode()
        )
        self._wait()

    def take(self) -> Any:
        """The next message. Raises EOFError or OSError where the process is gone."""
        message = json.loads(self.connection.recv_bytes())
        if isinstance(message, dict):
            self.ready, self.warm = "failed" not in message, message.get("warm", self.warm)
        self._wait()
        return message

    def _wait(self) -> None:
        self.overdue_at = time.monotonic() + (self.deadline_s if self.warm else _START_DEADLINE_S)

    def kill(self) -> None:
        """End the process now and reap it."""
        self.connection.close()
        self.process.kill()
        self.process.wait()
