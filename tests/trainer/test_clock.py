"""Seconds by phase."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rlcore.trainer.clock import PhaseClock


def test_phases_add_up_inside_their_context() -> None:
    seen: list[str] = []

    @contextmanager
    def enter(name: str) -> Iterator[None]:
        seen.append(f"into {name}")
        yield
        seen.append(f"out of {name}")

    clock = PhaseClock(enter)
    with clock.phase("gen"):
        seen.append("at work")
    assert seen == ["into gen", "at work", "out of gen"]
    with pytest.raises(ValueError, match="broken"), clock.phase("adv"):
        raise ValueError("broken")
    found = clock.seconds()
    assert [*found] == ["gen", "adv", "step"]
    assert 0 < found["gen"] + found["adv"] <= found["step"]
    with clock.phase("gen"):
        assert clock.seconds()["gen"] == found["gen"], "a running phase does not count yet"
    assert found["gen"] < clock.seconds()["gen"] < clock.seconds()["step"]
