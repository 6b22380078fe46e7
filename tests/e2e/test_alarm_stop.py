"""An alarm stops a run with its step saved, or is reported."""

from pathlib import Path

import pytest

from rlcore.run.watchdog import read_failures
from rlcore.tracking.journal import load_journal
from tests.helpers.running import WAIT_S, disturb, output_of, small, steps_of
from tests.helpers.share_of_digits import LEARNING
from tests.helpers.small_run import SmallRun

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(WAIT_S + 40)]

DRIFTS = (*LEARNING, "algo.kl.where=loss", "optim.lr=1e-2")
"""A learning rate at which the policy leaves its reference: its KL is 0.085 nats in step 7."""


def events(run: SmallRun, name: str) -> list[str]:
    return [str(event.data["text"]) for event in load_journal(run.layout.journal).events if event.name == name]


def test_an_alarm_that_stops_saves_its_step(tmp_path: Path) -> None:
    run = small(tmp_path, *DRIFTS, "alarms.kl=stop", "alarms.kl_above=0.005", steps=4)
    (stopped,) = disturb(run, None)
    assert stopped["code"] == 1
    assert "step 2: the KL divergence from the reference is 0.00659" in output_of(run)
    assert stopped["checkpoints"] == ["step-000002"]
    assert [str(fault.kind) for fault in read_failures(run.layout.run_dir)] == ["numbers"]
    reported = small(tmp_path, *DRIFTS, "alarms.kl=tell", "alarms.kl_above=0.005", steps=4)
    assert disturb(reported, None)[0]["code"] == 0, output_of(run)
    assert len(events(reported, "alarm")) == 2, "reported at the stop, and for the steps after it"
    assert len(steps_of(reported)) == 5
