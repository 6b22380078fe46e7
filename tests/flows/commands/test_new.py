"""`millrace new`: each file that it writes runs as it is, from an empty folder."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.commands.new import COMMANDS, new
from rlcore.errors import ConfigError
from tests.flows.conftest import in_this_process


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in ("sums", "judge", *(f"my_{kind}" for kind in COMMANDS)):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("experiment", "null"), *((kind, f"my_{kind}") for kind in COMMANDS if kind not in ("slurm", "project"))],
)
def test_the_command_that_it_names_can_be_planned(kind, name, capsys):
    command = in_this_process(capsys, "new", kind, name, code=0).out.splitlines()[-1].split()
    assert " ".join(command) == COMMANDS[kind].format(name=name)
    in_this_process(capsys, *command[1:], "--dry-run", code=0)
    assert kind != "task" or "sort_digits" not in Path(f"{name}.py").read_text()


def test_project_runs_from_its_folder(empty_folder):
    new("project", "study")
    assert not list(Path("study").rglob("*NAME*"))
    assert not [file for file in Path("study").rglob("*") if file.is_file() and "NAME" in file.read_text()]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for target in ("run", "sweep", "test"):
        command = ["make", "-C", "study", target, "ARGS=--dry-run"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_task_and_a_scorer_are_trained_on(capsys):
    new("task", "sums")
    new("scorer", "judge")
    in_this_process(capsys, "data", "make", *COMMANDS["task"].format(name="sums").split()[2:], code=0)
    words = ["data.scorer=judge:score", "warm_start.enabled=false", "trainer.total_steps=1", "tracking.enabled=false"]
    in_this_process(capsys, "train", "experiment=debug", *words, code=0)
    (journal,) = Path("artifacts/runs").glob("*/metrics.jsonl")
    assert "reward/short/mean" in journal.read_text()


@pytest.mark.parametrize(
    ("kind", "name", "reported"),
    [
        ("task", "Two-words", "NAME: must be small letters"),
        ("task", "class", "NAME: must not be a Python keyword; got 'class'. Choose another, such as my_class"),
        ("experiment", "-mine", "NAME: must be small letters, digits, _ and -, at most 64, and begin with a letter or"),
        ("task", "json", "got json. Choose another, such as my_json"),
        ("scorer", "data", "got data. Choose another, such as my_data"),
        ("experiment", "mine", "exists already"),
    ],
)
def test_a_kind_or_name_that_cannot_be(kind, name, reported, empty_folder):
    (empty_folder / "mine.yaml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match=reported):
        new(kind, name)
    assert [file.read_text() for file in empty_folder.iterdir()] == ["name: mine\n"]
