"""Ends a run whose phase lasts too long, or which does not stop when it is told to, and records faults.

The trainer says which phase it is in; a thread compares the time with the phase's deadline. Python threads cannot run
while C code keeps the interpreter lock, so a timer of `faulthandler`, which needs none, stands behind: it writes the
stacks to the log and ends the process.
"""

import _thread
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NoReturn, Self

import psutil

from rlcore import stacks
from rlcore.config import RunConfig
from rlcore.errors import HangError, MillraceError, StopRequestedError, WorkerLostError
from rlcore.run.failures import Failure, append_failure, as_known_error, failure_from, read_failures
from rlcore.run.layout import RunLayout
from rlcore.run.stop import StopFlag
from rlcore.storage.publish import write_text_atomically

Report = Callable[[Mapping[str, object]], None]
"""Takes an event for the flow."""

POLL_S = 0.25
LAST_RESORT_S = 60.0
"""Beyond a phase's deadline: by then the thread has acted, unless it could not run."""

PHASES = {
    "start_s": ("start",),
    "generate_s": ("gen",),
    "score_s": ("reward", "environment"),
    "forward_s": ("old_log_prob", "ref", "values", "adv"),
    "update_s": ("update_critic", "update_actor", "supervise"),
    "hand_over_s": ("update_weights",),
    "validate_s": ("testing",),
    "save_s": ("save_checkpoint", "commit", "export", "start_model", "profile"),
    "load_s": ("load",),
}
"""The phases of each key in `runtime.deadlines`. Phases of a step have the names of their `timing_s` metrics."""
DEADLINE_OF = {phase: key for key, phases in PHASES.items() for phase in phases}
BEFORE_THE_UPDATE = frozenset({"gen", "environment", "reward", "old_log_prob", "ref", "values", "adv"})
"""Phases that change nothing: a step that is given up in them leaves the weights of the step before."""

TRACKING_MODULE = "rlcore.tracking"
"""The process that delivers metrics: it outlives the trainer on purpose, until everything is delivered."""

FINAL_REPORT_S = 5.0
"""For the final output of a process that ends at once: its reader may be gone."""

STACKS_S = 40.0
"""For the stacks of all processes of a run that hangs: each is asked and waited for."""

log = logging.getLogger("rlcore.run.watchdog")


class StepAbandonedError(StopRequestedError):
    """A stop was asked for and the step takes too long: it is given up before it changed anything."""


@dataclass(frozen=True, slots=True)
class _Running:
    phase: str
    begun: float
    limit_s: float


