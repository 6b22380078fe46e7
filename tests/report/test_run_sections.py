"""Settings, lineage, phases and the memory plan of a run."""

import json

import numpy as np
import pytest

from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.report.build import build_report
from rlcore.report.record import read_run
from rlcore.report.run_sections import defaults_of, phase_table, settings_of, settings_tables
from rlcore.storage.publish import published_directory
from rlcore.tracking.lineage import Origin, Stage
from tests.helpers.reports import FEW, page_of, record_of, series, table, write_run

pytestmark = pytest.mark.slow


def test_settings_tables_are_complete(grpo_run, grpo_report):
    config = load_config(["trainer.total_steps=60"], experiment="countdown_demo")
    changed = {row["Setting"]: row for row in table(grpo_report, "settings_changed")}
    same = {row["Setting"]: row for row in table(grpo_report, "settings_default")}
    assert changed["data.train_size"]["Value"] == 4_767
    assert changed["data.train_size"]["Default"] == 327_680
    assert "Rows of the training split" in changed["data.train_size"]["Meaning"]
    assert "data.target_low" in same
    assert list(changed) == [
        key for key, value in settings_of(config).items() if defaults_of(config).get(key, ...) != value
    ]
    keys = page_of(grpo_report).words
    assert keys.index("data.train_size") < keys.index("data.target_low")


def test_lineage_sections(tmp_path):
    run_dir = tmp_path / "run"
    config = write_run(run_dir, experiment="debug", num_steps=2, validate=False, only=FEW)
    stages = (Stage("dataset", "0123456789abcdef", "artifacts/datasets/0123456789abcdef", {"train rows": 64}),)
    command = ("millrace", "run", "experiment=debug")
    Origin(config, {}, stages, command, "c0ffee", True, {"torch": "2.13.0"}).write(run_dir)
    facts = {"kind": "checkpoint", "step": 2, "created": "", "settings_fingerprint": "", "metrics": {}}
    with published_directory(run_dir / "checkpoints" / "step-000002", facts) as folder:
        (folder / "weights").write_bytes(b"12345678")
    files = build_report(run_dir)
    words = page_of(files).words
    for part in ("0123456789abcdef", "train rows 64", "millrace run experiment=debug", "c0ffee + changes", "2.13.0"):
        assert part in words
    assert "is not recorded" not in words
    assert table(files, "checkpoints") == [{"Name": "step-000002", "Size": 8e-06}]


def test_report_masks_passwords(tmp_path):
    config = load_config(["experiment=debug", "tracking.uri=http://me:SECRET@host"])
    tables = repr(settings_tables(config))
    assert "http://me:***@host" in tables
    assert "SECRET" not in tables
    write_run(tmp_path, experiment="debug", num_steps=1, validate=False, only=FEW)
    typed = ("millrace", "run", "tracking.uri=http://me:SECRET@host", "tags.why=two words")
    Origin(RunConfig(), command=typed).write(tmp_path)
    assert "SECRET" not in (tmp_path / "run.json").read_text()
    words = page_of(build_report(tmp_path)).words
    assert "'tracking.uri=http://me:***@host' 'tags.why=two words'" in words
    assert "SECRET" not in words


def test_phases_are_means_without_first_step(grpo_run, grpo_report):
    rows = {row["Phase"]: row for row in table(grpo_report, "phases")}
    assert rows["Generation"]["Mean"] == pytest.approx(np.mean(series(grpo_run, "timing_s/gen")[1:]))
    assert rows["Step"]["Mean"] == pytest.approx(np.mean(series(grpo_run, "timing_s/step")[1:]))
    assert sum(row["Share"] for name, row in rows.items() if name != "Step") == pytest.approx(1.0)


def test_memory_plan_is_next_to_peaks(tmp_path, grpo_report):
    assert "No memory plan exists for this run" in page_of(grpo_report).words
    write_run(tmp_path / "run", num_steps=3, validate=False, only=(*FEW, "perf/cpu_memory_used_gb"))
    plan = {"parts": {"weights": 2_000_000_000, "optimizer": 6_000_000_000}, "capacity_bytes": 80_000_000_000,
            "device": "a GPU", "notes": ["Activations are of the longest answer."]}  # fmt: skip
    (tmp_path / "run" / "memory_plan.json").write_text(json.dumps(plan))
    files = build_report(tmp_path / "run")
    planned = {row["Part"]: row["Planned"] for row in table(files, "memory_plan")}
    assert planned == {"weights": 2e9, "optimizer": 6e9, "Sum": 8e9, "Device capacity": 80e9}
    peaks = {row["Metric"]: row for row in table(files, "memory_peak")}
    record = read_run(tmp_path / "run")
    assert peaks
    for metric, row in peaks.items():
        assert row["Value"] == max(step.metrics[metric] for step in record.training_steps)
    (tmp_path / "run" / "memory_plan.json").write_text("[]")
    assert "the report omits this memory plan" in page_of(build_report(tmp_path / "run")).words


def test_validations_and_checkpoints_are_timed_separately():
    record = record_of(
        {"timing_s/step": [4.0, 5.0], "timing_s/testing": [2.0], "timing_s/save_checkpoint": [0.0, 1.5]},
    )
    rows = {row[0].text: row[1].value for row in phase_table(record).rows}
    assert rows["Checkpoint (mean over 2 steps, not in the step)"] == 0.75
    assert rows["Validation (once, not in the step)"] == 2.0
