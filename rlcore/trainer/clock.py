"""Seconds of each phase of a step."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

EnterPhase = Callable[[str], AbstractContextManager[object]]
"""Called with a phase's name when the phase begins, which runs inside the result; raises where it must not begin."""


class PhaseClock:
    """Wall seconds by phase, on the driver. A phase entered twice adds up."""

    def __init__(self, enter: EnterPhase = nullcontext) -> None:
        self._enter = enter
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block to `name`."""
        begun = time.perf_counter()
        try:
            with self._enter(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begun

    def seconds(self) -> Mapping[str, float]:
        """Each phase so far, and `step`: everything since the clock was made."""
        return {**self._seconds, "step": time.perf_counter() - self._started}
