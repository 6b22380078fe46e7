"""The stacks of all processes of a run in one text, for the diagnosis of a hang.

A signal makes each process that called `register` write the stacks of its threads to a file. This works even while the
process executes C code."""

import faulthandler
import os
import shutil
import signal
import tempfile
import time
from io import TextIOWrapper
from pathlib import Path

import psutil

FOLDER_VARIABLE = "MILLRACE_STACKS"
"""The environment variable that names the folder of the stack files. Without this variable no process registers."""
DUMP_SIGNAL = signal.SIGUSR2
DUMP_TIMEOUT_S = 3.0
"""The time limit, in seconds, for a process to write its stacks."""
POLL_S = 0.02
_ENDED = "has ended"

_file: TextIOWrapper | None = None


def register(name: str) -> None:
    """Install the signal handler for stacks. `name` is the role of the process (`rank-0`). Never raises an error."""
    global _file
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    try:
        _file = (Path(folder) / f"{name}-{os.getpid()}.txt").open("w")  # stays open: the signal writes to it
    except OSError:  # another host, a full disk
        return
    faulthandler.register(DUMP_SIGNAL, file=_file, all_threads=True, chain=False)


def open_folder(folder: Path) -> None:
    """Create the folder for stacks, and delete old files from it. Processes that start after this call can register in
    the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.txt"):  # left by a killed trainer
        path.unlink(missing_ok=True)
    os.environ[FOLDER_VARIABLE] = str(folder)


def close_folder(folder: Path) -> None:
    """Delete the folder for stacks and its files."""
    os.environ.pop(FOLDER_VARIABLE, None)
    shutil.rmtree(folder, ignore_errors=True)


def report(folder: Path) -> str:
    """Return the stacks and states of this process and of all registered processes. For descendants that are not
    registered, only the states are returned."""
    registered = {int(path.stem.rpartition("-")[2]): path for path in sorted(folder.glob("*.txt"))}
    sections = [f"=== trainer, process {os.getpid()} ({_state(os.getpid())})\n{_own_stacks()}"]
    for pid, path in registered.items():
        sections.append(f"=== {path.stem.rpartition('-')[0]}, process {pid} ({_state(pid)})\n{_stack(pid, path)}")
    for child in psutil.Process().children(recursive=True):
        if child.pid not in registered:
            try:
                name = " ".join(child.cmdline())[:200] or child.name()
            except psutil.Error:
                continue
            sections.append(f"=== process {child.pid}: {name} ({_state(child.pid)})\n")
    return "\n".join(sections)


def _own_stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _stack(pid: int, path: Path) -> str:
    state = _state(pid)
    if state == _ENDED:
        return path.read_text()
    if state.startswith("stopped"):
        return "It was stopped from outside (SIGSTOP) and cannot answer; SIGCONT resumes it.\n"
    if not _holds_open(pid, path):  # without a handler the signal would end the process
        return "Its id belongs to another process here. It has ended, or is on another host.\n" + path.read_text()
    before = path.stat().st_size
    try:
        os.kill(pid, DUMP_SIGNAL)
    except OSError as error:
        return f"It cannot be signalled: {error}\n"
    deadline, size = time.monotonic() + DUMP_TIMEOUT_S, before
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        now = path.stat().st_size
        if now == size > before:  # the output is complete
            break
        size = now
    with path.open() as file:
        file.seek(before)
        return (
            file.read() or f"It did not answer in {DUMP_TIMEOUT_S:g} s: it hangs in the kernel, or gets no processor.\n"
        )


def _holds_open(pid: int, path: Path) -> bool:
    """Return whether the process has the file open. If it does not, the file belongs to another process with the same
    id, which has ended or is on another host."""
    try:
        return any(path.samefile(file.path) for file in psutil.Process(pid).open_files())
    except (psutil.Error, OSError):
        return False


def _state(pid: int) -> str:
    """Return the state of the process and the kernel function that it waits in."""
    try:
        state = str(psutil.Process(pid).status())
    except psutil.Error:
        return _ENDED
    try:
        waits_in = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except OSError:
        waits_in = ""
    return f"{state}, in {waits_in}" if waits_in else state
