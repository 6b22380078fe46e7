"""Damage a small run on disk in about fifty ways (bits, rows, permissions, kinds of file) and start the run again.

    python -m benchmarks.damaged_inputs                    # all cases
    python -m benchmarks.damaged_inputs --only journal     # the cases with this word in their name
    python -m benchmarks.damaged_inputs --list             # list the cases

Each case damages a copy of a stopped or a finished run, and repeats the command of the run. A case passes if the
numbers equal those of an undamaged run and the console names the damaged file. A case also passes if the command
refuses the run with a message that names the file. If the journal is damaged, steps may be missing in it, but the
console and the report must mention the gap. The results are written to build/results/damaged_inputs.json or to --out.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.killed_run import layout
from rlcore.storage.manifest import manifest_digest
from rlcore.tracking.journal import read_journal
from tests.helpers.published import flip
from tests.helpers.repeatable import repeatable

REPOSITORY = Path(__file__).resolve().parents[1]
RUN = (
    "experiment=debug", "data.train_size=64", "warm_start.max_steps=50", "trainer.steps_per_chunk=2",
    "validation.every_steps=2", "checkpoint.keep_last=3", "tracking.enabled=false",
)  # fmt: skip
STEPS, STOPPED_AT = 6, 4
START_LIMIT_S = 900
UNPRIVILEGED = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")  # makes root obey file permissions

Action = Callable[[Path], object]


@dataclass(frozen=True)
class Damage:
    """One way to damage a run. `path`: a glob pattern below the workspace. `name`: a text that the console must print.
    `finished`: True to damage the finished run, not the stopped run. `limited`: True to start the command without
    root's right to ignore file permissions.
    """

    path: str
    action: Action
    name: str
    finished: bool = False
    limited: bool = False

    def apply(self, root: Path) -> None:
        """Damage the newest file or folder below `root` that matches the glob pattern `path`."""
        path = max(root.glob(self.path), key=lambda path: path.stat().st_mtime)  # models: the older one is its base
        self.action(path)


def _flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _reorder(order: Callable[[int], list[int]]) -> Action:
    def write(path: Path) -> None:
        table = pq.read_table(path)
        pq.write_table(table.take(order(table.num_rows)), path)

    return write


def _replace(make: Action) -> Action:
    def replace(path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        make(path)

    return replace


def _cut(path: Path, size: int = 40) -> None:
    os.truncate(path, path.stat().st_size - size)


def _deep_json(path: Path) -> None:
    path.write_bytes(b"[" * 200_000 + b"\n")


def _without_keys(path: Path) -> None:
    """Remove `metrics` from a checkpoint's manifest. The digest is updated, so that only the missing key is wrong."""
    document = {key: value for key, value in json.loads(path.read_bytes()).items() if key != "metrics"}
    document["manifest_sha256"] = manifest_digest(document)
    path.write_text(json.dumps(document))


def _change_step(step: int, change: Callable[[bytes], bytes]) -> Action:
    """Return a function that replaces a step's line in a journal with `change(line)`."""

    def rewrite(path: Path) -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        found = [json.loads(line) for line in lines]
        is_step = ["metrics" in record and record["step"] == step for record in found]
        path.write_bytes(b"".join(change(line) if hit else line for line, hit in zip(lines, is_step, strict=True)))

    return rewrite


def _change_digit(line: bytes) -> bytes:
    """Change the last digit of the first score in a journal's line, and return the line."""
    begin = line.index(b'"critic/score/mean":') + len(b'"critic/score/mean":')
    end = begin + len(line[begin:].split(b",")[0].rstrip(b"}\n"))
    return line[: end - 1] + bytes([line[end - 1] ^ 1]) + line[end:]


def _drop(_line: bytes) -> bytes:
    return b""


def _set_mode(mode: int = 0) -> Action:
    return lambda path: path.chmod(mode)


