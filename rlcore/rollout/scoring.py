"""Scoring of answers in processes that a model's output cannot hang.

Each process has one answer at a time under its deadline. One that overruns is killed and replaced; its answer gets no
score (`Score.failure` says why) and is counted. So does an answer at which the scorer raises. Results come in the order
of the requests, and `submit` returns at once, so that scoring can go on while the engine writes further answers.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, TypeVar

import psutil

from rlcore.config.rollout import RewardConfig
from rlcore.errors import ConfigError, EngineError, missing_object_remedy
from rlcore.rollout.environment import resolve_environment
from rlcore.rollout.scoring_worker import JUDGE_VARIABLE, describe, encode_line, resolve_scorer, score_one
from rlcore.score import Score, Scorer
from rlcore.start import python_path

R = TypeVar("R")

log = logging.getLogger(__name__)

# Answers sent to a process in one message: large enough to hide the way there, small enough to share out evenly.
_MAX_RESPONSES_PER_MESSAGE = 32
_MAX_READ_BYTES = 1 << 16
_MAX_FAILED_STARTS = 3
# Errors that are logged; later ones are only counted.
_MAX_LOGGED = 5
_START_DEADLINE_S = 120.0
"""For importing a scorer's module, and what its first call imports, on a busy machine."""
_SEND_DEADLINE_S = 10.0
"""An idle process reads answers at once; one that does not (stopped from outside) would hold up the pool."""
_MAX_WAIT_S = 1.0
"""The pool looks at the clock as often while processes are busy, and so sees when it stood still itself."""


@dataclass(slots=True)
class ScoringJob:
    """Answers submitted together, for `ScoringPool.collect`."""

    scores: list[Score]
    num_pending: int
    done: threading.Event = field(default_factory=threading.Event)
    failure: EngineError | None = None

    def put(self, index: int, score: Score) -> None:
        """Keep the score of one answer."""
        self.scores[index] = score
        self.num_pending -= 1
        if self.num_pending == 0:
            self.done.set()


@dataclass(slots=True)
class PendingResponse:
    """One answer to be scored: `index` is its place in the job, `num_deaths` the processes that ended at it."""

    job: ScoringJob
    index: int
    response: str
    ground_truth_json: str
    num_deaths: int = 0


