"""The settings that docs/from-verl-and-trl.md names exist."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
FIRST_CELL = re.compile(r"^\| `([a-z_.0-9]+)` \|", re.MULTILINE)
ROW = re.compile(r"^\| `[^|]*\|([^|]*)\|[^|]*\|$", re.MULTILINE)


def test_every_setting_of_the_tables_exists() -> None:
    known = set(FIRST_CELL.findall((DOCS / "settings.md").read_text(encoding="utf-8")))
    sections = {key[: match.start()] for key in known for match in re.finditer(r"\.", key)}
    rows = ROW.findall((DOCS / "from-verl-and-trl.md").read_text(encoding="utf-8"))
    named = [
        word.partition("=")[0] for cell in rows for span in re.findall(r"`([^`]+)`", cell) for word in span.split()
    ]
    assert len(named) > 60
    assert [name for name in named if name not in known | sections] == []
