"""Run a command that ends with the process that started it.

    python -S -E flows/server/tether.py PARENT_PID COMMAND...

The kernel sends SIGTERM to the command when its parent dies, however that happens. The signal is asked for here, after
an exec, and not in a `preexec_fn`: Python code in a forked child of a threaded process may deadlock. The kernel watches
the thread that forked, so start such commands from a thread that lives as long as they may.

Run as a file, with nothing imported but the standard library: it costs 20 ms.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
PARENT_IS_GONE = 143
"""Exit code where the parent died before the command could start: what a shell gives for SIGTERM."""


def tethered(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` tethered to this process."""
    return [sys.executable, "-S", "-E", str(Path(__file__).resolve()), str(os.getpid()), *command]


def main() -> None:
    """Ask for the signal, then become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux alone has it; elsewhere a lost parent is not noticed
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(PARENT_IS_GONE)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
