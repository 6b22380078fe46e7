"""Seconds by phase."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from rlcore.trainer import clock as module


def test_phases_add_up_inside_their_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes a second."""
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    seen: list[str] = []

    @contextmanager
    def enter(name: str) -> Iterator[None]:
        seen.append(f"into {name}")
        yield
        seen.append(f"out of {name}")

    clock = module.PhaseClock(enter)
    with clock.phase("gen"):
        seen.append("at work")
    assert seen == ["into gen", "at work", "out of gen"]
    with pytest.raises(ValueError, match="broken"), clock.phase("adv"):
        raise ValueError("broken")
    assert clock.seconds() == {"gen": 1, "adv": 1, "step": 5}
    with clock.phase("gen"):
        assert clock.seconds() == {"gen": 1, "adv": 1, "step": 7}, "a running phase does not count yet"
    assert clock.seconds() == {"gen": 3, "adv": 1, "step": 9}
