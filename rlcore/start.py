"""The start of a process: no garbage collection while it imports."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import what a process needs for good: no garbage is looked for inside the block, nor later in what it made.

    The collector would visit all modules again and again: a fifth of the time in which a trainer starts, and a second
    at its end.
    """
    gc.disable()
    atexit.register(gc.freeze)  # the interpreter's last collections have nothing to visit
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
