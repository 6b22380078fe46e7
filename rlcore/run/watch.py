"""Sees to it that no phase of a run lasts for ever, and that a run which is told to stop does.

The trainer says which phase it is in; a thread looks at the time. Python threads cannot run while C code keeps the
interpreter lock, so a timer of `faulthandler`, which needs none, stands behind: it writes the stacks to the log and
ends the process.
"""

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rlcore.config.deadlines import DeadlineConfig
from rlcore.errors import StopRequestedError

if TYPE_CHECKING:  # it imports torch, and a test of the watch alone needs none
    from rlcore.checkpoint.background import UnderWay

LOOK_EVERY_S = 0.25
LAST_RESORT_S = 60.0
"""Beyond a phase's deadline: by then the thread has acted, unless it could not run."""

DEADLINE_OF = {
    "start": "start_s",
    "gen": "generate_s",
    "reward": "score_s",
    "old_log_prob": "forward_s",
    "ref": "forward_s",
    "values": "forward_s",
    "adv": "forward_s",
    "update_critic": "update_s",
    "update_actor": "update_s",
    "update_weights": "hand_over_s",
    "testing": "validate_s",
    "save_checkpoint": "save_s",
    "commit": "save_s",
    "export": "save_s",
    "profile": "save_s",
    "load": "load_s",
}
"""Phase -> its key in `runtime.deadlines`. Phases of a step have the names of their `timing_s` metrics."""
BEFORE_THE_UPDATE = frozenset({"gen", "reward", "old_log_prob", "ref", "values", "adv"})
"""Phases that change nothing: a step that is given up in them leaves the weights of the step before."""

SLOW_AFTER_S = 120.0
"""A save that takes longer is told; the largest that were measured take a minute. A tenth of `save_s` where that is
less."""

log = logging.getLogger("rlcore.run.watch")


class StepAbandonedError(StopRequestedError):
    """A stop was asked for and the step takes too long: it is given up before it changed anything."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """A phase that lasts too long; `key`: the setting that says how long it may."""

    phase: str
    seconds: float
    key: str


@dataclass(frozen=True, slots=True)
class _Running:
    phase: str
    begun: float
    limit_s: float


class Watch:
    """Use as a context manager.

    Args:
        deadlines: seconds of each phase.
        stop_asked_s: seconds since a stop was asked for; None while none was.
        stop_deadline_s: a run that was told to stop has ended after this time. The step has half of it to finish.
        on_hang: called in the watch's thread, once; must end the process.
        on_stop_overdue: the same for a stop.
        on_slow: called in the watch's thread with what a save is at and for how many seconds; again when it has taken
            twice as long.
    """

    def __init__(
        self,
        deadlines: DeadlineConfig,
        *,
        stop_asked_s: Callable[[], float | None],
        stop_deadline_s: float,
        on_hang: Callable[[Overdue], None],
        on_stop_overdue: Callable[[], None],
        on_slow: Callable[[str, float], None] = lambda what, seconds: None,
    ) -> None:
        self._deadlines = deadlines
        self._stop_asked_s = stop_asked_s
        self._stop_deadline_s = stop_deadline_s
        self._on_hang = on_hang
        self._on_stop_overdue = on_stop_overdue
        self._on_slow = on_slow
        self.aside: Callable[[], UnderWay | None] = lambda: None
        """What a save is at beside the phases."""
        self._slow: tuple[float, float] = (0.0, 0.0)
        self._running: tuple[_Running, ...] = ()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def __enter__(self) -> Self:
        """Start to look."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    @property
    def phase_name(self) -> str:
        """The innermost phase; "" between phases."""
        running = self._running
        return running[-1].phase if running else ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is this phase.

        Raises:
            StepAbandonedError: at its begin, where a stop waits too long and nothing has been changed yet.
        """
        waited = self._stop_asked_s()
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
        """For the innermost phase: there is one such timer in a process."""
        faulthandler.cancel_dump_traceback_later()
        if self._running:
            innermost = self._running[-1]
            left_s = max(0.0, innermost.limit_s - (time.monotonic() - innermost.begun))
            faulthandler.dump_traceback_later(left_s + LAST_RESORT_S, exit=True, file=sys.__stderr__ or sys.stderr)

    def _tell_if_slow(self, now: float) -> None:
        under_way = self.aside()
        if under_way is None:
            return
        begun, after_s = self._slow
        if begun != under_way.begun:
            after_s = min(SLOW_AFTER_S, self._deadlines.save_s / 10)
        took_s = now - under_way.begun
        is_slow = took_s > after_s
        self._slow = (under_way.begun, 2 * took_s if is_slow else after_s)
        if is_slow:
            self._on_slow(under_way.what, took_s)

    def _look(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            waited = self._stop_asked_s()
            if waited is not None and waited > self._stop_deadline_s:
                self._on_stop_overdue()
                return
            now = time.monotonic()
            self._tell_if_slow(now)
            late = next((one for one in self._running if now - one.begun > one.limit_s), None)
            if late is not None:
                key = f"runtime.deadlines.{DEADLINE_OF[late.phase]}"
                self._on_hang(Overdue(late.phase, now - late.begun, key))
                return
