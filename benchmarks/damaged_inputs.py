"""A small run is damaged on disk in some fifty ways (bits, rows, permissions, kinds of file) and started again.

    python -m benchmarks.damaged_inputs                    # all of them
    python -m benchmarks.damaged_inputs --only journal     # those whose name holds the word
    python -m benchmarks.damaged_inputs --list

A run of six steps is stopped after four, and another is left finished. Each case copies one of them, does its damage,
and starts the same command again (`millrace train`). A case passes in one of three ways: the numbers and weights equal
the undisturbed run's, and the console names what was damaged; one clear refusal that names it; or, where a journal has
lost steps that no checkpoint can bring back, equal weights, and the gap on the console and in the report. A traceback,
a hang, other numbers, or silence fail it. Writes build/results/damaged_inputs.json; --out names another file.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.killed_run import layout
from rlcore.storage.manifest import manifest_digest
from rlcore.tracking.journal import read_journal
from tests.helpers.repeatable import repeatable

REPOSITORY = Path(__file__).resolve().parents[1]
RUN = (
    "experiment=debug", "data.train_size=64", "warm_start.max_steps=50", "trainer.steps_per_chunk=2",
    "validation.every_steps=2", "checkpoint.keep_last=3", "tracking.enabled=false",
)  # fmt: skip
STEPS, STOPPED_AT = 6, 4
START_LIMIT_S = 900
DEEP = b"[" * 200_000
UNPRIVILEGED = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
"""Before a command of root's: permissions then hold for it too."""


@dataclass(frozen=True)
class Place:
    """The files of a copied run."""

    root: Path

    def one(self, pattern: str) -> Path:
        """The only path below the root that fits."""
        (found,) = self.root.glob(pattern)
        return found

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.one("runs/*")

    @property
    def newest(self) -> Path:
        """The newest checkpoint."""
        return max(self.run.glob("checkpoints/step-*"))

    @property
    def journal(self) -> Path:
        """The run's journal."""
        return self.run / "metrics.jsonl"


@dataclass(frozen=True)
class Damage:
    """`named`: what the console has to name, where it is not '' (a damage that touches nothing that is read again).

    `finished`: done to the finished run. `limited`: started without root's right to read everything.
    """

    do: Callable[[Place], object]
    named: str
    finished: bool = False
    limited: bool = False


def flip_byte(path: Path, share: float = 0.5, *, quietly: bool = False) -> None:
    """Flip a bit; `quietly`: the file's times stay."""
    times, content = path.stat(), bytearray(path.read_bytes())
    content[int(len(content) * share)] ^= 1
    path.write_bytes(content)
    if quietly:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def rows(path: Path, order: Callable[[int], list[int]]) -> None:
    """Write a parquet file's rows in another order, or some of them."""
    table = pq.read_table(path)
    pq.write_table(table.take(order(table.num_rows)), path)


def replace_with(path: Path, make: Callable[[Path], object]) -> None:
    """Something else under a name."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    make(path)


def loop(path: Path) -> None:
    """A link to itself."""
    path.symlink_to(path)


def unreadable(path: Path) -> None:
    """Every read is an input/output error."""
    path.symlink_to("/proc/self/mem")


def lines(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Change a file's lines."""
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def of_step(line: bytes, step: int) -> bool:
    """Whether a line of the journal holds this step's metrics."""
    found = json.loads(line)
    return "metrics" in found and bool(found["step"] == step)


def without_keys(path: Path) -> None:
    """A manifest that fits its own digest and lacks what a checkpoint's says."""
    document = {key: value for key, value in json.loads(path.read_bytes()).items() if key != "metrics"}
    document["manifest_sha256"] = manifest_digest(document)
    path.write_text(json.dumps(document))


def digit(line: bytes) -> bytes:
    """Another last digit of the first score in a line."""
    begin = line.index(b'"critic/score/mean":') + len(b'"critic/score/mean":')
    end = begin + len(line[begin:].split(b",")[0].rstrip(b"}\n"))
    return line[: end - 1] + bytes([line[end - 1] ^ 1]) + line[end:]


def journal_lines(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Place], object]:
    """The same for the run's journal."""
    return lambda at: lines(at.journal, change)


def set_mode(pattern: str, mode: int = 0) -> Callable[[Place], object]:
    """Take permissions away."""
    return lambda at: at.one(pattern).chmod(mode)


