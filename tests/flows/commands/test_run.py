"""The last lines of `millrace run`."""

from dataclasses import replace

import pytest

from flows.stack.control import down, up
from flows.stack.state import read_stack
from tests.flows import conftest
from tests.flows.conftest import ended, wait_until
from tests.flows.test_pipeline import trainer_of
from tests.helpers.stack import prefect_home

pytestmark = pytest.mark.prefect


def test_run_names_a_stack_started_since_its_start(bare, tmp_path):
    prefect_home(bare.root / "prefect")
    hold = {"HOLD_PHASE": "export", "HOLD_FILE": str(held := tmp_path / "held"), "PYTHONPATH": str(conftest.HELD)}
    settings = ("experiment=debug", "trainer.total_steps=2", "warm_start.enabled=false", "tracking.enabled=false")
    process = replace(bare, environment=hold).start("run", *settings)
    wait_until(lambda: held.exists() or process.poll() is not None, "the export")
    try:
        up(bare.root)
        trainer_of(process).kill()  # its successor is not held
        done = ended(process, 0)
        assert done.out.splitlines()[-1] == f"  Prefect  {read_stack(bare.root).prefect_api_url.removesuffix('/api')}"
    finally:
        down(bare.root)
