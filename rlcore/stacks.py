"""The stacks of all processes of a run, in one text, for whoever asks why it hangs. Standard library and psutil.

Each process calls `register` at its start. A signal then makes it write where its threads are to a file of its own,
even while it is stuck in C code; a stopped process cannot, and is reported as stopped.
"""

import faulthandler
import os
import shutil
import signal
import tempfile
import time
from io import TextIOWrapper
from pathlib import Path

FOLDER_VARIABLE = "MILLRACE_STACKS"
"""Environment variable with the folder of the processes' files; without it nothing is registered."""
DUMP_SIGNAL = signal.SIGUSR2
ANSWER_WAIT_S = 3.0
"""A process that does not answer in this time is reported without a stack."""
POLL_S = 0.02

_file: TextIOWrapper | None = None


def register(name: str) -> None:
    """Answer the signal from now on. `name` says what this process is: `rank-0`, `scorer`. Never fails."""
    global _file
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    try:
        _file = (Path(folder) / f"{name}-{os.getpid()}.txt").open("w")  # open for good: the signal writes to it
    except OSError:  # another host, a full disk
        return
    faulthandler.register(DUMP_SIGNAL, file=_file, all_threads=True, chain=False)


def open_folder(folder: Path) -> None:
    """Take a folder for the files of the processes that are started from here on; what lies there is deleted."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.txt"):  # of a trainer that was killed
        path.unlink(missing_ok=True)
    os.environ[FOLDER_VARIABLE] = str(folder)


def close_folder(folder: Path) -> None:
    """Delete it and what is in it."""
    os.environ.pop(FOLDER_VARIABLE, None)
    shutil.rmtree(folder, ignore_errors=True)


def report(folder: Path) -> str:
    """What this process, those that registered in `folder`, and all descendants are doing."""
    import psutil

    registered = {_pid_of(path): path for path in sorted(folder.glob("*.txt"))}
    sections = [_section(f"trainer, process {os.getpid()}", _state(os.getpid()), _own_stacks())]
    for pid, path in registered.items():
        if psutil.pid_exists(pid):
            sections.append(_section(f"{path.stem.rpartition('-')[0]}, process {pid}", _state(pid), _stack(pid, path)))
        else:
            sections.append(_section(f"{path.stem.rpartition('-')[0]}, process {pid}", "has ended", path.read_text()))
    for child in psutil.Process().children(recursive=True):
        if child.pid not in registered:
            try:
                name = " ".join(child.cmdline())[:200] or child.name()
            except psutil.Error:
                continue
            sections.append(_section(f"process {child.pid}: {name}", _state(child.pid), ""))
    return "\n".join(sections)


def _section(title: str, state: str, text: str) -> str:
    return f"=== {title} ({state})\n{text}"


def _own_stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _stack(pid: int, path: Path) -> str:
    """What a registered process writes when it is asked."""
    if _state(pid).startswith("stopped"):
        return "It was stopped from outside (SIGSTOP) and answers nothing; SIGCONT lets it go on.\n"
    if not _holds_open(pid, path):  # the signal would end a process that does not wait for it
        return "Its id is another process's here: it has ended, or is on another host.\n" + path.read_text()
    before = path.stat().st_size
    try:
        os.kill(pid, DUMP_SIGNAL)
    except OSError as error:
        return f"It cannot be asked: {error}\n"
    deadline, size = time.monotonic() + ANSWER_WAIT_S, before
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        now = path.stat().st_size
        if now == size > before:  # it has said all
            break
        size = now
    with path.open() as file:
        file.seek(before)
        return file.read() or f"It did not answer in {ANSWER_WAIT_S:g} s: it hangs in the kernel, or has no time.\n"


def _holds_open(pid: int, path: Path) -> bool:
    """Whether it is the process that registered with that file."""
    import psutil

    try:
        return any(path.samefile(file.path) for file in psutil.Process(pid).open_files())
    except (psutil.Error, OSError):
        return False


def _state(pid: int) -> str:
    """The kernel's word for it, and where in the kernel it waits."""
    import psutil

    try:
        state = str(psutil.Process(pid).status())
    except psutil.Error:
        return "has ended"
    try:
        waits_in = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except OSError:
        waits_in = ""
    return f"{state}, in {waits_in}" if waits_in else state


def _pid_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
