"""The start of a process: where it imports from, and no garbage collection while it imports, or little."""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def import_path() -> str:
    """`PYTHONPATH` of a process that is to import what this one does. Python passes over an entry that is no text."""
    return os.pathsep.join(place or str(Path.cwd()) for place in sys.path if isinstance(place, str))


@contextmanager
def uncollected() -> Iterator[None]:
    """Import what a process needs for good: no garbage is looked for inside the block, nor later in what it made.

    The collector would visit all modules again and again: a fifth of the time in which a trainer starts, and a second
    at its end.
    """
    was_on = gc.isenabled()
    gc.disable()
    atexit.register(gc.freeze)  # the interpreter's last collections have nothing to visit
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def collect_rarely() -> None:
    """Collect garbage rarely, in a process that imports packages as it needs them: by Python's own threshold, 700 new
    objects, the collector takes two fifths of the time in which MLflow, Prefect or vLLM is imported."""
    gc.set_threshold(50_000, 20, 50)


def leave_uncollected() -> None:
    """Look for garbage once, and then no more in what is alive now: compiled code and models are hundreds of thousands
    of objects, and visiting them holds a step up for a tenth of a second. `gc.unfreeze` before they are given up."""
    gc.collect()
    gc.freeze()
