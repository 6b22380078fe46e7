"""Processes for tests, forked from one that has imported the trainer already, because an import takes 5 to 8 s of a
core.

A forked process runs a module as `python -m MODULE ARGUMENTS` would. Signals, kills and exit codes are as usual.
"""

import atexit
import gc
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SERVER = multiprocessing.get_context("forkserver")
# Of the command line what costs most; not Prefect, which reads its settings from the environment when it is imported.
SERVER.set_forkserver_preload(
    [
        "rlcore.run.process", "rlcore.workers.worker", "flows.cli", "flows.work.checks", "pandas", "pyarrow.parquet",
        "mlflow", "mlflow.store.tracking.sqlalchemy_store", "matplotlib.figure", "matplotlib.backends.backend_svg",
        "fastapi", "rich.console",
    ]
)  # fmt: skip


def fork_module(
    module: str,
    arguments: Sequence[str],
    *,
    output: Path,
    errors: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start `python -m MODULE ARGUMENTS` in the project's root and a new session. The files get its output."""
    files = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) for path in (output, errors or output)]
    return _forked(module, arguments, files, os.environ if environment is None else environment)


def run_module(
    module: str,
    arguments: Sequence[str],
    *,
    output: Path,
    errors: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float,
) -> int:
    """Call `fork_module`, wait, and return the exit code. The process is killed after `timeout_s`."""
    process = fork_module(module, arguments, output=output, errors=errors, environment=environment)
    try:
        process.join(timeout_s)
    finally:
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def run_side_by_side(
    *commands: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float = 540
) -> list[tuple[str, str]]:
    """Run `python -m MODULE ARGUMENTS` for each command, and return the output and errors of each.

    With an environment, which allocator and importer read at their start, each is a new interpreter, otherwise forked.
    """
    with TemporaryDirectory() as folder, ExitStack() as stack:
        codes, files = [], []
        for number, (module, *arguments) in enumerate(commands):
            output, errors = (Path(folder) / f"{number}.{name}" for name in ("out", "err"))
            files.append((output, errors))
            if environment is None:
                forked = fork_module(module, arguments, output=output, errors=errors)
                stack.callback(forked.join)
                stack.callback(forked.kill)
                codes.append(lambda process=forked: process.join(timeout_s) or process.exitcode)
            else:
                with output.open("w") as out, errors.open("w") as err:
                    command = [sys.executable, "-m", module, *arguments]
                    started = subprocess.Popen(
                        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
                    )
                stack.callback(started.wait)
                stack.callback(started.kill)
                codes.append(lambda process=started: process.wait(timeout_s))
        ended = [code() for code in codes]
        found = [(output.read_text(), errors.read_text()) for output, errors in files]
        assert ended == [0] * len(ended), "\n".join((output + errors)[-8_000:] for output, errors in found)
        return found


def loaded_by(statement: str) -> set[str]:
    """Return the packages that a statement loads."""
    code = f"{statement}; import sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


class ForkedCommand(subprocess.Popen[str]):
    """A forked `Popen` of a module in a folder and a new session, with pipes for its output and errors as text."""

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path = ROOT
    ) -> None:
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        self._process = _forked(module, arguments, [out_end, err_end], environment, folder)
        self.args = [module, *arguments]
        self.stdin, self.stdout, self.stderr = None, io.open(out), io.open(err)  # noqa: SIM115, UP020
        self.pid, self.returncode = self._process.pid or 0, None  # type: ignore[assignment]
        # What `Popen.communicate` reads.
        self._child_created = self.text_mode = True
        self._communication_started, self._input = False, None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._process.exitcode  # type: ignore[assignment]
        return self.returncode

    def __del__(self) -> None:
        """Do nothing, because the fork server waits for the process."""

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def _forked(
    module: str, arguments: Sequence[str], outputs: Sequence[int], environment: Mapping[str, str], folder: Path = ROOT
) -> BaseProcess:
    process: BaseProcess = SERVER.Process(  # type: ignore[attr-defined]  # known for forkserver contexts only
        target=_run, args=(module, [*arguments], _Sent(outputs), dict(environment), folder)
    )
    try:
        process.start()
    finally:
        for descriptor in set(outputs):
            os.close(descriptor)
    return process


class _Sent:
    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = descriptors

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([reduction.DupFd(descriptor) for descriptor in self._descriptors],)


def _run(module: str, arguments: list[str], outputs: list[Any], environment: dict[str, str], folder: Path) -> None:
    gc.freeze()  # what it shares with its fork server is not looked at: that would copy all of it
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    descriptors = [os.open(os.devnull, os.O_RDONLY), *(one.detach() for one in outputs)]
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    for descriptor in set(descriptors) - {0, 1, 2}:
        os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = (
        io.open(number, mode, buffering=1, closefd=False)  # noqa: SIM115, UP020 (until the process ends)
        for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)  # it is run, not imported
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing's processes leave them out
