"""What the stages of a run say of their results, and which results count as theirs."""

from dataclasses import replace
from pathlib import Path

import pytest

from data.tasks import StageResult
from flows.chain import finished_result
from flows.stages.export import ExportedWeights, best_step_to_export, find_weights
from flows.stages.pass_rates import PassRateTable
from flows.stages.report import ReportPage, find_report, report_fingerprint
from flows.stages.rows import describe_rows, warn_of_few_rows
from flows.stages.train import Chunk
from flows.stages.validate import find_suite_results, find_validation
from flows.work.checkpoints import checkpoint_name, committed_step
from flows.work.open_run import OpenRun, with_absolute_paths
from flows.work.recorded import MlflowContents, models_digest, settings_digest
from flows.work.validation_summary import ValidationSummary, with_interval
from rlcore.checkpoint.state import TrainerState
from rlcore.checkpoint.store import CheckpointStore
from rlcore.config import RunConfig, SuiteConfig
from rlcore.config.compose import load_config
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.run.inputs import RunInputs, suite_fingerprint
from rlcore.run.layout import RunLayout
from rlcore.storage.publish import published_directory, write_json_atomically
from rlcore.tracking.lineage import Origin
from tests.helpers.validations import problem, result

HERE = Path("here")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config([f"paths.root={tmp_path}"], experiment="debug")


@pytest.fixture
def layout(config: RunConfig) -> RunLayout:
    """A run's folder with its settings and an empty journal."""
    layout = RunLayout.of(config)
    layout.validation.mkdir(parents=True)
    (layout.suites / "sums").mkdir(parents=True)
    Origin(with_absolute_paths(config, layout)).write(layout.run_dir)
    layout.journal.touch()
    return layout


def test_results_as_lines() -> None:
    figures = {"critic/score/mean": 0.12345}
    for told, expected in (
        (describe_rows(StageResult(HERE, "f", cached=False, counts={"train": 1_200, "x": 3})), "1,200 train, 3 x rows"),
        (
            PassRateTable(HERE, 12_000, 1_500, "pass rates 0 to 1", cached=False),
            "kept 1,500 of 12,000 rows; pass rates 0 to 1",
        ),
        (Chunk(0, 20, HERE, skipped=False, metrics=figures), "step 0-20, reward 0.123"),
        (Chunk(20, 40, HERE, skipped=False, metrics={}), "step 20-40"),
        (ExportedWeights(HERE, 40, cached=False), "step 40"),
        (ReportPage(HERE, cached=False), "here"),
    ):
        assert str(told).removesuffix(" (here)") == expected
    again = ", skipped: done before"
    rows = StageResult(HERE, "f", cached=True, counts={"train": 9})
    assert describe_rows(rows) == f"9 train rows{again} (here)"
    assert str(PassRateTable(HERE, 3, 2, "s", cached=True)) == f"kept 2 of 3 rows; s{again} (here)"
    assert str(Chunk(0, 20, HERE, skipped=True, metrics={})) == f"step 0-20{again}"
    assert str(ExportedWeights(HERE, 40, cached=True)) == f"step 40{again} (here)"
    assert str(ReportPage(HERE, cached=True)) == "here, skipped: it is current"


def test_a_judgement_names_its_sources_where_there_are_several() -> None:
    one = {
        "val-core/openai/gsm8k/reward/mean@4": 0.25,
        "val-core/openai/gsm8k/reward/mean@4/ci_low": 0.2,
        "val-core/openai/gsm8k/reward/mean@4/ci_high": 0.3,
        "val-core/openai/gsm8k/reward/std@4": 0.1,
        "val-core/openai/gsm8k/reward/std@4/ci_low": 0.1,
        "val-core/openai/gsm8k/reward/pass@4": 0.5,
    }
    told = ValidationSummary("after", 40, HERE, cached=False, summary=one)
    assert str(told) == told.headline() == "after (step 40): mean@4 0.250 [0.200, 0.300]"
    two = one | {"val-core/countdown/reward/greedy": 0.5, "val-core/countdown/reward/greedy/ci_low": 0.4}
    told = ValidationSummary("before", 0, HERE, cached=True, summary=two)
    assert told.headline() == "before (step 0): openai/gsm8k mean@4 0.250 [0.200, 0.300], countdown greedy 0.500"
    assert str(told) == f"{told.headline()}, skipped: done before"


def test_an_interval_has_two_ends_or_is_left_out() -> None:
    assert with_interval({"a": 0.5, "a/ci_low": 0.0, "a/ci_high": 0.59}, "a") == "0.500 [0.000, 0.590]"
    assert with_interval({"a": 0.5, "a/ci_low": 0.4}, "a") == "0.500"
    assert with_interval({"a": 0.5, "a/ci_high": 0.6}, "a") == "0.500"
    assert with_interval({"a": 0.5}, "b") == ""


