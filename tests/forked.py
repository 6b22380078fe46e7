"""Processes for tests, forked from one that has imported the trainer already: an import costs 5 to 8 s of a core.

The standard library's fork server does it: one for each process of pytest, started at first use. A forked process runs
a module as `python -m MODULE ARGUMENTS` would, with an environment, a working directory and files of its own. Signals,
kills and exit codes are those of any process; only its command line is the fork server's.
"""

import io
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["rlcore.run.process", "rlcore.workers.worker", "pandas"])  # pyarrow imports it to read


def fork_module(
    module: str,
    arguments: Sequence[str],
    *,
    output: Path,
    errors: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start `python -m MODULE ARGUMENTS` in the project's root and a session of its own.

    Args:
        module: Full name of a module with a `__main__` part.
        arguments: Its `sys.argv[1:]`.
        output: File to whose end standard output goes.
        errors: File for standard error; None: the same as `output`.
        environment: All of its variables; None: those of this process.
    """
    files = str(output), str(errors or output)
    process = SERVER.Process(  # type: ignore[attr-defined]  # known for forkserver contexts only
        target=_run, args=(module, [*arguments], *files, dict(os.environ if environment is None else environment))
    )
    process.start()
    return process


def run_module(
    module: str,
    arguments: Sequence[str],
    *,
    output: Path,
    errors: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float,
) -> int:
    """As `fork_module`, until it ends; returns its exit code. After `timeout_s` it is killed (-9)."""
    process = fork_module(module, arguments, output=output, errors=errors, environment=environment)
    try:
        process.join(timeout_s)
    finally:
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(module: str, arguments: list[str], output: str, errors: str, environment: dict[str, str]) -> None:
    """In the forked process."""
    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((0, os.devnull), (1, output), (2, errors)):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (
        io.open(number, mode, buffering=1, closefd=False)  # noqa: SIM115, UP020 (until the process ends)
        for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
