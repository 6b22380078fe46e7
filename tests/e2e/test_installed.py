"""Millrace installed from a wheel, without a checkout."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import httpx
import psutil
import pytest

from flows.stack.state import root_login
from tests.flows.conftest import REPOSITORY, WAIT_S, ended, start
from tests.helpers.stack import Stack

PACKAGES = ("conf", "data", "flows", "rlcore")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and unpack it. It is built from a copy, because setuptools writes into the sources."""
    if int(version("setuptools").partition(".")[0]) < 77:
        pytest.skip("setuptools is older than pyproject.toml asks for: no wheel is built without a network")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in PACKAGES:
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "millrace.py"):
        shutil.copy(REPOSITORY / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_every_file_of_the_packages(installed: Path) -> None:
    tracked = subprocess.check_output(["git", "ls-files", "-z", *PACKAGES], cwd=REPOSITORY, text=True).split("\0")
    assert [name for name in tracked if name and not (installed / name).is_file()] == []


def write_wheel(folder: Path, name: str) -> Path:
    wheel, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return wheel


def test_make_shows_the_progress_of_pip_and_stops_at_its_failure(tmp_path: Path) -> None:
    wheel, stamp = write_wheel(tmp_path, "tiny"), tmp_path / "venv" / ".torch"
    settings = [f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}"]

    def install(package: Path) -> "subprocess.CompletedProcess[str]":
        command = ["make", "-C", str(REPOSITORY), str(stamp), *settings, f"TORCH={package}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)

    assert install(tmp_path / "missing-1.0-py3-none-any.whl").returncode == 2
    assert not stamp.exists()
    done = install(wheel)
    assert (done.returncode, stamp.exists()) == (0, True), done.stderr
    steps = [f"Installing {wheel} into {tmp_path / 'venv'} ...", "  installing the packages (1) ..."]
    assert [line for line in done.stdout.splitlines() if "nstalling" in line] == steps
    assert "Collecting" not in done.stdout
    assert "Processing" not in done.stdout


def python(
    installed: Path, folder: Path, *words: str, codes: tuple[int, ...] = (0,), **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run Python with the wheel in a folder."""
    done = subprocess.run(
        [sys.executable, "-P", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
    )
    assert done.returncode in codes, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def millrace(installed: Path, folder: Path, *words: str, codes: tuple[int, ...] = (0,)) -> str:
    done = python(installed, folder, "-m", "flows.cli", *words, codes=codes)
    return done.stdout if "--json" in words else done.stdout + done.stderr


def tab(installed: Path, folder: Path, *words: str) -> list[str]:
    asked = {"COMP_WORDS": " ".join(("millrace", *words)), "COMP_CWORD": str(len(words))}
    asked["_MILLRACE_COMPLETE"] = "complete_bash"
    done = python(installed, folder, "-c", "from flows.cli import app; app(prog_name='millrace')", **asked)
    return done.stdout.splitlines()


API = """
import millrace
settings = millrace.compose("trainer.total_steps=1", experiment="mine.yaml", root="artifacts")
(run,) = millrace.runs("artifacts")
same = millrace.open(run.id, root="artifacts")
print(settings.config.name, same.status().state, same.metrics().index.tolist()[-1], same.checkpoints()[-1].step)
print(len(same.responses("after")))
"""


@pytest.mark.lengthy
@pytest.mark.slow
def test_every_command_about_runs_works_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    def do(*words: str, codes: tuple[int, ...] = (0,)) -> str:
        return millrace(installed, tmp_path, *words, codes=codes)

    assert "no run" in do("runs")
    for kind, name in (("task", "sums"), ("experiment", "mine"), ("scorer", "own")):
        assert "is written" in do("new", kind, name)
    assert "train " in do("run", "experiment=mine.yaml", "--dry-run")
    assert "name: mine" in do("train", "experiment=mine.yaml", "--cfg", "job")
    do("train", "experiment=mine.yaml", "-m", "seed=1,2", codes=(2,))
    assert tab(installed, tmp_path, "train", "trainer.tot") == ["trainer.total_steps="]
    assert tab(installed, tmp_path, "train", "algo=dap") == ["algo=dapo"]
    assert "filter: " in do("data", "make", "experiment=debug")
    do("train", "experiment=debug", "trainer.total_steps=1", "warm_start.enabled=false")
    (run,) = json.loads(do("runs", "--json"))
    assert (run["state"], run["step"]) == ("finished", 1)
    assert tab(installed, tmp_path, "logs", "deb") == [run["run_id"]]
    assert "trainer-1.log" in do("logs", run["run_id"])
    assert "trainer-1.log" in do("logs", "-f", run["run_id"]), "it ends with the run"
    name, state, row, step, answers = python(installed, tmp_path, "-c", API).stdout.split()
    assert (name, state, row, step) == ("mine", "finished", "1", "1")
    assert int(answers) > 0
    assert "no process works on it" in do("stop", run["run_id"])
    assert "1 shown of" in do("rollouts", run["run_id"], "--limit", "1")
    assert "none of the responses that must not score did" in do("audit", run["run_id"], "--scorer", "own:score")
    (tmp_path / "suite.yaml").write_text(
        "data: {task: countdown, template: bare, train_size: 1, validation_size: 4, min_numbers: 3, max_numbers: 3}\n"
        "num_resamples: 1000\n"
    )
    assert "suite: 4 problems" in do("eval", run["run_id"], "--suite", "suite.yaml")
    page_has_answers(installed, tmp_path, run["run_id"])
    lines = {line["name"]: line for line in json.loads(do("doctor", "--json", codes=(0, 1)))}
    assert not {"data", "conf", "flows", "rlcore"} & lines.keys(), "Millrace's names are those of the wheel"
    assert {"Python", "torch", "memory", "ports"} <= {name for name, line in lines.items() if line["level"] != "error"}


def page_has_answers(installed: Path, folder: Path, run_id: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    process = start([sys.executable, "-P", "-m", "flows.cli", "ui"], environment, folder)
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")  # it may say first that its usual port is taken
        url = next((line.split()[1] for line in lines if line.startswith("Responses: ")), None)
        assert url is not None, ended(process)
        login = tuple(root_login(folder / "artifacts").split(":", 1))
        assert "<script" in httpx.get(url, auth=login).raise_for_status().text
        assert httpx.get(f"{url}runs", auth=login).raise_for_status().json() == [run_id]
        for member in psutil.Process(process.pid).children(recursive=True):
            member.kill()
        done = ended(process)
        assert (done.code, "MLflow's server has ended unexpectedly" in done.err) == (1, True), done.err
    finally:
        process.kill()


@pytest.mark.lengthy
@pytest.mark.prefect
@pytest.mark.slow
def test_the_stack_goes_up_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    try:
        assert "deployments are up to date" in millrace(installed, tmp_path, "up", "--root", str(root))
        stack = Stack(root)
        run = stack.start("pipeline/dataset")
        stack.wait(run, "COMPLETED")
        assert list(root.glob("datasets/*/manifest.json"))
        millrace(installed, tmp_path, "new", "experiment", "mine")
        said = millrace(installed, tmp_path, "deploy", "mine.yaml", "--root", str(root))
        assert "deployment pipeline/mine" in said
        run = stack.start("pipeline/mine", overrides=["trainer.total_steps=1", "warm_start.enabled=false"])
        stack.wait(run, "COMPLETED")
        (step,) = root.glob("runs/*/checkpoints/step-000001")
        assert step.is_dir()
    finally:
        millrace(installed, tmp_path, "down", "--root", str(root))