def test_a_warning_of_few_rows_begins_below_a_batch(config: RunConfig) -> None:
    size = config.trainer.batch_size
    assert warn_of_few_rows(config, size, "of the dataset") == warn_of_few_rows(config, None, "of the dataset") == ""
    many = config.model_copy(update={"trainer": config.trainer.model_copy(update={"batch_size": 2_000})})
    assert warn_of_few_rows(many, 1_999, "that are left") == (
        "warning: trainer.batch_size=2,000 is more than the 1,999 training rows that are left, so a prompt stands in a "
        "batch more than once. Lower it and trainer.mini_batch_size, or give more rows"
    )


def test_the_name_of_a_checkpoint() -> None:
    assert [checkpoint_name(name) for name in ("0", "40", "last", "step-000040")] == [
        "step-000000", "step-000040", "last", "step-000040",
    ]  # fmt: skip


def test_a_report_is_current_while_its_files_are(layout: RunLayout) -> None:
    folder = layout.run_dir / "report"
    folder.mkdir()
    (folder / "report.html").touch()
    assert find_report(layout) is None

    def write() -> None:
        known = {"fingerprint": report_fingerprint(layout), "html": "/elsewhere/report.html"}
        write_json_atomically(folder / "source.json", known)

    files = [layout.journal, layout.run_json, layout.validation / "after.json", layout.suites / "sums" / "a.json"]
    files.append(layout.run_dir / "memory_plan.json")
    for file in files:
        write()
        assert find_report(layout) == ReportPage(folder / "report.html", cached=True), "the folder may be a copy"
        file.write_text("changed")
        assert find_report(layout) is None, file
    write()
    (layout.run_dir / "notes.txt").touch()
    assert find_report(layout) is not None
    assert find_report(layout, "failed: x") is None
    known = {"fingerprint": report_fingerprint(layout, "failed: x"), "html": "report.html"}
    write_json_atomically(folder / "source.json", known)
    assert [find_report(layout, why) is None for why in ("failed: x", "failed: y", "")] == [False, True, True]
    write()
    (folder / "report.html").unlink()
    assert find_report(layout) is None


def test_mlflow_has_all_of_a_run_or_lacks_a_part(config: RunConfig, layout: RunLayout) -> None:
    last, best = ExportedWeights(HERE, 40, cached=True), ExportedWeights(HERE, 20, cached=True)
    assert models_digest(config, last, best) == "last 40, best 20, registered None"
    more = config.model_copy(update={"trainer": config.trainer.model_copy(update={"total_steps": 99})})
    assert settings_fingerprint(more) == settings_fingerprint(config)
    assert settings_digest(more) != settings_digest(config)
    settings, report, models = settings_digest(config), report_fingerprint(layout), models_digest(config, last, best)
    whole = MlflowContents("1", "url", "", settings, report, models).write(layout)
    assert MlflowContents.read(layout) == whole
    assert whole.is_complete(config, layout, last, best)
    assert not whole.is_complete(config, layout, last, last)
    assert not whole.is_complete(more, layout, last, best)
    layout.journal.write_text("more")
    assert not whole.is_complete(config, layout, last, best)
    for damaged in ("[1]", "{", '{"another": 1}'):
        (layout.run_dir / "recorded.json").write_text(damaged)
        assert MlflowContents.read(layout) == MlflowContents()


def test_best_weights_are_wanted_unless_last(config: RunConfig, layout: RunLayout) -> None:
    assert best_step_to_export(config, layout, 0) is None
    store = CheckpointStore(layout.checkpoints, config.checkpoint, config)
    for step, score in ((1, 0.5), (2, 0.75), (3, 0.25)):
        state = TrainerState(
            step=step, policy_version=step, num_prompts_drawn=8, num_tokens=9, kl_coef=0.0,
            settings_fingerprint=settings_fingerprint(config),
        )  # fmt: skip
        with store.writing(state, {"val-core/countdown/reward/mean@4": score}) as folder:
            (folder / "weights").write_text("x")
    assert [best_step_to_export(config, layout, last) for last in (2, 3)] == [None, 2]
    for update in ({"enabled": False}, {"log_best": False}):
        unwanted = config.model_copy(update={"tracking": config.tracking.model_copy(update=update)})
        assert best_step_to_export(unwanted, layout, 3) is None


