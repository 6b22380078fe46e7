"""A run does not resume with other code, data, weights, or fewer steps."""

import json
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from flows import chain
from flows.stages.dataset import Dataset
from flows.stages.outputs import Validate
from flows.stages.stage import Stage
from flows.stages.train import WarmStart, record_inputs
from flows.sweep.study import committed_step_or_zero
from flows.work.open_run import OpenRun, committed_step, open_run, require_same_inputs
from flows.work.plan import make_plan
from flows.work.protocol import Note
from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.errors import CheckpointError, DataError
from rlcore.models.load import build_scratch_model
from rlcore.run.layout import RunInputs, RunLayout
from rlcore.tracking.lineage import Origin, read_origin
from rlcore.user_code import code_for_run
from tests.flows.conftest import changed, commit

TASK = """
from pathlib import Path
from data.rows import Message, Row, TaskRows
from mine_helper import digits

def build(settings, seed):
    numbers = Path(settings.options[0]).read_text().split()
    rows = [Row((Message("user", f"{n} * 1 ="),), {"product": int(n)}, 1, n) for n in numbers]
    return TaskRows("mine", "math", "text", {"train": rows[2:], "validation": rows[:2]})

def score(response, truth):
    return digits(response)
"""
HELPER = "def digits(text):\n    return sum(letter.isdigit() for letter in text)\n"


