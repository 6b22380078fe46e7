"""Real ranks for a test, each in a separate process."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.helpers.forked import ROOT, fork_module


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
