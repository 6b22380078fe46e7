"""Start a command tethered to its parent.

    python -S -E flows/server/launch.py PARENT_PID COMMAND...

The kernel sends SIGTERM to the command when its parent dies. The signal is requested here after an exec, not in a
`preexec_fn`: Python code in a forked child of a threaded process may deadlock. The kernel watches the thread that
forked, so the starting thread must outlive the command.

Run as a file that imports the standard library alone, this costs 20 ms.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

PR_SET_PDEATHSIG = 1
EXIT_PARENT_GONE = 143
"""Exit code if the parent died before the command started: the shell's code for SIGTERM."""
_LAUNCH = (sys.executable, "-S", "-E", str(Path(__file__).resolve()))


def tethered_command(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` tethered to this process."""
    return [*_LAUNCH, str(os.getpid()), *command]


def start_process(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    descriptors: Sequence[int] = (),
    *,
    folder: Path | None = None,
    tether: bool = True,
) -> "subprocess.Popen[bytes]":
    """Start a command in a new session, without input, and append its output to `log`.

    An interrupt at the keyboard does not reach it.

    Args:
        descriptors: Inherited descriptors of this process.
        folder: Working folder; None: that of this process.
        tether: Whether it ends with this process.
    """
    import subprocess

    with log.open("ab") as output:
        return subprocess.Popen(
            tethered_command(command) if tether else command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=descriptors,
            start_new_session=True,
            env=environment,
        )


def python_path(*more: str) -> str:
    """Return the `PYTHONPATH` for a process that runs our code: our source, then the environment's path."""
    source = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"), *more)))


NUM_LAST_LINES = 15
HINTS = {
    "Can't locate revision": "Its database was written by a newer version of it: install that version, or name "
    "another database.",
    "out-of-date database schema": "Its database was written by an older version of it: make a copy, then "
    "`mlflow db upgrade ADDRESS`.",
    "Connection refused": "Its database does not answer: is it running, and is the address right?",
    "password authentication failed": "Its database refuses the user or the password in the address.",
    "already in use": "Another process has taken its port: run the command again.",
}
"""Remedy by a text in the last lines of a log."""


def log_tail(log: str) -> str:
    """Return the last lines of a log, after the remedies for known errors."""
    text = Path(log).read_text(errors="replace")
    hints = [hint for words, hint in HINTS.items() if words in text[-4_000:]]
    lines = [f"    {line}" for line in text.splitlines()[-NUM_LAST_LINES:]]
    return "\n".join([" ".join([*hints, f"The end of {log}:"]), *lines])


def _tether(parent: int) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux only; elsewhere a lost parent is not noticed
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(EXIT_PARENT_GONE)


def main() -> None:
    """Replace this process by the command."""
    parent, *command = sys.argv[1:]
    _tether(int(parent))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
