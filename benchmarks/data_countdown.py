"""327,680 + 1,024 countdown problems, as many as TinyZero's, written to parquet: seconds, memory, every row scored.

    python benchmarks/data_countdown.py                       # one build, on one core; about a minute
    python benchmarks/data_countdown.py --rows=20000          # a smaller one
    python benchmarks/data_countdown.py --check --write       # exit code 1 over 60 s or 1 GiB; keep the figures

The build runs in a process of its own, from settings to published folder. Then every row of both splits is read back,
its solution scored by the task's own scorer, and the multisets of numbers of the two splits compared.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from measured import Cost, peak_mb, write_result

ROOT = Path(__file__).resolve().parents[1]
MAX_WALL_S, MAX_MEMORY_MB = 60.0, 1024**3 / 1e6
SPLITS = ("train", "validation")


def main() -> None:
    """Measure the build, score every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=327_680, help="rows of the training split")
    parser.add_argument("--validation-rows", type=int, default=1_024, help="rows of the validation split")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a limit is missed")
    parser.add_argument("--write", action="store_true", help="write docs/results/data_countdown.json")
    parser.add_argument("--one", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(build(arguments, Path(arguments.one))))
        return
    figures: dict[str, Any] = {"train_rows": arguments.rows, "validation_rows": arguments.validation_rows}
    with tempfile.TemporaryDirectory() as folder:
        found = in_own_process(Path(folder))
        print(
            f"{found['wall_s']:.1f} s, {found['cpu_s']:.1f} s of processors, at most {found['peak_mb']:.0f} MB, "
            f"{found['bytes'] / 1e6:.1f} MB on disk"
        )
        figures["cores_1"] = found
        figures |= scored(Path(found["directory"]))
    print(
        f"{figures['scored']:,} solutions scored in {figures['scoring_s']:.1f} s, "
        f"{figures['wrong']} wrong; {figures['shared_multisets']} multisets in both splits"
    )
    if arguments.write:
        print(write_result("data_countdown", figures))
    sound = not figures["wrong"] and not figures["shared_multisets"]
    if arguments.check and not (sound and found["wall_s"] <= MAX_WALL_S and found["peak_mb"] <= MAX_MEMORY_MB):
        sys.exit(f"over the limits of {MAX_WALL_S:.0f} s and {MAX_MEMORY_MB:.0f} MB, or rows that are not sound")


def in_own_process(folder: Path) -> dict[str, Any]:
    """What the build took and gave."""
    command = [sys.executable, __file__, *sys.argv[1:], "--one", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def build(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make the dataset on one core."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    from data.tasks import build_dataset
    from rlcore.config import CountdownData

    settings = CountdownData(train_size=arguments.rows, validation_size=arguments.validation_rows)
    with Cost() as cost:
        result = build_dataset(settings, seed=1, root=folder)
    files = {split: result.directory / f"{split}.parquet" for split in SPLITS}
    return {
        "directory": str(result.directory),
        "wall_s": cost.wall_s,
        "cpu_s": cost.cpu_s,
        "peak_mb": peak_mb(),
        "bytes": sum(path.stat().st_size for path in files.values()),
        "sha256": {split: hashlib.sha256(path.read_bytes()).hexdigest() for split, path in files.items()},
    }


def scored(directory: Path) -> dict[str, Any]:
    """Every stored solution by the scorer, and what the splits share."""
    from data.countdown import score

    wrong = total = 0
    multisets: dict[str, set[tuple[int, ...]]] = {split: set() for split in SPLITS}
    with Cost() as cost:
        for split in SPLITS:
            file = pq.ParquetFile(directory / f"{split}.parquet")
            for batch in file.iter_batches(columns=["reward_model", "extra_info"]):
                truths = batch.column("reward_model").field("ground_truth").to_pylist()
                solutions = batch.column("extra_info").field("solution").to_pylist()
                total += len(truths)
                multisets[split].update(tuple(sorted(truth["numbers"])) for truth in truths)
                wrong += sum(
                    score(solution, truth).total != 1.0 for solution, truth in zip(solutions, truths, strict=True)
                )
    shared = len(multisets["train"] & multisets["validation"])
    return {"scored": total, "wrong": wrong, "shared_multisets": shared, "scoring_s": cost.wall_s}


if __name__ == "__main__":
    main()
