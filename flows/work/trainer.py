"""The control of a trainer process by its flow: start, commands, replies and end.

A signal to the flow's process group must not interrupt a step. The process therefore has a separate session and does
not use the standard streams of the flow. The kernel signals the process when the flow dies (see `flows.server.launch`).
"""

import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from flows.server.launch import line_text, log_tail, python_path, start_process
from flows.work.protocol import Done, Event, Failed, Note, Progress, Reply, RunEvent, parse_reply
from flows.work.slots import HeldSlots, SlotRequest, Slots
from rlcore.errors import EXIT_RESUMABLE, HostMemoryError, MillraceError, StopRequestedError, WorkerLostError, is_stop
from rlcore.run.watchdog import append_failure, failure_from, num_oom_kills
from rlcore.runtime.interpreter import trainer_path, trainer_process
from rlcore.tracking.attempts import DELIVERY_VARIABLE

TRAINER = ("-P", "-m", "rlcore.run.process")
POLL_S = 0.25  # longest time between two checks of the process and its log
CLOSE_WAIT_S = 60.0  # seconds for an idle trainer to end its workers and deliver its last metrics
TERMINATE_WAIT_S = 10.0  # seconds after a SIGTERM to a trainer without unsaved work
DRAIN_WAIT_S = 1.0  # seconds for the replies of a dead process in the pipe
WAITS_FOR_SLOTS = "waits_for_slots"  # event of a run that waits for slots of its workspace
CHILD_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    # Waiting threads yield their core to other processes. A step then takes 325 ms instead of 1,719 ms.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",
    "DO_NOT_TRACK": "1",
}
"""The default environment variables of the trainer. Variables of the user's environment have priority."""
MAX_READ_BYTES = 1 << 20  # largest number of bytes read from the log at a time


class LogTail:
    """A reader of a log file that is still growing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> Iterator[str]:
        """Yield the lines completed since the last call. Read at most `MAX_READ_BYTES`. A deleted file has no lines."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                content = file.read(MAX_READ_BYTES)
        except FileNotFoundError:
            return
        self._offset += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            yield line_text(line)

    def is_at_end(self) -> bool:
        """Return whether the whole file was read. A deleted file counts as read."""
        return not self.path.exists() or self._offset >= self.path.stat().st_size

    @property
    def rest(self) -> str:
        """The beginning of the line that is not complete yet."""
        return line_text(self._rest)


