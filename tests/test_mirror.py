"""Tests mirror the source: where a test file is, and what it imports from other tests."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py"))
WHOLE = ("e2e", ".")
"""Folders whose tests are of no single file."""


def sources(folder: Path) -> set[str]:
    """Names of the source files that tests in a folder of `tests/` may be of: `engine`, or `vllm_engine` below it."""
    package = ROOT / (folder if folder.parts[0] in ("data", "flows") else Path("rlcore") / folder)
    if not package.is_dir():
        return {package.name}
    files = [path.relative_to(package).with_suffix("") for path in package.rglob("*.py")]
    return {path.name.strip("_") for path in files} | {"_".join(path.parts) for path in files}


@pytest.mark.parametrize("file", [path for path in FILES if str(path.parent) not in WHOLE], ids=str)
def test_a_test_file_is_named_by_its_source(file: Path) -> None:
    words = file.stem.removeprefix("test_").split("_")
    names = {"_".join(words[:count]) for count in range(1, len(words) + 1)}
    assert names & sources(file.parent), "no source file has the beginning of its name: tests/e2e is for whole runs"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_nothing_is_imported_from_another_test_module(file: Path) -> None:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in modules if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")]
