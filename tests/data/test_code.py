"""Problems of HumanEval's form: whole functions, continuations, hostile responses."""

import json
from pathlib import Path

import pytest

from data.code import score
from data.records import records
from rlcore.config import SandboxConfig
from rlcore.sandbox import set_limits

PUBLISHED = Path(__file__).parent / "published" / "humaneval"
pytestmark = pytest.mark.program("bwrap")
TWICE = {
    "prompt": 'import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef twice(x):\n    """ Return 2 x. """\n',
    "test": "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(0) == 0\n",
    "entry_point": "twice",
}


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_SANDBOX", "{}")
    set_limits(SandboxConfig(time_s=3.0))


@pytest.mark.parametrize(("response", "total"), [
    ("    return 2 * x\n", 1.0), ("    return 2 * x\n\n\ndef half(x):\n    return\n\nprint(twice(", 1.0),
    ("    return 2 * x\n# the end\n)(", 1.0),
    ("    if x:\n        return 2 * x\n    return 0\nif twice(1):\n    raise SystemExit\n", 1.0),
    ("```python\ndef twice(x):\n    return 4 * half(x)\n```", 1.0),
    ("Use math.\n```python\nfrom math import fsum\n\ndef twice(x):\n    return fsum([x, x])\n```\nDone.", 1.0),
    ("```python\ndef twice(x):\n    return 2 * x\n```\nSo\n```python\nprint(twice(2))\n```", 1.0),
    ("```python\n    return 2 * x\n```", 1.0), ("```python\ndef double(x):\n    return 2 * x\n```", 0.0),
    ("\n    return 2 * x\n```\n\nSo:\n\n```python\nprint(twice(2))\n```", 1.0),
    ("    return x\n```python\ndef twice(x):\n    return 2 * x\n```", 0.0),
    (" Sure:\n```python\ndef twice(x):\n    return 2 * x\n```", 1.0), ("return 2 * x", 0.0),
    ("The function doubles x.", 0.0),
])  # fmt: skip
def test_function_is_continued_or_defined_again(response: str, total: float) -> None:
    assert score(response, TWICE).total == total


@pytest.mark.parametrize("response", [
    "    import sys; sys.exit(0)\n", "    import os; os._exit(0)\n",
    "```python\nimport sys\ndef twice(x):\n    return 1\nsys.exit(0)\n```",
    "```python\ndef twice(x):\n    return 1\ndef check(candidate):\n    pass\n```",
    "```python\nimport builtins\nbuiltins.exec = lambda *a: None\ndef twice(x):\n    return 1\n```",
    "    while True: pass\n", "    return '6' * 10**9\n", '    return 1\n"""\n```\n',
    "```python\ndef twice(x):\n    raise SystemExit\n```", "```python\n__debug__ = False\ndef twice(x): return 1\n```",
    "\0", "```python\ndef twice(x):\n    return 1\nprint('\\n' * 3)\n```",
])  # fmt: skip
def test_hostile_response_scores_zero(response: str) -> None:
    assert score(response, TWICE).total == 0.0


def test_score_equals_the_published_check() -> None:
    """The published scorer joins prompt, completion, test and call, and asks whether the program raises an error."""
    for record in records(str(PUBLISHED), "test"):
        truth = {name: record.values[name] for name in ("prompt", "test", "entry_point")}
        solution = record.text("canonical_solution")
        assert score(f"```python\n{truth['prompt']}{solution}```", truth).solved, record.where
        for completion, passes in ((solution, True), ("    return None\n", False), ("    return 1 /\n", False)):
            program = f"{truth['prompt']}{completion}\n{truth['test']}\ncheck({truth['entry_point']})"
            joined = score(f"```python\n{program}\n```", {"tests": json.dumps(["pass"])})
            assert score(completion, truth).total == joined.total == float(passes), record.where
