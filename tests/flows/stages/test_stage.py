"""Results of stages: their lines, their validity, and existing ones."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from data.tasks import StageResult
from flows import chain
from flows.chain import finished_result
from flows.progress import ValidationSummary, with_interval
from flows.stages import outputs, train
from flows.stages.dataset import Dataset
from flows.stages.outputs import Export, ExportBest, ExportedWeights, Report, ReportPage, report_fingerprint
from flows.stages.train import Chunk, PassRates, PassRateTable, Train, record_inputs
from flows.work.mlflow_record import MlflowContents, models_digest, settings_digest
from flows.work.open_run import OpenRun, open_run
from rlcore.config import RunConfig, SuiteConfig
from rlcore.config.compose import load_config
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.run.layout import RunInputs, RunLayout, suite_fingerprint
from rlcore.storage.publish import published_directory, write_json_atomically
from rlcore.user_code import code_for_run
from tests.flows.conftest import changed, commit
from tests.helpers.validations import problem, result

HERE = Path("here")


@pytest.fixture
def layout(layout: RunLayout) -> RunLayout:
    layout.validation.mkdir()
    (layout.suites / "sums").mkdir(parents=True)
    layout.journal.touch()
    return layout


def test_stage_describes_its_result():
    rows = StageResult(HERE, cached=False, counts={"train": 1_200, "x": 3}, warning="warning: few")
    table = PassRateTable(HERE, 12_000, 1_500, "pass rates 0 to 1", cached=False)
    weights = ExportedWeights(HERE, 40, cached=False)
    chunk = Chunk(0, 20, cached=False, metrics={"critic/score/mean": 0.12345})
    for stage, made, expected in (
        (Dataset(), rows, "dataset: 1,200 train, 3 x rows (here)\nwarning: few"),
        (PassRates(), table, "pass rates: kept 1,500 of 12,000 rows; pass rates 0 to 1 (here)"),
        (Train(0, 20, is_last=True), chunk, "train: step 0-20, reward at step 20: 0.123"),
        (Export(), weights, "weights: step 40 (here)"),
        (ExportBest(), weights, ""),
        (ExportBest(), replace(weights, is_best=True), "best weights: step 40 (here)"),
        (Report(), ReportPage(HERE, cached=False), "report: here"),
        (outputs.Evaluate(), [], ""),
    ):
        assert stage.describe(made) == expected
        if expected and not isinstance(made, list):
            again = "it is current" if isinstance(made, ReportPage) else "done before"
            assert f", skipped: {again}" in stage.describe(replace(made, cached=True))


def test_validation_names_several_sources():
    figures = {"mean_at_4": 0.25, "mean_at_4/ci_low": 0.2, "mean_at_4/ci_high": 0.3, "std_at_4": 0.1}
    figures |= {"std_at_4/ci_low": 0.1, "pass_at_4": 0.5}
    one = {f"val-core/openai/gsm8k/reward/{name}": value for name, value in figures.items()}
    message = ValidationSummary("after", 40, HERE, cached=False, summary=one)
    assert str(message) == message.headline() == "after (step 40): reward mean_at_4 0.250 [0.200, 0.300]"
    two = one | {"val-core/countdown/reward/greedy": 0.5, "val-core/countdown/reward/greedy/ci_low": 0.4}
    message = ValidationSummary("before", 0, HERE, cached=True, summary=two)
    rewards = "reward openai/gsm8k mean_at_4 0.250 [0.200, 0.300], countdown greedy 0.500"
    assert message.headline() == f"before (step 0): {rewards}"
    assert str(message) == f"{message.headline()}, skipped: done before"
    assert with_interval({"a": 0.5, "a/ci_low": 0.0, "a/ci_high": 0.59}, "a") == "0.500 [0.000, 0.590]"
    assert with_interval({"a": 0.5, "a/ci_high": 0.6}, "a") == "0.500"
    assert with_interval({"a": 0.5}, "b") == ""


def test_report_is_current_while_inputs_are_unchanged(layout):
    folder = layout.run_dir / "report"
    folder.mkdir()
    (folder / "report.html").touch()
    assert outputs.find_report(layout) is None

    def write(why: str = "") -> None:
        known = {"fingerprint": report_fingerprint(layout, why), "html": "/elsewhere/report.html"}
        write_json_atomically(folder / "source.json", known)

    files = [layout.journal, layout.run_json, layout.validation / "after.json", layout.suites / "sums" / "a.json"]
    for file in files:
        write()
        assert outputs.find_report(layout) == ReportPage(folder / "report.html", cached=True)
        file.write_text("changed")
        assert outputs.find_report(layout) is None, file
    write()
    (layout.run_dir / "notes.txt").touch()
    assert outputs.find_report(layout) is not None
    assert outputs.find_report(layout, "failed: x") is None
    write("failed: x")
    assert [outputs.find_report(layout, why) is None for why in ("failed: x", "failed: y", "")] == [False, True, True]
    write()
    (folder / "report.html").unlink()
    assert outputs.find_report(layout) is None


def test_mlflow_record_is_complete_or_lacks_a_part(config, layout):
    last, best = ExportedWeights(HERE, 40, cached=True), ExportedWeights(HERE, 20, cached=True)
    assert models_digest(config, last, best) == "last 40, best 20, registered None"
    more = changed(config, "trainer", total_steps=99)
    assert settings_fingerprint(more) == settings_fingerprint(config)
    assert settings_digest(more) != settings_digest(config)
    settings, report, models = settings_digest(config), report_fingerprint(layout), models_digest(config, last, best)
    whole = MlflowContents("1", "url", "", settings, report, models).write(layout)
    assert MlflowContents.read(layout) == whole
    assert whole.is_complete(OpenRun(config), last, best)
    assert not whole.is_complete(OpenRun(config), last, last)
    assert not whole.is_complete(OpenRun(more), last, best)
    layout.journal.write_text("more")
    assert not whole.is_complete(OpenRun(config), last, best)
    for damaged in ("[1]", "{", '{"another": 1}'):
        (layout.run_dir / "recorded.json").write_text(damaged)
        assert MlflowContents.read(layout) == MlflowContents()


def test_best_weights_are_exported_unless_last(config, layout):
    assert outputs.best_step_to_export(config, layout, 0) is None
    for step, score in ((1, 0.5), (2, 0.75), (3, 0.25)):
        commit(config, step, {"val/reward": score})
    assert [outputs.best_step_to_export(config, layout, last) for last in (2, 3)] == [None, 2]
    for unwanted in ("enabled", "log_best"):
        assert outputs.best_step_to_export(changed(config, "tracking", **{unwanted: False}), layout, 3) is None


def test_validation_is_valid_for_its_step_and_settings(config, layout, tmp_path):
    def find(config: RunConfig, step: int = 2) -> ValidationSummary | None:
        return outputs.find_validation(config, layout, "after", step)

    made = result([problem(1, (1.0, 0.0), greedy=1.0), problem(2, (0.0, 0.0), greedy=0.0)])
    written, place = replace(made, step=2, settings=config.validation.evaluation), layout.validation / "after.json"
    assert find(config) is None
    written.write(place)
    assert find(config) == ValidationSummary("after", 2, place, cached=True, summary=written.metrics())
    assert find(config, 1) is None
    assert find(changed(config, "validation", num_resamples=config.validation.num_resamples + 1)) is None
    assert find(changed(config, "validation", every_steps=config.validation.every_steps + 1)) == find(config)
    suite = SuiteConfig(name="sums", data=config.data)
    config = changed(config, "validation", suites=(suite,))
    assert find(config) is None
    inputs = RunInputs(tmp_path, tmp_path, suites={"sums": tmp_path / "rows"})
    inputs.write(config, layout)
    assert find(config) is None
    digest = suite_fingerprint(config, suite, tmp_path / "rows")
    evaluated = replace(made, step=2, settings=suite.evaluation, suite=digest, data_source="sums")
    file = layout.suites / "sums" / "after.json"
    for another in (replace(evaluated, suite="other rows"), replace(evaluated, step=1)):
        another.write(file)
        assert find(config) is None
    evaluated.write(file)
    assert find(config).summary == written.metrics() | evaluated.metrics()
    assert len(find(config).summary) > len(written.metrics())
    assert outputs.find_suite_results(config, layout, inputs, "after", 2) == [evaluated]
    assert outputs.find_suite_results(config, layout, replace(inputs, suites={}), "after", 2) is None


def test_run_is_finished_with_all_results(config, layout):
    commit(config, 2)
    for name, step in (("before", 0), ("after", 2)):
        evaluated = replace(result([problem(1, (1.0,))]), name=name, step=step, settings=config.validation.evaluation)
        evaluated.write(layout.validation / f"{name}.json")
    with published_directory(layout.exported_model, {"kind": "model", "step": 2}) as folder:
        (folder / "weights").write_text("x")
    assert Export().find(OpenRun(config)) == ExportedWeights(layout.exported_model, 2, cached=True)
    assert finished_result(OpenRun(config)) is None
    (layout.run_dir / "report").mkdir()
    page = layout.run_dir / "report" / "report.html"
    page.touch()
    known = {"fingerprint": report_fingerprint(layout), "html": str(page)}
    write_json_atomically(layout.run_dir / "report" / "source.json", known)
    assert finished_result(OpenRun(config)) is None
    silent = changed(config, "tracking", enabled=False)
    assert finished_result(OpenRun(silent)) is None
    last = ExportedWeights(layout.exported_model, 2, cached=True)
    settings, models = settings_digest(config), models_digest(config, last, last)
    recorded = MlflowContents("1", "url", "", settings, report_fingerprint(layout), models).write(layout)
    found = finished_result(OpenRun(config))
    assert (found.run_id, found.run_dir, found.report) == (layout.run_dir.name, layout.run_dir, page)
    assert [(one.name, one.step) for one in found.validations] == [("before", 0), ("after", 2)]
    assert (found.weights, found.mlflow) == (layout.exported_model, recorded)
    for file in (layout.validation / "before.json", layout.run_json, layout.exported_model / "manifest.json"):
        content = file.read_bytes()
        file.unlink()
        assert finished_result(OpenRun(config)) is None, file
        file.write_bytes(content)
        assert finished_result(OpenRun(config)) is not None


@pytest.fixture
def run(artifacts_root: Path) -> Iterator[OpenRun]:
    """A run with a checkpoint of its first step, without a trainer."""
    size = ["data.train_size=20", "data.validation_size=5", f"paths.root={artifacts_root}"]
    config = load_config(["experiment=debug", "warm_start.enabled=false", *size])
    with open_run(config, ("millrace", "run")) as run:
        commit(config, 1)
        yield run
        assert run.trainer.pid is None


@pytest.fixture
def rows(run: OpenRun) -> None:
    chain.make_rows(run, chain.run_quietly)
    record_inputs(run)


@pytest.mark.usefixtures("rows")
def test_existing_results_are_not_remade_and_chunks_have_bounds(run):
    assert Train(0, 1, is_last=False).find_or_make(run) == Chunk(0, 1, cached=True, metrics={})
    assert not run.origin.command
    assert outputs.Evaluate().find_or_make(run) == []
    config = changed(run.config, "trainer", total_steps=5, steps_per_chunk=2)
    assert Train.chunks(config) == [Train(0, 2, False), Train(2, 4, False), Train(4, 5, True)]
    assert Train.chunks(config, 4) == [Train(0, 2, False), Train(2, 4, True)]
    assert Train.chunks(config, 1) == [Train(0, 1, True)]


@pytest.mark.usefixtures("rows")
def test_start_is_recorded_once_per_process(run, caplog, monkeypatch):
    monkeypatch.setattr(train, "MAX_DIFF_CHARACTERS", 0)
    train.record_start(run)
    file = run.layout.run_json
    noted = json.loads(file.read_text())
    assert [stage["name"] for stage in noted["stages"]] == ["code", "dataset", "filtered", "tokenizer", "start model"]
    code = code_for_run(run.config)
    assert noted["stages"][0]["fingerprint"] == code.fingerprint
    assert ", ".join(code.sources) in json.dumps(noted["stages"][0])
    assert noted["command"] == ["millrace", "run"]
    assert (run.layout.run_dir / "code.diff").read_text() == ""
    file.unlink()
    train.record_start(run)
    assert not file.exists()
    run.is_origin_complete = False
    run.command = ("millrace", "train")
    file.mkdir()
    with caplog.at_level(logging.WARNING):
        train.record_start(run)
    (message,) = (one for one in caplog.messages if "how the training was started is not recorded" in one)
    assert message.startswith(f"{run.layout.run_dir}: how the training was started is not recorded: ")
