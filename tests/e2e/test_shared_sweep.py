"""Several processes work on one sweep, and one is killed: no run is trained twice or lost.

python -m tests.e2e.test_shared_sweep ROOT NAME     # one of the processes; it appends to ROOT/log.jsonl
"""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from flows import chain
from flows.stages.train import Train
from flows.sweep.flow import SweepWorker
from flows.sweep.study import Member
from flows.work.open_run import open_run
from rlcore.config.sweep import Sweep, load_sweep
from rlcore.storage.publish import write_text_atomically
from tests.flows.conftest import ended, forked, journal, wait_until
from tests.helpers.share_of_digits import LEARNING

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SPEC = f"""
name: shared
experiment: debug
overrides: [trainer.total_steps=2, tracking.enabled=false, {", ".join(LEARNING)}]
grid: {{optim.lr: [3e-3, 1.0]}}
"""


def shared_sweep(root: Path) -> Sweep:
    file = root / "shared.yaml"
    write_text_atomically(file, SPEC)
    return load_sweep(str(file), [f"paths.root={root}"])


def work(root: Path, name: str) -> None:
    def log(what: str, run_id: str) -> None:
        with (root / "log.jsonl").open("ab", buffering=0) as file:
            file.write(json.dumps({"what": what, "run": run_id, "by": name}).encode() + b"\n")

    def train(member: Member, to_step: int, label: str) -> None:
        with open_run(member.config) as run:
            log("begun", run.run_id)
            for stage in chain.stages_until(run.config, Train.name, to_step):
                chain.run_on_console(stage, run)
            log("ended", run.run_id)

    with disable_run_logger():
        SweepWorker(shared_sweep(root), train, name).run()


def log_of(root: Path) -> list[dict[str, Any]]:
    file = root / "log.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_two_processes_share_a_sweep_and_one_is_killed(artifacts_root: Path) -> None:
    root = artifacts_root
    killed, other = (forked(__name__, [str(root), name], os.environ) for name in ("killed", "other"))
    wait_until(lambda: any(one["by"] == "killed" for one in log_of(root)), "the first has begun a run")
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    done = ended(other)
    assert done.code == 0, done.err

    lines = log_of(root)
    trained = Counter(one["run"] for one in lines if one["what"] == "ended")
    assert set(trained.values()) == {1}
    assert trained.keys() == {one["run"] for one in lines}, "what the killed one had begun, the other one has ended"
    document = json.loads((shared_sweep(root).folder / "sweep.json").read_text())
    assert sorted(point["point"] for point in document["points"]) == [1, 2]
    assert {point["state"] for point in document["points"]} == {"finished"}
    for point in document["points"]:
        (run,) = point["runs"]
        assert [one["step"] for one in journal(Path(run["run_dir"]))] == [0, 1, 2], "each step once"


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2])
