"""Cancellation and kills of worker and server, against a running stack, as docs/operations.md describes."""

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows.stack.control import down, up
from tests.flows.conftest import HELD, WAIT_S, journal, numbers, wait_until
from tests.helpers.stack import Stack, stack_up

SHORT_CHUNKS = ["trainer.total_steps=40", "trainer.steps_per_chunk=2", "validation.every_steps=0"]
ENDLESS = ["trainer.total_steps=100000", "validation.every_steps=0"]  # longer than any test
PHASES = {"gen": "local", "update_actor": "ray", "save_checkpoint": "local"}
"""Phases of a step, and by what the trainer works in it."""

pytestmark = [pytest.mark.lengthy, pytest.mark.prefect, pytest.mark.slow, pytest.mark.timeout(4 * WAIT_S)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("stops")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOLD_SETTINGS", str(root / "hold.json"))
        environment.setenv("PYTHONPATH", str(HELD))
        with stack_up(root) as stack:
            yield stack


@pytest.mark.needs_ray
@pytest.mark.parametrize("phase", PHASES)
def test_a_cancellation_in_a_phase_saves_and_leaves_nothing_behind(stack: Stack, tmp_path: Path, phase: str) -> None:
    name, held = f"in-{phase}", tmp_path / "held"
    hold = stack.root / "hold.json"
    hold.write_text(json.dumps({"HOLD_PHASE": phase, "HOLD_FILE": str(held)}))
    overrides = [*SHORT_CHUNKS, f"name={name}", f"runtime={PHASES[phase]}"]
    run = stack.start("pipeline/debug", overrides=overrides)
    wait_until(held.exists, f"a trainer in {phase}")
    hold.unlink()
    trainer, process = stack.trainer(name), stack.process_of(run)
    family = [process, *process.children(recursive=True)]
    assert trainer in family

    stack.set_state(run, {"type": "CANCELLING"})
    stack.wait(run, "CANCELLED")
    _, left = psutil.wait_procs(family, timeout=WAIT_S)
    assert left == []

    saved = stack.steps_saved(name)
    assert saved[-1] == max(numbers(stack.run_dir(name))) > 0
    assert f"stopped after step {saved[-1]}, which is saved" in stack.log()
    assert stack.mlflow_status(name) == "KILLED"
    others = [
        path.name for path in (stack.run_dir(name) / "checkpoints").iterdir() if not path.name.startswith("step-")
    ]
    assert others in ([], [".writer.lock"])
    tasks = stack.api.filter("task_runs", flow_runs={"id": {"any_": [run]}})
    assert {one["state_type"] for one in tasks} == {"COMPLETED", "CANCELLED"}


def test_a_run_without_its_worker_continues_and_can_be_cancelled(stack: Stack) -> None:
    run = stack.start("pipeline/debug", overrides=[*ENDLESS, "name=orphan", "trainer.steps_per_chunk=20"])
    stack.wait_for_step("orphan", 3)
    process = stack.process_of(run)
    stack.kill("worker-1")
    up(stack.root)
    stack.wait_for_step("orphan", max(numbers(stack.run_dir("orphan"))) + 1)
    found = stack.run(run)
    assert (found["state_type"], found["run_count"], process.is_running()) == ("RUNNING", 1, True)
    assert stack.process_of(run) == process  # the new worker has started it no second time

    stack.set_state(run, {"type": "CANCELLING"})
    stack.wait(run, "CANCELLED")
    wait_until(lambda: not process.is_running(), "the flow's process has ended")
    assert stack.steps_saved("orphan")[-1] == max(numbers(stack.run_dir("orphan")))
    assert stack.mlflow_status("orphan") == "KILLED"


def test_down_ends_a_run_without_worker_and_up_resumes_it(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    run = stack.start("pipeline/debug", overrides=[*ENDLESS, "name=left", "trainer.steps_per_chunk=20"])
    stack.wait_for_step("left", 3)
    process, trainer = stack.process_of(run), stack.trainer("left")
    stack.kill("worker-1")
    down(stack.root)
    assert f"(process {process.pid}) has ended" in capsys.readouterr().out
    wait_until(lambda: not process.is_running() and not trainer.is_running(), "flow and trainer have ended")
    saved = stack.steps_saved("left")[-1]
    up(stack.root)
    stack.wait_for_step("left", saved + 1)
    stack.set_state(run, {"type": "CANCELLING"})
    stack.wait(run, "CANCELLED")


def test_a_killed_server_and_a_down_cost_a_run_nothing(stack: Stack) -> None:
    run = stack.start("pipeline/debug", overrides=[*ENDLESS, "name=kept", "trainer.steps_per_chunk=50000"])
    stack.wait_for_step("kept", 3)
    process = stack.process_of(run)

    # The training continues without a server, for longer than an unread pipe has room.
    stack.kill("prefect")
    stack.wait_for_step("kept", max(numbers(stack.run_dir("kept"))) + 400)
    up(stack.root)
    assert stack.run(run)["state_type"] == "RUNNING"
    assert stack.process_of(run) == process
    assert process.is_running()

    # At `down` the run saves; the next `up` starts it again.
    trainer = stack.trainer("kept")
    down(stack.root)
    wait_until(lambda: not process.is_running() and not trainer.is_running(), "flow and trainer have ended")
    saved = stack.steps_saved("kept")[-1]
    up(stack.root)
    stack.wait_for_step("kept", saved + 1)
    assert f"from step {saved}" in stack.log()
    stack.set_state(run, {"type": "CANCELLING"})
    assert stack.wait(run, "CANCELLED")["run_count"] > 1
    steps = [record["step"] for record in journal(stack.run_dir("kept"))]
    assert steps == list(range(steps[-1] + 1)), "each step once, in order"
