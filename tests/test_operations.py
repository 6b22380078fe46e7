"""The fault matrix names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`")


def test_every_test_of_the_fault_matrix_exists() -> None:
    named = NAMED.findall((ROOT / "docs" / "dev" / "failures.md").read_text())
    assert len(named) > 20
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).is_file() or (f"def {name}(" not in (ROOT / file).read_text() and name)
    ]
    assert missing == []
