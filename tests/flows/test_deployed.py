"""Runs of deployments on a stack that is up: wrong ones, by a clock, a sweep over the work pool, on Ray."""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest

from flows.stack.control import down, up
from tests.flows.conftest import Millrace, numbers, wait_until
from tests.flows.stack import ENDS, Stack
from tests.flows.sweep_specs import UNTRACKED

pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.lengthy, pytest.mark.timeout(1800)]

TINY = ["trainer.total_steps=1", *UNTRACKED]
EVERY_S = 5.0
"""Interval of a schedule: much shorter than a run, so that the second one is due while the first one goes on."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that is up, with one worker."""
    root = tmp_path_factory.mktemp("stack")
    try:
        up(root, say=print)
        yield Stack(root)
    finally:
        down(root, say=print)


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


# ---------------------------------------------------------------------- Ray


def test_the_log_of_ray_workers_is_in_the_flow_runs_log(stack: Stack) -> None:
    loud = "algo.policy_loss=tests.flows.spoken:speaks"
    run = stack.start("train/local", overrides=["name=on_ray", *TINY, "runtime=ray", loud])
    stack.wait(run, "COMPLETED")
    logs = stack.api.filter("logs", logs={"flow_run_id": {"any_": [run]}})
    lines = [str(one["message"]) for one in logs]
    assert any(re.search(r"pid=\d+.*a worker speaks", line) for line in lines), lines
