"""Settings, lineage and how a run was started."""

import pytest

from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.report.build import build_report
from rlcore.report.settings import defaults_of, settings_of, settings_tables
from rlcore.storage.publish import published_directory
from rlcore.tracking.lineage import Origin, Stage
from tests.helpers.reports import FEW, page_of, table, write_run

pytestmark = pytest.mark.slow


def test_settings_that_differ_come_first_and_are_all_there(grpo_run, grpo_report):
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


def test_lineage_is_shown(tmp_path):
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


def test_a_report_holds_no_password_of_an_address(tmp_path):
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