class ScoringProcess:
    """One scoring process: its answers (the running one first), its deadline, and how it is ended."""

    def __init__(self, scorer: str, config: RewardConfig, *, first_call: bool) -> None:
        ours, theirs = socket.socketpair()
        whole, rest = divmod(_SEND_DEADLINE_S, 1)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(whole), int(1e6 * rest)))
        # No standard stream of ours goes in: a child that holds them keeps a dead run's log open.
        with theirs:
            weights = json.dumps(config.weights)
            arguments = (str(theirs.fileno()), scorer, str(config.deadline_s), str(int(first_call)), weights)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlcore.rollout.scoring_worker", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "PYTHONPATH": python_path(),
                    JUDGE_VARIABLE: config.judge.model_dump_json(),
                },
                start_new_session=True,  # a Ctrl-C at the terminal is the trainer's to handle
            )
        self.socket = ours
        self._partial_line = b""  # of the next message
        self.deadline_s = config.deadline_s
        self.ready = False
        self.warm = not first_call
        """Whether the scorer has been called on an empty answer; an answer's deadline holds only then."""
        self.responses: deque[PendingResponse] = deque()
        self.overdue_at = time.monotonic() + _START_DEADLINE_S

    @property
    def is_idle(self) -> bool:
        """Whether it is ready and has no answers."""
        return self.ready and not self.responses

    @property
    def is_stopped(self) -> bool:
        """Whether a signal from outside has stopped it; its answer is not counted as overdue then."""
        try:
            return bool(psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def send(self, answers: Sequence[PendingResponse]) -> None:
        """Send answers. Raises OSError where the process has ended or does not read."""
        self.responses.extend(answers)
        self.socket.sendall(encode_line([(answer.response, answer.ground_truth_json) for answer in answers]))
        self._set_deadline()

    def receive(self) -> Iterator[Any]:
        """Read the messages that have come, one at least. Raises EOFError or OSError where the process has ended."""
        read = self.socket.recv(_MAX_READ_BYTES)
        if not read:
            raise EOFError
        *whole, self._partial_line = (self._partial_line + read).split(b"\n")
        for line in whole:
            message = json.loads(line)
            if isinstance(message, dict):
                self.ready, self.warm = "failed" not in message, message.get("warm", self.warm)
            self._set_deadline()
            yield message

    def _set_deadline(self) -> None:
        self.overdue_at = time.monotonic() + (self.deadline_s if self.warm else _START_DEADLINE_S)

    def kill(self) -> None:
        """End the process and what it has started (its process group) now, and reap it."""
        self.socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _unscored(why: str) -> Score:
    return Score(0.0, {}, failure=why)


def require_scorer(name: str, key: str = "data.scorer") -> Scorer:
    """The function at `module:function`. `key`: the setting or option that names it, for the message.

    Raises:
        ConfigError: there is no such function.
    """
    return _require(resolve_scorer, name, f"{key}: must name a function as module:function")


def require_environment(name: str) -> None:
    """There is a class at `module:Class`.

    Raises:
        ConfigError: there is none, or it lacks a method.
    """
    _require(resolve_environment, name, "data.environment: must name a class as module:Class")


def _require(resolve: Callable[[str], R], name: str, rule: str) -> R:
    try:
        return resolve(name)
    except Exception as error:  # importing somebody's module can raise anything
        raise ConfigError(f"{rule}, got {name!r} ({describe(error)}). {missing_object_remedy(name)}.") from error


class ScoringPool(contextlib.AbstractContextManager["ScoringPool"]):
    """Scores answers by `scorer`, a `module:function`; see `rlcore.score.Scorer`.

    With `num_processes` 0 it scores in this process, without a deadline: for scorers known to be bounded. `section`:
    that of the settings, for messages. `num_logged`: failures that are logged.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(
        self, scorer: str, config: RewardConfig, *, section: str = "reward", num_logged: int = _MAX_LOGGED
    ) -> None:
        self._num_logged = num_logged
        self._function = require_scorer(scorer)
        self._scorer = scorer
        self._config = config
        self._section = section
        self.timeouts = 0
        """Answers so far that overran the deadline."""
        self.errors = 0
        """Answers so far for which the scorer raised, returned no finite score, or took its process down."""
        self._last_failure = ""
        self._queue: deque[PendingResponse] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self._workers: list[ScoringProcess] = []
        self._failed_starts = 0
        self._first_call = True
        """Whether processes call the scorer on an empty answer first; not once it has hung in that, or has twice taken
        its process down before the same answer."""
        self._failure: EngineError | None = None
        self._thread: threading.Thread | None = None
        if config.num_processes:
            # A byte through this pair wakes the thread when there is something to do.
            self._wakes, self._woken = socket.socketpair()
            self._wakes.setblocking(False)
            self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)
            self._thread.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def unscored(self) -> tuple[int, str]:
        """Answers so far that have no score since the scorer failed on them, and what happened last."""
        return self.errors + self.timeouts, self._last_failure

    def score(self, responses: Sequence[str], ground_truths_json: Sequence[str]) -> list[Score]:
        """One score for each answer, in their order."""
        return self.collect(self.submit(responses, ground_truths_json))

    def submit(self, responses: Sequence[str], ground_truths_json: Sequence[str]) -> ScoringJob:
        """Start to score and return at once; with no processes return when all are scored."""
        pairs = list(zip(responses, ground_truths_json, strict=True))
        job = ScoringJob([_unscored("not scored yet")] * len(pairs), len(pairs))
        if not pairs:
            job.done.set()
        elif self._thread is None:
            for index, (response, truth) in enumerate(pairs):
                job.put(index, self._score_in_process(response, truth))
        else:
            with self._lock:
                if self._closing:
                    raise self._failure or EngineError("the scoring pool is closed; it takes no more answers")
                self._queue.extend(PendingResponse(job, index, *pair) for index, pair in enumerate(pairs))
            self._wake()
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

    @contextlib.contextmanager
    def without_counting(self) -> Iterator[None]:
        """Failures inside the block, in which nobody else uses the pool, are left out of the counts."""
        before = self.errors, self.timeouts, self._last_failure
        try:
            yield
        finally:
            self.errors, self.timeouts, self._last_failure = before

    def close(self) -> None:
        """End every scoring process. Answers still waiting are given up. May be called twice."""
        with self._lock:
            self._closing = True
        if self._thread is not None:
            self._wake()
            self._thread.join()
            self._wakes.close()
            self._woken.close()

    # ------------------------------------------------------------ in this process

    def _score_in_process(self, response: str, ground_truth_json: str) -> Score:
        try:
            return score_one(self._function, response, ground_truth_json, self._config.weights)
        except (Exception, SystemExit) as error:  # never kills a run
            return self._record_error(describe(error), response)

    def _record_error(self, what: str, response: str) -> Score:
        """Count and log an error of the scorer; returns its answer's score."""
        self.errors += 1
        self._last_failure = what
        if self.errors <= self._num_logged:
            log.warning("scorer %s failed, the answer has no score: %s; answer %.200r", self._scorer, what, response)
        return _unscored(what)

    # ------------------------------------------------------------ the thread that feeds the processes

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full of such bytes already, or closed
            self._wakes.send(b"!")

    def _run(self) -> None:
        try:
            while not self._closing:
                self._start_missing()
                self._distribute()
                self._start_missing()  # sending finds ended processes; with none left the wait would have no end
                self._wait_for_events()
        except EngineError as error:
            self._failure = error
        except Exception as error:
            log.exception("the scoring pool stopped")
            self._failure = EngineError(f"the scoring pool stopped: {describe(error)}")
        finally:
            self._fail_pending(self._failure or EngineError("the pool was closed before these answers were scored"))
            for worker in self._workers:
                worker.kill()

    def _start_missing(self) -> None:
        while len(self._workers) < self._config.num_processes:
            self._workers.append(ScoringProcess(self._scorer, self._config, first_call=self._first_call))

    def _distribute(self) -> None:
        for worker in [worker for worker in self._workers if worker.is_idle]:
            with self._lock:
                share = len(self._queue) // (4 * self._config.num_processes)
                size = min(max(share, 1), _MAX_RESPONSES_PER_MESSAGE, len(self._queue))
                answers = [self._queue.popleft() for _ in range(size)]
            if not answers:
                return
            try:
                worker.send(answers)
            except OSError as error:
                self._replace_ended(worker, describe(error))

    def _wait_for_events(self) -> None:
        """Wait for a result, a deadline or `_wake`, and handle it."""
        busy = [worker.overdue_at for worker in self._workers if not worker.is_idle]
        began = time.monotonic()
        timeout = min(max(0.0, min(busy) - began), _MAX_WAIT_S) if busy else None
        ready = set(wait([self._woken, *(worker.socket for worker in self._workers)], timeout))
        if self._woken in ready:
            self._woken.recv(4_096)
        now = time.monotonic()
        # After a longer wait this process stood still, and probably all of the job with it: a paused container.
        if timeout is not None and now - began - timeout > _MAX_WAIT_S:
            for worker in self._workers:
                worker.overdue_at += now - began - timeout
        for worker in list(self._workers):
            if worker.socket in ready:
                self._read_results(worker)
            elif not worker.is_idle and now >= worker.overdue_at:
                self._end_overdue(worker)

    def _read_results(self, worker: ScoringProcess) -> None:
        try:
            for message in worker.receive():
                self._handle(worker, message)
        except (EOFError, OSError) as error:
            self._replace_ended(worker, describe(error))

    def _handle(self, worker: ScoringProcess, message: Any) -> None:
        if isinstance(message, dict):
            if "failed" in message:
                raise EOFError(message["failed"])
            self._failed_starts = 0
            return
        total, rest, said = message
        answer = worker.responses.popleft()
        score = self._record_error(rest, answer.response) if total is None else Score(total, rest, said)
        answer.job.put(answer.index, score)

    def _end_overdue(self, worker: ScoringProcess) -> None:
        if worker.is_stopped:
            self._replace_ended(worker, "it was stopped from outside")
            return
        if worker.responses and worker.warm:
            answer = worker.responses.popleft()
            self.timeouts += 1
            limit = self._config.deadline_s
            self._last_failure = f"an answer took longer than {limit:g} s ({self._section}.deadline_s)"
            if self.timeouts <= self._num_logged:
                text = "scorer %s overran %s.deadline_s=%g, the answer has no score: %.200r"
                log.warning(text, self._scorer, self._section, limit, answer.response)
            answer.job.put(answer.index, _unscored(self._last_failure))
        elif worker.responses:
            self._disable_first_calls("it took too long")
        self._remove(worker, "it took too long")

    def _replace_ended(self, worker: ScoringProcess, why: str) -> None:
        """Replace a process that ended by itself.

        The first time its answer is tried again, since it may have been killed from outside; the second time the answer
        counts as an error, or there are no more first calls if it was in one.
        """
        if worker.responses:
            answer = worker.responses[0]
            answer.num_deaths += 1
            if answer.num_deaths > 1 and worker.warm:
                worker.responses.popleft()
                answer.job.put(answer.index, self._record_error(f"its process ended ({why})", answer.response))
            elif answer.num_deaths > 1:
                answer.num_deaths = 0
                self._disable_first_calls(why)
        self._remove(worker, why)

    def _disable_first_calls(self, why: str) -> None:
        log.warning("scorer %s did not come back from its first call, on an empty answer: %s", self._scorer, why)
        self._first_call = False

    def _remove(self, worker: ScoringProcess, why: str) -> None:
        with self._lock:
            self._queue.extendleft(reversed(worker.responses))
        self._workers.remove(worker)
        worker.kill()
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise EngineError(
                    f"data.scorer: the processes that score by {self._scorer} cannot be started ({why}). Try "
                    "reward.num_processes=0, which scores in the trainer's process"
                    if self._section == "reward"
                    else f"data.environment: the processes that play episodes cannot be started ({why})"
                )

    def _fail_pending(self, failure: EngineError) -> None:
        """Fail every job that has answers waiting."""
        with self._lock:
            self._closing = True
            left = [*self._queue, *(answer for worker in self._workers for answer in worker.responses)]
            self._queue.clear()
        for answer in left:
            answer.job.failure = answer.job.failure or failure
            answer.job.done.set()