class Watchdog:
    """Compares the time of each phase, of a save and of a stop with its deadline, in a thread; records a run's faults,
    with the stacks of all processes. A context manager, entered before workers start.

    Args:
        stop: whether the run was told to stop. The step has half of `runtime.stop_deadline_s` to finish then, and the
            run all of it to end.
        give_up: reports an error and ends the process; called from a thread.
        step: the last finished step.
    """

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
        self._give_up = abandon
        self._step = step
        self._deadlines = config.runtime.deadlines
        self._stop_deadline_s = config.runtime.stop_deadline_s
        self._last_phase = ""
        self._has_hung = False
        self.aside: Callable[[], str] = str
        """The save under way beside the phases, for the message about a hang."""
        self._running: tuple[_Running, ...] = ()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="watch", daemon=True)
        self._folder = layout.logs / "stacks"

    def __enter__(self) -> Self:
        """Start the thread. Processes that are started from here on can be asked for their stacks."""
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
        """Watch the block as this phase.

        Raises:
            StepAbandonedError: at its begin, where a stop waits too long and nothing has been changed yet.
        """
        self._last_phase = name
        waited = self.stop.seconds_since_request()
        if waited is not None and waited > self._stop_deadline_s / 2 and name in BEFORE_THE_UPDATE:
            raise StepAbandonedError(f"the step was given up before {name}: a stop was asked for {waited:.0f} s ago")
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
        """Set the timer for the innermost phase: a process has one such timer."""
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
        """Count the run's faults of this kind."""
        return sum(fault.kind == kind for fault in read_failures(self._layout.run_dir))

    def record_failure(self, error: Exception) -> Exception:
        """Record an error that ends this process; the error as one of ours, where it is a known fault."""
        ours = as_known_error(error, self._last_phase)
        found = failure_from(ours, self._last_phase, self._step())
        if not self._has_hung:  # what is ended after a hang raises here, and is no fault of its own
            # The others may still wait for a rank that is lost: their stacks say where.
            self._record(self._with_stacks(found) if isinstance(ours, WorkerLostError) else found)
        return ours

    def _on_hang(self, phase: str, seconds: float) -> None:
        self._has_hung = True
        where = f"in {phase} after step {self._step()}"
        key = f"runtime.deadlines.{DEADLINE_OF[phase]}"
        message = f"{key}: hang {where}: no end after {seconds:.0f} s{self._phase_of_save()}"
        found = [Failure(HangError.failure_kind, phase, self._step(), message)]
        # What hangs may be the file system that the stacks and the fault would be written to.
        _run_with_timeout(STACKS_S, lambda: found.append(self._with_stacks(found[0])))
        fault = found[-1]
        _run_with_timeout(FINAL_REPORT_S, lambda: self._record(fault))
        self._give_up(HangError(f"{message}. What every process was doing: {fault.stacks}"))

    def _phase_of_save(self) -> str:
        """What the save under way is at, if there is one."""
        saving = self.aside()
        return f"; {saving}" if saving else ""

    def _stop_takes_too_long(self) -> None:
        running = self._running
        where = f"{running[-1].phase if running else 'its end'}{self._phase_of_save()}"
        self._give_up(
            StopRequestedError(
                f"runtime.stop_deadline_s: told to stop, the run had not ended after {self._stop_deadline_s:g} s (in "
                f"{where}), and was ended. Start again to go on from the last checkpoint"
            )
        )

    def _with_stacks(self, fault: Failure) -> Failure:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        file = self._layout.failures / f"stacks-{stamp}-{os.getpid()}.txt"
        try:
            write_text_atomically(file, f"{fault}\n{fault.message}\n\n{stacks.report(self._folder)}")
        except Exception as reason:  # the fault itself matters more than its picture
            log.warning("the stacks could not be written: %s", reason)
            return fault
        return replace(fault, stacks=str(file))

    def _record(self, fault: Failure) -> None:
        self.report(
            {
                "event": "fault",
                "text": f"{fault}; stacks: {fault.stacks}" if fault.stacks else str(fault),
                "kind": fault.kind,
                "phase": fault.phase,
                "step": fault.step,
            }
        )
        log.error("fault: %s: %s", fault, fault.message)
        append_failure(self._layout.run_dir, fault)


def report_and_exit(say: Callable[[], None], code: int) -> NoReturn:
    """Run `say` for a few seconds at most, and end at once: the reader may be stopped, and its pipe be full."""
    _run_with_timeout(FINAL_REPORT_S, say)
    exit_immediately(code)


def exit_immediately(code: int) -> NoReturn:
    """End this process and what it has started, without cleaning up. What it has written to the journal is delivered by
    the process beside it, which sees that it has ended."""
    _run_with_timeout(FINAL_REPORT_S, sys.stdout.flush)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if TRACKING_MODULE not in child.cmdline():
                child.send_signal(signal.SIGKILL)
    os._exit(code)


def _run_with_timeout(seconds: float, do: Callable[[], None]) -> None:
    """Wait that long at most. The caller may be a signal's handler in the middle of a write, or of `threading`."""
    is_done = _thread.allocate_lock()
    is_done.acquire()

    def run() -> None:
        try:
            do()
        finally:
            is_done.release()

    _thread.start_new_thread(run, ())
    is_done.acquire(timeout=seconds)
