"""The training step: collection of responses, advantage estimates, updates, metrics and alarms."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

EnterPhase = Callable[[str], AbstractContextManager[object]]
"""A function that gets a phase's name and returns a context manager, inside which the phase runs. To prevent the phase,
the function raises an error."""


class PhaseClock:
    """The wall-clock seconds of each phase of a step. The durations of a phase that runs several times are added."""

    def __init__(self, enter: EnterPhase = nullcontext) -> None:
        self._enter = enter
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside the `with` block to the phase `name`."""
        started = time.perf_counter()
        try:
            with self._enter(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of each finished phase. The key `step` holds the seconds since the clock was created."""
        return {**self._seconds, "step": time.perf_counter() - self._started}
