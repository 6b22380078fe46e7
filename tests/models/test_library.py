"""transformers comes without the packages that it imports for nothing that is done here."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

HIDDEN = ("sklearn", "scipy")
pytestmark = pytest.mark.skipif(not all(map(find_spec, HIDDEN)), reason="they are not installed: nothing to hide")

STARTS = {
    "a trainer": "import rlcore.run.process",
    "vLLM's engine": "import rlcore.rollout.vllm.engine",
}


def said(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.parametrize("what", STARTS)
def test_neither_is_imported_at_a_start_and_whoever_wants_them_has_them_afterwards(what: str) -> None:
    start = f"{STARTS[what]}, sys\nprint(sorted({set(HIDDEN)} & set(sys.modules)))"
    assert said(f"{start}\nimport scipy.optimize, sklearn.metrics") == "[]"


def test_after_another_import_of_transformers_they_stay() -> None:
    theirs = "from transformers import AutoModelForCausalLM as theirs"
    ours = "from rlcore.models.library import AutoModelForCausalLM as ours"
    assert said(f"{theirs}\n{ours}\nprint(ours is theirs)") == "True"
