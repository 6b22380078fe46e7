"""Phases of a step and the memory plan."""

import json

import numpy as np
import pytest

from rlcore.report.build import build_report
from rlcore.report.performance import phase_table
from rlcore.report.record import read_run
from tests.helpers.reports import FEW, page_of, record_of, series, table, write_run

pytestmark = pytest.mark.slow


def test_phases_are_the_means_without_the_first_step(grpo_run, grpo_report):
    rows = {row["Phase"]: row for row in table(grpo_report, "phases")}
    assert rows["Generation"]["Mean"] == pytest.approx(np.mean(series(grpo_run, "timing_s/gen")[1:]))
    assert rows["Step"]["Mean"] == pytest.approx(np.mean(series(grpo_run, "timing_s/step")[1:]))
    assert sum(row["Share"] for name, row in rows.items() if name != "Step") == pytest.approx(1.0)


def test_the_memory_plan_stands_beside_the_peaks(tmp_path, grpo_report):
    assert "No memory plan was made for this run" in page_of(grpo_report).words
    write_run(tmp_path / "run", num_steps=3, validate=False, only=(*FEW, "perf/cpu_memory_used_gb"))
    plan = {"parts": {"weights": 2_000_000_000, "optimizer": 6_000_000_000}, "capacity_bytes": 80_000_000_000,
            "device": "a GPU", "notes": ["Activations are of the longest answer."]}  # fmt: skip
    (tmp_path / "run" / "memory_plan.json").write_text(json.dumps(plan))
    files = build_report(tmp_path / "run")
    planned = {row["Part"]: row["Planned"] for row in table(files, "memory_plan")}
    assert planned == {"weights": 2e9, "optimizer": 6e9, "Sum": 8e9, "The device has": 80e9}
    peaks = {row["Metric"]: row for row in table(files, "memory_peak")}
    record = read_run(tmp_path / "run")
    assert peaks
    for metric, row in peaks.items():
        assert row["Value"] == max(step.metrics[metric] for step in record.training_steps)
    (tmp_path / "run" / "memory_plan.json").write_text("[]")
    assert "the report goes on without this memory plan" in page_of(build_report(tmp_path / "run")).words


def test_validations_and_checkpoints_are_timed_next_to_the_step():
    record = record_of(
        {"timing_s/step": [4.0, 5.0], "timing_s/testing": [2.0], "timing_s/save_checkpoint": [0.0, 1.5]},
    )
    rows = {row[0].text: row[1].value for row in phase_table(record).rows}
    assert rows["Checkpoint (mean over 2 steps, not in the step)"] == 0.75
    assert rows["Validation (once, not in the step)"] == 2.0
