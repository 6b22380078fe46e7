"""A watchdog that records a run's failures, and ends the run if a phase or a stop takes too long. If C code holds the
interpreter lock, the watchdog's thread cannot run. A timer of `faulthandler` then writes the stacks and ends the
process."""

import _thread
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NoReturn, Self

import psutil
from pydantic import TypeAdapter

from rlcore import stacks
from rlcore.config import RunConfig
from rlcore.errors import (
    DeviceMemoryError,
    HangError,
    HostMemoryError,
    MillraceError,
    RankMemoryError,
    StopRequestedError,
    WorkerLostError,
)
from rlcore.run.layout import RunLayout
from rlcore.run.stop import StopFlag
from rlcore.storage.documents import read_ordinary
from rlcore.storage.publish import write_text_atomically

FAILURES_FILE = "faults.jsonl"
OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
"""The files that count out-of-memory kills, first for this container and then for the host."""
MAX_MESSAGE_CHARS = 1_000
_DEVICE_MEMORY_WORDS = ("cuda out of memory", "cuda error: out of memory")
_HOST_MEMORY_WORDS = ("can't allocate memory", "cannot allocate memory", "std::bad_alloc")


Report = Callable[[Mapping[str, object]], None]  # a function that sends an event to the flow

POLL_S = 0.25
LAST_RESORT_S = 60.0  # seconds from a deadline to the end by `faulthandler`

PHASES = {
    "start_s": ("start",),
    "generate_s": ("gen",),
    "score_s": ("reward", "environment"),
    "forward_s": ("old_log_prob", "ref", "teacher", "values", "adv"),
    "update_s": ("update_critic", "update_actor", "supervise"),
    "hand_over_s": ("update_weights",),
    "validate_s": ("testing",),
    "save_s": ("save_checkpoint", "commit", "export", "start_model", "profile"),
    "load_s": ("load",),
}
"""The phases that each key of `runtime.deadlines` limits. A phase of a step has the name of its `timing_s` metric."""
DEADLINE_OF = {phase: key for key, phases in PHASES.items() for phase in phases}
BEFORE_THE_UPDATE = frozenset({"gen", "environment", "reward", "old_log_prob", "ref", "teacher", "values", "adv"})
"""The phases of a step before its weights change. A step can be abandoned at the start of each of these phases."""

TRACKING_MODULE = "rlcore.tracking"  # delivers metrics, and outlives the trainer for this
FINAL_REPORT_S = 5.0  # limit for the final output, whose reader may have ended
STACKS_S = 40.0  # limit for collecting the stacks of all processes after a hang

