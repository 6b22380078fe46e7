"""Start a command tethered to its parent.

    python -S -E flows/server/launch.py PARENT_PID COMMAND...

The kernel sends SIGTERM to the command when its parent dies, however that happens. The signal is asked for
here, after an exec, and not in a `preexec_fn`: Python code in a forked child of a threaded process may deadlock. The
kernel watches the thread that forked, so start such commands from a thread that lives as long as they may.

Run as a file, with nothing imported but the standard library: it costs 20 ms.
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
"""Exit code where the parent died before the command could start: what a shell gives for SIGTERM."""
_LAUNCH = (sys.executable, "-S", "-E", str(Path(__file__).resolve()))


def tethered_command(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` tethered to this process."""
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
    """Start a command in a session of its own, without input, and with its output at the end of `log`.

    An interrupt at the keyboard does not reach it.

    Args:
        descriptors: descriptors of this process that it inherits.
        folder: where it is started; None: in the folder of this process.
        tether: end it with this process.
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
    """`PYTHONPATH` of a process that is to run the code that we run: our source first, then the environment's."""
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
    "already in use": "Another process has taken its port meanwhile: run the command again.",
}
"""Text at the end of a log, and the remedy that is shown for it."""


def log_tail(log: str) -> str:
    """The last lines of a log, and what to do where one of them says it."""
    text = Path(log).read_text(errors="replace")
    hints = [hint for words, hint in HINTS.items() if words in text[-4_000:]]
    lines = [f"    {line}" for line in text.splitlines()[-NUM_LAST_LINES:]]
    return "\n".join([" ".join([*hints, f"The end of {log}:"]), *lines])


def _tether(parent: int) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux alone has it; elsewhere a lost parent is not noticed
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
