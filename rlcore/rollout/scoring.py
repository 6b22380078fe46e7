"""Scoring in separate processes, so that model output cannot block a run. Each process scores one response at a time.
If scoring a response exceeds the deadline, the pool kills the process and starts another one. After a timeout or an
exception of the scorer, `Score.failure` contains the reason. `submit` does not block, so scoring and generation run
concurrently."""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, TypeVar

import psutil

from rlcore import python_path
from rlcore.config.rollout import RewardConfig
from rlcore.errors import ConfigError, EngineError, missing_object_remedy
from rlcore.rollout.environment import resolve_environment
from rlcore.rollout.scoring_worker import JUDGE_VARIABLE, describe, encode_line, resolve_scorer, score_one
from rlcore.score import Score, Scorer

R = TypeVar("R")
log = logging.getLogger(__name__)
# Enough responses per message to hide latency, and few enough to balance the load.
_MAX_RESPONSES_PER_MESSAGE = 32
_MAX_READ_BYTES = 1 << 16
_MAX_FAILED_STARTS = 3
_MAX_LOGGED = 5
START_DEADLINE_S = 120.0  # seconds allowed for the import of a scorer, and for the scorer's first call
_SEND_DEADLINE_S = 10.0  # seconds allowed for sending to an idle process, which a user may have stopped
_MAX_WAIT_S = 1.0  # seconds between two checks of busy processes. The checks also detect a pause of this process


@dataclass(slots=True)
class PendingResponse:
    """A response without a score. `num_deaths`: the number of processes that died while they scored it."""

    response: str
    ground_truth_json: str
    score: Future[Score] = field(default_factory=Future)
    num_deaths: int = 0


