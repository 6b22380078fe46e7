"""docs/settings.md agrees with the settings classes."""

import re

from rlcore.config.compose import GROUPS
from rlcore.config.documents import REFERENCE_FILE, reference
from rlcore.config.run import all_keys


def rows() -> list[list[str]]:
    """Return the cells of every table row of a setting."""
    lines = [line for line in reference().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_settings_page_is_current():
    assert REFERENCE_FILE.read_text(encoding="utf-8") == reference(), "run `make generated`"


def test_every_key_has_rows():
    found = [row[0].strip("`") for row in rows() if row[0].strip("`") not in GROUPS]
    assert sorted(found) == sorted(name for name, keys in all_keys().items() for _ in keys)


def test_type_range_default_and_meaning():
    by_key = {row[0]: row[1:] for row in rows()}
    assert by_key["`algo.lam`"][:2] == ["number, >= 0, <= 1", "`1.0`"]
    assert by_key["`rollout.engine`"][0] == "`hf` or `vllm` or `none`"
    assert by_key["`model.path`"][:2] == ["text or null", "`null`"]
    assert by_key["`tags`"][:2] == ["names with text", "`{}`"]
    assert by_key["`name`"][0].startswith("text, like `^")
