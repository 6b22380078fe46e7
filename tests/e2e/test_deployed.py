"""Runs of deployments on a running stack: each stage, sweeps over the work pool, and runs on Ray."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest

from flows.stack.control import service_states
from flows.stack.state import read_stack
from tests.flows.conftest import HELD, ended, forked, numbers, wait_until
from tests.helpers.stack import ENDS, Stack, stack_up
from tests.helpers.sweeps import UNTRACKED, in_the_way, points_of, score_of, spec_of

pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.lengthy, pytest.mark.timeout(1800)]

TINY = ["trainer.total_steps=1", *UNTRACKED]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("stack")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOLD_PHASE", "update_actor")
        environment.setenv("HOLD_FILE", str(root / "held"))
        environment.setenv("HOLD_SETTINGS", str(root / "hold.json"))
        environment.setenv("PYTHONPATH", str(HELD))
        (root / "held").touch()
        with stack_up(root, ray=True) as stack:
            yield stack


def time_of(run: Mapping[str, Any], what: str) -> datetime:
    return datetime.fromisoformat(str(run[what]).replace("Z", "+00:00"))


def assert_in_turn(runs: list[dict[str, Any]]) -> None:
    order = sorted(runs, key=lambda run: time_of(run, "start_time"))
    for one, after in pairwise(order):
        assert time_of(one, "end_time") <= time_of(after, "start_time"), (one["name"], after["name"])


def test_each_stage_runs_alone(stack: Stack) -> None:
    given = ["name=clock", *TINY]
    rows = ["pipeline/dataset", "pipeline/filter", "pipeline/warm-start", "validate/validate-run"]
    for together in (["pipeline/train"], rows, ["report/report-run"]):
        for run in [stack.start(name, overrides=given) for name in together]:
            stack.wait(run, "COMPLETED")
    files = {path.name for path in stack.run_dir("clock").rglob("*")}
    assert {"before.json", "after.json", "report.html"} <= files


def test_sft_ends_after_the_supervised_stage(stack: Stack) -> None:
    given = ["name=alone", "warm_start.enabled=true", "warm_start.max_steps=4", "warm_start.stop_at_reward=null"]
    run = stack.wait(stack.start("pipeline/sft", overrides=[*given, *UNTRACKED]), "COMPLETED")
    assert re.search(r"held-out loss \d\.\d\d -> \d\.\d\d, 4 steps, \d+ s", run["state"]["message"])
    files = {path.name for path in stack.run_dir("alone").rglob("*")}
    assert {"before.json", "after.json", "report.html", "model.safetensors"} <= files
    assert "checkpoints" not in files


# ---------------------------------------------------------------------- sweeps on workers


def start_sweep(stack: Stack, name: str) -> "subprocess.Popen[str]":
    environment = {**stack.environment, "PREFECT_HOME": str(stack.root / "prefect")}
    words = [str(spec_of(stack.root, name)), *UNTRACKED, f"paths.root={stack.root}", "--on-workers"]
    return forked("flows.cli", ["sweep", *words], os.environ | environment)


def children_of(stack: Stack, parent: str) -> list[dict[str, Any]]:
    return stack.api.filter("flow_runs", flow_runs={"parent_flow_run_id": {"any_": [parent]}})


def test_a_sweep_on_workers_repeats_only_its_failed_child(stack: Stack) -> None:
    spec = spec_of(stack.root, "grid")
    obstacle = in_the_way(spec, stack.root)

    # A deployment on a separate queue; its children wait for each other in the queue `training`.
    run = stack.start("sweep/countdown-lr", spec=str(spec), overrides=list(UNTRACKED))
    for number in range(1, 3):  # a deadline for each: two processes, one after the other

        def has_ended(number: int = number) -> bool:
            ended_ones = [child for child in children_of(stack, run) if child["state_type"] in ENDS]
            return len(ended_ones) >= number or stack.run(run)["state_type"] in ENDS

        wait_until(has_ended, f"child {number} has ended")
    stack.wait(run, "COMPLETED")
    children = children_of(stack, run)
    assert sorted(child["state_type"] for child in children) == ["COMPLETED", "FAILED"]
    assert {child["deployment_id"] for child in children} == {stack.deployment("sweep-child/sweep-point")["id"]}
    assert {child["work_queue_name"] for child in children} == {"training"}
    assert_in_turn(children)
    points = points_of(stack.root, "grid")
    assert [point["state"] for point in points] == ["failed", "finished"]
    assert "validation" in points[0]["error"]

    # Again, by the command: the one that had failed, and no other.
    obstacle.unlink()
    done = ended(start_sweep(stack, "grid"))
    assert done.code == 0, done.err
    assert "2 of 2 points finished, 1 runs worked on, 1 steps" in done.out
    (child,) = children_of(stack, stack.newest("sweep")["id"])
    (folder,) = stack.root.glob("sweeps/grid-*")
    assert child["name"] == f"point of {folder.name}"
    assert child["state_type"] == "COMPLETED"


def hold_the_next(stack: Stack) -> None:
    """Make the next trainer that comes to an update stay in it. `wait_until_held` waits for the trainer."""
    (stack.root / "held").unlink()


def wait_until_held(stack: Stack, run: str) -> None:
    wait_until(
        lambda: (stack.root / "held").exists() or stack.run(run)["state_type"] in ENDS, "a trainer in its update"
    )
    assert stack.run(run)["state_type"] == "RUNNING", stack.run(run)["state"]


def states_below(stack: Stack, run: str) -> list[str]:
    return sorted(child["state_type"] for child in children_of(stack, run))


def test_a_search_on_workers_is_stopped_twice_and_resumes(stack: Stack) -> None:
    # Interrupted at the command: the open child saves, the one that waits is not begun.
    hold_the_next(stack)
    process = start_sweep(stack, "on workers")
    wait_until(lambda: (stack.root / "held").exists() or process.poll() is not None, "a trainer in its update")
    run = stack.newest("sweep")["id"]
    wait_until(lambda: len(children_of(stack, run)) == 2, "two concurrent points")
    process.send_signal(signal.SIGINT)
    stopped = ended(process)
    assert stopped.code == 75, stopped.err
    assert states_below(stack, run) == ["CANCELLED", "CANCELLED"]
    first, *others = stack.root.glob("runs/worked-*/checkpoints/step-*")
    assert (first.name, others) == ("step-000001", [])

    # As a deployment, cancelled in the page.
    spec = str(spec_of(stack.root, "on workers"))
    hold_the_next(stack)
    run = stack.start("sweep/countdown-lr", spec=spec, overrides=list(UNTRACKED))
    wait_until_held(stack, run)
    stack.set_state(run, {"type": "CANCELLING"})
    stack.wait(run, "CANCELLED")
    wait_until(lambda: set(states_below(stack, run)) <= {"CANCELLED", "COMPLETED"}, "its children are over")
    assert "CANCELLED" in states_below(stack, run)
    begun = len(children_of(stack, run))

    # Retried in the page, it continues its study.
    stack.retry_cancelled(run)
    for number in range(begun, begun + 4):  # a deadline for each: four processes, one after the other

        def has_ended(number: int = number) -> bool:
            ended_ones = [child for child in children_of(stack, run) if child["state_type"] in ENDS]
            return len(ended_ones) > number or stack.run(run)["state_type"] == "COMPLETED"

        wait_until(has_ended, f"child {number + 1} has ended")
    assert stack.wait(run, "COMPLETED")["run_count"] == 2
    children = [child for child in children_of(stack, run) if child["start_time"] and child["total_run_time"] > 0]
    assert {child["deployment_id"] for child in children} == {stack.deployment("sweep-child/sweep-point")["id"]}
    assert_in_turn(children)

    points = points_of(stack.root, "on_workers")
    assert [point["point"] for point in points] == [1, 2, 3, 4]
    for point in points:
        scores = {step: score_of(point["runs"][0], step) for step in (1, 2)}
        is_pruned = point["state"] == "stopped early"
        assert is_pruned or point["state"] == "finished"
        assert (scores[2] is None) == is_pruned, "a poor one is trained no further"
        assert point["score"] == scores[1 if is_pruned else 2]


def test_a_sweep_in_one_process_is_cancelled_and_tried_again(stack: Stack) -> None:
    hold_the_next(stack)
    run = stack.start("sweep/debug-sweep", spec=str(spec_of(stack.root, "stopped")))
    wait_until_held(stack, run)
    stack.set_state(run, {"type": "CANCELLING"})
    stack.wait(run, "CANCELLED")
    saved = [path.name for path in stack.root.glob("runs/stopped-*/checkpoints/step-*")]
    assert saved == ["step-000001"], "the open run is saved, the other has not begun"

    stack.retry_cancelled(run)
    assert stack.wait(run, "COMPLETED")["run_count"] == 2
    assert [point["state"] for point in points_of(stack.root, "stopped")] == ["finished", "finished"]


# ---------------------------------------------------------------------- Ray


def test_a_run_joins_the_ray_head_and_the_login_is_hidden(stack: Stack) -> None:
    assert {state for _, state in service_states(stack.root)} == {"up"}
    head = read_stack(stack.root).service("ray")
    assert head is not None
    joins = ["name=on_head", *TINY, "runtime=ray", f"runtime.ray_address={head.url}"]
    stack.wait(stack.start("pipeline/train", overrides=joins), "COMPLETED")
    assert sorted(numbers(stack.run_dir("on_head"))) == [0, 1]
    stack.assert_hidden(stack.login, stack.login.partition(":")[2])


def test_the_log_of_ray_workers_is_in_prefect(stack: Stack) -> None:
    loud = "algo.policy_loss=tests.helpers.harmful:speaks"
    run = stack.start("pipeline/train", overrides=["name=on_ray", *TINY, "runtime=ray", loud])
    stack.wait(run, "COMPLETED")
    lines = [str(one["message"]) for one in stack.api.filter("logs", logs={"flow_run_id": {"any_": [run]}})]
    assert any(re.search(r"pid=\d+.*a worker speaks", line) for line in lines), lines