DATASET, FILTERED, MODEL = "datasets/*", "filtered/*", "models/*"
CHECKPOINT, NEWEST = "runs/*/checkpoints/step-000004", "step-000004"
SHARDS = f"{CHECKPOINT}/policy"
JOURNAL, LINES = "runs/*/metrics.jsonl", "metrics.jsonl"
ROWS, WEIGHTS, MANIFEST = "train.parquet", "model.safetensors", "manifest.json"
LOOP = _replace(lambda path: path.symlink_to(path))
READ_ERROR = _replace(lambda path: path.symlink_to("/proc/self/mem"))
PIPE, FOLDER, FILE = _replace(os.mkfifo), _replace(Path.mkdir), _replace(Path.touch)
REVERSED, HALF = _reorder(lambda n: list(range(n))[::-1]), _reorder(lambda n: list(range(n // 2)))
DAMAGES: Mapping[str, Damage] = {
    # ------------------------------------------------------------- bits
    "bit: dataset, training rows": Damage(f"{DATASET}/{ROWS}", _flip_bit, ROWS),
    "bit: dataset, manifest": Damage(f"{DATASET}/{MANIFEST}", _flip_bit, MANIFEST),
    "bit: filtered training rows": Damage(f"{FILTERED}/{ROWS}", _flip_bit, ROWS),
    "bit: filtered held-out rows": Damage(f"{FILTERED}/validation.parquet", _flip_bit, "validation.parquet"),
    "bit: filtered rows, manifest": Damage(f"{FILTERED}/{MANIFEST}", _flip_bit, MANIFEST),
    "bit: tokenizer": Damage("tokenizers/*/tokenizer.json", _flip_bit, "tokenizer.json"),
    "bit: initial policy, weights": Damage(f"{MODEL}/{WEIGHTS}", _flip_bit, WEIGHTS),
    "bit: initial policy, weights, same times": Damage(f"{MODEL}/{WEIGHTS}", flip, WEIGHTS),
    "bit: initial policy, config": Damage(f"{MODEL}/config.json", _flip_bit, "config.json"),
    "bit: initial policy, tokenizer": Damage(f"{MODEL}/tokenizer.json", _flip_bit, "tokenizer.json"),
    "bit: newest checkpoint, shard": Damage(SHARDS, lambda at: _flip_bit(_first_shard(at)), NEWEST),
    "bit: newest checkpoint, state": Damage(f"{CHECKPOINT}/state.json", _flip_bit, NEWEST),
    "bit: newest checkpoint, manifest": Damage(f"{CHECKPOINT}/{MANIFEST}", _flip_bit, NEWEST),
    "bit: exported weights": Damage(f"runs/*/model/{WEIGHTS}", _flip_bit, WEIGHTS, finished=True),
    "bit: initial policy of a finished run": Damage(f"{MODEL}/{WEIGHTS}", _flip_bit, WEIGHTS, finished=True),
    "bit: a number in the journal": Damage(JOURNAL, _change_step(3, _change_digit), LINES),
    "bit: a number in the journal, before all checkpoints": Damage(JOURNAL, _change_step(1, _change_digit), LINES),
    "bit: a line of the journal, before all checkpoints": Damage(
        JOURNAL, _change_step(1, lambda line: b"|" + line[1:]), LINES
    ),
    # ------------------------------------------------------------- rows
    "rows: filtered, reversed": Damage(f"{FILTERED}/{ROWS}", REVERSED, ROWS),
    "rows: filtered, half of them": Damage(f"{FILTERED}/{ROWS}", HALF, ROWS),
    "rows: dataset, reversed": Damage(f"{DATASET}/{ROWS}", REVERSED, ROWS),
    "rows: journal, the last step": Damage(JOURNAL, _change_step(4, _drop), LINES),
    "rows: journal, a step in the middle": Damage(JOURNAL, _change_step(1, _drop), LINES),
    "rows: journal, cut within a line": Damage(JOURNAL, _cut, LINES),
    "rows: journal, of a finished run": Damage(JOURNAL, _change_step(6, _drop), LINES, finished=True),
    "rows: journal, lost": Damage(JOURNAL, Path.unlink, LINES),
    "rows: journal, lost, of a finished run": Damage(JOURNAL, Path.unlink, LINES, finished=True),
    "rows: attempts, lost": Damage("runs/*/attempts.jsonl", Path.unlink, ""),
    "rows: attempts, nested deeply": Damage("runs/*/attempts.jsonl", _deep_json, ""),
    "rows: a validation, cut": Damage("runs/*/validation/step-000000.json", _cut, ""),
    # ------------------------------------------------------------- permissions
    "mode: newest checkpoint": Damage(CHECKPOINT, _set_mode(), NEWEST, limited=True),
    "mode: newest checkpoint, manifest": Damage(f"{CHECKPOINT}/{MANIFEST}", _set_mode(), NEWEST, limited=True),
    "mode: newest checkpoint, shards": Damage(SHARDS, _set_mode(), NEWEST, limited=True),
    "mode: checkpoints": Damage("runs/*/checkpoints", _set_mode(), "checkpoints", limited=True),
    "mode: dataset": Damage(DATASET, _set_mode(), "datasets", limited=True),
    "mode: filtered training rows": Damage(f"{FILTERED}/{ROWS}", _set_mode(), ROWS, limited=True),
    "mode: initial policy, weights": Damage(f"{MODEL}/{WEIGHTS}", _set_mode(), WEIGHTS, limited=True),
    "mode: journal": Damage(JOURNAL, _set_mode(), LINES, limited=True),
    "mode: the run's folder, read-only": Damage("runs/*", _set_mode(0o500), "runs/", limited=True),
    # ------------------------------------------------------------- kinds of file
    "kind: newest checkpoint, a file": Damage(CHECKPOINT, FILE, NEWEST),
    "kind: newest checkpoint, a link to itself": Damage(CHECKPOINT, LOOP, NEWEST),
    "kind: newest manifest, a folder": Damage(f"{CHECKPOINT}/{MANIFEST}", FOLDER, NEWEST),
    "kind: newest manifest, a pipe": Damage(f"{CHECKPOINT}/{MANIFEST}", PIPE, NEWEST),
    "kind: newest manifest, unreadable": Damage(f"{CHECKPOINT}/{MANIFEST}", READ_ERROR, NEWEST),
    "kind: newest manifest, nested deeply": Damage(f"{CHECKPOINT}/{MANIFEST}", _deep_json, NEWEST),
    "kind: newest manifest, without keys": Damage(f"{CHECKPOINT}/{MANIFEST}", _without_keys, NEWEST),
    "kind: newest checkpoint, a shard is a pipe": Damage(SHARDS, lambda at: PIPE(_first_shard(at)), NEWEST),
    "kind: journal, a pipe": Damage(JOURNAL, PIPE, LINES),
    "kind: journal, a folder": Damage(JOURNAL, FOLDER, LINES),
    "kind: answers, a file": Damage("runs/*/answers", FILE, "answers"),
    "kind: checkpoints, a file": Damage("runs/*/checkpoints", FILE, "checkpoints"),
    "kind: record, a pipe": Damage("runs/*/run.json", PIPE, "run.json"),
    "kind: filtered manifest, a folder": Damage(f"{FILTERED}/{MANIFEST}", FOLDER, "filtered"),
    "kind: initial policy, a link to itself": Damage(MODEL, LOOP, "models"),
    "kind: dataset, a file": Damage(DATASET, FILE, "datasets"),
    "kind: export, nested deeply": Damage(f"runs/*/model/{MANIFEST}", _deep_json, MANIFEST, finished=True),
}


def _first_shard(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


@dataclass(frozen=True)
class Numbers:
    steps: dict[int, dict[str, float]]
    weights: str
    validation: dict[str, object]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case. `verdict`: an entry of `PASSED` if the case passed, otherwise the kind of failure.
    `output`: the console lines that contain `Damage.name`."""

    name: str
    verdict: str
    exit_code: int | None
    output: tuple[str, ...]


PASSED = ("equal", "refused", "gap reported")


def _start(root: Path, steps: int = STEPS, *, limited: bool = False) -> tuple[int | None, str]:
    prefix = UNPRIVILEGED if limited and os.getuid() == 0 else ()
    command = [*prefix, sys.executable, "-m", "flows.cli", "train", *_overrides(steps), f"paths.root={root}"]
    with tempfile.TemporaryFile() as output:
        try:
            code: int | None = subprocess.run(
                command, cwd=REPOSITORY, stdout=output, stderr=output, timeout=START_LIMIT_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _overrides(steps: int) -> list[str]:
    return [*RUN, f"trainer.total_steps={steps}"]


def _numbers(root: Path) -> Numbers:
    where = layout(root, _overrides(STEPS))
    weights = hashlib.sha256((where.exported_model / WEIGHTS).read_bytes()).hexdigest()
    validation = json.loads((where.validation / f"step-{STEPS:06}.json").read_bytes())
    records = read_journal(where.journal) if where.journal.exists() else []
    return Numbers({record.step: repeatable(dict(record.metrics)) for record in records}, weights, validation)


def _report_names_gap(root: Path) -> bool:
    where = layout(root, _overrides(STEPS))
    command = [sys.executable, "-m", "flows.cli", "report", str(where.run_dir)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    missing = json.loads((where.run_dir / "report" / "report.json").read_bytes())["missing"]
    return any("metrics.jsonl" in line for line in missing)


def _try_damage(name: str, base: Path, expected: Numbers) -> Outcome:
    damage = DAMAGES[name]
    with tempfile.TemporaryDirectory(prefix="damaged-") as folder:
        root = Path(folder) / "root"
        shutil.copytree(base, root)
        damage.apply(root)
        try:
            code, output = _start(root, limited=damage.limited)
            verdict = _verdict(damage, root, expected, code, output)
        finally:
            subprocess.run(["chmod", "-R", "u+rwX", folder], check=False, capture_output=True)
    lines = [line for line in output.splitlines() if damage.name and damage.name in line]
    return Outcome(name, verdict, code, tuple(line.replace(folder, "...")[:400] for line in lines))


def _verdict(damage: Damage, root: Path, expected: Numbers, code: int | None, output: str) -> str:
    if code is None:
        return "hang"
    if "Traceback" in output:
        return "traceback"
    is_named = damage.name in output
    if code != 0:
        return "refused" if is_named else "refused without a name"
    found = _numbers(root)
    if (found.weights, found.validation) != (expected.weights, expected.validation):
        return "other numbers" if is_named else "other numbers, not reported"
    if found.steps == expected.steps:
        return "equal" if is_named else "equal, not reported"
    if damage.name != "metrics.jsonl":
        return "other metrics"
    return "gap reported" if is_named and _report_names_gap(root) else "gap not reported"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word in the names of the cases")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
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
            code, output = _start(root, steps)
            assert code == 0, output
        expected = _numbers(finished)
        for name in chosen:
            outcome = _try_damage(name, finished if DAMAGES[name].finished else stopped, expected)
            outcomes.append(outcome)
            print(json.dumps(asdict(outcome)), flush=True)
    failed = [outcome.name for outcome in outcomes if outcome.verdict not in PASSED]
    verdicts = Counter(sorted(outcome.verdict for outcome in outcomes))
    result = {"cases": len(outcomes), "verdicts": verdicts, "failed": failed}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**result, "outcomes": [asdict(one) for one in outcomes]}, indent=1) + "\n")
    print(json.dumps(result))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
