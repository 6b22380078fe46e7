"""`import millrace`; docs/python.md is executed from a folder with an empty MLflow store."""

import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import millrace
from rlcore.errors import ConfigError, DataError
from rlcore.evaluation.result import ProblemResult, Response, ValidationResult
from rlcore.run.layout import RunLayout
from rlcore.storage.publish import write_text_atomically
from rlcore.tracking.lineage import Origin
from tests.helpers.pages import BLOCK

PAGE = Path(__file__).parents[1] / "docs" / "python.md"


def test_folders_of_the_same_names_do_not_hide_the_packages(tmp_path):
    for name in ("millrace", "data", "conf"):  # such as the parent folder of a clone
        (tmp_path / name).mkdir()
    words = [sys.executable, "-c", "import millrace, data.rows, flows.cli; print(millrace.ConfigError.__name__)"]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout == "ConfigError\n"


@pytest.mark.filterwarnings("ignore:.*Any type hint:UserWarning")  # of MLflow's, where warnings are errors
@pytest.mark.slow
def test_page_runs_as_written(tmp_path, empty_store, monkeypatch, capsys):
    (tmp_path / "artifacts").mkdir()
    shutil.copy(empty_store, tmp_path / "artifacts" / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for language, block in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        assert language == "python"
        exec(block, names)
    shown = capsys.readouterr().out
    assert ("checkpoint after step 1:" in shown, "warm-start: step 1/" in shown) == (True, True)
    run, metrics, answers = names["run"], names["metrics"], names["answers"]
    assert repr(run) == f"<Run {run.id} finished 2/2, held-out {run.status().score:.3f}>"
    assert repr(names["settings"]).startswith(f"<RunSettings {run.id}: ")
    assert len(repr(names["settings"])) < 500
    assert (run.config.seed, run.config.rollout.samples_per_prompt) == (2, 8)
    assert metrics.index.tolist() == [0, 1, 2]
    assert len(answers) == 32 * 2
    assert answers["score"].between(0, 1).all()
    assert [info.step for info in run.checkpoints()] == [1, 2]
    assert names["same"].folder == run.folder


def test_api_mistakes_raise_millrace_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"Did you mean trainer\.total_steps"):
        millrace.compose("trainer.totl_steps=3", experiment="debug")
    with pytest.raises(ConfigError, match=r"overrides: each must be a string.*got \['optim.lr=1e-3'\]"):
        millrace.compose(["optim.lr=1e-3"], experiment="debug")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="is neither the folder nor the id of a run"):
        millrace.open("no-such-run", root=tmp_path)
    assert millrace.runs(tmp_path) == []


@pytest.fixture
def run(tmp_path: Path) -> millrace.Run:
    config = millrace.compose(experiment="debug", root=tmp_path).config
    return millrace.Run(config, RunLayout.of(config))


def test_responses_of_a_validation(run):
    with pytest.raises(DataError, match=r"has no validation of that name. It has none yet"):
        run.responses()
    failed = Response("a", 0.0, {}, 1, "stop", failure="the judge was away")
    problem = ProblemResult(3, 1, "p", "{}", None, (Response("b", 1.0, {"correct": 1.0}, 1, "stop"), failed))
    result = ValidationResult("after", 2, 2, "countdown", (problem,), run.config.validation.evaluation)
    result.write(run.layout.validation / "after.json")
    with pytest.raises(DataError, match=r"foo.json: run debug-s1-\w+ has no validation of that name. It has after"):
        run.responses("foo")
    answers = run.responses()
    assert answers["score"].mean() == 1.0
    assert answers["failure"].isna().tolist() == [True, False]


def test_unused_setting_is_logged(tmp_path, caplog):
    words = ("algo.importance.mode=off", "algo.importance.cap=3", "data.scorer=nowhere:score")
    settings = millrace.compose(*words, experiment="debug", root=tmp_path)
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="nowhere"):
        millrace.run(settings)
    assert "algo.importance.cap" in caplog.text


def test_run_of_another_version_is_skipped(run, tmp_path, caplog):
    Origin(run.config).write(run.layout.run_dir)
    other = tmp_path / "runs" / "other" / "run.json"
    write_text_atomically(other, '{"a_setting_of_another_version": 1}')
    with caplog.at_level(logging.WARNING):
        assert [one.id for one in millrace.runs(tmp_path)] == [run.id]
    assert f"skipped: {other}" in caplog.text
