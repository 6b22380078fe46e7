"""Millrace installed from a wheel, without a checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.flows.conftest import REPOSITORY, WAIT_S
from tests.flows.stack import Stack

PACKAGES = ("conf", "data", "flows", "rlcore")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds. It is built of a copy: setuptools writes beside the sources."""
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


@pytest.mark.lengthy
@pytest.mark.prefect
@pytest.mark.slow
def test_the_stack_goes_up_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"

    def millrace(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", *words, "--root", str(root)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(installed)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * WAIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        assert "deployments are up to date" in millrace("up")
        stack = Stack(root)
        run = stack.start("dataset/local")
        stack.wait(run, "COMPLETED")
        assert list(root.glob("datasets/*/manifest.json"))
    finally:
        millrace("down")
