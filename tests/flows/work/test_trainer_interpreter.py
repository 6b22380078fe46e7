"""A trainer in a separate environment, with another version of a package and without the packages of flows."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from flows import SOURCE_FOLDER
from flows.work.trainer import trainer_variables
from rlcore.errors import ConfigError
from rlcore.runtime.interpreter import trainer_environment
from rlcore.tracking.lineage import read_origin
from tests.flows.conftest import SMALL, in_this_process, mlflow_rows, numbers

FLOWS_ALONE = ("prefect", "mlflow", "fastapi", "hydra", "optuna", "sqlalchemy", "matplotlib", "datasets")


def make_environment(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/*/site-packages")
    (packages / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return packages


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Interpreter that refuses to import the packages of the extra `flows`, and that has another version of one."""
    folder = tmp_path_factory.mktemp("trainer")
    packages = make_environment(folder)
    for name in FLOWS_ALONE:
        (packages / f"{name}.py").write_text(f"raise RuntimeError('the trainer imports {name}')\n")
    (packages / "vllm.py").write_text("LLM = None\n")  # the import of vLLM takes a minute
    described = packages / "datasets-99.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: datasets\nVersion: 99.0\n")
    return str(folder / "bin" / "python")


def test_trainer_of_another_environment(python, millrace, reference):
    done = millrace("run", *SMALL, f"runtime.python={python}", "reward.num_processes=1", code=0)
    assert "the trainer imports" not in done.text
    run_dir = millrace.run_dir()
    assert numbers(run_dir) == numbers(reference.run_dir)
    assert mlflow_rows(millrace.root, "select status from runs") == [("FINISHED",)]
    tags = dict(mlflow_rows(millrace.root, "select key, value from tags"))
    origin = read_origin(run_dir)
    for found in (origin.environment, {name.removeprefix("env."): value for name, value in tags.items()}):
        assert (found["datasets"], found["flow.datasets"]) == ("99.0", metadata.version("datasets"))
        assert found["prefect"] == metadata.version("prefect"), "only this environment uses it"
        assert not any(name.startswith("flow.") and name != "flow.datasets" for name in found)
    exported = millrace.root / "exported"
    millrace("checkpoints", run_dir.name, "--root", str(millrace.root), "--export", str(exported), code=0)
    one, other = ((folder / "model.safetensors").read_bytes() for folder in (exported, run_dir / "model"))
    assert one == other


def test_flow_loads_no_torch():
    code = "import sys, flows.pipeline, flows.sweep.flow; print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_plan_and_doctor_show_both_environments(python, capsys):
    done = in_this_process(capsys, "run", "experiment=debug", f"runtime.python={python}", "--dry-run", "--json")
    versions = json.loads(done.out)["versions"]
    assert (versions["datasets"], versions["flow.datasets"]) == ("99.0", metadata.version("datasets"))
    lines = in_this_process(capsys, "doctor", "--python", python, "--json").out
    found = {line["name"]: line["found"] for line in json.loads(lines)}
    assert found["Python of flows"].endswith(sys.executable)
    assert found["Python of trainer"].endswith(python)
    assert {"packages of flows", "packages of trainer", "torch"} <= found.keys()


def test_unusable_interpreters_are_refused(tmp_path):
    bare = make_environment(tmp_path / "bare")
    (bare / "ours.pth").unlink()
    no_python = tmp_path / "echo"
    no_python.write_text("#!/bin/sh\necho hello\n")
    no_python.chmod(0o755)
    for file, why in (
        (tmp_path / "missing", r"which is no program\. Name the file bin/python"),
        (no_python, "which cannot run it"),
        (tmp_path / "bare" / "bin" / "python", "which lacks torch and transformers. In a checkout: "),
    ):
        with pytest.raises(ConfigError, match=rf"^runtime\.python: must be a Python interpreter .*; got {file}, {why}"):
            trainer_environment(str(file))


def test_other_millrace_is_refused(tmp_path, monkeypatch):
    """Both sides are installed, so that no checkout is shared."""
    for name in ("here", "there"):
        packages = make_environment(tmp_path / name)
        for package in ("rlcore", "data", "flows", "conf"):
            shutil.copytree(SOURCE_FOLDER / package, packages / package)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    programs = [str(tmp_path / name / "bin" / "python") for name in ("here", "there")]
    code = f"from rlcore.runtime.interpreter import trainer_environment as ask; print(ask({programs[1]!r}).path)"
    command = [programs[0], "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert str(tmp_path / "here") not in done.stdout
    (packages / "rlcore" / "score.py").write_text("changed = True\n")
    done = subprocess.run(command, capture_output=True, text=True)
    assert "runtime.python: must have the same Millrace as this process; got" in done.stderr


def test_path_of_trainer_has_own_packages_before_folder(python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/first", *sys.path])
    places = trainer_variables(python)["PYTHONPATH"].split(os.pathsep)
    (packages,) = Path(python).parents[1].glob("lib/*/site-packages")
    assert [one for one in places if one in (str(packages), "/first")] == [str(packages), "/first"]
    assert (places[0], places[-1]) == (str(SOURCE_FOLDER), str(tmp_path))
