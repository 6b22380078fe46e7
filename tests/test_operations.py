"""Files and tests that the documentation names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FILE = re.compile(r"(?<![\w/.-])((?:rlcore|flows|data|conf|tests|benchmarks)/[\w/]+\.(?:py|yaml))(?:::(test_\w+))?")


def missing(page: Path) -> list[str]:
    found = []
    for file, test in FILE.findall(page.read_text(encoding="utf-8")):
        if not (ROOT / file).is_file() or (test and f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")):
            found.append(f"{file}::{test}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_named_file_and_test_exists(page: Path) -> None:
    assert missing(page) == []


def test_the_failure_matrix_names_tests() -> None:
    assert len(FILE.findall((ROOT / "docs/dev/failures.md").read_text(encoding="utf-8"))) > 80
