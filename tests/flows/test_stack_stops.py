"""Cancellation, and kills of worker and server, against a stack that is up: what docs/operations.md says of them."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows.stack.control import down, up
from flows.trainer_client import SOURCE_FOLDER
from tests.flows.conftest import WAIT_S, numbers, wait_until
from tests.flows.stack import Stack

HELD = Path(__file__).parent / "held"
SHORT_CHUNKS = ["trainer.total_steps=40", "trainer.steps_per_chunk=2", "validation.every_steps=0"]
LONG = ["trainer.total_steps=400", "trainer.steps_per_chunk=20", "validation.every_steps=0"]
PHASES = {"gen": "local", "update_actor": "ray", "save_checkpoint": "local"}
"""Phases of a step, and by what the trainer works in it."""

pytestmark = [
    pytest.mark.lengthy,
    pytest.mark.prefect,
    pytest.mark.slow,
    pytest.mark.timeout(4 * WAIT_S),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that is up."""
    root = tmp_path_factory.mktemp("stops")
    try:
        up(root, say=print)
        yield Stack(root)
    finally:
        down(root, say=print)


@pytest.mark.needs_ray
@pytest.mark.parametrize("phase", PHASES)
def test_a_cancellation_in_a_phase_saves_and_leaves_nothing_behind(stack: Stack, tmp_path: Path, phase: str) -> None:
    name, held = f"in-{phase}", tmp_path / "held"
    hold = {"HOLD_PHASE": phase, "HOLD_FILE": str(held), "PYTHONPATH": os.pathsep.join([str(HELD), str(SOURCE_FOLDER)])}
    overrides = [*SHORT_CHUNKS, f"name={name}", f"runtime={PHASES[phase]}"]
    run = stack.start("pipeline/debug", environment=hold, overrides=overrides)
    wait_until(held.exists, f"a trainer in {phase}")
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
    nested = stack.api.filter("flow_runs", flow_runs={"parent_flow_run_id": {"any_": [run]}})
    assert {one["state_type"] for one in nested} == {"COMPLETED", "CANCELLED"}
