"""The command line of Millrace. This module also reports errors and sets the exit code.

A command's docstring is its help. A command imports large packages only when it runs.
"""

import atexit
import errno
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from flows import SOURCE_FOLDER
from flows.commands import run, runs, stack, tracking
from flows.commands.new import new
from flows.commands.rollouts import audit, rollouts
from flows.commands.settings import command_group
from flows.sweep.command import sweep
from rlcore.errors import EXIT_RESUMABLE, RESUMABLE, ConfigError, MillraceError
from rlcore.run.stop import SAME_REQUEST_S

EXIT_FAILED, EXIT_WRONG_SETTINGS = 1, 2
CLICK_INTERRUPTED = 130  # exit code of typer after a keyboard interrupt
EXPECTED_OS_ERRORS = frozenset({
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSPC, errno.EDQUOT, errno.EINVAL,
    errno.EISDIR,
})  # fmt: skip
"""The file errors that are reported without a traceback. The message names the file."""
INTERRUPTED = "interrupted; the same command resumes"

COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Run": {
        "run": run.run, "sft": run.sft, "train": run.train, "sweep": sweep, "validate": run.validate,
        "eval": tracking.evaluate,
    },
    "Look at results": {
        "runs": runs.runs, "logs": runs.logs, "checkpoints": tracking.checkpoints, "rollouts": rollouts, "audit": audit,
        "report": tracking.report, "compare": tracking.compare, "ui": tracking.ui, "sync": tracking.sync,
    },
    "Write and check": {"new": new, "doctor": stack.doctor},
    "Operate": {
        "stop": runs.stop, "slots": runs.slots, "up": stack.up, "down": stack.down, "status": stack.status,
        "deploy": stack.deploy, "metrics": stack.metrics,
    },
}  # fmt: skip
DATA_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Commands": {"make": run.make, "pass-rates": run.pass_rates}
}
app = command_group(
    COMMANDS,
    "Experiments in reinforcement learning of language models: data, training, validation and report as one run.",
    pretty_exceptions_enable=False,
)
app.add_typer(
    command_group(DATA_COMMANDS, "Make datasets, and measure them."), name="data", rich_help_panel="Write and check"
)


def _show_version(requested: bool) -> None:
    if requested:
        from importlib import metadata

        typer.echo(f"millrace {metadata.version('millrace')}")
        raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Handle the global option `--version`."""


def main() -> NoReturn:
    """Run `millrace`. An expected error is reported as a message instead of a traceback."""
    open_standard_streams()
    extend_module_path()
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # otherwise each command asks for a login
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # a flow's environment needs no torch
    run_and_exit(app)


def open_standard_streams() -> None:
    """Replace each closed standard stream by the null device, and make open output streams accept every text.

    Without the null device, the next file that this process opens would take the place of the closed stream. An open
    output stream escapes the characters that it cannot encode, instead of raising an error.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 until the end
        elif mode == "w":
            getattr(sys, name).reconfigure(errors="backslashreplace")


def extend_module_path() -> None:
    """Append the source folder and then the working folder to the module path.

    The working folder comes last, because it must not hide our package `data`.
    """
    sys.path.append(str(SOURCE_FOLDER))
    with suppress(FileNotFoundError):  # a deleted folder; each command reports it
        sys.path.append(str(Path.cwd()))


def run_and_exit(command: Callable[[], object]) -> NoReturn:
    """Run a command and end the process.

    The last exit handler calls `os._exit`, because Python's normal shutdown would take another 3 s.
    """
    signal.signal(signal.SIGTERM, _sigterm_handler())
    codes: list[int] = []

    def end() -> None:
        logging.shutdown()
        is_flushed = _flush_stdout()
        with suppress(OSError):
            sys.stderr.flush()
        if codes:  # none after an unexpected error, whose traceback Python prints
            os._exit(codes[0] if is_flushed else codes[0] or EXIT_FAILED)

    atexit.register(end)  # the first handler registered runs last
    codes.append(exit_code(command))
    if (url := os.environ.get("PREFECT_API_URL")) and "flows.pipeline" in sys.modules:  # a flow ran
        from flows.server.api import is_reachable

        if not is_reachable(url):  # Prefect's exit handlers would wait for the server
            print(f"the end was not reported to Prefect: no server answers at {url}", file=sys.stderr)
            end()
    sys.exit(codes[0])


def _flush_stdout() -> bool:
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            with suppress(OSError):
                _report(f"not all of the output could be written: {error}", EXIT_FAILED)
        return False
    return True


def _sigterm_handler() -> Callable[[int, FrameType | None], None]:
    """Return a SIGTERM handler that raises KeyboardInterrupt.

    A second SIGTERM is ignored if it comes within `SAME_REQUEST_S` seconds, because both signals may belong to one
    request to stop.
    """
    requested_at = float("-inf")

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal requested_at
        if time.monotonic() - requested_at > SAME_REQUEST_S:
            requested_at = time.monotonic()
            raise KeyboardInterrupt

    return interrupt


def exit_code(command: Callable[[], object]) -> int:
    """Run a command, report its error on standard error, and return the exit code of the process."""
    try:
        command()
    except SystemExit as exit:
        if exit.code == CLICK_INTERRUPTED:
            return _report(INTERRUPTED, EXIT_RESUMABLE)
        return exit.code if isinstance(exit.code, int) else EXIT_FAILED
    except MillraceError as error:
        failed = EXIT_WRONG_SETTINGS if isinstance(error, ConfigError) else EXIT_FAILED
        return _report(error, EXIT_RESUMABLE if isinstance(error, RESUMABLE) else failed)
    except OSError as error:
        if error.errno not in EXPECTED_OS_ERRORS:
            raise
        file = error.filename2 or error.filename or "the output, or a file"
        return _report(f"{file}: {error.strerror}", EXIT_FAILED)
    except KeyboardInterrupt:
        return _report(INTERRUPTED, EXIT_RESUMABLE)
    return 0


def _report(message: object, code: int) -> int:
    from flows.progress import printable  # not imported by a start that succeeds

    print(printable(str(message)), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
