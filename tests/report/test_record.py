"""The record that is read from a run's folder."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.config.compose import load_config
from rlcore.errors import DataError
from rlcore.report.build import build_report
from rlcore.report.record import read_run
from rlcore.tracking.journal import JOURNAL_FILE, Journal
from rlcore.tracking.lineage import Stage
from tests.helpers.reports import FEW, record_of, validation, with_stages, write_run

pytestmark = pytest.mark.slow


def test_validation_without_journal_line_is_on_curve(tmp_path):
    """If total_steps was lowered to the saved step, only after.json has that step."""
    config = write_run(tmp_path, num_steps=30, num_problems=6, validate=False, only=FEW)
    with Journal(tmp_path / JOURNAL_FILE) as journal:
        journal.append_step(20, {"val-core/countdown/reward/mean_at_4": 0.5})
    for name, step in (("before", 0), ("step-000020", 20), ("after", 30), ("step-000040", 40)):
        validation(config, name, step, 0.3, 6).write(tmp_path / "validation" / f"{name}.json")
    found = dict(read_run(tmp_path).held_out("reward/mean_at_4"))
    assert list(found) == [0, 20, 30], "the run has gone back before step 40"
    assert found[20].value == 0.5
    assert found[30] == validation(config, "after", 30, 0.3, 6).intervals["reward/mean_at_4"]


def test_after_is_newest_validation():
    """A finished run may be trained for more steps."""
    config = load_config([], experiment="countdown_demo")
    found = {
        name: validation(config, name, step, 0.3, 6)
        for name, step in (("after", 20), ("before", 0), ("step-000020", 20))
    }
    assert record_of({}, validations=found).after is found["after"]
    found["step-000040"] = validation(config, "step-000040", 40, 0.3, 6)
    assert record_of({}, validations=found).after is found["step-000040"]


@pytest.mark.parametrize("with_files", [True, False])
def test_newest_number_of_samples_is_used(tmp_path, with_files):
    """validation.samples_per_problem may be changed, and changed back."""
    write_run(tmp_path, num_steps=0, validate=False)
    with Journal(tmp_path / JOURNAL_FILE) as journal:
        for step, samples in ((0, 2), (10, 4), (20, 8), (30, 2), (40, 4)):
            changed = [f"validation.samples_per_problem={samples}"]
            config = load_config(changed, experiment="countdown_demo")
            result = validation(config, f"step-{step:06d}", step, 0.3, 6)
            journal.append_step(step, result.metrics())
            if with_files:
                result.write(tmp_path / "validation" / f"{result.name}.json")
    record = read_run(tmp_path)
    assert record.reward_statistic == "reward/mean_at_4"
    assert [step for step, _ in record.held_out(record.reward_statistic)] == [10, 40]


def test_changed_validation_is_read_again(tmp_path):
    write_run(tmp_path / "run", num_steps=10, num_problems=4)
    first, second = (read_run(tmp_path / "run").validations["after"] for _ in range(2))
    assert first is second
    replace(first, step=first.step + 1).write(tmp_path / "run" / "validation" / "after.json")
    assert read_run(tmp_path / "run").validations["after"].step == first.step + 1


def test_folder_without_run_is_rejected(tmp_path):
    with pytest.raises(DataError, match=r"run\.json: cannot be read .*name the folder of a run"):
        build_report(tmp_path)
    (tmp_path / "run.json").write_text('{"settings": {"trainer": {"totl_steps": 3}}}')
    with pytest.raises(DataError, match=r"trainer\.totl_steps"):
        build_report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_unreadable_supervised_stage_has_no_steps(tmp_path, monkeypatch):
    write_run(tmp_path / "begun", num_steps=2, num_problems=4, only=FEW)
    with_stages(tmp_path / "begun", Stage("initial policy", "1b", "y"))
    (tmp_path.parent / "warm-starts" / "warm-start-1b").mkdir(parents=True)
    (tmp_path.parent / "warm-starts" / "warm-start-1b" / JOURNAL_FILE).write_bytes(b"\x00no journal\n")
    monkeypatch.chdir(tmp_path)
    assert read_run(Path("begun")).supervised_steps == ()
