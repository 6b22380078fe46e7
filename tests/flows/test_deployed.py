"""Runs of deployments on a stack that is up: wrong ones, by a clock, a sweep over the work pool, on Ray."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.flows.conftest import REPOSITORY, Finished, Millrace, ended, numbers, wait_until
from tests.flows.stack import ENDS, Stack, stack_up
from tests.flows.sweep_series import in_the_way
from tests.flows.sweep_specs import SPECS, UNTRACKED

pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.lengthy, pytest.mark.timeout(1800)]

TINY = ["trainer.total_steps=1", *UNTRACKED]
EVERY_S = 5.0
"""Interval of a schedule: much shorter than a run, so that the second one is due while the first one goes on."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that is up, with one worker."""
    root = tmp_path_factory.mktemp("stack")
    with stack_up(root) as stack:
        yield stack


def time_of(run: Mapping[str, Any], what: str) -> datetime:
    """A time stamp of a flow run."""
    return datetime.fromisoformat(str(run[what]).replace("Z", "+00:00"))


def assert_in_turn(runs: list[dict[str, Any]]) -> None:
    """None of them began before the one before had ended."""
    order = sorted(runs, key=lambda run: time_of(run, "start_time"))
    for one, after in pairwise(order):
        assert time_of(one, "end_time") <= time_of(after, "start_time"), (one["name"], after["name"])


# ---------------------------------------------------------------------- mistakes


def test_mistakes_fail_the_flow_run_with_the_command_lines_message(stack: Stack, bare: Millrace) -> None:
    wrong = ["trainer.totl_steps=5", "trainer.mini_batch_size=7"]
    spec = stack.root / "wrong.yaml"
    spec.write_text("name: wrong\nexperiment: debug\ngrid: {optim.lrr: [1]}\n")
    run = stack.start("pipeline/debug", overrides=wrong)
    of_a_sweep = stack.start("sweep/debug", spec=str(spec))
    for flow_run, words in ((run, ("run", "experiment=debug", *wrong)), (of_a_sweep, ("sweep", str(spec)))):
        told = bare(*words)
        assert told.code == 2
        found = stack.wait(flow_run, "FAILED")
        assert told.err.strip() in found["state"]["message"]
        assert found["run_count"] == 1, "trying again would not help"
        took = time_of(found, "end_time") - time_of(found, "start_time")
        print(f"{words}: failed {took.total_seconds():.2f} s after its start")
    assert "Did you mean trainer.total_steps?" in stack.run(run)["state"]["message"]
    assert "Did you mean optim.lr?" in stack.run(of_a_sweep)["state"]["message"]
    assert not (stack.root / "runs").exists()
    assert not (stack.root / "sweeps").exists()


# ---------------------------------------------------------------------- by a clock


def test_a_schedule_fires_twice_and_its_runs_do_not_overlap(stack: Stack) -> None:
    deployment = stack.deployment("train/local")["id"]
    schedule = {
        "active": True,
        "schedule": {"interval": EVERY_S, "anchor_date": datetime.now(UTC).isoformat()},
        "parameters": {"overrides": ["name=clock", *TINY]},
    }
    (made,) = stack.ask(f"deployments/{deployment}/schedules", [schedule])

    def runs(**more: Any) -> list[dict[str, Any]]:
        found = stack.api.filter("flow_runs", deployments={"id": {"any_": [deployment]}}, **more)
        return [run for run in found if run["auto_scheduled"]]

    def done() -> list[dict[str, Any]]:
        return [run for run in runs(sort="END_TIME_DESC") if run["state_type"] in ENDS]

    wait_until(lambda: len(done()) >= 2, "two runs of the schedule have ended")
    stack.ask(f"deployments/{deployment}/schedules/{made['id']}", method="DELETE")
    for run in runs():  # those that wait; one may be on its way
        if run["state_type"] in ("SCHEDULED", "PENDING"):
            stack.ask(f"flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLED"}, "force": True})
    wait_until(lambda: all(run["state_type"] in ENDS for run in runs(sort="START_TIME_DESC")), "the last one ends")
    begun = [run for run in runs(sort="START_TIME_ASC") if run["start_time"] and run["total_run_time"] > 0]
    first, second = sorted(begun, key=lambda run: time_of(run, "start_time"))[:2]
    assert [run["state_type"] for run in (first, second)] == ["COMPLETED", "COMPLETED"]
    assert time_of(second, "expected_start_time") < time_of(first, "end_time"), "it was due before the first had ended"
    assert_in_turn([first, second])
    assert sorted(numbers(stack.run_dir("clock"))) == [0, 1], "the second found the work of the first"


