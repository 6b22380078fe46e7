"""Scores answers in processes that a model's output cannot hang.

Each process has one answer at a time under its deadline. One that overruns is killed and replaced; its answer gets no
score (`Score.failure` says why) and is counted. So does an answer at which the scorer raises. Results come in the order
of the requests, and `submit` returns at once, so that scoring can go on while the engine writes further answers.
"""

import contextlib
import json
import logging
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
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from rlcore.config.rollout import RewardConfig
from rlcore.errors import MODULES_ARE_FOUND, ConfigError, EngineError
from rlcore.rollout.scoring_worker import describe, resolve_scorer, score_one
from rlcore.score import Score, Scorer

log = logging.getLogger(__name__)

# Answers sent to a process in one message: large enough to hide the way there, small enough to share out evenly.
_MAX_ANSWERS_PER_MESSAGE = 32
_MAX_FAILED_STARTS = 3
# Errors told in the log; beyond these only the count goes on.
_MAX_TOLD = 5
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


def _unscored(why: str) -> Score:
    return Score(0.0, {}, failure=why)


def require_scorer(name: str) -> Scorer:
    """The function at `module:function`.

    Raises:
        ConfigError: there is no such function.
    """
    try:
        return resolve_scorer(name)
    except Exception as error:  # importing a scorer's module can raise anything
        raise ConfigError(
            f"data.scorer: must name a function as module:function, got {name!r} ({describe(error)}). "
            f"{MODULES_ARE_FOUND}."
        ) from error


