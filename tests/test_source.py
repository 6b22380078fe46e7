"""Rules of the whole source: what imports load, where tests are, the files that pages name, examples, type checks.
`make imports` checks the layers of packages."""

import ast
import doctest
import importlib
import re
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation

from rlcore.algos.aggregation import masked_sum
from rlcore.batching.balance import partition
from rlcore.types import Prompt
from tests.helpers.forked import loaded_by

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = [file for file in sorted(BENCHMARKS.glob("*.py")) if f"python benchmarks/{file.name}" in file.read_text()]
"""Benchmarks whose docstring runs them by their file."""
HEAVY = {"torch", "transformers", "ray", "prefect", "vllm", "mlflow", "datasets", "pyarrow", "pandas"}


def test_no_file_imports_itself_through_others() -> None:
    graph = grimp.build_graph("flows", "data", "rlcore", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()


def test_settings_and_command_line_load_nothing_heavy():
    loaded = loaded_by("import rlcore.config, rlcore.config.compose, rlcore.errors, flows.cli")
    assert "rlcore" in loaded
    assert not HEAVY & loaded


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.stem)
def test_a_benchmark_that_is_run_by_its_file_imports_what_is_on_the_path_then(file):
    """Its folder is, and the installed packages; `benchmarks` and `tests` are with `python -m benchmarks.<name>`."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not {"benchmarks", "tests"} & {name.partition(".")[0] for name in imported}


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


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FILE = re.compile(r"(?<![\w/.-])((?:rlcore|flows|data|conf|tests|benchmarks)/[\w/]+\.(?:py|yaml))(?:::(test_\w+))?")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_named_file_and_test_exists(page: Path) -> None:
    for file, test in FILE.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / file).is_file()
        assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")


def test_the_failure_matrix_names_tests() -> None:
    assert len(FILE.findall((ROOT / "docs/dev/failures.md").read_text(encoding="utf-8"))) > 80


EXAMPLES = [
    file.relative_to(ROOT)
    for package in ("rlcore", "data", "flows")
    for file in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("file", EXAMPLES, ids=str)
def test_examples(file):
    module = importlib.import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0
    assert found.failed == 0


def test_arrays_of_unlike_shapes_are_refused() -> None:
    masked_sum(torch.zeros(3), torch.ones(3, dtype=torch.bool))
    with pytest.raises(BeartypeCallHintParamViolation, match="dimension T is 4"):
        masked_sum(torch.zeros(3), torch.ones(4, dtype=torch.bool))


def test_a_wrong_type_is_refused_by_a_function_and_by_a_dataclass_without_arrays() -> None:
    with pytest.raises(BeartypeCallHintParamViolation, match="lengths"):
        partition("four", 2)  # type: ignore[arg-type]
    with pytest.raises(BeartypeCallHintParamViolation, match="token_ids"):
        Prompt(1, 2, "countdown", "{}")  # type: ignore[arg-type]
