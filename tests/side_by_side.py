"""Real ranks for a test: a process each, side by side."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_side_by_side(
    *arguments: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float = 540
) -> list[tuple[str, str]]:
    """`python ARGUMENTS` for each, in the project's root: what each wrote to its output and to its errors.

    All must end well; none outlives the call. They write to files: who fills a pipe would wait until it is read.
    """
    with ExitStack() as stack:
        started = []
        for one in arguments:
            output, errors = (stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(2))
            process = subprocess.Popen(
                [sys.executable, *one],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append((process, output, errors))
        codes = [process.wait(timeout=timeout_s) for process, _, _ in started]
        found = []
        for _, *files in started:
            for file in files:
                file.seek(0)
            output, errors = (file.read() for file in files)
            found.append((output, errors))
        assert codes == [0] * len(codes), "\n".join((output + errors)[-8_000:] for output, errors in found)
        return found