CHECKPOINT = "runs/*/checkpoints/step-000004"
DAMAGES: Mapping[str, Damage] = {
    # ------------------------------------------------------------- bits
    "bit: dataset, training rows": Damage(lambda at: flip_byte(at.one("datasets/*/train.parquet")), "train.parquet"),
    "bit: dataset, manifest": Damage(lambda at: flip_byte(at.one("datasets/*/manifest.json")), "manifest.json"),
    "bit: filtered training rows": Damage(lambda at: flip_byte(at.one("filtered/*/train.parquet")), "train.parquet"),
    "bit: filtered held-out rows": Damage(
        lambda at: flip_byte(at.one("filtered/*/validation.parquet")), "validation.parquet"
    ),
    "bit: filtered rows, manifest": Damage(lambda at: flip_byte(at.one("filtered/*/manifest.json")), "manifest.json"),
    "bit: tokenizer": Damage(lambda at: flip_byte(at.one("tokenizers/*/tokenizer.json")), "tokenizer.json"),
    "bit: start model, weights": Damage(
        lambda at: flip_byte(at.one("models/*/model.safetensors")), "model.safetensors"
    ),
    "bit: start model, weights, times as before": Damage(
        lambda at: flip_byte(at.one("models/*/model.safetensors"), quietly=True), "model.safetensors"
    ),
    "bit: start model, config": Damage(lambda at: flip_byte(at.one("models/*/config.json")), "config.json"),
    "bit: start model, tokenizer": Damage(lambda at: flip_byte(at.one("models/*/tokenizer.json")), "tokenizer.json"),
    "bit: newest checkpoint, shard": Damage(
        lambda at: flip_byte(next((at.newest / "policy").glob("*.safetensors"))), "step-000004"
    ),
    "bit: newest checkpoint, state": Damage(lambda at: flip_byte(at.newest / "state.json"), "step-000004"),
    "bit: newest checkpoint, manifest": Damage(lambda at: flip_byte(at.newest / "manifest.json"), "step-000004"),
    "bit: exported weights": Damage(
        lambda at: flip_byte(at.run / "model" / "model.safetensors"), "model.safetensors", finished=True
    ),
    "bit: start model of a finished run": Damage(
        lambda at: flip_byte(at.one("models/*/model.safetensors")), "model.safetensors", finished=True
    ),
    "bit: a number in the journal": Damage(
        journal_lines(lambda all: [digit(line) if of_step(line, 3) else line for line in all]), "metrics.jsonl"
    ),
    "bit: a number in the journal, before all checkpoints": Damage(
        journal_lines(lambda all: [digit(line) if of_step(line, 1) else line for line in all]), "metrics.jsonl"
    ),
    "bit: a line of the journal, before all checkpoints": Damage(
        journal_lines(lambda all: [b"|" + line[1:] if of_step(line, 1) else line for line in all]), "metrics.jsonl"
    ),
    # ------------------------------------------------------------- rows
    "rows: filtered, reversed": Damage(
        lambda at: rows(at.one("filtered/*/train.parquet"), lambda n: list(range(n))[::-1]), "train.parquet"
    ),
    "rows: filtered, half of them": Damage(
        lambda at: rows(at.one("filtered/*/train.parquet"), lambda n: list(range(n // 2))), "train.parquet"
    ),
    "rows: dataset, reversed": Damage(
        lambda at: rows(at.one("datasets/*/train.parquet"), lambda n: list(range(n))[::-1]), "train.parquet"
    ),
    "rows: journal, the last step": Damage(
        journal_lines(lambda all: [line for line in all if not of_step(line, 4)]), "metrics.jsonl"
    ),
    "rows: journal, a step in the middle": Damage(
        journal_lines(lambda all: [line for line in all if not of_step(line, 1)]), "metrics.jsonl"
    ),
    "rows: journal, cut within a line": Damage(
        lambda at: os.truncate(at.journal, at.journal.stat().st_size - 40), "metrics.jsonl"
    ),
    "rows: journal, of a finished run": Damage(
        journal_lines(lambda all: [line for line in all if not of_step(line, 6)]), "metrics.jsonl", finished=True
    ),
    "rows: journal, lost": Damage(lambda at: at.journal.unlink(), "metrics.jsonl"),
    "rows: journal, lost, of a finished run": Damage(lambda at: at.journal.unlink(), "metrics.jsonl", finished=True),
    "rows: attempts, lost": Damage(lambda at: (at.run / "attempts.jsonl").unlink(), ""),
    "rows: attempts, nested deeply": Damage(lambda at: (at.run / "attempts.jsonl").write_bytes(DEEP + b"\n"), ""),
    "rows: a validation, cut": Damage(lambda at: os.truncate(at.run / "validation" / "step-000000.json", 100), ""),
    # ------------------------------------------------------------- permissions
    "rights: newest checkpoint": Damage(set_mode(CHECKPOINT), "step-000004", limited=True),
    "rights: newest checkpoint, manifest": Damage(set_mode(f"{CHECKPOINT}/manifest.json"), "step-000004", limited=True),
    "rights: newest checkpoint, shards": Damage(set_mode(f"{CHECKPOINT}/policy"), "step-000004", limited=True),
    "rights: checkpoints": Damage(set_mode("runs/*/checkpoints"), "checkpoints", limited=True),
    "rights: dataset": Damage(set_mode("datasets/*"), "datasets", limited=True),
    "rights: filtered training rows": Damage(set_mode("filtered/*/train.parquet"), "train.parquet", limited=True),
    "rights: start model, weights": Damage(set_mode("models/*/model.safetensors"), "model.safetensors", limited=True),
    "rights: journal": Damage(set_mode("runs/*/metrics.jsonl"), "metrics.jsonl", limited=True),
    "rights: the run's folder, read-only": Damage(set_mode("runs/*", 0o500), "runs/", limited=True),
    # ------------------------------------------------------------- kinds of file
    "kind: newest checkpoint, a file": Damage(lambda at: replace_with(at.newest, Path.touch), "step-000004"),
    "kind: newest checkpoint, a link to itself": Damage(lambda at: replace_with(at.newest, loop), "step-000004"),
    "kind: newest manifest, a folder": Damage(
        lambda at: replace_with(at.newest / "manifest.json", Path.mkdir), "step-000004"
    ),
    "kind: newest manifest, a pipe": Damage(
        lambda at: replace_with(at.newest / "manifest.json", os.mkfifo), "step-000004"
    ),
    "kind: newest manifest, unreadable": Damage(
        lambda at: replace_with(at.newest / "manifest.json", unreadable), "step-000004"
    ),
    "kind: newest manifest, nested deeply": Damage(
        lambda at: (at.newest / "manifest.json").write_bytes(DEEP), "step-000004"
    ),
    "kind: newest manifest, without keys": Damage(lambda at: without_keys(at.newest / "manifest.json"), "step-000004"),
    "kind: newest checkpoint, a shard is a pipe": Damage(
        lambda at: replace_with(next((at.newest / "policy").glob("*.safetensors")), os.mkfifo), "step-000004"
    ),
    "kind: journal, a pipe": Damage(lambda at: replace_with(at.journal, os.mkfifo), "metrics.jsonl"),
    "kind: journal, a folder": Damage(lambda at: replace_with(at.journal, Path.mkdir), "metrics.jsonl"),
    "kind: samples, a file": Damage(lambda at: replace_with(at.run / "samples", Path.touch), "samples"),
    "kind: checkpoints, a file": Damage(lambda at: replace_with(at.run / "checkpoints", Path.touch), "checkpoints"),
    "kind: record, a pipe": Damage(lambda at: replace_with(at.run / "run.json", os.mkfifo), "run.json"),
    "kind: filtered manifest, a folder": Damage(
        lambda at: replace_with(at.one("filtered/*/manifest.json"), Path.mkdir), "filtered"
    ),
    "kind: start model, a link to itself": Damage(lambda at: replace_with(at.one("models/*"), loop), "models"),
    "kind: dataset, a file": Damage(lambda at: replace_with(at.one("datasets/*"), Path.touch), "datasets"),
    "kind: export, nested deeply": Damage(
        lambda at: (at.run / "model" / "manifest.json").write_bytes(DEEP), "manifest.json", finished=True
    ),
}


@dataclass(frozen=True)
class Numbers:
    """What a run has come to: each step's metrics without those of the machine, and digests of weights and result."""

    steps: dict[int, dict[str, float]]
    weights: str
    validation: dict[str, object]


@dataclass(frozen=True)
class Outcome:
    """`verdict`: equal, refused, gap told, or what went wrong. `told`: the console's lines about it."""

    name: str
    verdict: str
    exit_code: int | None
    output: tuple[str, ...]


PASSED = ("equal", "refused", "gap told")


def start(root: Path, steps: int = STEPS, *, limited: bool = False) -> tuple[int | None, str]:
    """The command; its exit code (None: it did not end) and what it said."""
    before = UNPRIVILEGED if limited and os.getuid() == 0 else ()
    command = [*before, sys.executable, "-m", "flows.cli", "train", *overrides(steps), f"paths.root={root}"]
    with tempfile.TemporaryFile() as said:
        try:
            code: int | None = subprocess.run(
                command, cwd=REPOSITORY, stdout=said, stderr=said, timeout=START_LIMIT_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
        said.seek(0)
        return code, said.read().decode(errors="replace")


def overrides(steps: int) -> list[str]:
    """The settings of a run of so many steps."""
    return [*RUN, f"trainer.total_steps={steps}"]


def numbers_of(root: Path) -> Numbers:
    """Of the run under a root."""
    where = layout(root, overrides(STEPS))
    weights = hashlib.sha256((where.exported_model / "model.safetensors").read_bytes()).hexdigest()
    validation = json.loads((where.validation / f"step-{STEPS:06}.json").read_bytes())
    records = read_journal(where.journal) if where.journal.exists() else []
    return Numbers({record.step: repeatable(dict(record.metrics)) for record in records}, weights, validation)


def report_names_gap(root: Path) -> bool:
    """Whether the report says that something is missing of the journal."""
    where = layout(root, overrides(STEPS))
    command = [sys.executable, "-m", "flows.cli", "report", str(where.run_dir)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    missing = json.loads((where.run_dir / "report" / "report.json").read_bytes())["missing"]
    return any("metrics.jsonl" in line for line in missing)


def try_one(name: str, base: Path, expected: Numbers) -> Outcome:
    """Copy, damage, start again, judge."""
    damage = DAMAGES[name]
    with tempfile.TemporaryDirectory(prefix="damaged-") as folder:
        root = Path(folder) / "root"
        shutil.copytree(base, root)
        damage.do(Place(root))
        try:
            code, said = start(root, limited=damage.limited)
            verdict = verdict_of(damage, root, expected, code, said)
        finally:
            subprocess.run(["chmod", "-R", "u+rwX", folder], check=False, capture_output=True)
    about = [line for line in said.splitlines() if damage.named and damage.named in line]
    return Outcome(name, verdict, code, tuple(line.replace(folder, "...")[:400] for line in about))


def verdict_of(damage: Damage, root: Path, expected: Numbers, code: int | None, output: str) -> str:
    """The verdict on a start."""
    if code is None:
        return "hang"
    if "Traceback" in output:
        return "traceback"
    is_named = damage.named in output
    if code != 0:
        return "refused" if is_named else "refused without a name"
    found = numbers_of(root)
    if (found.weights, found.validation) != (expected.weights, expected.validation):
        return "other numbers" if is_named else "other numbers without a word"
    if found.steps == expected.steps:
        return "equal" if is_named else "equal without a word"
    if damage.named != "metrics.jsonl":
        return "other metrics"
    return "gap told" if is_named and report_names_gap(root) else "gap without a word"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word in the names of the cases")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "results" / "damaged_inputs.json")
    arguments = parser.parse_args()
    chosen = [name for name in DAMAGES if arguments.only in name]
    if arguments.list:
        print("\n".join(chosen))
        return
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="damaged-base-") as folder:
        stopped, finished = Path(folder) / "stopped", Path(folder) / "finished"
        for root, steps in ((stopped, STOPPED_AT), (finished, STEPS)):
            code, said = start(root, steps)
            assert code == 0, said
        expected = numbers_of(finished)
        for name in chosen:
            outcome = try_one(name, finished if DAMAGES[name].finished else stopped, expected)
            outcomes.append(outcome)
            print(json.dumps(asdict(outcome)), flush=True)
    failed = [outcome.name for outcome in outcomes if outcome.verdict not in PASSED]
    counts = {
        verdict: sum(one.verdict == verdict for one in outcomes) for verdict in sorted({o.verdict for o in outcomes})
    }
    result = {"cases": len(outcomes), "verdicts": counts, "failed": failed}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**result, "outcomes": [asdict(one) for one in outcomes]}, indent=1) + "\n")
    print(json.dumps(result))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
