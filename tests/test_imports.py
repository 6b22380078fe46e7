"""The modules that an import may load. `make imports` checks the layers of packages."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.helpers.forked import loaded_by

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = [file for file in sorted(BENCHMARKS.glob("*.py")) if f"python benchmarks/{file.name}" in file.read_text()]
"""Benchmarks whose docstring runs them by their file."""
HEAVY = {"torch", "transformers", "ray", "prefect", "vllm", "mlflow", "datasets", "pyarrow", "pandas"}


def test_no_file_imports_itself_through_others() -> None:
    graph = grimp.build_graph("flows", "data", "rlcore", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()


@pytest.mark.parametrize(
    "statement", ["import rlcore.config", "import rlcore.config.compose", "import rlcore.errors", "import flows.cli"]
)
def test_settings_and_command_line_load_nothing_heavy(statement):
    loaded = loaded_by(statement)
    assert "rlcore" in loaded
    assert not HEAVY & loaded


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.stem)
def test_a_benchmark_that_is_run_by_its_file_imports_what_is_on_the_path_then(file):
    """Its folder is, and the installed packages; `benchmarks` and `tests` are with `python -m benchmarks.<name>`."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not {"benchmarks", "tests"} & {name.partition(".")[0] for name in imported}
