"""The examples in docstrings give the shown results."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = [
    file.relative_to(ROOT)
    for package in ("rlcore", "data", "flows")
    for file in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_examples(file):
    module = importlib.import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0
    assert found.failed == 0
