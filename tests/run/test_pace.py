"""The time left: by the pace of the last steps, without what happens once."""

import math

import pytest

from rlcore.run import record
from rlcore.run.record import Pace


def test_the_first_step_of_a_process_counts_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(record.time, "monotonic", lambda: now)
    pace = Pace(is_warm=False)
    now += 60.0  # it compiles
    pace.tick()
    assert math.isnan(pace.eta_s(9)), "nothing is known yet"
    assert pace.eta_s(0) == 0
    now += 2.0
    pace.tick()
    assert pace.eta_s(8) == 16
    now += 4.0
    pace.tick()
    assert pace.eta_s(7) == 21
    later = Pace(is_warm=True)  # the next chunk of the same process
    now += 3.0
    later.tick()
    assert later.eta_s(5) == 15