@pytest.fixture
def config(tmp_path: Path, artifacts_root: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    (tmp_path / "mine_task.py").write_text(TASK)
    (tmp_path / "mine_helper.py").write_text(HELPER)
    (tmp_path / "mine_numbers.txt").write_text("2 3 4 5 6 7")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mine_task", "mine_helper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    own = ["data=custom", "data.build=mine_task:build", "data.scorer=mine_task:score", "warm_start.enabled=false"]
    own.append(f"data.options=[{tmp_path}/mine_numbers.txt]")
    return load_config(["experiment=debug", *own, f"paths.root={artifacts_root}", "run_id=mine"])


def begin(config: RunConfig) -> RunLayout:
    """Write the files of a run after two steps, without training."""
    layout = RunLayout.of(config)
    with open_run(config) as run:
        chain.make_rows(run, chain.run_quietly)
        record_inputs(run)
    commit(config, 2)
    assert make_plan(config).committed_step == 2
    return layout


def refused(config: RunConfig) -> str:
    """Return the error of the plan and of a start; a sweep counts the run as not begun."""
    message = set()
    assert committed_step_or_zero(config) == 0
    for resume in (make_plan, lambda config: open_run(config).__enter__()):
        with pytest.raises(CheckpointError) as error:
            resume(config)
        message.add(str(error.value))
    (text,) = message
    return text


def test_edited_scorer_is_refused_with_a_patch(config, tmp_path):
    layout = begin(config)
    assert sorted(file.name for file in layout.code.glob("*.py")) == ["mine_helper.py", "mine_task.py"]
    (tmp_path / "mine_helper.py").write_text(HELPER.replace("isdigit", "isalpha"))
    message = refused(config)
    for sign, kind in (("-", "isdigit"), ("+", "isalpha")):
        assert f"{sign}    return sum(letter.{kind}() for letter in text)" in message
    for words in (
        f"{layout.run_dir}: has begun with other code",
        f"the run's code is in {layout.code}",
        "--fork mine@2",
    ):
        assert words in message
    (tmp_path / "mine_helper.py").write_bytes((layout.code / "mine_helper.py").read_bytes())
    with open_run(config):
        (tmp_path / "mine_helper.py").write_text("an edit during the run is for the next start")
        assert committed_step_or_zero(config) == committed_step(config) == 2
    assert "for the next start" in refused(config)


def test_changed_data_of_a_custom_build_are_refused(config, tmp_path, artifacts_root):
    layout = begin(config)
    (dataset,) = [folder for folder in (artifacts_root / "datasets").iterdir() if folder.is_dir()]
    (tmp_path / "mine_numbers.txt").write_text("7 6 5 4 3 2")
    message = refused(config)
    now, then = (sha256(text.encode()).hexdigest()[:16] for text in ("7 6 5 4 3 2", "2 3 4 5 6 7"))
    line = f"  mine_numbers.txt: {then} then, {now} now"
    assert f"cannot resume with these:\n{line}\nRestore what has changed" in message
    assert "--fork mine@2" in message
    again = Dataset().make(OpenRun(config.model_copy(update={"run_id": "another"})))
    assert not again.cached
    assert again.directory != dataset
    Origin(config).write(layout.run_dir)
    require_same_inputs(config, layout)


def test_fewer_steps_than_the_run_has_are_refused(config):
    commit(config, 1)
    layout = begin(config)
    kept = layout.run_json.read_bytes()
    assert refused(changed(config, "trainer", total_steps=1)) == (
        "trainer.total_steps: must be at least 2, the steps that run mine already has; got 1. Set it to 2 or more; for "
        "fewer steps start another run, from these weights (--fork mine@1) or from step 0, with another name or run_id."
    )
    assert layout.run_json.read_bytes() == kept


def test_run_without_checkpoint_or_stored_code_takes_the_present_code(config, tmp_path):
    layout = RunLayout.of(config)
    with open_run(config):
        before = (layout.code / "mine_helper.py").read_text()
    (tmp_path / "mine_helper.py").write_text(HELPER.replace("isdigit", "isalpha"))
    with open_run(config):
        assert (layout.code / "mine_helper.py").read_text() != before
        assert code_for_run(config).sources["mine_helper.py"].content.decode().count("isalpha") == 1
    begin(config)
    shutil.rmtree(layout.code)
    with open_run(config):
        assert committed_step_or_zero(config) == 2
    assert (layout.code / "mine_task.py").is_file()


def test_changed_model_under_the_same_path_is_refused(config, tmp_path, monkeypatch):
    for name, seed in (("here", 1), ("there", 2)):
        build_scratch_model(config.model.scratch, seed=seed, directory=tmp_path / name / "mm")
    config = changed(config, "model", path="mm")
    monkeypatch.chdir(tmp_path / "here")
    layout = begin(config)
    weights = tmp_path / "here" / "mm" / "model.safetensors"
    whole, other = weights.read_bytes(), (tmp_path / "there" / "mm" / weights.name).read_bytes()
    assert len(whole) == len(other)
    weights.touch()
    assert committed_step_or_zero(config) == 2
    weights.write_bytes(other)
    message = refused(config)
    assert f"model.path, {weights.parent}: {weights.name}: " in message
    assert "--fork mine@2" in message
    weights.write_bytes(whole)
    with open_run(config):
        assert committed_step_or_zero(config) == 2
    monkeypatch.chdir(tmp_path / "there")
    assert str(tmp_path / "there" / "mm") in refused(config)
    origin = read_origin(layout.run_dir)
    replace(origin, models={}).write(layout.run_dir)  # begun on a machine without the model
    with open_run(config):
        assert committed_step_or_zero(config) == 2
    monkeypatch.chdir(tmp_path / "here")
    assert str(weights.parent) in refused(config)
    layout.run_json.write_text("[]")
    with pytest.raises(DataError, match=r"run\.json: cannot be read .* use the version of Millrace"):
        make_plan(config)


def test_validated_run_has_begun(config, tmp_path):
    layout = RunLayout.of(config)
    with open_run(config):
        pass
    layout.validation.mkdir()
    (layout.validation / "before.json").touch()
    require_same_inputs(config, layout)
    (tmp_path / "mine_helper.py").write_text(HELPER.replace("isdigit", "isalpha"))
    message = refused(config)
    assert message.startswith(f"{layout.run_dir}: has begun with other code, data or models, and cannot resume")
    assert message.endswith("or start another run with the current inputs, from step 0, with a separate run_id.")
    (layout.validation / "before.json").rename(layout.validation / "before.txt")
    require_same_inputs(config, layout)


def test_changed_demonstrations_are_refused(config, tmp_path):
    file = tmp_path / "shown.jsonl"
    lines = [json.dumps({"prompt": f"{n}?", "completion": str(n)}) + "\n" for n in range(20)]
    file.write_text("".join(lines))
    layout = begin(config := changed(config, "warm_start", enabled=True, demonstrations=str(file)))
    require_same_inputs(config, layout)
    before, now = (sha256("".join(text).encode()).hexdigest()[:16] for text in (lines, lines[1:]))
    file.write_text("".join(lines[1:]))
    line = f"  warm_start.demonstrations: {before} then, {now} now"
    assert f"cannot resume with these:\n{line}\nRestore what has changed" in refused(config)
    file.unlink()
    assert f"  warm_start.demonstrations: {before} then, absent now\n" in refused(config)
    file.write_text("".join(lines))
    assert committed_step_or_zero(config) == 2


def test_changed_rows_are_refused_before_a_new_initial_policy(config, artifacts_root, tmp_path):
    """A changed filter writes its rows to another folder."""
    (tmp_path / "mine_numbers.txt").write_text("2 3 4 5 6")
    others = chain.make_rows(OpenRun(config), chain.run_quietly).filtered_directory
    (tmp_path / "mine_numbers.txt").write_text("2 3 4 5 6 7")
    layout = begin(config)
    now = RunInputs.read(layout)
    replace(now, filtered_directory=others).write(config, layout)
    stages: tuple[Stage[object], ...] = (Validate("last"), WarmStart())
    for stage in stages:
        with pytest.raises(CheckpointError) as error, open_run(config) as run:
            stage.find_or_make(run)
        line = f"  rows: {others} then, {now.filtered_directory} now"
        for words in (f"cannot resume with these:\n{line}\nRestore what", "--fork mine@2"):
            assert words in str(error.value)
    same = artifacts_root / "filtered" / "same-rows"
    shutil.copytree(now.filtered_directory, same)
    for known in (now.filtered_directory, same, artifacts_root / "filtered" / "deleted"):
        replace(now, filtered_directory=known).write(config, layout)
        require_same_inputs(config, layout, now)
    shutil.rmtree(layout.checkpoints)
    replace(now, filtered_directory=others).write(config, layout)
    require_same_inputs(config, layout, now)


def test_events_are_routed_inside_the_block(config):
    heard: list[object] = []
    with open_run(config) as run:
        before = run.trainer.on_event, run.trainer.on_line, run.trainer.on_wait
        with suppress(KeyError), run.route_events(heard.append, heard.append, lambda: heard.append("waits")):
            run.trainer.on_event(Note("a"))
            run.trainer.on_line("b")
            run.trainer.on_wait()
            raise KeyError
        assert (run.trainer.on_event, run.trainer.on_line, run.trainer.on_wait) == before
    assert heard == [Note("a"), "b", "waits"]