class TrainerProcess:
    """A trainer process. The first `call` starts it. If the process is lost, the next `call` starts a new process.

    Use it as a context manager in the main thread, because the process ends with the thread that started it. The
    process inherits `lock`, the file descriptor of the run's lock, unless `lock` is None.

    An exception from `on_event`, `on_line` or `on_wait` stops the process. The process then has `stop_wait_s` seconds
    to finish its step and save a checkpoint.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        stop_wait_s: float,
        slots: Slots,
        request: SlotRequest,
        python: str | None = None,
        command: Sequence[str] = TRAINER,
    ) -> None:
        self._run_dir = run_dir
        self.on_event: Callable[[Event], None] = lambda event: None
        self.on_line: Callable[[str], None] = lambda line: None
        self.on_wait: Callable[[], None] = lambda: None
        self._stop_wait_s = stop_wait_s
        self._slots = slots
        self._request = request
        self._python = python
        self._command = tuple(command)
        self._child: _Child | None = None
        self._reason = ""
        self.lock: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the process. If a stop was requested, let the process save a checkpoint first."""
        if is_stop(error) and self._child is not None:
            self._end(self._child, is_stop=True)
        else:
            self.close()

    @property
    def pid(self) -> int | None:
        """The process id, or None while there is no process."""
        return None if self._child is None else self._child.process.pid

    def call(self, command: str, **arguments: str | int) -> Mapping[str, Any]:
        """Send a command to the process and wait for its result. If there is no process, wait for slots and start one.

        Raises the trainer's error, StopRequestedError if the trainer was stopped, or WorkerLostError if the process is
        lost. The next call then resumes from the last checkpoint.
        """
        child = self._start()
        try:
            child.send(command, **arguments)
            reply = self._wait_for_reply(child)
        except BaseException as error:
            if isinstance(error, WorkerLostError) or (isinstance(error, MillraceError) and child.has_ended()):
                self._child = None  # the process is dead or out of sync
                child.destroy()
            else:
                self._end(child, is_stop=True)
            raise
        if isinstance(reply, Done):
            return reply.result
        self._end(child, is_stop=False)
        raise reply.error()

    def close(self) -> None:
        """End an idle process and wait for its end."""
        child, self._child = self._child, None
        if child is None:
            return
        try:
            with suppress(WorkerLostError):
                child.send("close")
            for wait_s in (self._stop_wait_s, TERMINATE_WAIT_S):  # the process may be writing a checkpoint
                if self._wait_for_exit(child, wait_s):
                    return
                child.signal(signal.SIGTERM)
        finally:
            child.destroy()

    def _start(self) -> "_Child":
        if self._child is not None and self._child.has_ended():
            self._end(self._child, is_stop=False)
        if self._child is not None and self._child.held.must_yield():
            self.close()
        if self._child is None:
            held = self._slots.acquire(self._request, self._report_wait)
            try:
                if self._reason:
                    number = len(held.descriptors)
                    self.on_event(Note(f"has {number} slot{'s' * (number > 1)} of the workspace now"))
                    self._reason = ""
                self._child = _Child(self._python, self._command, self._run_dir, held, self.lock)
            except BaseException:
                held.release()
                raise
        return self._child

    def _report_wait(self, reason: str) -> None:
        if reason != self._reason:
            self.on_event(RunEvent(WAITS_FOR_SLOTS, {"text": reason}))
        self._reason = reason
        self.on_wait()

    def _wait_for_reply(self, child: "_Child") -> Done | Failed:
        while True:
            is_dead = child.has_ended()  # before the last read of its output
            for reply in child.replies(DRAIN_WAIT_S if is_dead else POLL_S):
                if isinstance(reply, Done | Failed):
                    self._forward_lines(child)
                    return reply
                self.on_event(reply)
            self._forward_lines(child)
            self.on_wait()
            if is_dead:
                raise child.lost_error()

    def _forward_lines(self, child: "_Child") -> None:
        for line in child.log.new_lines():
            self.on_line(line)

    def _wait_for_exit(self, child: "_Child", wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        while True:
            has_ended = child.has_ended()
            for reply in child.replies(0.0 if has_ended else POLL_S):
                if isinstance(reply, Failed) and reply.type == StopRequestedError.__name__:
                    self._report(Note(reply.message))
                elif not isinstance(reply, Done | Failed):
                    self._report(reply)
            with suppress(Exception):
                self._forward_lines(child)
            if has_ended:
                return True
            if time.monotonic() >= deadline:
                return False

    def _report(self, event: Event) -> None:
        with suppress(Exception):  # so that the ending process can save
            self.on_event(event)

    def _end(self, child: "_Child", *, is_stop: bool) -> None:
        """Wait until the process has ended. With `is_stop`, first request a stop, so that the process finishes its step
        and saves. If the user interrupts again or a time limit is exceeded, kill the process.
        """
        self._child = None
        try:
            if is_stop:
                child.signal(signal.SIGTERM)
                self._report(Note("stopping: the trainer finishes its step and saves; interrupt again to kill it"))
            self._wait_for_exit(child, self._stop_wait_s if is_stop else CLOSE_WAIT_S)
        finally:
            child.destroy()


class _Child:
    """The trainer process with its two pipes, its log, and the slots and the lock that it inherits."""

    def __init__(
        self, python: str | None, command: Sequence[str], run_dir: Path, held: HeldSlots, lock: int | None
    ) -> None:
        environment = trainer_variables(python) | held.environment
        folder = run_dir / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        log_file = folder / f"trainer-{1 + max(trainer_logs(folder), default=0)}.log"
        log_file.touch()
        child_reads, self._commands_fd = os.pipe()
        self._replies_fd, child_writes = os.pipe()
        line = [trainer_process(python)[0], *command, "--run", str(run_dir)]
        line += ["--commands-fd", str(child_reads), "--replies-fd", str(child_writes)]
        try:
            inherited = [child_reads, child_writes, *held.descriptors]
            if lock is not None:
                line += ["--lock-fd", str(lock)]
                inherited.append(lock)
            self.process = start_process(line, log_file, environment, inherited)
        except BaseException:
            os.close(self._commands_fd)
            os.close(self._replies_fd)
            raise
        finally:
            os.close(child_reads)
            os.close(child_writes)
        self.log = LogTail(log_file)
        self.held = held
        self._rest = b""
        self._oom_kills = num_oom_kills()
        self._last_step = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._replies_fd, selectors.EVENT_READ)
        self._at_end = False

    def send(self, command: str, **arguments: str | int) -> None:
        line = json.dumps({"command": command, **arguments}).encode() + b"\n"
        try:
            os.write(self._commands_fd, line)  # far below PIPE_BUF, so it is written whole or not at all
        except BrokenPipeError:
            raise self.lost_error() from None

    def replies(self, timeout_s: float) -> list[Reply]:
        if self._at_end:
            time.sleep(0 if self.has_ended() else timeout_s)
            return []
        lines: list[bytes] = []
        while self._selector.select(0 if lines else timeout_s):
            content = os.read(self._replies_fd, 1 << 16)
            if not content:
                self._at_end = True
                break
            *complete, self._rest = (self._rest + content).split(b"\n")
            lines += complete
        found: list[Reply] = []
        for line in lines:
            try:
                found.append(parse_reply(line))
            except ValueError as error:
                raise WorkerLostError(
                    f"the trainer process sent {line[:200]!r}, which is not a reply ({error})"
                ) from error
        steps = [reply.step for reply in found if isinstance(reply, Progress) and reply.stage == "train"]
        self._last_step = max(steps, default=self._last_step)
        return found

    def lost_error(self) -> MillraceError:
        code = self.process.wait()
        if code == EXIT_RESUMABLE:
            return StopRequestedError(
                "a stop of the trainer was requested; start again to resume from its last checkpoint"
            )
        reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        text = f"the trainer process has ended ({reason}). {log_tail(self.log.path, hints={})}"
        error: MillraceError = WorkerLostError(text)
        # The kernel counts the processes that it kills because of memory.
        if code == -signal.SIGKILL and num_oom_kills() > self._oom_kills:
            error = HostMemoryError(f"the kernel killed a process because of memory: {text}")
        append_failure(self.log.path.parent.parent, failure_from(error, "", self._last_step))
        return error

    def has_ended(self) -> bool:
        """Return whether the process has ended, without reaping it.

        `Popen.poll` is not used, because an interrupt can leave Popen's lock locked. `Popen.wait` would then wait
        forever.
        """
        try:
            gone = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # already reaped
            return True
        return gone is not None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process only.

        Its helper processes get no signal, because they are needed to finish the step.
        """
        if self.process.returncode is None:
            os.kill(self.process.pid, number)  # `send_signal` would poll

    def destroy(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.held.release()
        self._selector.close()
        os.close(self._commands_fd)
        os.close(self._replies_fd)


def trainer_logs(folder: Path) -> dict[int, Path]:
    """Return the log files of a run's trainer processes. The keys are the numbers of the processes.

    A copy of a log file has no number in its name and is skipped.
    """
    numbers = {path: path.stem.removeprefix("trainer-") for path in folder.glob("trainer-*.log") if path.is_file()}
    return {int(number): path for path, number in numbers.items() if number.isdecimal()}


def trainer_variables(python: str | None) -> dict[str, str]:
    """Return the trainer's environment variables: those of this process, and a `PYTHONPATH`.

    With the `PYTHONPATH`, the trainer imports the same code as this process. The last entry is the current folder, so
    the trainer finds custom scorers there, but no file there replaces an installed module. If `python` is set, the
    `PYTHONPATH` contains the packages of that interpreter instead of those of this process. `DELIVERY_VARIABLE` then
    names the interpreter of this process, which uploads the metrics to MLflow.
    """
    here = str(Path.cwd())
    if python is None:
        path = python_path(*(place for place in sys.path if isinstance(place, str) and place not in ("", here)), here)
        return CHILD_ENVIRONMENT | os.environ | {"PYTHONPATH": path}
    path = os.pathsep.join((*(place for place in trainer_path(python) if place not in ("", here)), here))
    delivery = os.pathsep.join((sys.executable, python_path()))
    return CHILD_ENVIRONMENT | os.environ | {"PYTHONPATH": path, DELIVERY_VARIABLE: delivery}
