r"""Count how many random mutations of the sources make a test fail.

    pip install pytest-cov
    COVERAGE_FILE=/tmp/lines python -m pytest -n 2 --dist loadfile -m "not lengthy" \
        --cov=rlcore --cov=flows --cov=data --cov-context=test --cov-report=      # which test executes which line
    python -m benchmarks.mutations --lines /tmp/lines                             # 8 mutations per folder
    python -m benchmarks.mutations --lines /tmp/lines --each 3 --seed 7 rlcore/run flows/work
    python -m benchmarks.mutations --list                                         # list the mutations

A mutation changes one expression, such as a comparison, `and`, `not`, a number, True, a sign, `min` or a condition.
Another kind of mutation deletes a statement: a call, a raise, a break or a `+=`. In a copy of the checkout, the tests
that execute the mutated statement run, beginning with the 20 quickest. The folder's tests run last, because the
coverage file lacks the lines that subprocesses execute. If a test fails, it has noticed the mutation, and no more tests
run. A timeout (--limit) also counts as noticed. At the end, the tests that noticed a mutation run on the unchanged
sources. If a test also fails there, the mutations that it noticed count as unnoticed.

The mutations and their tests are written to --out (JSON). If the file exists, its results for folders without new
mutations are kept. If an unnoticed mutation changes no behavior, a reviewer can write the reason into its entry
`equivalent` in the file. Later runs keep this entry. The exit code is 0.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "rlcore/algos", "rlcore/batching", "rlcore/checkpoint", "rlcore/config", "rlcore/rollout", "rlcore/run",
    "rlcore/storage", "rlcore/tracking", "rlcore/trainer", "rlcore/workers", "data",
    "flows/work",
)  # fmt: skip
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
FIRST = 20  # tests that run first for a mutated statement and notice most mutations
NO_TESTS = 5  # pytest's exit code if no test ran
OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass
class Mutation:
    """A change of the source: `new` replaces the text from `start` to `end`. Each position is a line number,
    from 1, and a column.

    `statement` is the line where the mutated statement begins. `tried` is the number of tests that execute this line,
    or 0 if only the folder's tests ran. `noticed_by` is the test that failed, or "limit" after a timeout.
    `equivalent` is the reason, given by a reviewer, why the mutation changes no behavior."""

    folder: str
    file: str
    start: tuple[int, int]
    end: tuple[int, int]
    old: str
    new: str
    statement: int
    tried: int = 0
    noticed_by: str | None = None
    equivalent: str | None = None

    def apply(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        (first, left), (last, right) = self.start, self.end
        head = lines[first - 1].encode()[:left].decode()
        tail = lines[last - 1].encode()[right:].decode()
        return "".join([*lines[: first - 1], head + self.new + tail, *lines[last:]])


def _mutants(node: ast.AST) -> Iterator[ast.AST]:
    changed = copy.deepcopy(node)
    match node, changed:
        case ast.Compare(ops=[operator]), ast.Compare() if type(operator) in COMPARED:
            changed.ops = [COMPARED[type(operator)]()]
        case ast.BoolOp(op=ast.And()), ast.BoolOp():
            changed.op = ast.Or()
        case ast.BoolOp(op=ast.Or()), ast.BoolOp():
            changed.op = ast.And()
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand), _:
            changed = operand
        case ast.Constant(value=bool(value)), ast.Constant():
            changed.value = not value
        case ast.Constant(value=int(value)), ast.Constant():
            changed.value = value + 1
        case ast.Constant(value=float(value)), ast.Constant():
            changed.value = value * 2 + 1
        case ast.BinOp(op=operator), ast.BinOp() if type(operator) in CALCULATED:
            changed.op = CALCULATED[type(operator)]()
        case ast.Call(func=ast.Name(id=name)), ast.Call(func=ast.Name() as called) if name in OTHER_NAME:
            called.id = OTHER_NAME[name]
        case (ast.Expr(value=ast.Call()) | ast.Raise() | ast.Break() | ast.Continue() | ast.AugAssign(), _):
            changed = ast.Pass()
        case _:
            return
    yield changed


def _mutations_of(folder: str, file: Path) -> Iterator[Mutation]:
    """Yield every mutation of a file, except in annotations and decorators."""
    source = file.read_text()
    tree = ast.parse(source)
    left_alone: set[ast.AST] = set()
    for node in ast.walk(tree):
        asides = [getattr(node, name, None) for name in ("annotation", "returns")] + getattr(node, "decorator_list", [])
        left_alone.update(inner for aside in asides if aside is not None for inner in ast.walk(aside))
    # The innermost statement around a line begins last.
    begins = sorted({node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)})
    conditions = {node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp)}
    for node in ast.walk(tree):
        if node in left_alone or not isinstance(node, ast.expr | ast.stmt) or node.end_lineno is None:
            continue
        start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset or 0)
        turned = [ast.UnaryOp(ast.Not(), node)] if node in conditions and not isinstance(node, ast.Compare) else []
        for changed in [*_mutants(node), *turned]:
            new = ast.unparse(changed)
            if isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare):
                new = f"({new})"
            old = ast.get_source_segment(source, node) or ""
            statement = max(line for line in begins if line <= node.lineno)
            mutation = Mutation(folder, str(file.relative_to(ROOT)), start, end, old, new, statement)
            try:
                ast.parse(mutation.apply(source))
            except SyntaxError:  # for example inside an f-string
                continue
            yield mutation


def sample_mutations(folders: list[str], each: int, seed: int) -> list[Mutation]:
    """Draw `each` random mutations of every folder. The mutations of one folder do not depend on the other folders."""
    found = []
    for folder in folders:
        chance = random.Random(f"{seed} {folder}")
        root = ROOT / folder
        files = sorted(root.rglob("*.py")) if root.is_dir() else [root]
        every = [mutation for file in files for mutation in _mutations_of(folder, file)]
        found += chance.sample(every, min(each, len(every)))
    return found


def _tests_of(folder: str) -> str:
    parts = Path(folder).parts
    return "/".join(["tests", *(parts[1:2] if parts[0] == "rlcore" else parts[:1])])


@cache
def tests_by_line(lines: Path) -> dict[str, dict[int, list[str]]]:
    """Read from the coverage data `lines` which tests execute each line of each file. For each line, tests that execute
    fewer lines overall come first."""
    from coverage import CoverageData

    data: Any = CoverageData(str(lines))
    data.read()
    found = {}
    executed: Counter[str] = Counter()
    for file in data.measured_files():
        # such as tests/e2e/test_stop.py::test_it[case]|run; empty for an import
        by_line = {
            line: {re.split(r"[\[|]", name)[0] for name in names if name}
            for line, names in data.contexts_by_lineno(file).items()
        }
        found[str(Path(file).relative_to(ROOT))] = by_line
        executed.update(name for names in by_line.values() for name in names)
    return {
        file: {line: sorted(names, key=lambda name: (executed[name], name)) for line, names in by_line.items()}
        for file, by_line in found.items()
    }


def first_failure(checkout: Path, tests: list[str], limit_s: float, processes: int) -> str | None:
    """Run the tests in the checkout. Return the first failing test, "limit" after a timeout, or None if all pass."""
    command = [sys.executable, "-m", "pytest", "-n", str(processes), "--dist", "loadfile", "-x", "-q", "--tb=no"]
    command += ["-m", "not lengthy", "-o", f"cache_dir={ROOT / '.pytest_cache'}", *tests]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=checkout, env=os.environ | environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "limit"
    if failed := re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE):
        return failed[1]
    return None if process.returncode in (0, NO_TESTS) else f"pytest ended with {process.returncode}"


def write(out: Path, seed: int, mutations: list[Mutation]) -> None:
    """Write the mutations and their tests to `out`. If the file exists, its results for folders without new mutations
    are kept. The `equivalent` entries, in which reviewers gave the reason why a mutation changes no behavior, are kept
    too."""
    before = [Mutation(**one) for one in json.loads(out.read_text())["mutations"]] if out.exists() else []
    remarks = {(one.file, one.old, one.new): one.equivalent for one in before}
    for one in mutations:
        one.equivalent = None if one.noticed_by else remarks.get((one.file, one.old, one.new))
    folders = {one.folder for one in mutations}
    every = sorted([one for one in before if one.folder not in folders] + mutations, key=lambda one: one.folder)
    table = {}
    for folder in dict.fromkeys(one.folder for one in every):
        here = [one for one in every if one.folder == folder]
        noticed, equivalent = (sum(bool(getattr(m, name)) for m in here) for name in ("noticed_by", "equivalent"))
        left = len(here) - noticed - equivalent
        table[folder] = {"tried": len(here), "noticed": noticed, "equivalent": equivalent, "survivors": left}
    head = json.dumps({"seed": seed, "folders": table}, indent=1).removesuffix("\n}")
    rows = ",\n  ".join(json.dumps(asdict(one)) for one in every)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f'{head},\n "mutations": [\n  {rows}\n ]\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    parser.add_argument("--each", type=int, default=8, help="mutations per folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for the tests of one mutation")
    parser.add_argument("--lines", type=Path, help="coverage file of the tests, with contexts")
    parser.add_argument("--processes", type=int, default=2, help="processes of pytest")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "results" / "mutations.json")
    parser.add_argument("--list", action="store_true")
    chosen = parser.parse_args()
    mutations = sample_mutations(list(chosen.folders), chosen.each, chosen.seed)
    if chosen.list:
        for one in mutations:
            print(f"{one.file}:{one.start[0]}: {one.old!r} -> {one.new!r}")
        return
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder)
        checkout.chmod(0o755)  # tests without superuser rights also read the checkout
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in listed.stdout.splitlines():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name, follow_symlinks=False)
        for one in mutations:
            source = (ROOT / one.file).read_text()
            (checkout / one.file).write_text(one.apply(source))
            known = tests_by_line(chosen.lines).get(one.file, {}) if chosen.lines else {}
            tests = known.get(one.start[0]) or known.get(one.statement) or []
            one.tried = len(tests)
            for some in (tests[:FIRST], tests[FIRST:], [_tests_of(one.folder)]):
                if some and one.noticed_by is None:
                    one.noticed_by = first_failure(checkout, some, chosen.limit, chosen.processes)
            (checkout / one.file).write_text(source)
            shown = one.noticed_by or "NOT NOTICED"
            print(f"{one.file}:{one.start[0]}: {one.old!r} -> {one.new!r}: {shown}", flush=True)
        by_test = defaultdict(list)
        for one in mutations:
            if one.noticed_by and "::" in one.noticed_by:
                by_test[one.noticed_by.partition("[")[0]].append(one)
        while by_test and (failed := first_failure(checkout, sorted(by_test), chosen.limit, chosen.processes)):
            print(f"fails without a mutation too: {failed}")
            if (name := failed.partition("[")[0]) not in by_test:  # for example "limit"
                break
            for one in by_test.pop(name):
                one.noticed_by = None
        write(chosen.out, chosen.seed, mutations)


if __name__ == "__main__":
    main()
