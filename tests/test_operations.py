"""Files and tests that the documentation names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FILE = re.compile(r"(?<![\w/.-])((?:rlcore|flows|data|conf|tests|benchmarks)/[\w/]+\.(?:py|yaml))(?:::(test_\w+))?")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_named_file_and_test_exists(page: Path) -> None:
    for file, test in FILE.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / file).is_file()
        assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")


def test_the_failure_matrix_names_tests() -> None:
    assert len(FILE.findall((ROOT / "docs/dev/failures.md").read_text(encoding="utf-8"))) > 80