class ScoringProcess:
    """A scoring process, and the responses that it has received but not scored yet. The deadline applies to the first
    of these responses."""

    def __init__(self, scorer: str, config: RewardConfig, *, first_call: bool) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(_SEND_DEADLINE_S)  # data is read only when it is there
        # Standard streams are not inherited, since a child would keep a dead run's log open.
        with theirs:
            weights = json.dumps(config.weights)
            arguments = (str(theirs.fileno()), scorer, str(int(first_call)), weights)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlcore.rollout.scoring_worker", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": python_path(), JUDGE_VARIABLE: config.judge.model_dump_json()},
                start_new_session=True,  # the trainer handles Ctrl-C
            )
        self.socket = ours
        self._partial_line = b""
        self.deadline_s = config.deadline_s
        self.ready = False
        self.warm = not first_call
        """False until the process has finished its first call, on an empty response. Until then, a longer deadline
        applies than the deadline of the settings. If first calls are skipped, the value is always True."""
        self.responses: deque[PendingResponse] = deque()
        self.overdue_at = time.monotonic() + START_DEADLINE_S

    @property
    def is_idle(self) -> bool:
        """Return whether the process is ready and has no responses left to score."""
        return self.ready and not self.responses

    @property
    def is_stopped(self) -> bool:
        """Return whether a signal such as SIGSTOP has stopped the process. If a stopped process is overdue, the pool
        replaces it and does not count a timeout."""
        try:
            return bool(psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def send(self, answers: Sequence[PendingResponse]) -> None:
        """Send responses to the process. Raises OSError if the process has ended or does not read from its socket."""
        self.responses.extend(answers)
        self.socket.sendall(encode_line([(answer.response, answer.ground_truth_json) for answer in answers]))
        self._set_deadline()

    def receive(self) -> Iterator[Any]:
        """Wait for data from the process. Yield each complete message, which is a result or a status. Raises EOFError
        or OSError if the process has ended."""
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
        self.overdue_at = time.monotonic() + (self.deadline_s if self.warm else START_DEADLINE_S)

    def kill(self) -> None:
        """Kill the process and its process group, and wait for the process to end."""
        self.socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def require_scorer(name: str, key: str = "data.scorer") -> Scorer:
    """Return the function named `module:function`. Raises ConfigError, which names the setting `key`, if the function
    does not exist."""
    return _require(resolve_scorer, name, f"{key}: must name a function as module:function")


def require_environment(name: str) -> None:
    """Raise ConfigError if the class named `module:Class` does not exist or lacks `reset` or `step`."""
    _require(resolve_environment, name, "data.environment: must name a class as module:Class")


def _require(resolve: Callable[[str], R], name: str, rule: str) -> R:
    try:
        return resolve(name)
    except Exception as error:  # user code can raise anything
        raise ConfigError(f"{rule}, got {name!r} ({describe(error)}). {missing_object_remedy(name)}.") from error


class ScoringPool(contextlib.AbstractContextManager["ScoringPool"]):
    """Processes that score responses. `scorer`: the `Scorer`, in the form `module:function`. If `num_processes` is 0,
    the calling process scores without a deadline. `section`: the settings section that is named in error messages, such
    as `reward`. `num_logged`: the maximum number of logged errors, and of logged timeouts. Raises ConfigError if the
    scorer does not exist."""

    def __init__(
        self, scorer: str, config: RewardConfig, *, section: str = "reward", num_logged: int = _MAX_LOGGED
    ) -> None:
        self._num_logged = num_logged
        self._function = require_scorer(scorer)
        self._scorer = scorer
        self._config = config
        self._section = section
        self.timeouts = 0  # number of responses that exceeded the deadline
        self.errors = 0
        """The number of responses whose scorer raised an error, returned no finite score or ended its process."""
        self._last_failure = ""
        self._queue: deque[PendingResponse] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self._workers: list[ScoringProcess] = []
        self._failed_starts = 0
        self._first_call = True
        """True if new processes first score an empty response. False after such a call was too slow or ended a second
        process."""
        self._failure: EngineError | None = None
        self._thread: threading.Thread | None = None
        if config.num_processes:
            # A byte through this pair wakes the thread.
            self._wakes, self._woken = socket.socketpair()
            self._wakes.setblocking(False)
            self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)
            self._thread.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def unscored(self) -> tuple[int, str]:
        """The number of responses whose scoring has failed or timed out so far, and the reason for the last failure."""
        return self.errors + self.timeouts, self._last_failure

    def submit(self, responses: Sequence[str], ground_truths_json: Sequence[str]) -> list[Future[Score]]:
        """Start scoring, and return a future for the score of each response. If the pool has no processes, all
        responses are scored before this method returns."""
        answers = [PendingResponse(*pair) for pair in zip(responses, ground_truths_json, strict=True)]
        if self._thread is None:
            for answer in answers:
                try:
                    score = score_one(self._function, answer.response, answer.ground_truth_json, self._config.weights)
                except (Exception, SystemExit) as error:  # never ends a run
                    score = self._record_error(describe(error), answer.response)
                answer.score.set_result(score)
        elif answers:
            with self._lock:
                if self._closing:
                    raise self._failure or EngineError("the scoring pool is closed; it accepts no more responses")
                self._queue.extend(answers)
            self._wake()
        return [answer.score for answer in answers]

    def score(self, responses: Sequence[str], ground_truths_json: Sequence[str]) -> list[Score]:
        """Return the scores of the responses, in order. Raises EngineError if the pool is closed or cannot start."""
        return [score.result() for score in self.submit(responses, ground_truths_json)]

    @contextlib.contextmanager
    def without_counting(self) -> Iterator[None]:
        """Leave failures inside the `with` block out of `errors`, `timeouts` and `unscored`. No other thread may use
        the pool during the block."""
        before = self.errors, self.timeouts, self._last_failure
        try:
            yield
        finally:
            self.errors, self.timeouts, self._last_failure = before

    def close(self) -> None:
        """End every scoring process and cancel pending responses. Repeated calls are allowed."""
        with self._lock:
            self._closing = True
        if self._thread is not None:
            self._wake()
            self._thread.join()
            self._wakes.close()
            self._woken.close()

    def _record_error(self, what: str, response: str) -> Score:
        self.errors += 1
        self._last_failure = what
        if self.errors <= self._num_logged:
            log.warning(
                "scorer %s failed, the response has no score: %s; response %.200r", self._scorer, what, response
            )
        return Score(0.0, {}, failure=what)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the socket is full or closed
            self._wakes.send(b"!")

    def _run(self) -> None:
        try:
            while not self._closing:
                self._start_missing()
                self._distribute()
                self._start_missing()  # sending detects ended processes, and without any the wait would not end
                self._wait_for_events()
        except EngineError as error:
            self._failure = error
        except Exception as error:
            log.exception("the scoring pool stopped")
            self._failure = EngineError(f"the scoring pool stopped: {describe(error)}")
        finally:
            self._fail_pending(self._failure or EngineError("the pool was closed before these responses were scored"))
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
        busy = [worker.overdue_at for worker in self._workers if not worker.is_idle]
        began = time.monotonic()
        timeout = min(max(0.0, min(busy) - began), _MAX_WAIT_S) if busy else None
        ready = set(wait([self._woken, *(worker.socket for worker in self._workers)], timeout))
        if self._woken in ready:
            self._woken.recv(4_096)
        now = time.monotonic()
        # After a longer wait this process was paused, and probably the whole container.
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
                if isinstance(message, dict):
                    if "failed" in message:
                        raise EOFError(message["failed"])
                    self._failed_starts = 0
                    continue
                total, rest, said = message
                answer = worker.responses.popleft()
                score = self._record_error(rest, answer.response) if total is None else Score(total, rest, said)
                answer.score.set_result(score)
        except (EOFError, OSError) as error:
            self._replace_ended(worker, describe(error))

    def _end_overdue(self, worker: ScoringProcess) -> None:
        if worker.is_stopped:
            self._replace_ended(worker, "it was stopped by a signal")
            return
        if worker.responses and worker.warm:
            answer = worker.responses.popleft()
            self.timeouts += 1
            limit = self._config.deadline_s
            self._last_failure = f"a response took longer than {limit:g} s ({self._section}.deadline_s)"
            if self.timeouts <= self._num_logged:
                text = "scorer %s overran %s.deadline_s=%g, the response has no score: %.200r"
                log.warning(text, self._scorer, self._section, limit, answer.response)
            answer.score.set_result(Score(0.0, {}, failure=self._last_failure))
        elif worker.responses:
            self._disable_first_calls("it took too long")
        self._remove(worker, "it took too long")

    def _replace_ended(self, worker: ScoringProcess, why: str) -> None:
        """Replace a process that has ended. Another process scores the current response again, because the first
        process may have been killed from outside. If the second process also ends, the response counts as an error. But
        if the second process ended in its first call, on an empty response, later processes skip this call."""
        if worker.responses:
            answer = worker.responses[0]
            answer.num_deaths += 1
            if answer.num_deaths > 1 and worker.warm:
                worker.responses.popleft()
                answer.score.set_result(self._record_error(f"its process ended ({why})", answer.response))
            elif answer.num_deaths > 1:
                answer.num_deaths = 0
                self._disable_first_calls(why)
        self._remove(worker, why)

    def _disable_first_calls(self, why: str) -> None:
        log.warning("scorer %s did not return from its first call, on an empty response: %s", self._scorer, why)
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
        with self._lock:
            self._closing = True
            left = [*self._queue, *(answer for worker in self._workers for answer in worker.responses)]
            self._queue.clear()
        for answer in left:
            answer.score.set_exception(failure)
