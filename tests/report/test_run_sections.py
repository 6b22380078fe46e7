"""Settings, origin and phases of a run."""

import numpy as np
import pytest

from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.report.build import build_report
from rlcore.report.run_sections import defaults_of, phase_table, settings_of, settings_table
from rlcore.tracking.lineage import Origin, Stage
from tests.helpers.reports import FEW, page_of, record_of, series, table, write_run

pytestmark = pytest.mark.slow


def test_settings_table_is_complete(grpo_run, grpo_report):
    config = load_config(["trainer.total_steps=60"], experiment="countdown_demo")
    changed = {row["Setting"]: row for row in table(grpo_report, "settings_changed")}
    assert changed["data.train_size"]["Value"] == 4_767
    assert changed["data.train_size"]["Default"] == 327_680
    assert "rows in the training split" in changed["data.train_size"]["Meaning"]
    assert "data.target_low" not in page_of(grpo_report).words
    assert list(changed) == [
        key for key, value in settings_of(config).items() if defaults_of(config).get(key, ...) != value
    ]


def test_origin_section(tmp_path):
    run_dir = tmp_path / "run"
    config = write_run(run_dir, experiment="debug", num_steps=2, validate=False, only=FEW)
    stages = (Stage("dataset", "0123456789abcdef", "artifacts/datasets/0123456789abcdef", {"train rows": 64}),)
    command = ("millrace", "run", "experiment=debug")
    Origin(config, {}, stages, command, "c0ffee", True, {"torch": "2.13.0"}).write(run_dir)
    files = build_report(run_dir)
    words = page_of(files).words
    for part in ("0123456789abcdef", "train rows 64", "millrace run experiment=debug", "c0ffee + changes", "2.13.0"):
        assert part in words


def test_report_masks_passwords(tmp_path):
    config = load_config(["experiment=debug", "tracking.uri=http://me:SECRET@host"])
    tables = repr(settings_table(config))
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


def test_validations_and_checkpoints_are_timed_separately():
    record = record_of(
        {"timing_s/step": [4.0, 5.0], "timing_s/testing": [2.0], "timing_s/save_checkpoint": [0.0, 1.5]},
    )
    rows = {row[0].text: row[1].value for row in phase_table(record).rows}
    assert rows["Checkpoint (mean over 2 steps, not in the step)"] == 0.75
    assert rows["Validation (once, not in the step)"] == 2.0
