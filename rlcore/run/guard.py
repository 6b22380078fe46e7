"""What stands between a run and its faults: the watch, the stacks of all processes, the record of what went wrong."""

import _thread
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn, Self

import psutil

from rlcore import stacks
from rlcore.config import RunConfig
from rlcore.errors import HangError, MillraceError, StopRequestedError, WorkerLostError
from rlcore.run.faults import Fault, FaultKind, as_ours, fault_of, note_fault, read_faults
from rlcore.run.layout import RunLayout
from rlcore.run.watch import Overdue, Watch
from rlcore.storage.publish import write_text_atomically

if TYPE_CHECKING:  # it imports torch, and a test of the watch alone needs none
    from rlcore.checkpoint.background import UnderWay

TRACKING_MODULE = "rlcore.tracking"
"""The process that delivers metrics: it outlives the trainer on purpose, until everything is delivered."""

LAST_WORDS_S = 5.0
"""For what a process that ends at once has still to write; nobody may read it."""

STACKS_S = 40.0
"""For the stacks of all processes of a run that hangs: each is asked and waited for."""

log = logging.getLogger("rlcore.run.guard")


class Guard:
    """Use as a context manager, before workers are started.

    Args:
        config: of the run.
        layout: of the run.
        stop_asked_s: seconds since a stop was asked for; None while none was.
        report: hears of faults.
        give_up: says an error to whoever waits and ends the process; called from a thread.
        step: the last finished step.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        *,
        stop_asked_s: Callable[[], float | None],
        report: Callable[[Mapping[str, object]], None],
        give_up: Callable[[MillraceError], None],
        step: Callable[[], int],
    ) -> None:
        self._layout = layout
        self._report = report
        self._give_up = give_up
        self._step = step
        self._stop_deadline_s = config.runtime.stop_deadline_s
        self._last_phase = ""
        self._open = ExitStack()
        self._watch = Watch(
            config.runtime.deadlines,
            stop_asked_s=stop_asked_s,
            stop_deadline_s=config.runtime.stop_deadline_s,
            on_hang=self._hangs,
            on_stop_overdue=self._stop_takes_too_long,
            on_slow=self._is_slow,
        )

    def __enter__(self) -> Self:
        """Processes that are started from here on can be asked for their stacks."""
        self._folder = self._layout.logs / "stacks"
        stacks.open_folder(self._folder)
        self._open.callback(stacks.close_folder, self._folder)
        self._open.enter_context(self._watch)
        return self

    def __exit__(self, *error: object) -> None:
        """Look no more."""
        self._open.close()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """The block is this phase; see `Watch.phase`."""
        self._last_phase = name
        return self._watch.phase(name)

    def attend(self, saving: "Callable[[], UnderWay | None]") -> None:
        """`saving` says what a save is at: one that takes long is told."""
        self._watch.aside = saving

    def faults(self) -> list[Fault]:
        """All faults of the run so far."""
        return read_faults(self._layout.run_dir)

    def fault(self, error: Exception) -> Exception:
        """Record an error that ends this process; the error as one of ours, where it is a known fault."""
        ours = as_ours(error, self._last_phase)
        found = fault_of(ours, self._last_phase, self._step())
        # The others may still wait for a rank that is lost: their stacks say where.
        self._record(self._with_stacks(found) if isinstance(ours, WorkerLostError) else found)
        return ours

    def _hangs(self, overdue: Overdue) -> None:
        where = f"in {overdue.phase} after step {self._step()}"
        message = f"{overdue.key}: hang {where}: no end after {overdue.seconds:.0f} s{self._of_save()}"
        found = [Fault(FaultKind.HANG, overdue.phase, self._step(), message)]
        # What hangs may be the file system that the stacks and the fault would be written to.
        _within(STACKS_S, lambda: found.append(self._with_stacks(found[0])))
        fault = found[-1]
        _within(LAST_WORDS_S, lambda: self._record(fault))
        self._give_up(HangError(f"{message}. What every process was doing: {fault.stacks}"))

    def _is_slow(self, what: str, seconds: float) -> None:
        text = (
            f"{what} since {seconds:.0f} s; does the file system answer? What waits for it counts as hung after "
            "runtime.deadlines.save_s"
        )
        _within(LAST_WORDS_S, lambda: self._report({"event": "note", "text": text}))
        _within(LAST_WORDS_S, lambda: log.warning("%s", text))

    def _of_save(self) -> str:
        """What the save under way is at, if there is one."""
        saving = self._watch.aside()
        return "" if saving is None else f"; {saving.what}"

    def _stop_takes_too_long(self) -> None:
        where = f"{self._watch.phase_name or 'its end'}{self._of_save()}"
        self._give_up(
            StopRequestedError(
                f"runtime.stop_deadline_s: told to stop, the run had not ended after {self._stop_deadline_s:g} s (in "
                f"{where}), and was ended. Start again to go on from the last checkpoint"
            )
        )

    def _with_stacks(self, fault: Fault) -> Fault:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        file = self._layout.failures / f"stacks-{stamp}-{os.getpid()}.txt"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(file, f"{fault}\n{fault.message}\n\n{stacks.report(self._folder)}")
        except Exception as reason:  # the fault itself matters more than its picture
            log.warning("the stacks could not be written: %s", reason)
            return fault
        return replace(fault, stacks=str(file))

    def _record(self, fault: Fault) -> None:
        self._report(
            {
                "event": "fault",
                "text": f"{fault}; stacks: {fault.stacks}" if fault.stacks else str(fault),
                "kind": str(fault.kind),
                "phase": fault.phase,
                "step": fault.step,
            }
        )
        log.error("fault: %s: %s", fault, fault.message)
        note_fault(self._layout.run_dir, fault)


def say_and_end(say: Callable[[], None], code: int) -> NoReturn:
    """Say why, and end at once: who should hear it may have been stopped, and its pipe be full."""
    _within(LAST_WORDS_S, say)
    end_at_once(code)


def end_at_once(code: int) -> NoReturn:
    """End this process and what it has started, without a goodbye. What it has written to the journal is delivered by
    the process beside it, which sees that it has ended."""
    _within(LAST_WORDS_S, sys.stdout.flush)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if TRACKING_MODULE not in child.cmdline():
                child.send_signal(signal.SIGKILL)
    os._exit(code)


def _within(seconds: float, do: Callable[[], None]) -> None:
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
