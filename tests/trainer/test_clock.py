"""Seconds by phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rlcore.trainer.clock import PhaseClock


def test_phase_runs_inside_context_and_counts_failures() -> None:
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


def test_repeated_phases_add_up() -> None:
    before = time.perf_counter()
    clock = PhaseClock()
    with clock.phase("gen"):
        pass
    first = clock.seconds()["gen"]
    with clock.phase("gen"):
        again = clock.seconds()["gen"]
    assert again == first, "a running phase does not count yet"
    assert first < clock.seconds()["gen"] <= clock.seconds()["step"] <= time.perf_counter() - before