def test_a_validation_counts_for_its_step_and_settings(config: RunConfig, layout: RunLayout, tmp_path: Path) -> None:
    made = result([problem(1, (1.0, 0.0), greedy=1.0), problem(2, (0.0, 0.0), greedy=0.0)])
    written = replace(made, step=2, settings=config.validation.evaluation)
    assert find_validation(config, layout, "after", 2) is None
    written.write(layout.validation / "after.json")
    found = find_validation(config, layout, "after", 2)
    assert found == ValidationSummary(
        "after", 2, layout.validation / "after.json", cached=True, summary=written.metrics()
    )
    assert find_validation(config, layout, "after", 1) is None
    other = config.validation.model_copy(update={"num_resamples": config.validation.num_resamples + 1})
    assert find_validation(config.model_copy(update={"validation": other}), layout, "after", 2) is None
    seldom = config.validation.model_copy(update={"every_steps": config.validation.every_steps + 1})
    assert find_validation(config.model_copy(update={"validation": seldom}), layout, "after", 2) == found

    suite = SuiteConfig(name="sums", data=config.data)
    validation = config.validation.model_copy(update={"suites": (suite,)})
    config = config.model_copy(update={"validation": validation})
    assert find_validation(config, layout, "after", 2) is None, "what the suite is made of is not known"
    inputs = RunInputs(tmp_path, tmp_path, suites={"sums": tmp_path / "rows"})
    inputs.write(config, layout)
    assert find_validation(config, layout, "after", 2) is None, "the suite was not judged"
    digest = suite_fingerprint(config, suite, tmp_path / "rows")
    judged = replace(made, step=2, settings=suite.evaluation, suite=digest, data_source="sums")
    file = layout.suites / "sums" / "after.json"
    for another in (replace(judged, suite="other rows"), replace(judged, step=1)):
        another.write(file)
        assert find_validation(config, layout, "after", 2) is None
    judged.write(file)
    found = find_validation(config, layout, "after", 2)
    assert found is not None
    assert found.summary == written.metrics() | judged.metrics()
    assert len(found.summary) > len(written.metrics())
    assert find_suite_results(config, layout, inputs, "after", 2) == [judged]
    assert find_suite_results(config, layout, replace(inputs, suites={}), "after", 2) is None


def test_a_run_is_finished_with_all_results(config: RunConfig, layout: RunLayout) -> None:
    state = TrainerState(
        step=2, policy_version=2, num_prompts_drawn=16, num_tokens=9, kl_coef=0.0,
        settings_fingerprint=settings_fingerprint(config),
    )  # fmt: skip
    with CheckpointStore(layout.checkpoints, config.checkpoint, config).writing(state, {}) as folder:
        (folder / "weights").write_text("x")
    for name, step in (("before", 0), ("after", 2)):
        judged = replace(result([problem(1, (1.0,))]), name=name, step=step, settings=config.validation.evaluation)
        judged.write(layout.validation / f"{name}.json")
    with published_directory(layout.exported_model, {"kind": "model", "step": 2}) as folder:
        (folder / "weights").write_text("x")
    assert find_weights(layout.exported_model, 2) == ExportedWeights(layout.exported_model, 2, cached=True)
    assert finished_result(OpenRun(config)) is None, "there is no report"
    (layout.run_dir / "report").mkdir()
    page = layout.run_dir / "report" / "report.html"
    page.touch()
    known = {"fingerprint": report_fingerprint(layout), "html": str(page)}
    write_json_atomically(layout.run_dir / "report" / "source.json", known)
    assert finished_result(OpenRun(config)) is None, "MLflow has nothing of it"
    silent = config.model_copy(update={"tracking": config.tracking.model_copy(update={"enabled": False})})
    assert finished_result(OpenRun(silent)) is None, "the settings on disk are others"
    last = ExportedWeights(layout.exported_model, 2, cached=True)
    settings, models = settings_digest(config), models_digest(config, last, last)
    recorded = MlflowContents("1", "url", "", settings, report_fingerprint(layout), models).write(layout)
    found = finished_result(OpenRun(config))
    assert found is not None
    assert (found.run_id, found.run_dir, found.report) == (layout.run_dir.name, layout.run_dir, page)
    assert [(one.name, one.step) for one in found.validations] == [("before", 0), ("after", 2)]
    assert (found.weights, found.mlflow) == (layout.exported_model, recorded)
    for file in (layout.validation / "before.json", layout.run_json, layout.exported_model / "manifest.json"):
        content = file.read_bytes()
        file.unlink()
        assert finished_result(OpenRun(config)) is None, file
        file.write_bytes(content)
        assert finished_result(OpenRun(config)) is not None


def test_without_a_checkpoint_a_run_is_at_step_0(config: RunConfig) -> None:
    assert committed_step(config) == 0


def test_kept_settings_name_the_root_and_the_store_absolutely(
    config: RunConfig, layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(layout.root.parent)
    relative = config.model_copy(update={"paths": config.paths.model_copy(update={"root": layout.root.name})})
    assert with_absolute_paths(relative, layout).paths.root == str(layout.root)
    assert with_absolute_paths(relative, layout).tracking.uri is None
    tracking = config.tracking.model_copy(update={"uri": "sqlite:///x.db"})
    assert with_absolute_paths(config.model_copy(update={"tracking": tracking}), layout).tracking.uri == (
        f"sqlite:///{layout.root.parent}/x.db"
    )
