"""Custom tasks and environments in the folder where the command is started."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from data import sort_digits
from flows import SOURCE_FOLDER
from flows.work.trainer import TRAINER, trainer_variables
from tests.data.openenv_servers import PAGE, any_server, block_of_the_page, failed, game_server, observed

MILLRACE = "from flows.cli import main; main()"
"""The installed command: the module path has its own folder, not the current one."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with a task, and with modules named like modules of Millrace, Python and a package."""
    (tmp_path / "sorting.py").write_text(Path(sort_digits.__file__).read_text())
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
    done = run(project, "data make", "data.build=sorting:build", "data.scorer=sorting:score")
    assert (done.returncode, done.stderr) == (0, "")
    assert "filter: 20 train, 5 validation rows" in done.stdout


def test_trainer_finds_own_modules(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [*sys.path, project])  # as in notebooks; Python ignores a Path
    program = "import data, sorting, pydantic, queue; print(data.__file__); print(sorting.__file__)"
    command = [sys.executable, *TRAINER[: TRAINER.index("-m")], "-c", program]
    done = subprocess.run(command, env=trainer_variables(None), capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(SOURCE_FOLDER / "data" / "__init__.py"), str(project / "sorting.py")]


ONE_STEP = ("tracking.enabled=false", "trainer.total_steps=1", "trainer.steps_per_chunk=1", "validation.every_steps=1")


def command_of_the_page(start: str) -> list[str]:
    page = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = (line for line in page.splitlines() if line.startswith(f"millrace run {start} "))
    own = {setting.partition("=")[0] for setting in ONE_STEP}
    return [word for word in shlex.split(line)[2:] if word.partition("=")[0] not in own]


def last_metrics(folder: Path) -> dict[str, float]:
    (journal,) = (folder / "artifacts" / "runs").glob("*/metrics.jsonl")
    lines = map(json.loads, journal.read_text().splitlines())
    return [line["metrics"] for line in lines if "metrics" in line][-1]


def test_taskset_of_the_page_trains_from_an_empty_folder(tmp_path: Path) -> None:
    pytest.importorskip("verifiers", reason="needs the package verifiers: pip install -e '.[verifiers]'")
    (tmp_path / "sums.py").write_text(block_of_the_page("sums.py"))
    command = command_of_the_page("experiment=debug data=verifiers")
    done = run(tmp_path, "train", *command, *ONE_STEP, settings=())
    assert done.returncode == 0, done.stderr
    metrics = last_metrics(tmp_path)
    assert 0 <= metrics["reward"] <= 1.1
    assert {"reward/right/mean", "reward/number/mean", "reward/length/mean"} <= metrics.keys()
    assert "reward/unscored_share" not in metrics


def test_server_of_the_page_trains_from_an_empty_folder(tmp_path: Path) -> None:
    command = command_of_the_page("experiment=number_guessing data=openenv")
    with game_server(tmp_path) as address:
        command = [word.replace("http://127.0.0.1:8000", address) for word in command]
        done = run(tmp_path, "train", *command, *ONE_STEP, settings=())
    assert done.returncode == 0, done.stderr
    metrics = last_metrics(tmp_path)
    assert 0 <= metrics["reward"] <= 1
    assert 1 <= metrics["reward/turns/mean"] <= 6
    assert metrics["reward/invalid_actions/mean"] == 0
    assert "reward/unscored_share" not in metrics


def test_server_that_fails_in_a_run_ends_the_run(tmp_path: Path) -> None:
    command = command_of_the_page("experiment=number_guessing data=openenv")
    with any_server() as server:
        server.observation = {"hint": {"type": "string"}}
        kinds: list[str] = []

        def reply(message: dict[str, Any]) -> str:
            kinds.append(message["type"])
            return observed(hint="+", done=kinds[-1] == "step") if len(kinds) < 100 else failed("EXECUTION_ERROR")

        server.reply = reply
        command = [word.replace("http://127.0.0.1:8000", server.address) for word in command]
        done = run(tmp_path, "train", *command, *ONE_STEP, settings=())
    assert done.returncode not in (0, 2), "the trial succeeds, and the run fails"
    assert f"episode.server: must be an OpenEnv server; got from {server.address} to " in done.stderr
    assert "have no score; data.openenv:OpenEnv failed, the last time" in done.stderr


def test_environment_of_the_page_trains_from_an_empty_folder(tmp_path: Path) -> None:
    block = block_of_the_page("count_on.py")
    assert len(block.splitlines()) < 40
    (tmp_path / "count_on.py").write_text(block)
    settings = [
        "experiment=number_guessing", "data.build=count_on:build", "data.train_size=40", "data.validation_size=8",
        "episode.max_tool_tokens=2", "model.scratch.max_integer=63", *ONE_STEP,
    ]  # fmt: skip
    done = run(tmp_path, "train", *settings, "data.environment=count_on:CountOn", settings=())
    assert done.returncode == 0, done.stderr
    metrics = last_metrics(tmp_path)
    assert 0 <= metrics["reward/right/mean"] <= 1
    assert metrics["reward/turns/mean"] == 3
    assert metrics["environment_length/mean"] == 4
