"""docs/algorithms.md names every public function."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path.stem for path in (ROOT / "rlcore/algos").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("module", MODULES)
def test_the_document_names_every_public_function(module: str) -> None:
    document = (ROOT / "docs/algorithms.md").read_text()
    tree = ast.parse((ROOT / f"rlcore/algos/{module}.py").read_text())
    public = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    assert public
    missing = [name for name in public if f"`{name}`" not in document and f"`{module}.{name}`" not in document]
    assert not missing, f"docs/algorithms.md does not name {missing} of rlcore/algos/{module}.py"