class ScoringPool:
    """Scores answers by `scorer`, a `module:function`; see `rlcore.score.Scorer`.

    With `num_processes` 0 it scores in this process, without a deadline: for scorers known to be bounded.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(self, scorer: str, config: RewardConfig) -> None:
        self._function = require_scorer(scorer)
        self._scorer = scorer
        self._config = config
        self._timeouts = 0
        self._errors = 0
        self._last_failure = ""
        self._queue: deque[Answer] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self._workers: list[ScoringProcess] = []
        self._failed_starts = 0
        self._first_call = True
        """Whether processes call the scorer on an empty answer first; not once it has failed to come back from that."""
        self._failure: EngineError | None = None
        self._thread: threading.Thread | None = None
        if config.num_processes:
            # A byte through this pair wakes the thread when there is something to do.
            self._bell, self._ear = socket.socketpair()
            self._bell.setblocking(False)
            self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)
            self._thread.start()

    def __enter__(self) -> "ScoringPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def timeouts(self) -> int:
        """Answers so far that overran the deadline."""
        return self._timeouts

    @property
    def errors(self) -> int:
        """Answers so far for which the scorer raised, returned no finite score, or took its process down."""
        return self._errors

    @property
    def unscored(self) -> tuple[int, str]:
        """Answers so far that have no score since the scorer failed on them, and what happened last."""
        return self._errors + self._timeouts, self._last_failure

    def score(self, responses: Sequence[str], ground_truths_json: Sequence[str]) -> list[Score]:
        """One score for each answer, in their order."""
        return self.collect(self.submit(responses, ground_truths_json))

    def submit(self, responses: Sequence[str], ground_truths_json: Sequence[str]) -> ScoringJob:
        """Start to score and return at once (with no processes: after it is done)."""
        pairs = list(zip(responses, ground_truths_json, strict=True))
        job = ScoringJob([_unscored("not scored yet")] * len(pairs), len(pairs))
        if not pairs:
            job.done.set()
        elif self._thread is None:
            for index, (response, truth) in enumerate(pairs):
                job.put(index, self._score_here(response, truth))
        else:
            with self._lock:
                if self._closing:
                    raise self._failure or EngineError("the scoring pool is closed; it takes no more answers")
                self._queue.extend(Answer(job, index, *pair) for index, pair in enumerate(pairs))
            self._ring()
        return job

    def collect(self, job: ScoringJob) -> list[Score]:
        """Wait for the scores of a job.

        Raises:
            EngineError: the scoring processes cannot be started, or the pool was closed meanwhile.
        """
        job.done.wait()
        if job.failure is not None:
            raise job.failure
        return job.scores

    def close(self) -> None:
        """End every scoring process. Answers still waiting are given up. May be called twice."""
        with self._lock:
            self._closing = True
        if self._thread is not None:
            self._ring()
            self._thread.join()
            self._bell.close()
            self._ear.close()

    # ------------------------------------------------------------ in this process

    def _score_here(self, response: str, ground_truth_json: str) -> Score:
        try:
            return score_one(self._function, response, ground_truth_json)
        except (Exception, SystemExit) as error:  # never kills a run
            return self._error(describe(error), response)

    def _error(self, what: str, response: str) -> Score:
        """Count and tell an error of the scorer; what its answer gets."""
        self._errors += 1
        self._last_failure = what
        if self._errors <= _MAX_TOLD:
            log.warning("scorer %s failed, the answer has no score: %s; answer %.200r", self._scorer, what, response)
        return _unscored(what)

    # ------------------------------------------------------------ the thread that feeds the processes

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it is ringing already, or nobody listens any more
            self._bell.send(b"!")

    def _run(self) -> None:
        try:
            while not self._closing:
                self._keep_staff()
                self._hand_out()
                self._keep_staff()  # one may have been found dead at that: without any the wait would have no end
                self._listen()
        except EngineError as error:
            self._failure = error
        except Exception as error:
            log.exception("the scoring pool stopped")
            self._failure = EngineError(f"the scoring pool stopped: {describe(error)}")
        finally:
            self._give_up(self._failure or EngineError("the pool was closed before these answers were scored"))
            for worker in self._workers:
                worker.kill()

    def _keep_staff(self) -> None:
        while len(self._workers) < self._config.num_processes:
            self._workers.append(ScoringProcess(self._scorer, self._config, first_call=self._first_call))

    def _hand_out(self) -> None:
        for worker in [worker for worker in self._workers if worker.is_idle]:
            with self._lock:
                share = len(self._queue) // (4 * self._config.num_processes)
                size = min(max(share, 1), _MAX_ANSWERS_PER_MESSAGE, len(self._queue))
                answers = [self._queue.popleft() for _ in range(size)]
            if not answers:
                return
            try:
                worker.give(answers)
            except OSError as error:
                self._bury(worker, describe(error))

    def _listen(self) -> None:
        """Wait until a process speaks, is overdue, or the bell rings; deal with it."""
        busy = [worker.overdue_at for worker in self._workers if not worker.is_idle]
        timeout = max(0.0, min(busy) - time.monotonic()) if busy else None
        heard = set(wait([self._ear, *(worker.connection for worker in self._workers)], timeout))
        if self._ear in heard:
            self._ear.recv(4_096)
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.connection in heard:
                self._hear(worker)
            elif not worker.is_idle and now >= worker.overdue_at:
                self._end_overdue(worker)

    def _hear(self, worker: ScoringProcess) -> None:
        try:
            message = worker.take()
            while True:
                self._understand(worker, message)
                if not worker.connection.poll():
                    return
                message = worker.take()
        except (EOFError, OSError) as error:
            self._bury(worker, describe(error))

    def _understand(self, worker: ScoringProcess, message: Any) -> None:
        if isinstance(message, dict):
            if "failed" in message:
                raise EOFError(message["failed"])
            self._failed_starts = 0
            return
        total, rest, said = message
        answer = worker.answers.popleft()
        score = self._error(rest, answer.response) if total is None else Score(total, rest, said)
        answer.job.put(answer.index, score)

    def _end_overdue(self, worker: ScoringProcess) -> None:
        if worker.is_stopped:
            self._bury(worker, "it was stopped from outside")
            return
        if worker.answers and worker.warm:
            answer = worker.answers.popleft()
            self._timeouts += 1
            self._last_failure = f"an answer took longer than {self._config.deadline_s:g} s (reward.deadline_s)"
            if self._timeouts <= _MAX_TOLD:
                limit = self._config.deadline_s
                text = "scorer %s overran reward.deadline_s=%g, the answer has no score: %.200r"
                log.warning(text, self._scorer, limit, answer.response)
            answer.job.put(answer.index, _unscored(self._last_failure))
        self._dismiss(worker, "it took too long")

    def _bury(self, worker: ScoringProcess, why: str) -> None:
        """A process that ended by itself. Once is bad luck (killed from outside): the answer is tried again. Twice is
        the answer's doing, and counts as an error."""
        if worker.answers and worker.warm:
            answer = worker.answers[0]
            answer.num_deaths += 1
            if answer.num_deaths > 1:
                worker.answers.popleft()
                answer.job.put(answer.index, self._error(f"its process ended ({why})", answer.response))
        self._dismiss(worker, why)

    def _dismiss(self, worker: ScoringProcess, why: str) -> None:
        with self._lock:
            self._queue.extendleft(reversed(worker.answers))
        self._workers.remove(worker)
        worker.kill()
        if worker.answers and not worker.warm:
            log.warning("scorer %s did not come back from its first call, on an empty answer: %s", self._scorer, why)
            self._first_call = False
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise EngineError(
                    f"data.scorer: the processes that score by {self._scorer} cannot be started ({why}). Try "
                    "reward.num_processes=0, which scores in the trainer's process"
                )

    def _give_up(self, failure: EngineError) -> None:
        """Tell everyone who waits."""
        with self._lock:
            self._closing = True
            left = [*self._queue, *(answer for worker in self._workers for answer in worker.answers)]
            self._queue.clear()
        for answer in left:
            answer.job.failure = answer.job.failure or failure
            answer.job.done.set()
