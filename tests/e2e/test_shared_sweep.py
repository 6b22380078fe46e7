"""Several processes work on one sweep, and one is killed: no run is trained twice or lost."""

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.flows.conftest import ended, forked, journal, wait_until
from tests.helpers.sweep_shared import shared_sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def log_of(root: Path) -> list[dict[str, Any]]:
    file = root / "log.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_two_processes_share_a_sweep_and_one_is_killed(artifacts_root: Path) -> None:
    root = artifacts_root

    def process(name: str) -> Any:
        return forked("tests.helpers.sweep_shared", [str(root), name], os.environ)

    killed, other = process("killed"), process("other")
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
