"""Custom tasks and environments in the folder where the command is started."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from data import multiplication
from flows import SOURCE_FOLDER
from flows.work.trainer import TRAINER, trainer_variables

MILLRACE = "from flows.cli import main; main()"
"""The installed command: the module path has its own folder, not the current one."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a task and with modules named like one of ours, of Python's and of a package's."""
    (tmp_path / "products.py").write_text(Path(multiplication.__file__).read_text())
    for name in ("data", "queue", "pydantic"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('somebody else\\'s {name}.py')\n")
    return tmp_path


DEBUG = ("experiment=debug", "data=custom", "data.train_size=20", "data.validation_size=5")


def run(project: Path, *words: str, settings: Sequence[str] = DEBUG) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-c", MILLRACE, *words[0].split(), *settings, *words[1:]],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(SOURCE_FOLDER)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_rows_of_own_task_are_made(project: Path) -> None:
    done = run(project, "data make", "data.build=products:build", "data.scorer=products:score")
    assert (done.returncode, done.stderr) == (0, "")
    assert "filter: 20 train, 5 validation rows" in done.stdout


def test_missing_function_is_reported_before_anything_is_made(project: Path) -> None:
    done = run(project, "run", "data.build=product:build", "data.scorer=products:score")
    assert done.returncode == 2
    assert "data.build: must name a function" in done.stderr
    assert "A module is found in the working directory" in done.stderr
    assert not (project / "artifacts").exists()


def test_trainer_finds_own_modules(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [*sys.path, project])  # as in notebooks; Python ignores a Path
    program = "import data, products, pydantic, queue; print(data.__file__); print(products.__file__)"
    command = [sys.executable, *TRAINER[: TRAINER.index("-m")], "-c", program]
    done = subprocess.run(command, env=trainer_variables(None), capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(SOURCE_FOLDER / "data" / "__init__.py"), str(project / "products.py")]


def test_environment_of_the_page_trains_from_an_empty_folder(tmp_path: Path) -> None:
    page = (SOURCE_FOLDER / "docs" / "environments.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(# count_on\.py\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(block.splitlines()) < 40
    (tmp_path / "count_on.py").write_text(block)
    settings = [
        "experiment=number_guessing", "data.build=count_on:build", "data.train_size=40", "data.validation_size=8",
        "episode.max_tool_tokens=2", "model.scratch.max_integer=63",
        "tracking.enabled=false",
        "trainer.total_steps=1", "trainer.steps_per_chunk=1", "validation.every_steps=1",
    ]  # fmt: skip
    done = run(tmp_path, "train", *settings, "data.environment=count_on:CountOn", settings=())
    assert done.returncode == 0, done.stderr
    (journal,) = (tmp_path / "artifacts" / "runs").glob("*/metrics.jsonl")
    metrics = [line["metrics"] for line in map(json.loads, journal.read_text().splitlines()) if "metrics" in line]
    assert 0 <= metrics[-1]["reward/right/mean"] <= 1
    assert metrics[-1]["reward/turns/mean"] == 3
    assert metrics[-1]["environment_length/mean"] == 4
