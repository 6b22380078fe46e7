"""What a run does about an alarm: it tells, stops with its step saved, or goes back; resumed, it is the same run."""

from pathlib import Path

import pytest

from rlcore.run.faults import read_faults
from rlcore.tracking.journal import load_journal
from tests.run.running import WAIT_S, disturb, said, small, steps_of, weights_of
from tests.share_of_digits import LEARNING
from tests.small_run import SmallRun

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(WAIT_S + 40)]

STEPS = 8
DRIFTS = (*LEARNING, "algo.kl.where=loss", "optim.lr=1e-2")
"""A learning rate at which the policy leaves its reference: its KL is 0.085 nats in step 7."""


def events(run: SmallRun, name: str) -> list[str]:
    return [str(event.data["text"]) for event in load_journal(run.layout.journal).events if event.name == name]


def test_a_roll_back_goes_on_with_a_lower_rate_and_survives_a_kill(tmp_path: Path) -> None:
    back = (*DRIFTS, "alarms.kl=roll_back", "alarms.kl_above=0.075", "alarms.roll_back_lr_factor=0.1")
    calm = small(tmp_path / "calm", *back, steps=STEPS)
    (done,) = disturb(calm, None)
    assert done["code"] == 0, said(calm)
    told = [event["text"] for event in done["events"] if event["event"] == "roll_back"]
    assert len(told) == 1
    assert "alarm at step 7: the KL divergence from the reference is 0.0845" in told[0]
    assert "learning rate x 0.1" in told[0]
    assert events(calm, "roll_back") == told
    steps = steps_of(calm)
    assert steps[2]["actor/lr"] == pytest.approx(1e-2)
    assert steps[STEPS]["actor/lr"] == pytest.approx(1e-3)
    assert max(step.get("actor/ref_kl", 0.0) for step in steps.values()) <= 0.075
    assert not list(calm.layout.checkpoints.glob("*.left.*")), "checkpoints of the abandoned way are deleted"

    killed = small(tmp_path / "killed", *back, steps=STEPS)
    found = disturb(
        killed,
        {"at": "load", "nth": 1, "signals": ["SIGKILL"]},  # in the middle of the roll-back
        {"at": "gen", "nth": 5, "signals": ["SIGKILL"]},  # after it
        None,
    )
    assert [one["code"] for one in found] == [-9, -9, 0], said(killed)
    assert steps_of(killed) == steps
    assert weights_of(killed) == weights_of(calm)


def test_an_alarm_that_stops_saves_its_step_and_another_setting_goes_on(tmp_path: Path) -> None:
    run = small(tmp_path, *DRIFTS, "alarms.kl=stop", "alarms.kl_above=0.005", steps=4)
    (stopped,) = disturb(run, None)
    assert stopped["code"] == 1
    assert "step 2: the KL divergence from the reference is 0.00659" in said(run)
    assert stopped["checkpoints"] == ["step-000002"]
    assert [str(fault.kind) for fault in read_faults(run.layout.run_dir)] == ["numbers"]
    told = small(tmp_path, *DRIFTS, "alarms.kl=tell", "alarms.kl_above=0.005", steps=4)
    assert disturb(told, None)[0]["code"] == 0, said(run)
    assert len(events(told, "alarm")) == 2, "told once as it stopped, and once for the steps after it"
    assert len(steps_of(told)) == 5
