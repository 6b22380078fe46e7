"""`import millrace`: the notebook in docs is executed as it stands, from a folder with an empty MLflow store."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import millrace
from rlcore.errors import ConfigError, DataError
from rlcore.run.layout import RunLayout
from tests.notebook import NOTEBOOK, notebook


@pytest.mark.filterwarnings("ignore:.*Any type hint:UserWarning")  # of MLflow's, where warnings are errors
@pytest.mark.slow
def test_the_notebook_is_true(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "artifacts").mkdir()
    shutil.copy(empty_store, tmp_path / "artifacts" / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    shown = capsys.readouterr().out
    assert "checkpoint after step 1:" in shown, "the trainer's events are shown"
    assert "warm-start: step 1/" in shown
    run, metrics, answers = names["run"], names["metrics"], names["answers"]
    assert run.status().state == "finished"
    assert (run.config.seed, run.config.rollout.samples_per_prompt) == (2, 8)
    assert metrics.index.tolist() == [0, 1, 2], "step 0: the validation before training"
    assert len(answers) == 32 * 2
    assert answers["score"].between(0, 1).all()
    assert [info.step for info in run.checkpoints()] == [1, 2]
    assert names["same"].folder == run.folder
    assert names["result"].step == 1


def test_the_notebook_is_the_page() -> None:
    assert NOTEBOOK.read_text() == notebook(), "make generated"


def test_mistakes_are_errors_of_millrace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean trainer\.total_steps"):
        millrace.compose("trainer.totl_steps=3", experiment="debug")
    with pytest.raises(DataError, match="is neither the folder nor the id of a run"):
        millrace.open("nobody", root=tmp_path)
    assert millrace.runs(tmp_path) == []


def test_a_validation_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    config = millrace.compose(experiment="debug", root=tmp_path).config
    run = millrace.Run(config, RunLayout.of(config))
    with pytest.raises(DataError, match=r"has no validation of that name. It has none yet"):
        run.answers()
    run.layout.validation.mkdir(parents=True)
    (run.layout.validation / "before.json").touch()
    with pytest.raises(DataError, match=r"foo.json: run debug-s1-\w+ has no validation of that name. There are before"):
        run.answers("foo")
