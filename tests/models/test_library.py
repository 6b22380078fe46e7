"""transformers comes without the packages that it imports, and the metadata that it reads, for nothing done here."""

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

HIDDEN = ("sklearn", "scipy")
are_there = pytest.mark.skipif(not all(map(find_spec, HIDDEN)), reason="they are not installed: nothing to hide")

COUNTED = """
import importlib.metadata
times, real = [], importlib.metadata.packages_distributions
def counted():
    times.append(1)
    return real()
importlib.metadata.packages_distributions = counted
import rlcore.models.library
from transformers.utils.import_utils import PACKAGE_DISTRIBUTION_MAPPING as found
assert importlib.metadata.packages_distributions is counted
before, wanted = len(times), real()
assert {name: found.get(name) for name in ("torch", "PIL", "yaml", "none")} == {
    "torch": wanted["torch"], "PIL": wanted["PIL"], "yaml": wanted["yaml"], "none": None
}
said = [before, len(times), found == wanted]
"""

AT_A_START = """
import {module}, sys
said = sorted({{"sklearn", "scipy"}} & set(sys.modules))
import scipy, sklearn
"""

AFTER_ANOTHER = """
from transformers import AutoModelForCausalLM as theirs
from rlcore.models.library import AutoModelForCausalLM as ours
said = ours is theirs
"""

READ_ONCE = """
import rlcore.models.library
from pathlib import Path
from transformers.utils import import_utils
folder = Path(import_utils.__file__).parents[1] / "models"
real, read = import_utils.create_import_structure_from_path, []
def counted(path):
    read.append(str(path))
    return real(path)
import_utils.create_import_structure_from_path = counted
import transformers.models
num_read = sum(Path(path) in (folder, folder / "__init__.py") for path in read)
theirs = import_utils.spread_import_structure(real(folder))
said = [num_read, import_utils.define_import_structure(str(folder / "__init__.py")) == theirs, len(theirs) > 2]
"""

PROGRAMS = {
    "a trainer": AT_A_START.format(module="rlcore.run.process"),
    "vLLM's engine": AT_A_START.format(module="rlcore.rollout.vllm.engine"),
    "after another": AFTER_ANOTHER,
    "counted": COUNTED,
    "read once": READ_ONCE,
}

EACH_IN_A_FORK = """
import json, os, sys, torch  # the import that all of them share; it brings no transformers
assert "transformers" not in sys.modules
for program in sys.argv[1:]:
    if os.fork() == 0:
        found = {}
        exec(program, found)
        print(json.dumps(found["said"]), flush=True)
        os._exit(0)
    if os.wait()[1] != 0:
        print(json.dumps("failed"), flush=True)
"""


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """What each program says in an interpreter that has imported torch alone."""
    command = [sys.executable, "-c", EACH_IN_A_FORK, *PROGRAMS.values()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    return dict(zip(PROGRAMS, map(json.loads, done.stdout.splitlines()), strict=True))


@are_there
@pytest.mark.parametrize("what", ["a trainer", "vLLM's engine"])
def test_neither_is_imported_at_a_start_and_whoever_wants_them_has_them_afterwards(
    said: dict[str, Any], what: str
) -> None:
    assert said[what] == []


@are_there
def test_after_another_import_of_transformers_they_stay(said: dict[str, Any]) -> None:
    assert said["after another"] is True


def test_the_metadata_of_all_packages_is_read_once_and_when_it_is_asked_for(said: dict[str, Any]) -> None:
    assert said["counted"] == [0, 1, True]


def test_the_files_of_all_models_are_read_once(said: dict[str, Any]) -> None:
    assert said["read once"] == [0, True, True]
