"""The selection of the profiled steps."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rlcore.config.compose import load_config
from rlcore.run.layout import RunLayout
from rlcore.run.workers import ProfileWindow
from rlcore.workers.worker import Worker


class Ranks:
    """Two ranks whose traces have the given size."""

    def __init__(self, *sizes: float) -> None:
        self.sizes = sizes
        self.called: list[tuple[object, ...]] = []

    def each(self, verb: Any, *arguments: Any) -> list[float]:
        self.called.append((verb, *arguments))
        return list(self.sizes)


def window(folder: Path, ranks: Ranks, reported: list[Mapping[str, object]], *words: str) -> ProfileWindow:
    config = load_config(["experiment=debug", *words])
    guard = SimpleNamespace(phase=lambda name: nullcontext(), report=reported.append)
    record = SimpleNamespace(config=config, layout=RunLayout(folder, folder), guard=guard)
    return ProfileWindow(cast(Any, record), cast(Any, ranks))


def profiled(window: ProfileWindow, ranks: Ranks, num_steps: int) -> list[int]:
    found = []
    for step in range(num_steps):
        before = len(ranks.called)
        with window.around(step):
            assert ranks.called[before:] in ([], [(Worker.start_profile,)])
        if len(ranks.called) > before:
            found.append(step)
    return found


def test_steps_of_the_window_are_profiled(tmp_path: Path) -> None:
    ranks, reported = Ranks(1.25, 3.0), list[Mapping[str, object]]()
    words = ("runtime.profile.first_step=3", "runtime.profile.num_steps=2", "runtime.profile.max_mb=3")
    assert profiled(window(tmp_path, ranks, reported, *words), ranks, 7) == [3, 4]
    folder = str(tmp_path / "profile")
    assert ranks.called[:2] == [(Worker.start_profile,), (Worker.stop_profile, folder, 3, 3.0)]
    texts = [f"profile of step {step}: 3.0 MB a rank, in {folder}" for step in (3, 4)]
    assert reported == [{"event": "note", "text": text} for text in texts]
    assert profiled(window(tmp_path, ranks, reported), ranks, 7) == []


def test_large_trace_ends_the_window(tmp_path: Path) -> None:
    ranks, reported = Ranks(1.25, 3.01), list[Mapping[str, object]]()
    words = ("runtime.profile.first_step=3", "runtime.profile.num_steps=2", "runtime.profile.max_mb=3")
    assert profiled(window(tmp_path, ranks, reported, *words), ranks, 7) == [3]
    (event,) = reported
    assert event["text"] == (
        "profile of step 3: 3.0 MB is over runtime.profile.max_mb=3: the trace is deleted and no further step is "
        "profiled. Raise it, or profile a run with fewer or shorter responses"
    )
