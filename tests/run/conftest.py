"""Fixtures of the tests of runs."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rlcore.config import RunConfig
from rlcore.run.initial_policy import stage_layout
from rlcore.run.layout import RunLayout
from rlcore.run.record import RunRecord
from rlcore.run.stop import StopFlag
from rlcore.run.watchdog import Watchdog
from rlcore.tracking.journal import read_journal
from tests.helpers.repeatable import repeatable
from tests.helpers.small_run import SmallRun

Reported = list[Mapping[str, object]]


def stage_steps(run: SmallRun) -> list[dict[str, float]]:
    """The steps of the warm start, as its journal has them."""
    journal = stage_layout(run.config, run.inputs.filtered_directory).journal
    return [repeatable(record.metrics) for record in read_journal(journal)]


@pytest.fixture
def reported() -> Reported:
    return []


@pytest.fixture
def record(tmp_path: Path, reported: Reported) -> Iterator[RunRecord]:
    config = RunConfig(tracking={"enabled": False}, trainer={"total_steps": 9}, checkpoint={"reserve_gb": 0.5})
    layout = RunLayout(tmp_path, tmp_path / "run")
    layout.run_dir.mkdir()
    guard = Watchdog(config, layout, stop=StopFlag(lambda: None), report=reported.append, abandon=lambda error: None)
    made = RunRecord(config, layout, guard)
    yield made
    made.finish(failed=False, is_over=False)
