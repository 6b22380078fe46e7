"""A launcher for commands that must end when their parent process dies.

    python -S -E flows/server/launch.py PARENT_PID COMMAND...

The launcher asks the kernel to send SIGTERM to the launcher as soon as the thread that started the launcher ends. This
request remains valid after the launcher has replaced itself with the command. A `preexec_fn` could make the same
request, but it may deadlock if the parent has threads. The launcher delays the start of the command by 20 ms.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

PR_SET_PDEATHSIG = 1
EXIT_PARENT_GONE = 143  # the shell's code for SIGTERM, if the parent died before the command started
_LAUNCH = (sys.executable, "-S", "-E", str(Path(__file__).resolve()))


def tethered_command(command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command`. The command gets SIGTERM when the calling Python process dies."""
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
    """Start a command in a new session, without input, and append its output to `log`. The command inherits
    `descriptors` and works in `folder` or the current folder. With `tether`, the command ends with this process.
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
    """Return a `PYTHONPATH` for a new process: our source folder, the current `PYTHONPATH` and then `more`."""
    source = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"), *more)))


MAX_TAIL_BYTES = 1 << 20  # longest end of a log that `log_tail` reads
NUM_LAST_LINES = 20
HINTS = {
    "Can't locate revision": "Its database was written by a newer version of it: install that version, or name "
    "another database.",
    "out-of-date database schema": "Its database was written by an older version of it: make a copy, then "
    "`mlflow db upgrade ADDRESS`.",
    "Connection refused": "Its database does not answer: is it running, and is the address right?",
    "password authentication failed": "Its database refuses the user or the password in the address.",
    "already in use": "Another process has taken its port: run the command again.",
}
"""Remedies for known errors of servers. Each key is a part of the error's message in a log."""


def log_tail(log: str | Path, hints: Mapping[str, str] = HINTS) -> str:
    """Return the last lines of a log file that are not empty. A deleted file has no lines.

    If the log's end contains known errors, which are the keys of `hints`, their remedies come first.
    """
    content = b""
    with suppress(FileNotFoundError), Path(log).open("rb") as file:
        file.seek(max(0, Path(log).stat().st_size - MAX_TAIL_BYTES))
        content = file.read()
    found = [hint for words, hint in hints.items() if words.encode() in content[-4_000:]]
    lines = [f"    {text}" for line in content.split(b"\n") if (text := line_text(line)).strip()]
    return "\n".join([" ".join([*found, f"The end of {log}:"]), *lines[-NUM_LAST_LINES:]])


def line_text(line: bytes) -> str:
    """Return a line of a log as text. Of a progress bar, only the last state is returned."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


def main() -> None:
    """Replace this process with the command in the arguments."""
    parent, *command = sys.argv[1:]
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # only on Linux: other systems do not notice a lost parent
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit(EXIT_PARENT_GONE)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
