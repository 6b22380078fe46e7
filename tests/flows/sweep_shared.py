"""One process of a sweep that several share. Each run is trained by a real trainer, without Prefect.

    python -m tests.flows.sweep_shared ROOT NAME

Writes to ROOT/log.jsonl what it begins and ends.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from prefect.logging import disable_run_logger

from flows import chain
from flows.stages.train import Train
from flows.sweep.drive import Drive, Task
from flows.sweep.record import sweep_directory
from flows.work.open_run import open_run
from rlcore.config.sweep_load import Sweep, load_sweep
from rlcore.storage.publish import write_text_atomically
from tests.share_of_digits import LEARNING

POINTS = (3e-3, 1.0, 1e-3, 3.0)
SPEC = f"""
name: shared
experiment: debug
overrides: [trainer.total_steps=2, validation.every_steps=1, tracking.enabled=false, {", ".join(LEARNING)}]
grid: {{optim.lr: {list(POINTS)}}}
pruning: {{every_steps: 1, confidence: 0.5}}
"""


def shared_sweep(root: Path) -> Sweep:
    """The sweep that all processes work on."""
    file = root / "shared.yaml"
    write_text_atomically(file, SPEC)
    return load_sweep(str(file), [f"paths.root={root}"])


class Logged:
    """Trains one run after the other, and logs it."""

    def __init__(self, root: Path, name: str) -> None:
        self._file = root / "log.jsonl"
        self._name = name

    def work(self, tasks: Iterator[Task]) -> Iterator[tuple[Task, str]]:
        """Train each to its step."""
        for task in tasks:
            config = task.member.config
            with open_run(config) as run:
                self._log("begun", run.run_id, task.to_step)
                chain.run_stages(run, chain.run_here, Train.name, task.to_step)
                self._log("ended", run.run_id, task.to_step)
            yield task, ""

    def _log(self, what: str, run_id: str, step: int) -> None:
        line = {"what": what, "run": run_id, "step": step, "by": self._name}
        with self._file.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")


def main(root: Path, name: str) -> None:
    sweep = shared_sweep(root)
    with disable_run_logger():
        Drive(sweep, sweep_directory(sweep), Logged(root, name).work, {}).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