log = logging.getLogger("rlcore.run.watchdog")


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure of a run. `stacks`: the file with the stacks of all processes. `time`: seconds since the epoch."""

    kind: str
    phase: str
    step: int
    message: str
    stacks: str | None = None
    time: float = field(default_factory=lambda: round(time.time(), 3))

    def __str__(self) -> str:
        where = f" in {self.phase}" if self.phase else ""
        return f"{self.kind}{where} after step {self.step}"


_FAILURE = TypeAdapter(Failure)


def as_known_error(error: Exception, phase: str) -> Exception:
    """Convert an out-of-memory error of a library to a `MillraceError`. Return any other error unchanged."""
    if isinstance(error, RankMemoryError):
        return error
    if isinstance(error, DeviceMemoryError) and _is_host_memory(str(error)):
        return HostMemoryError(str(error))
    if isinstance(error, MillraceError):
        return error
    text, where = f"{type(error).__name__}: {error}", f" in {phase}" if phase else ""
    lowered = text.lower()
    if "torch.OutOfMemoryError" in text or any(words in lowered for words in _DEVICE_MEMORY_WORDS):
        return DeviceMemoryError(
            f"GPU out of memory{where}: {text}\nLower trainer.max_tokens_per_micro_batch or rollout.memory_share; "
            "neither changes the numbers."
        )
    if _is_host_memory(text):
        return HostMemoryError(
            f"host out of memory{where}: {text}\nFree memory on this host, or lower runtime.num_workers or "
            "reward.num_processes."
        )
    return error


def _is_host_memory(text: str) -> bool:
    return "MemoryError" in text or any(words in text.lower() for words in _HOST_MEMORY_WORDS)


def failure_from(error: Exception, phase: str, step: int) -> Failure:
    """Return a `Failure` that describes this error."""
    kind = error.failure_kind if isinstance(error, MillraceError) else MillraceError.failure_kind
    return Failure(kind, phase, step, str(error)[:MAX_MESSAGE_CHARS])


def append_failure(run_dir: Path, failure: Failure) -> None:
    """Append the failure to `faults.jsonl` as a new line. If the file cannot be written, only log a warning."""
    try:
        with (run_dir / FAILURES_FILE).open("a+b") as file:
            file.seek(max(0, file.tell() - 1))
            torn = b"\n" if file.read() not in (b"", b"\n") else b""
            file.write(torn + json.dumps(asdict(failure)).encode() + b"\n")
    except OSError as reason:
        log.warning("%s: cannot be written: %s", run_dir / FAILURES_FILE, reason)


def read_failures(run_dir: Path) -> list[Failure]:
    """Return all failures of a run, oldest first. Log and skip damaged lines. Raises OSError for an unreadable file."""
    try:
        lines = read_ordinary(run_dir / FAILURES_FILE).split(b"\n")
    except FileNotFoundError:
        return []
    found = []
    for line in filter(None, lines):
        try:
            found.append(_FAILURE.validate_json(line))
        except ValueError:
            log.warning("%s: a line is damaged and skipped: %.100r", run_dir / FAILURES_FILE, line)
    return found


def num_oom_kills() -> int:
    """Return the number of processes that the kernel has killed for lack of memory, or 0 if the number is unknown."""
    for path in OOM_COUNTERS:
        try:
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        except (OSError, ValueError):
            continue
    return 0


class StepAbandonedError(StopRequestedError):
    """A step took too long after a stop request and was abandoned before it changed the weights."""


@dataclass(frozen=True, slots=True)
class _Running:
    phase: str
    begun: float
    limit_s: float


class Watchdog:
    """A context manager around the workers, which enforces deadlines and records failures. A run must end within
    `runtime.stop_deadline_s` after a stop request. After half of this time, the current step is abandoned if it has not
    changed the weights yet. `abandon`: a function that reports an error and ends the process. The
    watchdog's thread calls it."""

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        *,
        stop: StopFlag,
        report: Report,
        abandon: Callable[[MillraceError], None],
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        self.stop, self.report = stop, report
        self._layout = layout
        self._abandon = abandon
        self._step = step
        self._deadlines = config.runtime.deadlines
        self._stop_deadline_s = config.runtime.stop_deadline_s
        self._last_phase = ""
        self._has_hung = False
        self.aside: Callable[[], str] = str
        """A function that describes the current stage of saving a checkpoint, or returns ''. The message about a hang
        includes this text."""
        self._running: tuple[_Running, ...] = ()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="watch", daemon=True)
        self._folder = layout.logs / "stacks"

    def __enter__(self) -> Self:
        """Start the watchdog's thread. Only processes that start after this call can write their stacks."""
        stacks.open_folder(self._folder)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        stacks.close_folder(self._folder)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enforce the deadline of a phase inside the `with` block. Raises StepAbandonedError on entry if a stop was
        requested too long ago and the step has not changed the weights."""
        self._last_phase = name
        waited = self.stop.seconds_since_request()
        if waited is not None and waited > self._stop_deadline_s / 2 and name in BEFORE_THE_UPDATE:
            raise StepAbandonedError(f"the step was abandoned before {name}: a stop was requested {waited:.0f} s ago")
        limit_s = float(getattr(self._deadlines, DEADLINE_OF[name]))
        outer = self._running
        self._running = (*outer, _Running(name, time.monotonic(), limit_s))
        self._arm_last_resort()
        try:
            yield
        finally:
            self._running = outer
            self._arm_last_resort()

    def _arm_last_resort(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._running:
            innermost = self._running[-1]
            left_s = max(0.0, innermost.limit_s - (time.monotonic() - innermost.begun))
            faulthandler.dump_traceback_later(left_s + LAST_RESORT_S, exit=True, file=sys.__stderr__ or sys.stderr)

    def _poll(self) -> None:
        while not self._ended.wait(POLL_S):
            waited = self.stop.seconds_since_request()
            if waited is not None and waited > self._stop_deadline_s:
                self._stop_takes_too_long()
                return
            now = time.monotonic()
            late = next((one for one in self._running if now - one.begun > one.limit_s), None)
            if late is not None:
                self._on_hang(late.phase, now - late.begun)
                return

    def num_failures(self, kind: str) -> int:
        """Return the number of failures of this kind in the run."""
        return sum(failure.kind == kind for failure in read_failures(self._layout.run_dir))

    def record_failure(self, error: Exception) -> Exception:
        """Record an error that ends this process. Return the error as converted by `as_known_error`."""
        known = as_known_error(error, self._last_phase)
        failure = failure_from(known, self._last_phase, self._step())
        if not self._has_hung:  # errors after a hang are its consequences
            # Other ranks may still wait for the lost one.
            self._record(self._with_stacks(failure) if isinstance(known, WorkerLostError) else failure)
        return known

    def _on_hang(self, phase: str, seconds: float) -> None:
        self._has_hung = True
        where = f"in {phase} after step {self._step()}"
        key = f"runtime.deadlines.{DEADLINE_OF[phase]}"
        message = f"{key}: hang {where}: no end after {seconds:.0f} s{self._saving}"
        failures = [Failure(HangError.failure_kind, phase, self._step(), message)]
        # The file system of the stacks and the failure may hang too.
        _run_with_timeout(STACKS_S, lambda: failures.append(self._with_stacks(failures[0])))
        failure = failures[-1]
        _run_with_timeout(FINAL_REPORT_S, lambda: self._record(failure))
        self._abandon(HangError(f"{message}. Stacks of every process: {failure.stacks}"))

    @property
    def _saving(self) -> str:
        return f"; {stage}" if (stage := self.aside()) else ""

    def _stop_takes_too_long(self) -> None:
        running = self._running
        where = f"{running[-1].phase if running else 'its end'}{self._saving}"
        self._abandon(
            StopRequestedError(
                f"runtime.stop_deadline_s: the run had not ended {self._stop_deadline_s:g} s after a stop request (in "
                f"{where}), and was killed. Start again to resume from the last checkpoint"
            )
        )

    def _with_stacks(self, failure: Failure) -> Failure:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        file = self._layout.failures / f"stacks-{stamp}-{os.getpid()}.txt"
        try:
            write_text_atomically(file, f"{failure}\n{failure.message}\n\n{stacks.report(self._folder)}")
        except Exception as reason:  # the failure itself must be recorded
            log.warning("the stacks could not be written: %s", reason)
            return failure
        return replace(failure, stacks=str(file))

    def _record(self, failure: Failure) -> None:
        self.report(
            {
                "event": "fault",
                "text": f"{failure}; stacks: {failure.stacks}" if failure.stacks else str(failure),
                "kind": failure.kind,
                "phase": failure.phase,
                "step": failure.step,
            }
        )
        log.error("failure: %s: %s", failure, failure.message)
        append_failure(self._layout.run_dir, failure)


def report_and_exit(say: Callable[[], None], code: int) -> NoReturn:
    """Call `say` for at most `FINAL_REPORT_S` seconds, because it may block on a full pipe. Then end the process."""
    _run_with_timeout(FINAL_REPORT_S, say)
    exit_immediately(code)


def exit_immediately(code: int) -> NoReturn:
    """End this process and its children without cleanup. The process that delivers the journal to MLflow continues."""
    _run_with_timeout(FINAL_REPORT_S, sys.stdout.flush)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if TRACKING_MODULE not in child.cmdline():
                child.send_signal(signal.SIGKILL)
    os._exit(code)


def _run_with_timeout(seconds: float, do: Callable[[], None]) -> None:
    """Call `do` in another thread and wait at most `seconds`. Signal handlers may call this function, because it
    starts the thread with `_thread` and does not use the locks of `threading`."""
    is_done = _thread.allocate_lock()
    is_done.acquire()

    def run() -> None:
        try:
            do()
        finally:
            is_done.release()

    _thread.start_new_thread(run, ())
    is_done.acquire(timeout=seconds)
