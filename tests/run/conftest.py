"""Fixtures of the tests of runs."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rlcore.config import CheckpointConfig, RunConfig, TrackingConfig, TrainerConfig
from rlcore.run.layout import RunLayout
from rlcore.run.record import RunRecord
from rlcore.run.stop import StopFlag
from rlcore.run.watchdog import Watchdog

Reported = list[Mapping[str, object]]


@pytest.fixture
def reported() -> Reported:
    return []


@pytest.fixture
def record(tmp_path: Path, reported: Reported) -> Iterator[RunRecord]:
    config = RunConfig(
        tracking=TrackingConfig(enabled=False),
        trainer=TrainerConfig(total_steps=9),
        checkpoint=CheckpointConfig(reserve_gb=0.5),
    )
    layout = RunLayout(tmp_path, tmp_path / "run")
    layout.run_dir.mkdir()
    guard = Watchdog(config, layout, stop=StopFlag(lambda: None), report=reported.append, abandon=lambda error: None)
    made = RunRecord(config, layout, guard)
    yield made
    made.finish(failed=False)
