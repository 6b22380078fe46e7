"""Start a command in another way than as a plain child: tethered to its parent, or detached from it.

    python -S -E flows/server/launch.py tethered PARENT_PID COMMAND...
    python -S -E flows/server/launch.py detached LOG COMMAND...

Tethered: the kernel sends SIGTERM to the command when its parent dies, however that happens. The signal is asked for
here, after an exec, and not in a `preexec_fn`: Python code in a forked child of a threaded process may deadlock. The
kernel watches the thread that forked, so start such commands from a thread that lives as long as they may.

Detached: the command outlives whoever starts it, and its process id is printed. It gets a session of its own, no input,
and LOG for its output. Its parent is init, so it leaves no zombie.

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
PARENT_IS_GONE = 143
"""Exit code where the parent died before the command could start: what a shell gives for SIGTERM."""
_LAUNCH = (sys.executable, "-S", "-E", str(Path(__file__).resolve()))


def tethered(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` tethered to this process."""
    return [*_LAUNCH, "tethered", str(os.getpid()), *command]


def start_tethered(
    command: Sequence[str], log: Path, environment: Mapping[str, str], descriptors: Sequence[int] = ()
) -> "subprocess.Popen[bytes]":
    """Start a command tethered, in a session of its own, without input, and with its output at the end of `log`.

    An interrupt at the keyboard is for us, and we end it. `descriptors`: those of ours that it inherits.
    """
    import subprocess

    with log.open("ab") as output:
        return subprocess.Popen(
            tethered(command),
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


def detached(log: Path, command: Sequence[str]) -> list[str]:
    """The command line that starts `command` detached, with its output in `log`, and prints its process id."""
    return [*_LAUNCH, "detached", str(log), *command]


def _tether(parent: int) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux alone has it; elsewhere a lost parent is not noticed
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(PARENT_IS_GONE)


def _detach(log: str) -> None:
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        sys.exit()
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.fchmod(output, 0o600)  # a server's log may say more than everybody should read
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)


def main() -> None:
    """Replace this process by the command."""
    way, place, *command = sys.argv[1:]
    if way == "tethered":
        _tether(int(place))
    else:
        _detach(place)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
