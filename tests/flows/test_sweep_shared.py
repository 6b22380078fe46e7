"""Several processes work on one sweep, and one of them is killed: nothing is trained twice, nothing is forgotten."""

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from flows.sweep.drive import Drive, Task
from flows.sweep.record import sweep_directory
from tests.flows.conftest import ended, forked, journal, wait_until
from tests.flows.sweep_shared import shared_sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def nothing_to_do(tasks: Iterator[Task]) -> Iterator[tuple[Task, str]]:
    """Fails if it is given a run."""
    for task in tasks:
        raise AssertionError(f"{task.label} to step {task.to_step} is not done")
    return iter(())


def log_of(root: Path) -> list[dict[str, Any]]:
    file = root / "log.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_three_processes_one_of_them_killed_share_a_sweep(artifacts_root: Path) -> None:
    root = artifacts_root

    def process(name: str) -> Any:
        return forked("tests.flows.sweep_shared", [str(root), name], os.environ)

    killed, second = process("killed"), process("second")
    wait_until(lambda: any(one["by"] == "killed" for one in log_of(root)), "the first has begun a run")
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    third = process("third")
    for one in (second, third):
        done = ended(one)
        assert done.code == 0, done.err

    # Every run that was trained to a step was so by one process; what the killed one had begun, another has ended.
    lines = log_of(root)
    trained = Counter((one["run"], one["step"]) for one in lines if one["what"] == "ended")
    assert set(trained.values()) == {1}
    assert trained.keys() == {(one["run"], one["step"]) for one in lines}
    sweep = shared_sweep(root)
    document = json.loads((sweep_directory(sweep) / "sweep.json").read_text())
    states = {point["settings"]["optim.lr"]: point["state"] for point in document["points"]}
    assert set(states.values()) == {"finished", "stopped early"}
    for point in document["points"]:
        (run,) = point["runs"]
        steps = [one["step"] for one in journal(Path(run["run_dir"]))]
        assert steps == list(range(point["runs"][0]["step"] + 1)), "each step once"
        assert steps[-1] == (2 if point["state"] == "finished" else 1)

    # One process alone, with a study of its own, decides the same of these runs, and finds nothing to do.
    shutil.rmtree(sweep_directory(sweep))
    alone = Drive(sweep, sweep_directory(sweep), nothing_to_do, {})
    with disable_run_logger():
        alone.run()
    assert {point.settings["optim.lr"]: point.state for point in alone.points.values()} == states
