"""Random mutations of the sources: how many of them does a test notice?

    python -m benchmarks.mutations                               # 8 in each folder; hours
    python -m benchmarks.mutations --each 3 --seed 7 rlcore/run flows/plan.py
    python -m benchmarks.mutations --list                        # what would be tried

A mutation changes one place: a comparison, `and` or `or`, a `not`, a number, True or False, a sign, min or max, or a
statement that goes (a call, a raise). It is made in a copy of the checkout. The tests of its folder run first, then
those of the folders that use it, up to the first failure; a run that takes longer than --limit is noticed too. Writes
each mutation and the test that noticed it to --out (JSON). Whether an unnoticed one changes any behaviour is for a
reader to say: the exit code is 0.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "rlcore/algos", "rlcore/batching", "rlcore/checkpoint", "rlcore/config", "rlcore/rollout", "rlcore/run",
    "rlcore/storage", "rlcore/tracking", "rlcore/trainer", "rlcore/workers", "data", "flows",
)  # fmt: skip
USED_BY = {
    "rlcore/batching": ["tests/trainer", "tests/run"],
    "rlcore/checkpoint": ["tests/run"],
    "rlcore/config": ["tests/flows/test_plan.py"],
    "rlcore/rollout": ["tests/trainer"],
    "rlcore/run": ["tests/flows"],
    "rlcore/storage": ["tests/checkpoint", "tests/run"],
    "rlcore/tracking": ["tests/flows/test_tracking_commands.py", "tests/flows/test_mlflow_record.py"],
    "rlcore/trainer": ["tests/workers", "tests/run"],
    "rlcore/workers": ["tests/trainer", "tests/run"],
    "data": ["tests/flows/test_pipeline.py"],
}
"""Folder -> tests that also hold it, after the folder's own."""
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass
class Mutation:
    """In `file`, the text from `start` to `end` (line from 1, column) becomes `new`. `noticed_by`: a test, "limit"."""

    folder: str
    file: str
    start: tuple[int, int]
    end: tuple[int, int]
    old: str
    new: str
    noticed_by: str | None = None

    def apply(self, source: str) -> str:
        """The mutated source."""
        lines = source.splitlines(keepends=True)
        (first, left), (last, right) = self.start, self.end
        head = lines[first - 1].encode()[:left].decode()
        tail = lines[last - 1].encode()[right:].decode()
        return "".join([*lines[: first - 1], head + self.new + tail, *lines[last:]])


def mutants(node: ast.AST) -> Iterator[ast.AST]:
    """Changed copies of one node."""
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
        case ast.Call(func=ast.Name(id=name)), ast.Call(func=ast.Name()) if name in OTHER_NAME:
            changed.func.id = OTHER_NAME[name]
        case ((ast.Expr(value=ast.Call()) | ast.Raise()), _):
            changed = ast.Pass()
        case _:
            return
    yield changed


def places(folder: str, file: Path) -> Iterator[Mutation]:
    """Every mutation of one file; annotations and decorators are left alone."""
    source = file.read_text()
    tree = ast.parse(source)
    left_alone: set[ast.AST] = set()
    for node in ast.walk(tree):
        asides = [getattr(node, name, None) for name in ("annotation", "returns")] + getattr(node, "decorator_list", [])
        left_alone.update(inner for aside in asides if aside is not None for inner in ast.walk(aside))
    for node in ast.walk(tree):
        if node in left_alone or not isinstance(node, ast.expr | ast.stmt) or node.end_lineno is None:
            continue
        start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset or 0)
        for changed in mutants(node):
            new = ast.unparse(changed)
            if isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare):
                new = f"({new})"
            old = ast.get_source_segment(source, node) or ""
            mutation = Mutation(folder, str(file.relative_to(ROOT)), start, end, old, new)
            try:
                ast.parse(mutation.apply(source))
            except SyntaxError:  # inside an f-string, say
                continue
            yield mutation


def drawn(folders: list[str], each: int, seed: int) -> list[Mutation]:
    """`each` random mutations of every folder."""
    chance = random.Random(seed)
    found = []
    for folder in folders:
        root = ROOT / folder
        files = sorted(root.rglob("*.py")) if root.is_dir() else [root]
        every = [mutation for file in files for mutation in places(folder, file)]
        found += chance.sample(every, min(each, len(every)))
    return found


def tests_of(folder: str) -> list[str]:
    """Test paths in the order in which they run."""
    parts = Path(folder).parts
    own = "/".join(["tests", *(parts[1:2] if parts[0] == "rlcore" else parts[:1])])
    return [own, *USED_BY.get(folder, [])]


def first_failure(checkout: Path, tests: list[str], limit_s: float) -> str | None:
    """The first test that fails in the checkout; "limit" where they take longer than that; None where all pass."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    for path in tests:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "--dist", "loadfile", "--tb=no", "-m"]
        command += ["not lengthy", "-p", "no:cacheprovider", path]
        process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return "limit"
        if process.returncode:
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
            return failed[1] if failed else f"pytest ended with {process.returncode}"
    return None


def main() -> None:
    """Try them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    parser.add_argument("--each", type=int, default=8, help="mutations of a folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for the tests of one path")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "mutations.json")
    parser.add_argument("--list", action="store_true")
    chosen = parser.parse_args()
    mutations = drawn(list(chosen.folders), chosen.each, chosen.seed)
    if chosen.list:
        for one in mutations:
            print(f"{one.file}:{one.start[0]}: {one.old!r} -> {one.new!r}")
        return
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder)
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in listed.stdout.splitlines():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for one in mutations:
            source = (ROOT / one.file).read_text()
            (checkout / one.file).write_text(one.apply(source))
            one.noticed_by = first_failure(checkout, tests_of(one.folder), chosen.limit)
            (checkout / one.file).write_text(source)
            print(
                f"{one.file}:{one.start[0]}: {one.old!r} -> {one.new!r}: {one.noticed_by or 'NOT NOTICED'}", flush=True
            )
            counts[one.folder][0] += one.noticed_by is not None
            counts[one.folder][1] += 1
            result = {"seed": chosen.seed, "noticed_of": counts, "mutations": [asdict(m) for m in mutations]}
            chosen.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
