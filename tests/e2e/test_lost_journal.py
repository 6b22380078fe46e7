"""A journal that was cut, changed or lost between two starts is reported. Its steps are trained again if possible."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlcore.errors import DataError
from rlcore.report.record import read_run
from rlcore.run.layout import RunLayout
from tests.helpers.running import assert_same, weights_of
from tests.helpers.sessions import OVERRIDES, Event, elsewhere, run_to_the_end, session_of, verified_steps
from tests.helpers.small_run import SmallRun


@pytest.fixture
def copied(undisturbed: SmallRun, tmp_path: Path) -> SmallRun:
    run = elsewhere(undisturbed, tmp_path, *OVERRIDES)
    shutil.copytree(undisturbed.layout.run_dir, run.layout.run_dir)
    shutil.rmtree(run.layout.exported_model)
    return run


@pytest.fixture
def stopped(copied: SmallRun) -> SmallRun:
    shutil.rmtree(copied.layout.checkpoints / "step-000006")
    return copied


def without_steps(layout: RunLayout, *steps: int) -> None:
    lines = layout.journal.read_text().splitlines(keepends=True)
    layout.journal.write_text(
        "".join(line for line in lines if not line.startswith(tuple(f'{{"step":{s},' for s in steps)))
    )


def events_of_resume(run: SmallRun, name: str) -> list[str]:
    events: list[Event] = []
    run_to_the_end(run, events.append)
    return [str(event["text"]) for event in events if event["event"] == name]


def change_a_digit(layout: RunLayout) -> None:
    layout.journal.write_text(layout.journal.read_text().replace('"step":6,', '"step":5,'))


@pytest.mark.parametrize(
    ("harm", "reason"), [(lambda layout: without_steps(layout, 6), "was cut"), (change_a_digit, "was changed")]
)
def test_the_checkpoint_that_fits_the_journal_is_taken(
    undisturbed: SmallRun, copied: SmallRun, harm: Callable[[RunLayout], None], reason: str
) -> None:
    harm(copied.layout)
    (reported,) = events_of_resume(copied, "checkpoint_refused")
    assert "step-000004: " in reported
    assert f"metrics.jsonl: {reason}" in reported
    assert_same(copied, undisturbed)
    assert verified_steps(copied) == verified_steps(undisturbed)
    assert not [line for line in read_run(copied.layout.run_dir).missing if "metrics.jsonl" in line]


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_gap_of_the_journal_is_named(undisturbed: SmallRun, stopped: SmallRun, is_lost: bool) -> None:
    if is_lost:
        stopped.layout.journal.unlink()
    else:
        without_steps(stopped.layout, 1, 5, 6)
    (reported,) = events_of_resume(stopped, "journal_mismatch")
    gap = "steps 1-4" if is_lost else "step 1"
    assert "step 4 nevertheless" in reported
    assert f"it lacks {gap} permanently" in reported
    assert weights_of(stopped) == weights_of(undisturbed)
    missing = read_run(stopped.layout.run_dir).missing
    assert reported in missing
    assert f"metrics.jsonl has no line for {gap}: the metrics of these trained steps are lost." in missing


def test_the_report_names_lost_steps(undisturbed: SmallRun, tmp_path: Path) -> None:
    run_dir = tmp_path / undisturbed.layout.run_dir.name
    shutil.copytree(undisturbed.layout.run_dir, run_dir)
    assert not [line for line in read_run(run_dir).missing if "metrics.jsonl" in line]
    layout = RunLayout(tmp_path, run_dir)
    without_steps(layout, 6)
    missing = "\n".join(read_run(run_dir).missing)
    assert "metrics.jsonl has no line for step 6" in missing
    assert "metrics.jsonl: was cut" in missing


def test_a_part_of_another_kind_is_refused(undisturbed: SmallRun, tmp_path: Path) -> None:
    run = elsewhere(undisturbed, tmp_path, *OVERRIDES)
    run.layout.run_dir.mkdir(parents=True)
    run.layout.answers.touch()
    os.mkfifo(run.layout.journal)
    with pytest.raises(
        DataError, match=r"/answers: must be a folder; .*/metrics\.jsonl: must be an ordinary file\. Move these away"
    ):
        session_of(run).__enter__()
