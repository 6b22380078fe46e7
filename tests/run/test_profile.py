"""A window of steps under torch's profiler: its traces are there, and no number of the run is another."""

import gzip
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.config.compose import load_config
from rlcore.run.workers import ProfileWindow
from rlcore.workers.worker import Worker
from tests.run.running import steps_of, weights_of
from tests.run.sessions import elsewhere, run_to_the_end
from tests.small_run import SmallRun, prepare

SETTINGS = (
    "trainer.steps_per_chunk=2", "trainer.total_steps=2", "validation.every_steps=0", "tracking.enabled=false",
    "trainer.batch_size=4", "trainer.mini_batch_size=4", "rollout.max_response_tokens=8", "validation.max_problems=2",
    "runtime.stop_deadline_s=200",
)  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    run = prepare(tmp_path_factory.mktemp("plain"), *SETTINGS)
    run_to_the_end(run)
    assert not run.layout.profile.exists()
    return run


def test_traces_of_the_window_and_the_numbers_of_a_run_without(plain: SmallRun, tmp_path: Path) -> None:
    profiled = elsewhere(plain, tmp_path / "seen", *SETTINGS, "runtime.profile.first_step=1",
                         "runtime.profile.num_steps=2")  # fmt: skip
    told: list[str] = []
    run_to_the_end(profiled, lambda event: told.append(str(event.get("text", ""))))
    files = sorted(file.name for file in profiled.layout.profile.iterdir())
    assert files == ["step-1-rank-0.json.gz", "step-2-rank-0.json.gz"]
    assert sum("profile of step" in text for text in told) == 2
    operators = {str(event.get("name")) for event in events(profiled.layout.profile / files[0])}
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= operators
    assert steps_of(profiled) == steps_of(plain)
    assert weights_of(profiled) == weights_of(plain)


def test_a_trace_over_the_bound_is_not_kept_and_ends_the_window(plain: SmallRun, tmp_path: Path) -> None:
    run = elsewhere(plain, tmp_path, *SETTINGS, "runtime.profile.first_step=1", "runtime.profile.num_steps=2",
                    "runtime.profile.max_mb=0.001")  # fmt: skip
    told: list[str] = []
    run_to_the_end(run, lambda event: told.append(str(event.get("text", ""))))
    assert list(run.layout.profile.iterdir()) == []
    assert [text.split(":")[0] for text in told if "profile of step" in text] == ["profile of step 1"]
    assert any("runtime.profile.max_mb=0.001" in text for text in told)


def test_the_largest_rank_counts(tmp_path: Path) -> None:
    config = load_config(
        ["experiment=debug", "runtime.profile.first_step=1", "runtime.profile.num_steps=2", "runtime.profile.max_mb=50"]
    )
    told: list[Any] = []
    group = SimpleNamespace(each=lambda verb, *given: [3.0, 80.0] if verb is Worker.stop_profile else [None, None])
    guard = SimpleNamespace(phase=lambda name: nullcontext(), report=told.append)
    record = SimpleNamespace(config=config, layout=SimpleNamespace(profile=tmp_path), guard=guard)
    window = ProfileWindow(record, group)
    for step in (1, 2):
        with window.around(step):
            pass
    assert len(told) == 1
    assert "80.0 MB is over runtime.profile.max_mb=50" in told[0]["text"]


def events(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt") as packed:
        found: list[dict[str, Any]] = json.load(packed)["traceEvents"]
    return found
