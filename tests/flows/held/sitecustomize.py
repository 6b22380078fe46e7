"""Hold a trainer in the phase HOLD_PHASE until a stop is requested, unless HOLD_FILE exists. Python runs it at its
start.

HOLD_AFTER is the number of earlier passes through the phase. Each may be a list with commas. HOLD_SETTINGS is a JSON
file with these variables, because the worker of a stack has one environment for all runs.
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
    with passed.open("ab") as times:
        times.write(b".")
        return times.tell() - 1


def hold(phase_name: str, file: Path, after: int) -> None:
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
