"""Seconds of each phase of a step."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

EnterPhase = Callable[[str], AbstractContextManager[object]]
"""Returns the context in which a phase of this name runs; raises to prevent it."""


class PhaseClock:
    """Wall seconds by phase, on the driver. Repeated phases add up."""

    def __init__(self, enter: EnterPhase = nullcontext) -> None:
        self._enter = enter
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the block to `name`."""
        started = time.perf_counter()
        try:
            with self._enter(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of finished phases, and `step`: all since the clock was created."""
        return {**self._seconds, "step": time.perf_counter() - self._started}
