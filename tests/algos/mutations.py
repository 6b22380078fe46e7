"""Break each mask, clip, bound and denominator on purpose and see that a test turns red.

    python -m tests.algos.mutations            every mutation (some minutes); writes tests/algos/mutations.md
    python -m tests.algos.mutations dual       those whose file or description contains the word

Each one is made in a copy of the sources, never in the checkout, and the test that the table names is run before all
others. A mutation that no test notices ends the script with exit code 1. `test_mutations.py` keeps this list and the
written table in step with the sources.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALGOS = Path("rlcore/algos")
TABLE = Path(__file__).with_suffix(".md")
NONE = "**none**"
ANY = "test_advantages.py"  # first for a file without tests of its own name


@dataclass(frozen=True)
class Mutation:
    """In `rlcore/algos/<file>`, `old` (which occurs once) becomes `new`."""

    file: str
    what: str
    old: str
    new: str

    def row(self) -> str:
        """The first columns of its line in the table."""
        return f"| {self.file} | {self.what} "


def listed() -> list[Mutation]:
    """The mutations of `mutations.toml`."""
    return [Mutation(**entry) for entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["mutation"]]


def first_failure(copy: Path, *tests: str) -> str | None:
    """Run tests of a copy of the sources, in this order, up to the first one that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    command += [f"tests/algos/{test}" for test in tests]
    command += ["--ignore=tests/algos/test_mutations.py"]  # it compares the list of mutations with the sources
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"the tests did not run, exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    failed = re.search(r"^FAILED tests/algos/(test_\w+\.py::\w+)", done.stdout, re.MULTILINE)
    return failed and failed[1]


def test_that_turns_red(mutation: Mutation, copy: Path, known: str | None) -> str | None:
    """A test that fails with this mutation in the copy: the one known to, else the first of all."""
    target = copy / ALGOS / mutation.file
    source = (ROOT / ALGOS / mutation.file).read_text()
    if source.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.file}: {mutation.what}: the text occurs {source.count(mutation.old)} times")
    target.write_text(source.replace(mutation.old, mutation.new))
    own = f"test_{mutation.file}"
    try:
        if known and (red := first_failure(copy, known)):
            return red
        return first_failure(copy, own if (ROOT / "tests/algos" / own).exists() else ANY, "")
    finally:
        target.write_text(source)


def read_table() -> dict[str, str]:
    """What the table says: mutation -> the test that turned red."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = [line.rsplit("|", 2)[:2] for line in lines if line.startswith("|")]
    return {name: red.strip() for name, red in rows}


def is_there(test: str) -> bool:
    """Whether there is a test `file.py::name`."""
    file, _, name = test.partition("::")
    path = ROOT / "tests/algos" / file
    return path.is_file() and f"def {name}(" in path.read_text()


def write_table(found: dict[str, str]) -> None:
    """The mutations of the list in its order."""
    rows = [f"{m.row()}| {found[m.row()]} |" for m in listed() if m.row() in found]
    head = [
        "# Mutations tried",
        "",
        f"Written by `python -m tests.algos.mutations`: {len(rows)} mutations, "
        f"{sum(row.endswith(NONE + ' |') for row in rows)} unnoticed.",
        "",
        "| file | mutation | first test that turns red |",
        "| --- | --- | --- |",
    ]
    TABLE.write_text("\n".join([*head, *rows]) + "\n")


def main(word: str) -> int:
    """Try the mutations whose description contains the word; 1 if one went unnoticed."""
    known = read_table()
    found = dict(known) if word else {}
    known = {name: test for name, test in known.items() if is_there(test)}
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("rlcore", "tests/algos"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / "docs").mkdir()
        for part in ("pyproject.toml", "tests/__init__.py", "tests/conftest.py", "docs/algorithms.md"):
            shutil.copy(ROOT / part, copy / part)
        if broken := first_failure(copy, ANY, ""):
            raise SystemExit(f"{broken} fails without any mutation")
        for mutation in listed():
            if word in mutation.row():
                red = test_that_turns_red(mutation, copy, known.get(mutation.row()))
                unnoticed += red is None
                found[mutation.row()] = red or NONE
                print(f"{mutation.row()}| {red or NONE} |", flush=True)
    write_table(found)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
