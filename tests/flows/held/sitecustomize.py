"""Lets a trainer stay in a phase until it is told to stop, so that the stop arrives in that phase and in no other.

Python runs this file at its start where PYTHONPATH names its folder. In a trainer of which HOLD_PHASE names a phase and
HOLD_FILE a file, the phase is entered as ever; then the file is made, and the phase goes on once a stop was asked for.
Where the file is there already, nothing is held. HOLD_AFTER: how many times the phase is gone through before, by this
trainer or by one before it. Each may be several, with commas between them.

HOLD_SETTINGS names a file with such variables as JSON, for a stack: its worker has one environment for all runs.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HELD_FOR_S = 280.0


def times_before(passed: Path) -> int:
    """How many times this was called with this file before, by any process."""
    with passed.open("ab") as times:
        times.write(b".")
        return times.tell() - 1


def hold(phase_name: str, file: Path, after: int) -> None:
    """Wrap `Watchdog.phase`."""
    from rlcore.run.watchdog import Watchdog

    whole, passed = Watchdog.phase, file.with_name(f"{file.name}.{phase_name}")

    @contextmanager
    def phase(self: Watchdog, name: str) -> Iterator[None]:
        with whole(self, name):
            if name == phase_name and not file.exists() and times_before(passed) >= after:
                file.touch()
                deadline = time.monotonic() + HELD_FOR_S
                while self.stop.seconds_since_request() is None and time.monotonic() < deadline:
                    time.sleep(0.02)
            yield

    Watchdog.phase = phase  # type: ignore[method-assign]


if "rlcore.run.process" in sys.orig_argv and Path(os.environ.get("HOLD_SETTINGS", "")).is_file():
    os.environ.update(json.loads(Path(os.environ["HOLD_SETTINGS"]).read_text()))
if "rlcore.run.process" in sys.orig_argv and "HOLD_PHASE" in os.environ:
    phases, files = (os.environ[name].split(",") for name in ("HOLD_PHASE", "HOLD_FILE"))
    for phase, file, after in zip(phases, files, os.environ.get("HOLD_AFTER", "0").split(","), strict=True):
        hold(phase, Path(file), int(after))
