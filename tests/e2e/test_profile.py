"""A window of steps under torch's profiler: its traces are there, and no number of the run is another."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import steps_of, weights_of
from tests.helpers.sessions import elsewhere, run_to_the_end
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


def test_profiling_changes_no_number(plain: SmallRun, tmp_path: Path) -> None:
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


def events(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt") as packed:
        found: list[dict[str, Any]] = json.load(packed)["traceEvents"]
    return found
