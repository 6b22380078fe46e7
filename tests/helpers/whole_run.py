"""A run from its first command to its last in a trainer process, without a flow; events are printed.

python -m tests.helpers.whole_run --run RUN_DIR
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import EXIT_RESUMABLE
from rlcore.run.process import run
from rlcore.run.stop import StopFlag
from rlcore.run.watchdog import exit_immediately
from rlcore.tracking.lineage import read_origin


def print_event(event: Mapping[str, object]) -> None:
    print(json.dumps(event), flush=True)


class WholeRun:
    """A stand-in for `Channel` with the commands of a run's stages. `send` receives the events."""

    def __init__(self, run_dir: Path, send: Callable[[Mapping[str, object]], None] = print_event) -> None:
        origin = read_origin(run_dir)
        assert origin is not None
        self._config = origin.settings
        self.send = send

    def commands(self, stop: Callable[[], bool]) -> Iterator[Mapping[str, Any]]:
        yield {"command": "warm_start"}
        if self._config.pass_rates.is_enabled:
            yield {"command": "measure_pass_rates"}
        if not self._config.is_supervised:
            yield {"command": "train", "to_step": self._config.trainer.total_steps}
            yield {"command": "validate", "checkpoint": "start", "name": "before"}
        yield {"command": "validate", "checkpoint": "last", "name": "after"}
        yield {"command": "export", "checkpoint": "last"}


def run_whole(run_dir: Path, send: Callable[[Mapping[str, object]], None] = print_event) -> int:
    """Train to the end, or until a signal stops it; return the exit code."""
    stop = StopFlag(lambda: exit_immediately(EXIT_RESUMABLE))
    stop.install()
    return run(run_dir, WholeRun(run_dir, send), stop)


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO)
    sys.exit(run_whole(Path(sys.argv[2])))
