"""transformers comes without the packages that it imports, and the metadata that it reads, for nothing done here."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

HIDDEN = ("sklearn", "scipy")
are_there = pytest.mark.skipif(not all(map(find_spec, HIDDEN)), reason="they are not installed: nothing to hide")

STARTS = {
    "a trainer": "import rlcore.run.process",
    "vLLM's engine": "import rlcore.rollout.vllm.engine",
}


def said(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@are_there
@pytest.mark.parametrize("what", STARTS)
def test_neither_is_imported_at_a_start_and_whoever_wants_them_has_them_afterwards(what: str) -> None:
    start = f"{STARTS[what]}, sys\nprint(sorted({set(HIDDEN)} & set(sys.modules)))"
    assert said(f"{start}\nimport scipy.optimize, sklearn.metrics") == "[]"


@are_there
def test_after_another_import_of_transformers_they_stay() -> None:
    theirs = "from transformers import AutoModelForCausalLM as theirs"
    ours = "from rlcore.models.library import AutoModelForCausalLM as ours"
    assert said(f"{theirs}\n{ours}\nprint(ours is theirs)") == "True"


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
print(before, len(times), found == wanted)
"""


def test_the_metadata_of_all_packages_is_read_once_and_when_it_is_asked_for() -> None:
    assert said(COUNTED) == "0 1 True"