# ---------------------------------------------------------------------- sweeps on workers


def sweep(stack: Stack, name: str) -> Finished:
    """`millrace sweep --on-workers` with the stack's server."""
    environment = {"PREFECT_API_URL": stack.url, "PREFECT_HOME": str(stack.root / "prefect")}
    words = [str(stack.root / "specs" / f"{name}.yaml"), *UNTRACKED, f"paths.root={stack.root}", "--on-workers"]
    return ended(
        subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "sweep", *words],
            cwd=REPOSITORY,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )


def record_of(stack: Stack, name: str) -> dict[str, Any]:
    """The sweep's `sweep.json`."""
    (file,) = stack.root.glob(f"sweeps/{name}-*/sweep.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def children_of(stack: Stack, parent: str) -> list[dict[str, Any]]:
    """Flow runs that a flow run has started."""
    return stack.api.filter("flow_runs", flow_runs={"parent_flow_run_id": {"any_": [parent]}})


def test_a_sweep_on_workers_goes_on_after_a_failed_child_and_runs_only_that_one_again(stack: Stack) -> None:
    folder = stack.root / "specs"
    folder.mkdir()
    (folder / "grid.yaml").write_text(SPECS["grid"])
    obstacle = in_the_way(folder, stack.root)

    # As a deployment, on a queue of its own; its children wait for each other in the queue `training`.
    run = stack.start("sweep/countdown-lr", spec=str(folder / "grid.yaml"), overrides=list(UNTRACKED))
    for number in range(1, 9):  # a deadline for each: eight processes, one after the other

        def has_ended(number: int = number) -> bool:
            ended_ones = [child for child in children_of(stack, run) if child["state_type"] in ENDS]
            return len(ended_ones) >= number or stack.run(run)["state_type"] in ENDS

        wait_until(has_ended, f"child {number} has ended")
    stack.wait(run, "COMPLETED")
    children = children_of(stack, run)
    assert sorted(child["state_type"] for child in children) == ["COMPLETED"] * 7 + ["FAILED"]
    assert {child["deployment_id"] for child in children} == {stack.deployment("sweep-child/local")["id"]}
    assert {child["work_queue_name"] for child in children} == {"training"}
    assert_in_turn(children)
    points = record_of(stack, "grid")["points"]
    assert [point["state"] for point in points] == ["finished", "failed", "finished", "finished"]
    assert "validation" in points[1]["error"]

    # Again, by the command: the one that had failed, and no other.
    obstacle.unlink()
    done = sweep(stack, "grid")
    assert done.code == 0, done.err
    assert "4 of 4 points finished, 1 runs worked on, 1 steps" in done.out
    again = stack.newest("sweep")
    (child,) = children_of(stack, again["id"])
    assert child["name"] == "debug optim.lr=0.0003 algo=rloo seed=2 to step 1"
    assert child["state_type"] == "COMPLETED"

    # The comparison says what the journals say.
    points = record_of(stack, "grid")["points"]
    for point in points:
        scores = [numbers(Path(one["run_dir"]))[1]["val-core/countdown/reward/mean@2"] for one in point["runs"]]
        assert point["score"] == pytest.approx(fmean(scores))
    (comparison,) = stack.root.glob("sweeps/grid-*/comparison/comparison.json")
    assert len(json.loads(comparison.read_text())["tables"]["runs"]["rows"]) == 8
    assert f"best: point {max(points, key=lambda one: (one['score'], -one['point']))['point']}," in done.out


# ---------------------------------------------------------------------- Ray


def test_the_log_of_ray_workers_is_in_the_flow_runs_log(stack: Stack) -> None:
    loud = "algo.policy_loss=tests.flows.spoken:speaks"
    run = stack.start("train/local", overrides=["name=on_ray", *TINY, "runtime=ray", loud])
    stack.wait(run, "COMPLETED")
    logs = stack.api.filter("logs", logs={"flow_run_id": {"any_": [run]}})
    lines = [str(one["message"]) for one in logs]
    assert any(re.search(r"pid=\d+.*a worker speaks", line) for line in lines), lines
